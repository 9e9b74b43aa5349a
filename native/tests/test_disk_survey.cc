#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "survey_fixture.h"

using namespace kv;
using namespace kv::test;
using State = FoundSegment::State;

namespace {

const SlotFormat kFormats[] = {kTwoPages, format_of_pages(1), format_of_pages(7)};

}  // namespace

TEST_CASE("an empty directory has nothing to find") {
  const Surveyed disk;
  const auto survey = disk.survey();
  CHECK(survey->segments().empty());
  CHECK(survey->errors() == 0);
  survey->verify(2);
  CHECK(survey->repair() == 0);
  CHECK_THROWS_AS(survey->read(0), Invalid);
}

TEST_CASE("every state of a segment, and every format, is found as it was written") {
  const Surveyed disk;
  std::map<std::uint32_t, SegmentImage> images;
  std::map<std::uint32_t, State> expected;
  const auto keep = [&](SegmentImage image, State state) {
    image.save(disk.options.path);
    expected[image.header().segment] = state;
    images.emplace(image.header().segment, std::move(image));
  };
  keep(disk.image(0, 0), State::kEmpty);      // made, never opened
  keep(disk.image(1, 7), State::kUnsealed);   // opened, nothing in it
  std::uint64_t name = 1;
  for (std::uint32_t number = 2; number < 8; ++number) {
    SegmentImage image = disk.image(number, number);
    const SlotFormat& format = kFormats[number % 3];
    const auto chain = chain_of(kRoot, name, 11, format);
    for (const RecordHeader& record : chain) image.append(record);
    name += chain.size();
    if (number % 2 == 0) image.seal();
    keep(std::move(image), number % 2 == 0 ? State::kSealed : State::kUnsealed);
  }
  SegmentImage sealed_empty = disk.image(8, 20);
  sealed_empty.seal();
  keep(std::move(sealed_empty), State::kSealed);
  disk.image(9, 21).save(disk.options.path, kSegment / 2);  // never finished
  disk.image(10, 22).save(disk.options.path, 0);

  for (const int threads : {1, 4}) {
    const auto survey = disk.survey(threads);
    CHECK(survey->errors() == 0);
    const auto& files = survey->directory()->segments();
    REQUIRE(survey->segments().size() == files.size());
    for (std::size_t i = 0; i < files.size(); ++i) {
      const std::uint32_t number = files[i].number;
      const FoundSegment& found = survey->segments()[i];
      CAPTURE(number);
      CHECK(found.rotten == 0);
      if (number >= 9) {
        CHECK(found.state == State::kUnfinished);
        CHECK(found.records.empty());
        continue;
      }
      CHECK(found.state == expected.at(number));
      CHECK(same(found.records, images.at(number).entries()));
      CHECK(found.end_page == (found.state == State::kEmpty ? 0 : images.at(number).next()));
    }
    survey->verify(threads);
    CHECK(survey->bytes_read() == survey->bytes_in_all());
    for (std::size_t i = 0; i < files.size(); ++i) CHECK(survey->segments()[i].rotten == 0);
  }
}

TEST_CASE("any damaged byte of a footer or a trailer only costs the time of a scan") {
  const Surveyed disk;
  SegmentImage image = disk.with_records(3);
  image.seal();
  image.save(disk.options.path);
  REQUIRE(disk.found().state == State::kSealed);
  const auto directory = disk.open();
  const std::size_t footer = (kPages - 2) * kPageBytes, trailer = (kPages - 1) * kPageBytes;
  const auto state_with = [&](std::size_t offset) {
    CAPTURE(offset);
    const std::uint8_t byte = image.page(0)[offset];
    disk.poke(0, offset, byte ^ 0x80);
    const auto survey = Surveyed::survey(directory, 1);
    disk.poke(0, offset, byte);
    REQUIRE(same(survey->segments()[0].records, image.entries()));
    REQUIRE(survey->segments()[0].end_page == image.next());
    return survey->segments()[0].state;
  };
  for (std::size_t i = 0; i < 3 * kFooterEntryBytes; ++i) REQUIRE(state_with(footer + i) == State::kUnsealed);
  REQUIRE(state_with(footer + kPageBytes - 1) == State::kUnsealed);
  for (std::size_t i = 0; i < 44; ++i) REQUIRE(state_with(trailer + i) == State::kUnsealed);
  REQUIRE(state_with(trailer + 44) == State::kSealed);
}

TEST_CASE("verify() finds records of sealed segments that are not what the footer says") {
  const Surveyed disk;
  SegmentImage image = disk.with_records(6);
  image.seal();
  const auto& entries = image.entries();
  image.page(entries[1].page)[40] ^= 1;                           // a header
  image.page(entries[3].page + 1)[kTwoPages.cell_stride()] ^= 1;  // a cell
  // A good record, whose bytes agree with its sums, but of another key than the footer says.
  RecordHeader other = record_of(key_of(77), kRoot, kRoot, 1, kTwoPages);
  other.nonce = image.header().nonce;
  other.sequence = image.header().sequence;
  other.payload_crc = entries[4].payload_crc;
  encode(other, image.page(entries[4].page));
  image.save(disk.options.path);

  const auto survey = disk.survey();
  CHECK(same(survey->segments()[0].records, entries));  // read() believes the footer
  CHECK(survey->bytes_in_all() == 0);
  survey->verify(2);
  CHECK(survey->bytes_in_all() == 6 * 3 * kPageBytes);
  CHECK(survey->bytes_read() == survey->bytes_in_all());
  const FoundSegment& found = survey->segments()[0];
  CHECK(found.state == State::kSealed);
  CHECK(found.rotten == 3);
  CHECK(same(found.records, {entries[0], entries[2], entries[5]}));
  CHECK(survey->errors() == 0);
}

TEST_CASE("a trailer that lies about its footer, under a right sum, is not followed") {
  const Surveyed disk;
  SegmentImage image = disk.with_records(3);
  image.seal();
  Trailer trailer;
  REQUIRE(decode(image.page(kPages - 1), trailer));
  const Trailer good = trailer;
  const auto state_with = [&](const Trailer& lie) {
    encode(lie, image.page(kPages - 1));
    image.save(disk.options.path);
    const FoundSegment found = disk.found();
    CHECK(same(found.records, image.entries()));
    return found.state;
  };
  CHECK(state_with(good) == State::kSealed);
  for (const std::uint32_t page : {1u, kPages - 3, kPages - 1, kPages, kSegmentPagesMax - 1}) {
    trailer = good;
    trailer.footer_page = page;
    CHECK(state_with(trailer) == State::kUnsealed);
  }
  for (const std::uint32_t count : {0u, 4u, 43u, kSegmentPagesMax / 2}) {
    trailer = good;
    trailer.count = count;
    CHECK(state_with(trailer) == State::kUnsealed);
  }
}

TEST_CASE("repair() seals what is unsealed and takes rot out of footers; the next survey agrees") {
  const Surveyed disk;
  SegmentImage unsealed = disk.with_records(5);
  unsealed.save(disk.options.path);
  SegmentImage rotten = disk.image(1, 6), good = disk.image(2, 7);
  for (const RecordHeader& record : chain_of(kRoot, 100, 43, format_of_pages(1))) rotten.append(record);
  rotten.seal();
  rotten.page(rotten.entries()[9].page + 1)[0] ^= 1;
  rotten.save(disk.options.path);
  for (const RecordHeader& record : chain_of(kRoot, 200, 3, kTwoPages)) good.append(record);
  good.seal();
  good.save(disk.options.path);
  disk.image(3, 0).save(disk.options.path);
  disk.image(4, 9).save(disk.options.path, kSegment / 2);
  disk.image(5, 10).save(disk.options.path);  // opened, empty
  {
    const auto survey = disk.survey();
    survey->verify(2);
    CHECK(survey->segments()[1].rotten == 1);
    CHECK(survey->repair() == 3);
    CHECK(survey->segments()[1].rotten == 0);
    CHECK(survey->repair() == 0);
  }
  const auto survey = disk.survey();
  survey->verify(2);
  const auto& found = survey->segments();
  const State expected[] = {State::kSealed, State::kSealed, State::kSealed,
                            State::kEmpty,  State::kUnfinished, State::kSealed};
  for (std::size_t i = 0; i < 6; ++i) {
    CAPTURE(i);
    CHECK(found[i].state == expected[i]);
    CHECK(found[i].rotten == 0);
  }
  CHECK(same(found[0].records, unsealed.entries()));
  CHECK(same(found[1].records, without(rotten.entries(), 9)));
  CHECK(same(found[2].records, good.entries()));
  CHECK(found[5].records.empty());
  CHECK(survey->repair() == 0);
}

TEST_CASE("a footer never covers a record: those that reach too far are given up") {
  const Surveyed disk;
  SegmentImage image = disk.image(0, 5);
  const auto chain = chain_of(kRoot, 1, 85, kTwoPages);  // 255 pages: to the very end
  for (const RecordHeader& record : chain) image.append(record);
  REQUIRE(image.next() == kPages);
  image.save(disk.options.path);
  CHECK(disk.survey()->repair() == 1);
  const auto survey = disk.survey();
  survey->verify(1);
  const FoundSegment& found = survey->segments()[0];
  CHECK(found.state == State::kSealed);
  CHECK(found.rotten == 0);
  // 84 entries need two pages, and the trailer one.
  CHECK(same(found.records, {image.entries().begin(), image.entries().begin() + 84}));
}

TEST_CASE("progress can be watched from another thread") {
  const Surveyed disk;
  for (std::uint32_t i = 0; i < 6; ++i) {
    SegmentImage image = disk.image(i, i + 1);
    for (const RecordHeader& record : chain_of(kRoot, i * 100 + 1, 50, kTwoPages)) image.append(record);
    if (i % 2 == 0) image.seal();
    image.save(disk.options.path);
  }
  DiskSurvey survey(disk.open());
  std::atomic<bool> done{false}, backwards{false};
  std::thread watcher([&] {
    for (std::size_t seen = 0; !done.load();) {
      const std::size_t read = survey.bytes_read();
      if (read < seen) backwards.store(true);
      seen = read;
    }
  });
  survey.read(3);
  const std::size_t scanned = 3 * (kPages - 1) * kPageBytes;
  CHECK(survey.bytes_in_all() == scanned);
  survey.verify(3);
  done.store(true);
  watcher.join();
  CHECK_FALSE(backwards.load());
  CHECK(survey.bytes_read() == scanned + 3 * 50 * 3 * kPageBytes);
  CHECK(survey.bytes_read() == survey.bytes_in_all());
}

TEST_CASE("random lives: what a survey finds is what was written and not damaged") {
  // Each round writes some segments, each with holes, damage or none, and asks for exactly the rest.
  const Surveyed disk;
  Random random(2024);
  for (int round = 0; round < 8; ++round) {
    CAPTURE(round);
    std::map<std::uint32_t, std::vector<FooterEntry>> expected;
    std::uint64_t name = 1;
    for (std::uint32_t number = 0; number < 4; ++number) {
      SegmentImage image = disk.image(number, 10 + number + static_cast<std::uint64_t>(round) * 4);
      std::vector<std::uint32_t> damaged;
      while (image.next() < kPages - 20 && !random.chance(3)) {
        if (random.chance(10)) image.skip(1 + random.below(9));
        const SlotFormat& format = kFormats[random.below(3)];
        const std::uint32_t page = image.append(record_of(key_of(name++), kRoot, kRoot, 1, format));
        if (random.chance(15)) damaged.push_back(page);
      }
      for (const FooterEntry& entry : image.entries())
        if (std::find(damaged.begin(), damaged.end(), entry.page) == damaged.end()) expected[number].push_back(entry);
      if (random.chance(50)) image.seal();
      for (const std::uint32_t page : damaged) image.page(page + random.below(2))[random.below(100)] ^= 0x11;
      image.save(disk.options.path);
    }
    const auto directory = disk.open();
    const auto survey = Surveyed::survey(directory);
    survey->verify(2);
    for (std::size_t i = 0; i < directory->segments().size(); ++i)
      REQUIRE(same(survey->segments()[i].records, expected[directory->segments()[i].number]));
    survey->repair();
    const auto again = Surveyed::survey(directory);
    for (std::size_t i = 0; i < directory->segments().size(); ++i) {
      REQUIRE(again->segments()[i].state == State::kSealed);
      REQUIRE(same(again->segments()[i].records, expected[directory->segments()[i].number]));
    }
  }
}
