// What lies on the disk: format version 1, little endian, in units of kPageBytes.
//
//   page 0        SegmentHeader
//   page 1 …      records: one page of RecordHeader, then the slot as it was in the arena (whole pages)
//   …             footer, only when the segment is sealed: FooterEntry × count, rounded up to pages,
//   last page     Trailer
//
// A segment is filled from page 1 upwards and never changed. Its header is written, and synced, before its
// first record: from then on nothing that an earlier life of the file has left is believed, because `nonce`
// (random, new in every life) is in every record and in the trailer. All records are synced before the
// footer is written: a whole footer proves that the records reached the disk, not that they are good.
//
// A client of the trust group may choose what a payload holds, but knows no nonce: a payload that looks like
// a header is not taken for one.
//
// Every struct begins with eight letters that name it and with the version, and ends with a CRC32C of all before it
// (a footer's entries have one in common, in the trailer). What follows in its page is zeros, and nothing reads them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "types.h"

namespace kv {

inline constexpr std::uint32_t kDiskVersion = 1;
inline constexpr std::uint32_t kHeaderPages = 1;  // of a segment, and of a record
// A segment is at most 1 GiB, so that page numbers stay small, and at least header, record, footer and trailer.
inline constexpr std::uint32_t kSegmentPagesMax = 262144;
inline constexpr std::uint32_t kSegmentPagesMin = 5;
using StoreId = std::array<std::uint8_t, 16>;  // random, of one directory

// What a block of this format takes, its header included.
inline std::uint32_t record_pages(const SlotFormat& format) {
  return kHeaderPages + static_cast<std::uint32_t>(format.slot_bytes() / kPageBytes);
}

// What makes a directory one of ours.
struct Manifest {
  std::uint32_t version = kDiskVersion;
  StoreId store{};
};

struct SegmentHeader {
  StoreId store{};
  std::uint32_t segment = 0;   // number in the file's name
  std::uint32_t pages = 0;     // of the file
  std::uint64_t sequence = 0;  // 1, 2, 3, … in the order in which segments were opened; 0 = never
  std::uint64_t nonce = 0;
};

struct RecordHeader {
  Key key;
  Key parent;             // the root's key at depth 1
  Key root;               // namespace and tenant, by their digest under a secret
  std::uint64_t nonce = 0;     // of the segment
  std::uint64_t sequence = 0;  // of the segment
  std::uint32_t depth = 0;
  std::uint32_t payload_crc = 0;  // CRC32C of the slot's CRC table, which sums every cell
  SlotFormat format;

  std::uint32_t payload_pages() const { return static_cast<std::uint32_t>(format.slot_bytes() / kPageBytes); }
  std::uint32_t pages() const { return kHeaderPages + payload_pages(); }
};

// A record as a footer tells of it. Its root is not among it: the chain ends there.
struct FooterEntry {
  Key key;
  Key parent;
  std::uint32_t depth = 0;
  std::uint32_t page = 0;  // of the record's header, from the start of the file
  std::uint32_t payload_crc = 0;
  SlotFormat format;

  std::uint32_t pages() const { return record_pages(format); }
};
inline constexpr std::size_t kFooterEntryBytes = 96;

struct Trailer {
  std::uint64_t nonce = 0;
  std::uint64_t sequence = 0;
  std::uint32_t count = 0;
  std::uint32_t footer_page = 0;
  std::uint32_t entries_crc = 0;  // CRC32C of the pages [footer_page, last page)
};

// Each writes one whole page.
void encode(const Manifest& manifest, std::uint8_t* page) noexcept;
void encode(const SegmentHeader& header, std::uint8_t* page) noexcept;
void encode(const RecordHeader& header, std::uint8_t* page) noexcept;
void encode(const Trailer& trailer, std::uint8_t* page) noexcept;
// False: the page is not one of these, of another version, or torn; `out` is as it was then. Every value is
// bounded before it is believed, so a true result can be acted on without overflow: a format is one that
// copy.h takes and that fits a segment, depths, pages and sequences of records lie in their ranges.
bool decode(const std::uint8_t* page, SegmentHeader& out) noexcept;
bool decode(const std::uint8_t* page, RecordHeader& out) noexcept;
bool decode(const std::uint8_t* page, Trailer& out) noexcept;
// True for one of any version, so that a program can say which it does not know; of another version only
// `version` is set.
bool decode(const std::uint8_t* page, Manifest& out) noexcept;

void encode(const FooterEntry& entry, std::uint8_t* bytes) noexcept;  // kFooterEntryBytes
bool decode(const std::uint8_t* bytes, FooterEntry& out) noexcept;

// How a footer tells of the record whose header is on that page.
FooterEntry footer_entry(const RecordHeader& header, std::uint32_t page) noexcept;
// Pages that `entries` records need in a footer, the trailer included.
std::uint32_t footer_pages(std::size_t entries) noexcept;

// The end of a segment's file, ready to be written: entries in the order of their pages, then the trailer.
struct Footer {
  std::uint32_t page = 0;           // where it begins
  std::vector<std::uint8_t> bytes;  // whole pages, to the end of the file
};
// `segment` gives nonce, sequence and the file's pages. Broken when records overlap or reach into the footer.
Footer footer(std::span<const FooterEntry> entries, const SegmentHeader& segment);
// `pages`: those from trailer.footer_page up to the trailer. True, with the entries in `out`, if that footer is this
// segment's and whole: its sum agrees, and records follow each other between header and footer.
bool decode_footer(const std::uint8_t* pages, const Trailer& trailer, const SegmentHeader& segment,
                   std::vector<FooterEntry>& out);
// Whether it is this life's trailer, and the footer that it tells of fits the file: what to ask before the
// footer is read.
bool belongs(const Trailer& trailer, const SegmentHeader& segment) noexcept;

}  // namespace kv
