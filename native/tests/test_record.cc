// The bytes of format 1 come from a program of their own (struct and a CRC table, in another language): whoever
// changes one of them changes the format, and with it the version.
#include <doctest/doctest.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "crc.h"
#include "disk_kit.h"
#include "index.h"
#include "record.h"

using namespace kv;
using namespace kv::test;

namespace {

using Page = std::vector<std::uint8_t>;

std::string hex(const std::uint8_t* bytes, std::size_t n) {
  std::string text;
  for (std::size_t i = 0; i < n; ++i) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(bytes[i]));
    text += two;
  }
  return text;
}

constexpr std::uint64_t kNonce = 0x1112131415161718, kSequence = 0x0102030405060708;
constexpr SlotFormat kFormat{2, 4, 4096};  // nine pages

Manifest a_manifest() { return {kDiskVersion, store_of(9)}; }
SegmentHeader a_segment() { return {store_of(9), 7, 256, kSequence, kNonce}; }

RecordHeader a_record() {
  RecordHeader header;
  header.key = key_of(1);
  header.parent = key_of(2);
  header.root = key_of(3);
  header.nonce = kNonce;
  header.sequence = kSequence;
  header.depth = 3;
  header.payload_crc = 0xA1B2C3D4;
  header.format = kFormat;
  return header;
}

std::vector<FooterEntry> some_entries() {
  std::vector<FooterEntry> entries;
  for (std::uint32_t i = 0; i < 3; ++i)
    entries.push_back({key_of(i + 1), key_of(i), i + 1, 1 + i * 10, 0xA1B2C3D4 + i, kFormat});
  return entries;
}

// The trailer of a segment with some_entries().
Trailer a_trailer() { return {kNonce, kSequence, 3, 254, 0x55ccf2b0}; }

template <class Struct>
Page page_of(const Struct& value) {
  Page page(kPageBytes, 0xEE);
  encode(value, page.data());
  return page;
}

// Bytes as they must be, and nothing but zeros behind them.
template <class Struct>
void check_golden(const Struct& value, const std::string& expected) {
  const Page page = page_of(value);
  const std::size_t n = expected.size() / 2;
  CHECK(hex(page.data(), n) == expected);
  for (std::size_t i = n; i < page.size(); ++i) REQUIRE(page[i] == 0);
}

// The same fields, whatever the struct: what it encodes to.
template <class Struct>
bool same(const Struct& a, const Struct& b) {
  return page_of(a) == page_of(b);
}

// Every flipped byte, and every page that is torn at one: refused, or read as what it was.
template <class Struct>
void check_damage(const Struct& value, std::size_t bytes) {
  const Page whole = page_of(value);
  Struct read;
  REQUIRE(decode(whole.data(), read));
  REQUIRE(same(read, value));
  for (std::size_t i = 0; i < kPageBytes; ++i) {
    CAPTURE(i);
    for (const std::uint8_t flip : {0x01, 0x80, 0xFF}) {
      Page damaged = whole;
      damaged[i] ^= flip;
      Struct out{};
      const bool accepted = decode(damaged.data(), out);
      REQUIRE(accepted == (i >= bytes));
      if (accepted) REQUIRE(same(out, value));
    }
  }
  for (std::size_t i = 0; i < bytes; ++i) {
    Page torn = whole;
    std::fill(torn.begin() + static_cast<std::ptrdiff_t>(i), torn.end(), std::uint8_t{0});
    Struct out{};
    REQUIRE((!decode(torn.data(), out) || same(out, value)));
  }
  CHECK_FALSE(decode(Page(kPageBytes, 0).data(), read));
  CHECK_FALSE(decode(Page(kPageBytes, 0xFF).data(), read));
}

// A value out of its bounds, under a right sum, is refused all the same, and `out` stays as it was.
template <class Struct>
void check_refused(const char* what, const Struct& good, const std::function<void(Struct&)>& spoil) {
  CAPTURE(what);
  Struct bad = good;
  spoil(bad);
  Struct out = good;
  CHECK_FALSE(decode(page_of(bad).data(), out));
  CHECK(same(out, good));
}

}  // namespace

TEST_CASE("format 1 is these bytes") {
  check_golden(a_manifest(), "6b76732d6469736b0100000000000000441a43eff27540bc3ad9c6d7cd4fdb1dd6d63c08");
  check_golden(a_segment(),
               "6b76732d7365676d0100000007000000441a43eff27540bc3ad9c6d7cd4fdb1d00010000000000000807060504030201"
               "181716151413121125a532c1");
  check_golden(a_record(),
               "6b76732d72656364010000000300000018171615141312110807060504030201ed8f01dbe4140b1d89a9817b8a6f46b3"
               "01dd50d0a6e8eb9ccfc9ab66fb64a7125ac389a30c3b0363f83697934d3197c047c16b10f0d3923b45b905dac24e6e19"
               "d70d3259e4e1cb631c663cf4d73c4c04022ab1ba804098e6cb293e6770eb3a95020000000400000000100000d4c3b2a1"
               "cd2091ff");
  check_golden(a_trailer(),
               "6b76732d74726c72010000000300000018171615141312110807060504030201fe000000b0f2cc55d651a68f");

  std::uint8_t entry[kFooterEntryBytes];
  encode(some_entries()[0], entry);
  CHECK(hex(entry, sizeof entry) ==
        "ed8f01dbe4140b1d89a9817b8a6f46b301dd50d0a6e8eb9ccfc9ab66fb64a712c15c0289ec2d0a9167ec8e65a18debbe"
        "5e5532fbeea293f80bc942ee9086c1710100000001000000d4c3b2a10200000004000000001000000000000000000000");

  // A whole footer: entries in a row, zeros to the end of the page, the trailer.
  const Footer end = footer(some_entries(), a_segment());
  CHECK(end.page == 254);
  REQUIRE(end.bytes.size() == 2 * kPageBytes);
  CHECK(crc32c(end.bytes.data(), kPageBytes) == 0x55ccf2b0);
  CHECK(hex(end.bytes.data(), sizeof entry) == hex(entry, sizeof entry));
  const Page trailer = page_of(a_trailer());
  CHECK(std::memcmp(end.bytes.data() + kPageBytes, trailer.data(), kPageBytes) == 0);
}

TEST_CASE("any flipped or torn byte of a struct is refused, or in the zeros behind it") {
  check_damage(a_segment(), 60);
  check_damage(a_record(), 148);
  check_damage(a_trailer(), 44);
}

TEST_CASE("a manifest of another version says which, one that is damaged is none") {
  const Page whole = page_of(a_manifest());
  Manifest read;
  REQUIRE(decode(whole.data(), read));
  CHECK(read.version == kDiskVersion);
  CHECK(read.store == store_of(9));
  for (std::size_t i = 0; i < kPageBytes; ++i) {
    CAPTURE(i);
    Page damaged = whole;
    damaged[i] ^= 0x40;
    Manifest out;
    const bool accepted = decode(damaged.data(), out);
    const bool in_version = i >= 8 && i < 12;
    REQUIRE(accepted == (in_version || i >= 36));
    if (in_version) {
      REQUIRE(out.version != kDiskVersion);
      REQUIRE(out.store == StoreId{});
    }
    if (i >= 36) REQUIRE(out.store == store_of(9));
  }
}

TEST_CASE("structs are not taken for each other, nor for another version") {
  SegmentHeader segment;
  RecordHeader record;
  Trailer trailer;
  CHECK_FALSE(decode(page_of(a_record()).data(), segment));
  CHECK_FALSE(decode(page_of(a_trailer()).data(), segment));
  CHECK_FALSE(decode(page_of(a_segment()).data(), record));
  CHECK_FALSE(decode(page_of(a_trailer()).data(), record));
  CHECK_FALSE(decode(page_of(a_segment()).data(), trailer));
  CHECK_FALSE(decode(page_of(a_record()).data(), trailer));

  const auto of_version_2 = [](Page page, std::size_t sum_at) {
    page[8] = 2;
    const std::uint32_t sum = crc32c(page.data(), sum_at);
    std::memcpy(page.data() + sum_at, &sum, sizeof sum);
    return page;
  };
  CHECK_FALSE(decode(of_version_2(page_of(a_segment()), 56).data(), segment));
  CHECK_FALSE(decode(of_version_2(page_of(a_record()), 144).data(), record));
  CHECK_FALSE(decode(of_version_2(page_of(a_trailer()), 40).data(), trailer));
}

TEST_CASE("values out of their bounds are refused under a right sum") {
  using S = SegmentHeader;
  check_refused<S>("no pages", a_segment(), [](S& s) { s.pages = 0; });
  check_refused<S>("too few pages", a_segment(), [](S& s) { s.pages = kSegmentPagesMin - 1; });
  check_refused<S>("more than 1 GiB", a_segment(), [](S& s) { s.pages = kSegmentPagesMax + 1; });

  using R = RecordHeader;
  check_refused<R>("depth 0", a_record(), [](R& r) { r.depth = 0; });
  check_refused<R>("too deep", a_record(), [](R& r) { r.depth = kDepthMax + 1; });
  check_refused<R>("never opened", a_record(), [](R& r) { r.sequence = 0; });
  check_refused<R>("no layers", a_record(), [](R& r) { r.format.layers = 0; });
  check_refused<R>("no heads", a_record(), [](R& r) { r.format.heads = 0; });
  check_refused<R>("no cell", a_record(), [](R& r) { r.format.cell_bytes = 0; });
  check_refused<R>("too many cells", a_record(), [](R& r) { r.format = {256, 257, 64}; });
  check_refused<R>("cells that overflow", a_record(), [](R& r) { r.format = {kNone, kNone, kNone}; });
  check_refused<R>("larger than a segment", a_record(), [](R& r) { r.format = {1, 1, 1u << 30}; });
  check_refused<R>("larger than 32 bits of pages", a_record(), [](R& r) { r.format = {256, 256, kNone}; });

  using T = Trailer;
  check_refused<T>("never opened", a_trailer(), [](T& t) { t.sequence = 0; });
  check_refused<T>("too many records", a_trailer(), [](T& t) { t.count = kSegmentPagesMax / 2 + 1; });
  check_refused<T>("over the header", a_trailer(), [](T& t) { t.footer_page = 0; });
  check_refused<T>("beyond a segment", a_trailer(), [](T& t) { t.footer_page = kSegmentPagesMax; });
}

TEST_CASE("the largest values are read") {
  RecordHeader record = a_record();
  record.depth = kDepthMax;
  // What a segment of 1 GiB has left beside its header, the record's, an entry and the trailer.
  record.format = format_of_pages(kSegmentPagesMax - 4);
  RecordHeader out;
  REQUIRE(decode(page_of(record).data(), out));
  CHECK(same(out, record));
  CHECK(out.pages() == kSegmentPagesMax - 3);
  record.format = {256, 256, 4096 - kCellAlign};
  REQUIRE(decode(page_of(record).data(), out));
  CHECK(out.payload_pages() == 65536 / 4096 * 4032 + 64);
  record.format = format_of_pages(kSegmentPagesMax - 3);
  CHECK_FALSE(decode(page_of(record).data(), out));

  SegmentHeader segment = a_segment(), read;
  segment.pages = kSegmentPagesMax;
  segment.sequence = 0;  // made, never opened
  REQUIRE(decode(page_of(segment).data(), read));
  CHECK(same(read, segment));
}

TEST_CASE("a footer is read back whole, in the order of its pages") {
  for (const std::size_t n : {0, 1, 42, 43, 127, 1000}) {
    CAPTURE(n);
    SegmentHeader segment = a_segment();
    segment.pages = 4096;
    std::vector<FooterEntry> entries;
    const SlotFormat format = format_of_pages(2);
    for (std::uint32_t i = 0; i < n; ++i)
      entries.push_back({key_of(i + 1), key_of(i), i + 1, 1 + 3 * i, i, format});
    std::vector<FooterEntry> shuffled = entries;
    Random random(n + 1);
    for (std::size_t i = n; i > 1; --i) std::swap(shuffled[i - 1], shuffled[random.below(i)]);

    const Footer end = footer(shuffled, segment);
    CHECK(end.bytes.size() == footer_pages(n) * kPageBytes);
    CHECK(end.page == segment.pages - footer_pages(n));
    CHECK(footer_pages(n) == (n * kFooterEntryBytes + kPageBytes - 1) / kPageBytes + 1);
    Trailer trailer;
    REQUIRE(decode(end.bytes.data() + end.bytes.size() - kPageBytes, trailer));
    CHECK(trailer.count == n);
    CHECK(trailer.footer_page == end.page);
    CHECK(belongs(trailer, segment));
    std::vector<FooterEntry> read(7);
    REQUIRE(decode_footer(end.bytes.data(), trailer, segment, read));
    REQUIRE(read.size() == n);
    for (std::size_t i = 0; i < n; ++i) {
      std::uint8_t a[kFooterEntryBytes], b[kFooterEntryBytes];
      encode(entries[i], a);
      encode(read[i], b);
      REQUIRE(std::memcmp(a, b, sizeof a) == 0);
    }
  }
}

TEST_CASE("any flipped byte of a footer's entries is refused") {
  const Footer end = footer(some_entries(), a_segment());
  std::vector<FooterEntry> read;
  REQUIRE(decode_footer(end.bytes.data(), a_trailer(), a_segment(), read));
  for (std::size_t i = 0; i < kPageBytes; ++i) {
    CAPTURE(i);
    Page damaged(end.bytes.begin(), end.bytes.begin() + static_cast<std::ptrdiff_t>(kPageBytes));
    damaged[i] ^= 0x04;
    read.clear();
    REQUIRE_FALSE(decode_footer(damaged.data(), a_trailer(), a_segment(), read));
    REQUIRE(read.empty());
  }
}

TEST_CASE("a footer of another life, of another length or with impossible records is refused") {
  const SegmentHeader segment = a_segment();
  const auto accepted = [&](const std::function<void(std::vector<FooterEntry>&)>& spoil, const SegmentHeader& judge) {
    // Entries as a bug of ours would have written them: under a right sum.
    std::vector<FooterEntry> entries = some_entries();
    spoil(entries);
    Page page(kPageBytes, 0);
    for (std::size_t i = 0; i < entries.size(); ++i) encode(entries[i], page.data() + i * kFooterEntryBytes);
    Trailer trailer = a_trailer();
    trailer.entries_crc = crc32c(page.data(), kPageBytes);
    std::vector<FooterEntry> read;
    return decode_footer(page.data(), trailer, judge, read);
  };
  const auto nothing = [](auto&) {};
  REQUIRE(accepted(nothing, segment));
  SegmentHeader other = segment;
  other.nonce += 1;
  CHECK_FALSE(accepted(nothing, other));
  other = segment;
  other.sequence += 1;
  CHECK_FALSE(accepted(nothing, other));
  other = segment;
  other.pages += 1;
  CHECK_FALSE(accepted(nothing, other));
  using Entries = std::vector<FooterEntry>;
  CHECK_FALSE(accepted([](Entries& e) { e[0].page = 0; }, segment));
  CHECK_FALSE(accepted([](Entries& e) { e[1].page = 10; }, segment));    // overlaps the first
  CHECK_FALSE(accepted([](Entries& e) { e[2].page = 245; }, segment));   // reaches into the footer
  CHECK_FALSE(accepted([](Entries& e) { e[2].page = kNone; }, segment));
  CHECK_FALSE(accepted([](Entries& e) { std::swap(e[0], e[1]); }, segment));
  CHECK_FALSE(accepted([](Entries& e) { e[2].depth = 0; }, segment));
  CHECK_FALSE(accepted([](Entries& e) { e[2].format.heads = 0; }, segment));
  CHECK(accepted([](Entries& e) { e[2].page = 244; }, segment));
}

TEST_CASE("a footer that cannot be true is a bug of whoever asks for it") {
  const SegmentHeader segment = a_segment();
  std::vector<FooterEntry> entries = some_entries();
  entries[1].page = 5;
  CHECK_THROWS_AS(footer(entries, segment), Broken);
  entries = some_entries();
  entries[2].page = 245;
  CHECK_THROWS_AS(footer(entries, segment), Broken);
  entries[2].page = 244;
  CHECK_NOTHROW(footer(entries, segment));
  SegmentHeader small = segment;
  small.pages = 2;
  CHECK_THROWS_AS(footer(some_entries(), small), Broken);
  CHECK_THROWS_AS(footer(std::vector<FooterEntry>(kSegmentPagesMax), segment), Broken);
}
