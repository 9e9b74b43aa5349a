// Unsealed segments: what is found in them after any end.
#include <doctest/doctest.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "disk_scan.h"
#include "survey_fixture.h"

using namespace kv;
using namespace kv::test;
using State = FoundSegment::State;

TEST_CASE("records that lie across the borders of what is read at once, and larger ones, are found") {
  // 16 MiB in reads of 4 MiB; a record of 1,100 pages is longer than a read.
  const Surveyed disk;
  SegmentImage image = disk.image(0, 5, 4096);
  Random random(7);
  std::uint64_t name = 1;
  const auto add = [&](std::size_t pages) {
    const Key key = key_of(name++);
    image.append(record_of(key, kRoot, kRoot, 1, format_of_pages(pages)));
  };
  add(1100);
  while (image.next() < 4000) {
    if (image.next() < 2400) add(image.next() % 1024 > 900 ? 200 : 90 + random.below(7));
    else add(1 + random.below(60));
    if (random.chance(20)) image.skip(1 + random.below(3));
  }
  image.save(disk.options.path);
  const FoundSegment found = disk.found();
  CHECK(found.state == State::kUnsealed);
  CHECK(found.rotten == 0);
  CHECK(same(found.records, image.entries()));
}

TEST_CASE("holes of any length are passed, to the last page of the file") {
  const Surveyed disk;
  SegmentImage image = disk.image(0, 5);
  const auto chain = chain_of(kRoot, 1, 4, kTwoPages);
  image.append(chain[0]);
  image.skip(1);
  image.append(chain[1]);
  image.skip(100);
  image.append(chain[2]);
  image.skip(kPages - 3 - image.next());
  image.append(chain[3]);
  REQUIRE(image.next() == kPages);
  image.save(disk.options.path);
  const FoundSegment found = disk.found();
  CHECK(same(found.records, image.entries()));
  CHECK(found.end_page == kPages);
}

TEST_CASE("any damaged byte of an unsealed record loses that record and no other") {
  const Surveyed disk;
  SegmentImage image = disk.with_records(5);
  image.save(disk.options.path);
  const auto directory = disk.open();
  const FooterEntry& victim = image.entries()[2];
  const std::size_t start = victim.page * kPageBytes;
  const auto found_with = [&](std::size_t offset) {
    CAPTURE(offset);
    const std::uint8_t byte = image.page(0)[start + offset];
    disk.poke(0, start + offset, byte ^ 0x08);
    const FoundSegment found = Surveyed::survey(directory, 1)->segments()[0];
    disk.poke(0, start + offset, byte);
    REQUIRE(found.state == State::kUnsealed);
    return found;
  };
  for (std::size_t i = 0; i < 148; ++i) {  // the header: its record is not seen any more
    const FoundSegment found = found_with(i);
    REQUIRE(same(found.records, without(image.entries(), 2)));
    REQUIRE(found.rotten == 0);
  }
  const std::size_t payload = kPageBytes, table = payload + kTwoPages.table_offset();
  std::vector<std::size_t> offsets;
  for (std::size_t i = 0; i < 4 * kTwoPages.cells(); ++i) offsets.push_back(table + i);
  for (std::size_t cell = 0; cell < kTwoPages.cells(); ++cell)
    for (const std::size_t i : {std::size_t{0}, std::size_t{801}, std::size_t{kTwoPages.cell_bytes - 1}})
      offsets.push_back(payload + cell * kTwoPages.cell_stride() + i);
  for (const std::size_t offset : offsets) {
    const FoundSegment found = found_with(offset);
    REQUIRE(same(found.records, without(image.entries(), 2)));
    REQUIRE(found.rotten == 1);
  }
  // Nothing depends on what lies between the fields.
  for (const std::size_t offset : {std::size_t{148}, kPageBytes - 1, payload + kTwoPages.cell_bytes,
                                   table + 4 * kTwoPages.cells()})
    REQUIRE(same(found_with(offset).records, image.entries()));
}

TEST_CASE("torn records, cut at any page, are rotten; those around them stay") {
  const Surveyed disk;
  SegmentImage image = disk.with_records(6, format_of_pages(7));
  SegmentImage torn = image;
  const FooterEntry& victim = image.entries()[3];
  for (std::uint32_t pages = 0; pages < victim.pages(); ++pages) {  // so many reached the disk
    CAPTURE(pages);
    std::memcpy(torn.page(victim.page), image.page(victim.page), victim.pages() * kPageBytes);
    std::fill(torn.page(victim.page + pages), torn.page(victim.page + victim.pages()), std::uint8_t{0x5A});
    torn.save(disk.options.path);
    const FoundSegment found = disk.found();
    CHECK(same(found.records, without(image.entries(), 3)));
    CHECK(found.rotten == (pages == 0 ? 0u : 1u));
    CHECK(found.end_page == image.next());
  }
}

TEST_CASE("a torn last record counts for where the segment ends") {
  const Surveyed disk;
  SegmentImage image = disk.with_records(3);
  image.page(image.entries()[2].page + 1)[5] ^= 1;
  image.save(disk.options.path);
  const FoundSegment found = disk.found();
  CHECK(same(found.records, without(image.entries(), 2)));
  CHECK(found.end_page == image.next());
}

TEST_CASE("what an earlier life of the file has left is not believed") {
  const Surveyed disk;
  SegmentImage image = disk.with_records(40);
  image.seal();
  SegmentHeader next = image.header();
  next.sequence = 6;
  next.nonce += 1;
  SUBCASE("opened again, nothing written: old records and the old footer") {
    image.reopen(next);
  }
  SUBCASE("some new records before the old ones and the old footer") {
    image.reopen(next);
    for (const RecordHeader& record : chain_of(kRoot, 500, 3, format_of_pages(7))) image.append(record);
  }
  SUBCASE("the same nonce by chance: the sequence tells") {
    next.nonce -= 1;
    image.reopen(next);
    for (const RecordHeader& record : chain_of(kRoot, 500, 3, kTwoPages)) image.append(record);
  }
  SUBCASE("new records, then a hole over old ones, then a new one") {
    image.reopen(next);
    const auto chain = chain_of(kRoot, 500, 4, kTwoPages);
    image.append(chain[0]);
    image.skip(3);  // a whole record of before
    image.append(chain[1]);
    image.skip(20);
    image.append(chain[2]);
  }
  image.save(disk.options.path);
  const FoundSegment found = disk.found();
  CHECK(found.state == State::kUnsealed);
  CHECK(found.rotten == 0);
  CHECK(same(found.records, image.entries()));
  CHECK(found.end_page == image.next());
}

TEST_CASE("a header that a client has written into its block is not believed") {
  // A block of four pages whose second page looks like a record of its own, with good sums behind it.
  const Surveyed disk;
  SegmentImage image = disk.image(0, 5);
  const SlotFormat outer = format_of_pages(5);
  const Key key = key_of(1), prey = key_of(2);
  const auto block_with = [&](std::uint64_t nonce, std::uint64_t sequence) {
    Payload payload = payload_of(key, outer);
    RecordHeader forged = record_of(prey, kRoot, kRoot, 1, kTwoPages);
    forged.nonce = nonce;
    forged.sequence = sequence;
    encode(forged, payload.bytes.data() + kPageBytes);
    const Payload inner = payload_of(prey, kTwoPages);
    std::memcpy(payload.bytes.data() + 2 * kPageBytes, inner.bytes.data(), inner.bytes.size());
    const std::uint32_t cell = crc32c(payload.bytes.data(), outer.cell_bytes);
    std::memcpy(payload.bytes.data() + outer.table_offset(), &cell, 4);
    payload.crc = crc32c(payload.bytes.data() + outer.table_offset(), 4);
    return payload;
  };
  const std::uint64_t nonce = image.header().nonce;
  RecordHeader header = record_of(key, kRoot, kRoot, 1, outer);
  const auto find = [&](std::uint64_t claimed, std::uint64_t sequence, bool torn) {
    SegmentImage forged = image;
    const Payload payload = block_with(claimed, sequence);
    header.payload_crc = payload.crc;
    const std::uint32_t page = forged.append(header, payload.bytes);
    if (torn) forged.page(page + 1)[0] ^= 1;  // so that the scan goes through the block page by page
    forged.save(disk.options.path);
    return disk.found();
  };
  for (const std::uint64_t claimed : {nonce + 1, std::uint64_t{0}}) {
    CHECK(find(claimed, 5, true).records.empty());
    CHECK(find(claimed, 5, true).rotten == 1);
    CHECK(find(claimed, 5, false).records.size() == 1);
  }
  CHECK(find(nonce, 4, true).records.empty());
  // What the nonce is for: with it the forgery would be believed, unless its block is whole.
  CHECK(find(nonce, 5, true).records.size() == 1);
  const FoundSegment whole = find(nonce, 5, false);
  REQUIRE(whole.records.size() == 1);
  CHECK(whole.records[0].key == key);
}

TEST_CASE("a header whose record would end behind the file is not followed") {
  const Surveyed disk;
  SegmentImage image = disk.with_records(3);
  RecordHeader header = record_of(key_of(9), kRoot, kRoot, 1, kTwoPages);  // three pages
  header.nonce = image.header().nonce;
  header.sequence = image.header().sequence;
  for (const std::uint32_t left : {1u, 2u}) {
    SegmentImage cut = image;
    encode(header, cut.page(kPages - left));
    cut.save(disk.options.path);
    const FoundSegment found = disk.found();
    CHECK(same(found.records, image.entries()));
    CHECK(found.rotten == 0);
    CHECK(found.end_page == image.next());
  }
}

TEST_CASE("what cannot be read is missing, is told, and is not repaired away") {
  const Surveyed disk;
  SegmentImage image = disk.with_records(40);  // up to page 121
  SUBCASE("unsealed") {
    image.save(disk.options.path);
    const auto directory = disk.open();
    REQUIRE(::truncate(segment_path(disk.options.path, 0).c_str(), 100 * kPageBytes) == 0);
    const auto survey = Surveyed::survey(directory, 1);
    const FoundSegment& found = survey->segments()[0];
    CHECK(found.error == EIO);
    CHECK(found.state == State::kUnsealed);
    CHECK(found.records.size() == 33);
    CHECK(same(found.records, {image.entries().begin(), image.entries().begin() + 33}));
    CHECK(survey->errors() == 1);
    CHECK(survey->repair() == 0);
  }
  SUBCASE("unsealed, after its trailer was read") {
    image.save(disk.options.path);
    const auto directory = disk.open();
    const SegmentFile& file = directory->segments()[0];
    FoundSegment found;
    read_footer(file, found);
    CHECK(found.error == 0);
    REQUIRE(::truncate(segment_path(disk.options.path, 0).c_str(), 100 * kPageBytes) == 0);
    BytesRead read{0};
    scan_records(file, found, read);
    CHECK(read.load() == scan_bytes(file));
    CHECK(found.error == EIO);
    CHECK(same(found.records, {image.entries().begin(), image.entries().begin() + 33}));
  }
  SUBCASE("sealed, after its footer was read") {
    image.seal();
    image.save(disk.options.path);
    const auto survey = disk.survey(1);
    REQUIRE(::truncate(segment_path(disk.options.path, 0).c_str(), 100 * kPageBytes) == 0);
    CHECK(survey->errors() == 0);
    survey->verify(1);
    CHECK(survey->bytes_read() == survey->bytes_in_all());
    CHECK(survey->errors() == 1);
    CHECK(survey->segments()[0].records.size() == 33);
    CHECK(survey->segments()[0].rotten == 7);
    CHECK(survey->repair() == 0);
  }
  SUBCASE("a trailer that cannot be read costs a scan") {
    image.seal();
    image.save(disk.options.path);
    const auto directory = disk.open();
    REQUIRE(::truncate(segment_path(disk.options.path, 0).c_str(), kSegment - kPageBytes) == 0);
    const auto survey = Surveyed::survey(directory, 1);
    CHECK(same(survey->segments()[0].records, image.entries()));
    CHECK(survey->segments()[0].state == State::kUnsealed);
    CHECK(survey->errors() == 1);
    CHECK(survey->repair() == 0);
  }
}
