#include <doctest/doctest.h>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "directory_fixture.h"

using namespace kv;
using namespace kv::test;

TEST_CASE("a new directory is private, empty, and known again by its id") {
  const TempDir at;
  StoreId id;
  {
    const auto directory = DiskDirectory::open(options_for(at, 4));
    id = directory->id();
    CHECK(id != StoreId{});
    CHECK(directory->segments().empty());
    CHECK(directory->bytes() == 0);
    CHECK(directory->removed() == 0);
    CHECK(directory->room_for_another());
  }
  CHECK(mode_of(at.path("disk")) == 0700);
  CHECK(names_in(at.path("disk")) == std::set<std::string>{"kvstore.disk", "lock"});
  CHECK(mode_of(at.path("disk/kvstore.disk")) == 0600);
  CHECK(mode_of(at.path("disk/lock")) == 0600);
  CHECK(fs::file_size(at.path("disk/kvstore.disk")) == kPageBytes);
  CHECK(DiskDirectory::open(options_for(at, 4))->id() == id);
  CHECK(DiskDirectory::open(tool_for(at))->id() == id);

  const TempDir other;
  CHECK(DiskDirectory::open(options_for(other, 4))->id() != id);
}

TEST_CASE("an empty directory is taken, whatever its mode, unless anyone may write to it") {
  const TempDir at;
  REQUIRE(::mkdir(at.path("disk").c_str(), 0755) == 0);
  fs::create_directory(at.path("disk/lost+found"));
  REQUIRE(::chmod(at.path("disk").c_str(), 0777) == 0);
  check_refused(options_for(at, 4), "anyone may write");
  REQUIRE(::chmod(at.path("disk").c_str(), 0755) == 0);
  CHECK_NOTHROW(DiskDirectory::open(options_for(at, 4)));
  CHECK(mode_of(at.path("disk")) == 0755);
}

TEST_CASE("the directory may be reached through a link") {
  const TempDir at;
  fs::create_directory(at.path("far"));
  fs::create_symlink("far", at.path("disk"));
  const StoreId id = DiskDirectory::open(options_for(at, 4))->id();
  DiskDirectory::Options options = options_for(at, 4);
  options.path = at.path("far");
  CHECK(DiskDirectory::open(options)->id() == id);
}

TEST_CASE("options out of their range are refused by name") {
  const TempDir at;
  const auto refused = [&](const std::string& name, const std::function<void(DiskDirectory::Options&)>& spoil) {
    DiskDirectory::Options options = options_for(at, 4);
    spoil(options);
    CAPTURE(name);
    try {
      DiskDirectory::open(options);
      FAIL_CHECK("opened");
    } catch (const Invalid& error) {
      CHECK(std::string(error.what()).rfind(name, 0) == 0);
    }
    CHECK_FALSE(fs::exists(at.path("disk")));
  };
  using Options = DiskDirectory::Options;
  refused("path", [](Options& o) { o.path.clear(); });
  refused("path", [](Options& o) { o.path.push_back('\0'); });
  refused("segment_bytes", [](Options& o) { o.segment_bytes = 0; });
  refused("segment_bytes", [](Options& o) { o.segment_bytes += 512; });
  refused("segment_bytes", [](Options& o) { o.segment_bytes = kSegmentBytesMin - kPageBytes; });
  refused("segment_bytes", [](Options& o) { o.segment_bytes = kSegmentBytesMax + kPageBytes; });
  refused("capacity_bytes", [](Options& o) { o.capacity_bytes = kSegment - 1; });
  refused("capacity_bytes", [](Options& o) { o.capacity_bytes = (kSegmentsMax + 1) * kSegment; });
}

TEST_CASE("what is absent, or no directory, is refused; a missing parent is the system's refusal") {
  const TempDir at;
  check_refused(tool_for(at), "does not exist");
  DiskDirectory::Options deep = options_for(at, 4);
  deep.path = at.path("no/disk");
  CHECK_THROWS_AS(DiskDirectory::open(deep), std::system_error);
  write_file(at.path("disk"), "a file");
  check_refused(options_for(at, 4), "is not a directory");
  check_refused(tool_for(at), "is not a directory");
  CHECK(read_file(at.path("disk")) == "a file");
}

TEST_CASE("a directory with other people's files is refused and left as it was") {
  const TempDir at;
  fs::create_directory(at.path("disk"));
  SUBCASE("a file") {
    write_file(at.path("disk/thesis.tex"), "years of work");
    check_refused(options_for(at, 4), "thesis.tex");
    CHECK(names_in(at.path("disk")) == std::set<std::string>{"thesis.tex"});
    CHECK(read_file(at.path("disk/thesis.tex")) == "years of work");
  }
  SUBCASE("a lock that is no lock") {
    write_file(at.path("disk/lock"), "dear diary, today we went to the lake");
    check_refused(options_for(at, 4), "(lock)");
    CHECK(read_file(at.path("disk/lock")).size() == 37);
  }
  SUBCASE("a tool does not make it ours either") {
    check_refused(tool_for(at), "no kvstore.disk");
    CHECK(names_in(at.path("disk")).empty());
  }
  SUBCASE("segments without a manifest") {
    write_file(segment_path(at.path("disk"), 3), "precious");
    check_refused(options_for(at, 4), "holds segments but no kvstore.disk");
    check_refused(tool_for(at), "no kvstore.disk");
    CHECK(read_file(segment_path(at.path("disk"), 3)) == "precious");
  }
}

TEST_CASE("links, pipes and directories under our names are refused, and what they lead to is left alone") {
  const TempDir at;
  DiskDirectory::open(options_for(at, 4));
  write_file(at.path("target"), "elsewhere");
  for (const std::string name : {"lock", "kvstore.disk", "segment-000002.kvs"}) {
    CAPTURE(name);
    const std::string path = at.path("disk/" + name);
    const bool existed = fs::exists(path);
    if (existed) fs::rename(path, at.path("aside"));
    fs::create_symlink(at.path("target"), path);
    check_refused(options_for(at, 4), name + ": is not a regular file");
    fs::remove(path);
    fs::create_symlink(at.path("nowhere"), path);
    check_refused(options_for(at, 4), name + ": is not a regular file");
    fs::remove(path);
    REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
    check_refused(options_for(at, 4), name + ": is not a regular file");  // and does not hang
    fs::remove(path);
    fs::create_directory(path);
    check_refused(options_for(at, 4), name + ": is not a regular file");
    fs::remove(path);
    if (existed) fs::rename(at.path("aside"), path);
  }
  CHECK(read_file(at.path("target")) == "elsewhere");
  CHECK_FALSE(fs::exists(at.path("nowhere")));
  CHECK_NOTHROW(DiskDirectory::open(options_for(at, 4)));
}

TEST_CASE("one process at a time, and the message says which") {
  const TempDir at;
  int ready[2], done[2];
  REQUIRE(::pipe(ready) == 0);
  REQUIRE(::pipe(done) == 0);
  const pid_t child = fork_quietly();
  if (child == 0) {
    ::close(done[1]);
    char byte = 0;
    try {
      const auto held = DiskDirectory::open(options_for(at, 4));
      if (::write(ready[1], "x", 1) != 1) ::_exit(2);
      ::_exit(::read(done[0], &byte, 1) == 0 ? 0 : 3);  // until the other end closes
    } catch (const std::exception&) {
      ::_exit(1);
    }
  }
  ::close(ready[1]);
  ::close(done[0]);
  char byte = 0;
  REQUIRE(::read(ready[0], &byte, 1) == 1);
  const std::string pid = "another daemon (pid " + std::to_string(child) + ")";
  check_refused(options_for(at, 4), pid);
  check_refused(tool_for(at), pid);
  write_file(at.path("disk/lock"), "");  // between its lock and its id
  check_refused(options_for(at, 4), "another daemon uses it");
  ::close(done[1]);
  ::close(ready[0]);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);

  const auto ours = DiskDirectory::open(options_for(at, 4));  // it died; its lock with it
  CHECK(read_file(at.path("disk/lock")) == std::to_string(::getpid()) + "\n");
  check_refused(options_for(at, 4), "this process uses it already");
}

TEST_CASE("a damaged manifest, or one of another version, is refused and stays as it is") {
  const TempDir at;
  const StoreId id = DiskDirectory::open(options_for(at, 4))->id();
  const std::string path = at.path("disk/kvstore.disk");
  const std::string whole = read_file(path);
  const auto refused = [&](const std::string& bytes, const std::string& why) {
    write_file(path, bytes);
    check_refused(options_for(at, 4), why);
    CHECK(read_file(path) == bytes);
  };
  refused("", "is damaged or not ours");
  refused(whole.substr(0, 100), "is damaged or not ours");
  refused(whole + whole, "is damaged or not ours");
  for (std::size_t i = 0; i < 36; ++i) {
    std::string flipped = whole;
    flipped[i] = static_cast<char>(flipped[i] ^ 1);
    refused(flipped, i >= 8 && i < 12 ? "says format version" : "is damaged or not ours");
  }
  std::string newer = whole;
  newer[8] = 2;
  refused(newer, "says format version 2, this program knows 1");
  write_file(path, whole);
  CHECK(DiskDirectory::open(options_for(at, 4))->id() == id);
}

TEST_CASE("a directory whose making was cut short is made again") {
  const TempDir at;
  fs::create_directory(at.path("disk"));
  write_file(at.path("disk/kvstore.disk.new"), "half a pa");
  write_file(at.path("disk/lock"), "4194304\n");
  CHECK_NOTHROW(DiskDirectory::open(options_for(at, 4)));
  CHECK(names_in(at.path("disk")) == std::set<std::string>{"kvstore.disk", "lock"});
}

TEST_CASE("what the system refuses is told with the path") {
  // As root nothing is read-only, so a child gives up being root first.
  const TempDir at;
  REQUIRE(::chmod(at.path().c_str(), 0755) == 0);
  fs::create_directory(at.path("disk"));
  REQUIRE(::chmod(at.path("disk").c_str(), 0555) == 0);
  const int status = in_child([&] {
    if (::geteuid() == 0 && ::setuid(65534) != 0) return 1;
    try {
      DiskDirectory::open(options_for(at, 4));
      return 2;
    } catch (const std::system_error& error) {
      const bool named = std::string(error.what()).find(at.path("disk")) != std::string::npos;
      return error.code().value() == EACCES && named ? 0 : 3;
    }
  });
  CHECK(status == 0);
  CHECK(names_in(at.path("disk")).empty());
}

TEST_CASE("a file system without O_DIRECT is refused with the way out, and served without it") {
  // Linux from 6.6 on takes O_DIRECT on tmpfs; older ones are the file system that the message is for.
  const fs::path memory = "/dev/shm";
  if (!fs::is_directory(memory) || ::access(memory.c_str(), W_OK) != 0) return;
  const std::string path = memory / ("kvstore-test-" + std::to_string(::getpid()));
  DiskDirectory::Options options;
  options.path = path;
  options.capacity_bytes = 4 * kSegment;
  options.segment_bytes = kSegment;
  if (!direct_works(memory)) {
    check_refused(options, "nvme.direct = false");
    CHECK(names_in(path) == std::set<std::string>{"lock"});
  }
  options.direct = direct_works(memory);
  CHECK_NOTHROW(DiskDirectory::open(options));
  fs::remove_all(path);
}
