// Segment files of a directory: made, believed or not, removed for want of capacity.
#include <doctest/doctest.h>

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "directory_fixture.h"
#include "disk_pages.h"

using namespace kv;
using namespace kv::test;

TEST_CASE("beside a manifest, other files are neither counted nor touched") {
  const TempDir at;
  DiskDirectory::open(options_for(at, 2));
  const std::set<std::string> strange = {"notes.txt",           "segment-1.kvs",      "segment-000001.kvs.bak",
                                         "segment-065536.kvs",  "segment-0000001.kvs", "segment-00001x.kvs",
                                         "segment-4294967296.kvs", "Segment-000001.kvs", "segment-"};
  for (const std::string& name : strange) write_file(at.path("disk/" + name), "not ours");
  {
    const auto directory = DiskDirectory::open(options_for(at, 2));
    CHECK(directory->segments().empty());
    directory->add();
    directory->add();
    CHECK(directory->bytes() == 2 * kSegment);
  }
  DiskDirectory::open(options_for(at, 1));
  for (const std::string& name : strange) CHECK(read_file(at.path("disk/" + name)) == "not ours");
}

TEST_CASE("files are made in the lowest free numbers, as long as the capacity has room") {
  const TempDir at;
  const auto directory = DiskDirectory::open(options_for(at, 3));
  CHECK(directory->add() == 0);
  CHECK(directory->add() == 1);
  write_file(segment_path(at.path("disk"), 2), "somebody's");  // came after open()
  CHECK(directory->add() == 2);
  CHECK(numbers_of(*directory) == std::set<std::uint32_t>{0, 1, 3});
  CHECK(read_file(segment_path(at.path("disk"), 2)) == "somebody's");
  CHECK(directory->bytes() == 3 * kSegment);  // although nothing is in them yet
  CHECK_FALSE(directory->room_for_another());
  CHECK_THROWS_AS(directory->add(), Broken);
  CHECK(mode_of(segment_path(at.path("disk"), 3)) == 0600);
  for (const SegmentFile& file : directory->segments()) CHECK_FALSE(file.usable);

  directory->discard(1);
  directory->discard(1);  // an empty position stays one
  CHECK_FALSE(directory->segments()[1].fd);
  CHECK(directory->segments()[1].pages == 0);
  CHECK_FALSE(fs::exists(segment_path(at.path("disk"), 1)));
  CHECK(directory->bytes() == 2 * kSegment);
  CHECK(directory->add() == 3);
  CHECK(numbers_of(*directory) == std::set<std::uint32_t>{0, 1, 3});
  CHECK(::fsync(directory->fd()) == 0);
}

TEST_CASE("only a whole header of this directory, for this very file, makes a segment usable") {
  const TempDir at;
  const std::string path = at.path("disk");
  SegmentHeader header;
  {
    const auto directory = DiskDirectory::open(options_for(at, 4));
    header = header_for(*directory, 5, 77);
  }
  SegmentImage image(header);
  const auto usable = [&](std::size_t bytes = kSegment) {
    image.save(path, bytes);
    const auto directory = DiskDirectory::open(tool_for(at));
    REQUIRE(directory->segments().size() == 1);
    const SegmentFile& file = directory->segments()[0];
    CHECK(file.number == 5);
    CHECK(file.bytes() == round_up(bytes, kPageBytes));
    CHECK(directory->bytes() == file.bytes());
    CHECK(file.header.sequence == (file.usable ? 77 : 0));
    return file.usable;
  };
  CHECK(usable());
  SUBCASE("files that end too early, never grew, or do not end with a page") {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{60}, kPageBytes, kSegment - kPageBytes,
                                    kSegment - 1, kSegment - 512})
      CHECK_FALSE(usable(bytes));
  }
  SUBCASE("files that are too long") {
    std::error_code error;
    fs::resize_file(segment_path(path, 5), kSegment + kPageBytes);
    CHECK_FALSE(DiskDirectory::open(tool_for(at))->segments()[0].usable);
    fs::resize_file(segment_path(path, 5), kSegmentBytesMax + kPageBytes, error);  // sparse
    REQUIRE_FALSE(error);
    const auto directory = DiskDirectory::open(tool_for(at));
    CHECK_FALSE(directory->segments()[0].usable);
    CHECK(directory->bytes() == kSegmentBytesMax + kPageBytes);
  }
  SUBCASE("any flipped byte of the header") {
    for (std::size_t i = 0; i < 60; ++i) {
      CAPTURE(i);
      image.page(0)[i] ^= 0x20;
      CHECK_FALSE(usable());
      image.page(0)[i] ^= 0x20;
    }
    image.page(0)[60] ^= 0x20;  // behind it
    CHECK(usable());
  }
  SUBCASE("another directory's, another number's, another size's") {
    SegmentHeader other = header;
    other.store[3] ^= 1;
    encode(other, image.page(0));
    CHECK_FALSE(usable());
    other = header;
    other.segment = 6;
    encode(other, image.page(0));
    CHECK_FALSE(usable());
    other = header;
    other.pages = kPages - 1;
    encode(other, image.page(0));
    CHECK_FALSE(usable());
  }
  SUBCASE("zeros, as in a file whose making was cut short") {
    std::fill(image.page(0), image.page(1), std::uint8_t{0});
    CHECK_FALSE(usable());
  }
}

TEST_CASE("a lowered capacity removes what was never finished, and leaves the choice of the rest") {
  const TempDir at;
  const std::string path = at.path("disk");
  {
    const auto directory = DiskDirectory::open(options_for(at, 8));
    // 4 was never opened, 2 and 6 never finished.
    const std::uint64_t sequences[] = {9, 3, 12, 5, 0, 8, 99};
    for (std::uint32_t i = 0; i < 7; ++i)
      SegmentImage(header_for(*directory, i, sequences[i])).save(path, i == 2 || i == 6 ? kSegment / 2 : kSegment);
  }
  using Numbers = std::set<std::uint32_t>;
  const auto on_disk = [&] {
    Numbers numbers;
    for (std::uint32_t i = 0; i < 8; ++i)
      if (fs::exists(segment_path(path, i))) numbers.insert(i);
    return numbers;
  };
  CHECK(DiskDirectory::open(tool_for(at))->segments().size() == 7);  // a tool removes nothing
  {
    const auto directory = DiskDirectory::open(options_for(at, 6));  // of which two are half as large
    CHECK(directory->removed() == 0);
    CHECK_FALSE(directory->over_capacity());
  }
  {
    auto options = options_for(at, 6);
    options.capacity_bytes -= kSegment / 2;
    const auto directory = DiskDirectory::open(options);
    CHECK(directory->removed() == 1);
    CHECK_FALSE(directory->over_capacity());
    CHECK(on_disk() == numbers_of(*directory));
  }
  const auto directory = DiskDirectory::open(options_for(at, 3));
  CHECK(directory->removed() == 1);
  CHECK(numbers_of(*directory) == Numbers{0, 1, 3, 4, 5});
  CHECK(on_disk() == Numbers{0, 1, 3, 4, 5});
  CHECK(directory->bytes() == 5 * kSegment);
  for (const SegmentFile& file : directory->segments()) CHECK(file.usable);
  for (std::uint32_t position : {3u, 1u}) {
    CHECK(directory->over_capacity());
    CHECK_FALSE(directory->room_for_another());
    CHECK_THROWS_AS(directory->add(), Broken);
    directory->discard(position);
  }
  CHECK_FALSE(directory->over_capacity());
  CHECK(on_disk() == numbers_of(*directory));
  directory->discard(0);
  CHECK(directory->room_for_another());
}

TEST_CASE("segments of other sizes stay, also one that is larger than the whole capacity") {
  const TempDir at;
  const std::string path = at.path("disk");
  {
    const auto directory = DiskDirectory::open(options_for(at, 8));
    SegmentHeader small = header_for(*directory, 0, 1), large = header_for(*directory, 1, 2);
    large.pages = 3 * kPages;
    SegmentImage(small).save(path);
    SegmentImage(large).save(path);
  }
  for (const std::size_t segments : {4, 2}) {
    const auto directory = DiskDirectory::open(options_for(at, segments));
    CHECK(directory->bytes() == 4 * kSegment);
    CHECK(segment_of(*directory, 1).usable);
    CHECK(directory->over_capacity() == (segments == 2));
    CHECK_FALSE(directory->room_for_another());
    CHECK(directory->removed() == 0);
  }
}

TEST_CASE("a tool makes nothing and removes nothing") {
  const TempDir at;
  {
    const auto directory = DiskDirectory::open(options_for(at, 2));
    SegmentImage(header_for(*directory, 0, 1)).save(at.path("disk"));
  }
  const auto directory = DiskDirectory::open(tool_for(at));
  CHECK(directory->segments().size() == 1);
  CHECK_FALSE(directory->room_for_another());
  CHECK_THROWS_AS(directory->add(), Broken);
}

TEST_CASE("the limit of open files is raised as far as it may be, else the message says what to do") {
  const TempDir at;
  const int status = in_child([&] {  // limits are the process's
    rlimit limit{64, 400};
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
    DiskDirectory::Options options = options_for(at, 100);
    try {
      DiskDirectory::open(options);
    } catch (const std::exception&) {
      return 2;
    }
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur < 300 || limit.rlim_max != 400) return 3;
    options.capacity_bytes = 1000 * kSegment;
    try {
      DiskDirectory::open(options);
      return 4;
    } catch (const Invalid& error) {
      return std::string(error.what()).find("LimitNOFILE") != std::string::npos ? 0 : 5;
    }
  });
  CHECK(status == 0);
}
