#include "record.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "copy.h"
#include "crc.h"
#include "index.h"

namespace kv {
namespace {

constexpr char kManifestMagic[] = "kvs-disk";
constexpr char kSegmentMagic[] = "kvs-segm";
constexpr char kRecordMagic[] = "kvs-recd";
constexpr char kTrailerMagic[] = "kvs-trlr";
constexpr std::size_t kMagicBytes = 8;

// Most pages of a block: what the largest segment has left beside its header, one record header and a footer.
constexpr std::size_t kPayloadPagesMax = kSegmentPagesMax - (kSegmentPagesMin - 1);
// Most records of a segment: two pages each.
constexpr std::uint32_t kRecordsMax = kSegmentPagesMax / (kHeaderPages + 1);

// Puts fields one after the other, little endian on every machine.
class Writer {
 public:
  Writer(std::uint8_t* bytes, std::size_t n) noexcept : start_(bytes), at_(bytes) { std::memset(bytes, 0, n); }

  void magic(const char* name) noexcept {
    raw(reinterpret_cast<const std::uint8_t*>(name), kMagicBytes);
    u32(kDiskVersion);
  }
  void u32(std::uint32_t value) noexcept {
    for (int i = 0; i < 4; ++i) *at_++ = static_cast<std::uint8_t>(value >> 8 * i);
  }
  void u64(std::uint64_t value) noexcept {
    u32(static_cast<std::uint32_t>(value));
    u32(static_cast<std::uint32_t>(value >> 32));
  }
  template <std::size_t kBytes>
  void bytes(const std::array<std::uint8_t, kBytes>& value) noexcept {
    raw(value.data(), kBytes);
  }
  void format(const SlotFormat& value) noexcept {
    u32(value.layers);
    u32(value.heads);
    u32(value.cell_bytes);
  }
  void crc() noexcept { u32(crc32c(start_, static_cast<std::size_t>(at_ - start_))); }

 private:
  void raw(const std::uint8_t* value, std::size_t n) noexcept {
    std::memcpy(at_, value, n);
    at_ += n;
  }

  std::uint8_t* start_;
  std::uint8_t* at_;
};

// Takes fields in the same order.
class Reader {
 public:
  explicit Reader(const std::uint8_t* bytes) noexcept : start_(bytes), at_(bytes) {}

  bool magic(const char* name) noexcept {
    const bool same = std::memcmp(at_, name, kMagicBytes) == 0;
    at_ += kMagicBytes;
    return same;
  }
  std::uint32_t u32() noexcept {
    std::uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value |= std::uint32_t{*at_++} << 8 * i;
    return value;
  }
  std::uint64_t u64() noexcept {
    const std::uint64_t low = u32();
    return low | std::uint64_t{u32()} << 32;
  }
  template <std::size_t kBytes>
  void bytes(std::array<std::uint8_t, kBytes>& out) noexcept {
    std::memcpy(out.data(), at_, kBytes);
    at_ += kBytes;
  }
  SlotFormat format() noexcept {
    SlotFormat value;
    value.layers = u32();
    value.heads = u32();
    value.cell_bytes = u32();
    return value;
  }
  // Whether the sum that comes next is that of everything before it.
  bool whole() noexcept {
    const auto n = static_cast<std::size_t>(at_ - start_);
    return u32() == crc32c(start_, n);
  }

 private:
  const std::uint8_t* start_;
  const std::uint8_t* at_;
};

bool is_version(std::uint32_t version) noexcept { return version == kDiskVersion; }

// check_format() of copy.h without its messages, and a segment's bound instead of an arena's. The product of
// two u32 fits 64 bits, and so do kCellsMax cells of less than 2^32 + 64 bytes.
bool fits(const SlotFormat& format) noexcept {
  return format.layers > 0 && format.heads > 0 && format.cell_bytes > 0 && format.cells() <= kCellsMax &&
         format.slot_bytes() / kPageBytes <= kPayloadPagesMax;
}

bool is_depth(std::uint32_t depth) noexcept { return depth >= 1 && depth <= kDepthMax; }

std::uint32_t entry_pages(std::size_t entries) noexcept {
  return static_cast<std::uint32_t>(round_up(entries * kFooterEntryBytes, kPageBytes) / kPageBytes);
}

// Whether records in this order, the header of the first not before page 1, end before the footer.
bool in_place(std::span<const FooterEntry> entries, std::uint32_t footer_page) noexcept {
  std::uint32_t next = kHeaderPages;  // pages are at most 2^18 each: no sum here overflows
  for (const FooterEntry& entry : entries) {
    if (entry.page < next) return false;
    next = entry.page + entry.pages();
  }
  return next <= footer_page;
}

}  // namespace

// ---- the manifest ----------------------------------------------------------------------------------------

void encode(const Manifest& manifest, std::uint8_t* page) noexcept {
  Writer out(page, kPageBytes);
  out.magic(kManifestMagic);
  out.u32(0);  // keeps the id aligned
  out.bytes(manifest.store);
  out.crc();
}

bool decode(const std::uint8_t* page, Manifest& out) noexcept {
  Reader in(page);
  Manifest read;
  if (!in.magic(kManifestMagic)) return false;
  read.version = in.u32();
  if (!is_version(read.version)) {
    out.version = read.version;
    return true;
  }
  const std::uint32_t zero = in.u32();
  in.bytes(read.store);
  if (!in.whole() || zero != 0) return false;
  out = read;
  return true;
}

// ---- segments --------------------------------------------------------------------------------------------

void encode(const SegmentHeader& header, std::uint8_t* page) noexcept {
  Writer out(page, kPageBytes);
  out.magic(kSegmentMagic);
  out.u32(header.segment);
  out.bytes(header.store);
  out.u32(header.pages);
  out.u32(0);  // keeps what follows aligned
  out.u64(header.sequence);
  out.u64(header.nonce);
  out.crc();
}

bool decode(const std::uint8_t* page, SegmentHeader& out) noexcept {
  Reader in(page);
  SegmentHeader read;
  if (!in.magic(kSegmentMagic) || !is_version(in.u32())) return false;
  read.segment = in.u32();
  in.bytes(read.store);
  read.pages = in.u32();
  const std::uint32_t zero = in.u32();
  read.sequence = in.u64();
  read.nonce = in.u64();
  if (!in.whole() || zero != 0) return false;
  if (read.pages < kSegmentPagesMin || read.pages > kSegmentPagesMax) return false;
  out = read;
  return true;
}

// ---- records ---------------------------------------------------------------------------------------------

void encode(const RecordHeader& header, std::uint8_t* page) noexcept {
  Writer out(page, kPageBytes);
  out.magic(kRecordMagic);
  out.u32(header.depth);
  out.u64(header.nonce);
  out.u64(header.sequence);
  out.bytes(header.key.bytes);
  out.bytes(header.parent.bytes);
  out.bytes(header.root.bytes);
  out.format(header.format);
  out.u32(header.payload_crc);
  out.crc();
}

bool decode(const std::uint8_t* page, RecordHeader& out) noexcept {
  Reader in(page);
  RecordHeader read;
  if (!in.magic(kRecordMagic) || !is_version(in.u32())) return false;
  read.depth = in.u32();
  read.nonce = in.u64();
  read.sequence = in.u64();
  in.bytes(read.key.bytes);
  in.bytes(read.parent.bytes);
  in.bytes(read.root.bytes);
  read.format = in.format();
  read.payload_crc = in.u32();
  if (!in.whole() || !is_depth(read.depth) || read.sequence == 0 || !fits(read.format)) return false;
  out = read;
  return true;
}

// ---- footers ---------------------------------------------------------------------------------------------

void encode(const Trailer& trailer, std::uint8_t* page) noexcept {
  Writer out(page, kPageBytes);
  out.magic(kTrailerMagic);
  out.u32(trailer.count);
  out.u64(trailer.nonce);
  out.u64(trailer.sequence);
  out.u32(trailer.footer_page);
  out.u32(trailer.entries_crc);
  out.crc();
}

bool decode(const std::uint8_t* page, Trailer& out) noexcept {
  Reader in(page);
  Trailer read;
  if (!in.magic(kTrailerMagic) || !is_version(in.u32())) return false;
  read.count = in.u32();
  read.nonce = in.u64();
  read.sequence = in.u64();
  read.footer_page = in.u32();
  read.entries_crc = in.u32();
  if (!in.whole() || read.sequence == 0 || read.count > kRecordsMax) return false;
  if (read.footer_page < kHeaderPages || read.footer_page >= kSegmentPagesMax) return false;
  out = read;
  return true;
}

void encode(const FooterEntry& entry, std::uint8_t* bytes) noexcept {
  Writer out(bytes, kFooterEntryBytes);
  out.bytes(entry.key.bytes);
  out.bytes(entry.parent.bytes);
  out.u32(entry.depth);
  out.u32(entry.page);
  out.u32(entry.payload_crc);
  out.format(entry.format);
}

bool decode(const std::uint8_t* bytes, FooterEntry& out) noexcept {
  Reader in(bytes);
  FooterEntry read;
  in.bytes(read.key.bytes);
  in.bytes(read.parent.bytes);
  read.depth = in.u32();
  read.page = in.u32();
  read.payload_crc = in.u32();
  read.format = in.format();
  if (in.u64() != 0) return false;  // up to kFooterEntryBytes
  if (!is_depth(read.depth) || read.page < kHeaderPages || read.page >= kSegmentPagesMax || !fits(read.format))
    return false;
  out = read;
  return true;
}

FooterEntry footer_entry(const RecordHeader& header, std::uint32_t page) noexcept {
  return {header.key, header.parent, header.depth, page, header.payload_crc, header.format};
}

std::uint32_t footer_pages(std::size_t entries) noexcept { return entry_pages(entries) + 1; }

Footer footer(std::span<const FooterEntry> entries, const SegmentHeader& segment) {
  std::vector<FooterEntry> sorted(entries.begin(), entries.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const FooterEntry& a, const FooterEntry& b) { return a.page < b.page; });
  const std::uint32_t pages = footer_pages(sorted.size());
  if (sorted.size() > kRecordsMax || pages >= segment.pages || !in_place(sorted, segment.pages - pages))
    throw Broken("footer: records of segment " + std::to_string(segment.segment) + " overlap, or leave no room for it");

  Footer out{segment.pages - pages, std::vector<std::uint8_t>(pages * kPageBytes)};
  std::uint8_t* at = out.bytes.data();
  for (const FooterEntry& entry : sorted) {
    encode(entry, at);
    at += kFooterEntryBytes;
  }
  const std::size_t bytes = out.bytes.size() - kPageBytes;
  Trailer trailer;
  trailer.nonce = segment.nonce;
  trailer.sequence = segment.sequence;
  trailer.count = static_cast<std::uint32_t>(sorted.size());
  trailer.footer_page = out.page;
  trailer.entries_crc = crc32c(out.bytes.data(), bytes);
  encode(trailer, out.bytes.data() + bytes);
  return out;
}

bool belongs(const Trailer& trailer, const SegmentHeader& segment) noexcept {
  return trailer.nonce == segment.nonce && trailer.sequence == segment.sequence &&
         trailer.footer_page + footer_pages(trailer.count) == segment.pages;
}

bool decode_footer(const std::uint8_t* pages, const Trailer& trailer, const SegmentHeader& segment,
                   std::vector<FooterEntry>& out) {
  const std::size_t bytes = entry_pages(trailer.count) * kPageBytes;
  if (!belongs(trailer, segment) || crc32c(pages, bytes) != trailer.entries_crc) return false;
  std::vector<FooterEntry> entries(trailer.count);
  for (std::size_t i = 0; i < entries.size(); ++i)
    if (!decode(pages + i * kFooterEntryBytes, entries[i])) return false;
  if (!in_place(entries, trailer.footer_page)) return false;
  out = std::move(entries);
  return true;
}

}  // namespace kv
