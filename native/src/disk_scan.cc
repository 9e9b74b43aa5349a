#include "disk_scan.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "copy.h"
#include "disk_pages.h"

namespace kv {
namespace {

constexpr std::uint32_t kChunkPages = 1024;  // 4 MiB a read: fast on every disk, and a thread's memory
// Failed reads after which the rest of a segment is given up: a dying disk may take seconds for each.
constexpr int kFailuresMax = 64;

// A part of the bytes that a survey announced: all of it counts as read in the end, also what was skipped.
class Share {
 public:
  Share(std::size_t bytes, BytesRead& read) : left_(bytes), read_(read) {}
  ~Share() { add(left_); }
  Share(const Share&) = delete;
  Share& operator=(const Share&) = delete;

  void add(std::size_t bytes) noexcept {
    bytes = std::min(bytes, left_);
    left_ -= bytes;
    read_.fetch_add(bytes, std::memory_order_relaxed);
  }

 private:
  std::size_t left_;
  BytesRead& read_;
};

// Pages of a segment in memory, moving forwards, so that whoever asks in ascending order reads each page once.
// Near pages that cannot be read its reads get smaller, until only those are missing.
class Window {
 public:
  // Of the pages [0, stop).
  Window(const SegmentFile& file, std::uint32_t stop, Share& share)
      : fd_(file.fd.get()), stop_(stop), share_(share), memory_(std::min(kChunkPages, stop)) {}

  // Pages [page, page + pages), inside [0, stop), until the next call; null if one of them cannot be read.
  const std::uint8_t* at(std::uint32_t page, std::uint32_t pages) {
    if (page >= first_ && page + pages <= end_) return memory_.page(page - first_);
    keep_from(page);
    for (; failures_ < kFailuresMax; chunk_ = std::max(chunk_ / 4, 1u)) {
      const std::uint32_t want = std::min(std::max(pages, chunk_), stop_ - page);
      if (want > memory_.pages()) grow(want);
      const std::uint32_t kept = end_ - page;
      const int error = read_pages(fd_, end_, memory_.page(kept), want - kept);
      if (error == 0) {
        share_.add((want - kept) * kPageBytes);
        end_ = page + want;
        chunk_ = std::min(chunk_ * 2, kChunkPages);
        return memory_.data();
      }
      error_ = error;
      ++failures_;
      if (want == pages) break;
    }
    return nullptr;
  }

  int error() const noexcept { return error_; }  // of the last failed read, or 0

 private:
  // What is there of [page, …) moves to the front: a record may begin in one chunk and end in the next.
  void keep_from(std::uint32_t page) {
    if (page >= first_ && page < end_) {
      std::memmove(memory_.data(), memory_.page(page - first_), (end_ - page) * kPageBytes);
    } else {
      end_ = page;
    }
    first_ = page;
  }

  void grow(std::uint32_t pages) {
    PageBuffer larger(pages);
    std::memcpy(larger.data(), memory_.data(), (end_ - first_) * kPageBytes);
    memory_ = std::move(larger);
  }

  int fd_;
  std::uint32_t stop_;
  Share& share_;
  PageBuffer memory_;
  std::uint32_t first_ = 0, end_ = 0;  // pages in memory
  std::uint32_t chunk_ = kChunkPages;
  int failures_ = 0;
  int error_ = 0;
};

bool is_of(const RecordHeader& record, const SegmentHeader& segment) noexcept {
  return record.nonce == segment.nonce && record.sequence == segment.sequence;
}

bool payload_agrees(const std::uint8_t* record, const FooterEntry& entry, CopyScratch& scratch) noexcept {
  return sums_agree(record + kHeaderPages * kPageBytes, entry.format, entry.payload_crc, scratch);
}

bool same(const FooterEntry& a, const FooterEntry& b) noexcept {
  std::uint8_t bytes[2][kFooterEntryBytes];
  encode(a, bytes[0]);
  encode(b, bytes[1]);
  return std::memcmp(bytes[0], bytes[1], kFooterEntryBytes) == 0;
}

// The records that a whole footer of this life tells of. False: there is none, or it cannot be read (found.error).
bool take_footer(const SegmentFile& file, FoundSegment& found) {
  const PageBuffer last(1);
  Trailer trailer;
  found.error = read_pages(file.fd.get(), file.pages - 1, last.data(), 1);
  if (found.error != 0 || !decode(last.data(), trailer) || !belongs(trailer, file.header)) return false;
  const std::uint32_t pages = file.pages - 1 - trailer.footer_page;
  const PageBuffer entries(std::max(pages, 1u));
  if (pages > 0) found.error = read_pages(file.fd.get(), trailer.footer_page, entries.data(), pages);
  return found.error == 0 && decode_footer(entries.data(), trailer, file.header, found.records);
}

}  // namespace

void read_footer(const SegmentFile& file, FoundSegment& found) {
  found.end_page = kHeaderPages;
  found.state = FoundSegment::State::kUnsealed;
  if (!take_footer(file, found)) return;
  found.state = FoundSegment::State::kSealed;
  if (!found.records.empty()) found.end_page = found.records.back().page + found.records.back().pages();
}

std::size_t scan_bytes(const SegmentFile& file) noexcept { return file.bytes() - kHeaderPages * kPageBytes; }

void scan_records(const SegmentFile& file, FoundSegment& found, BytesRead& read) {
  Share share(scan_bytes(file), read);
  Window window(file, file.pages, share);
  const auto scratch = std::make_unique_for_overwrite<CopyScratch>();
  for (std::uint32_t page = kHeaderPages; page < file.pages;) {
    const std::uint8_t* bytes = window.at(page, 1);
    RecordHeader header;
    const bool begins = bytes != nullptr && decode(bytes, header) && is_of(header, file.header) &&
                        header.pages() <= file.pages - page;
    if (!begins) {
      ++page;
      continue;
    }
    const FooterEntry entry = footer_entry(header, page);
    found.end_page = std::max(found.end_page, page + entry.pages());
    bytes = window.at(page, entry.pages());
    if (bytes != nullptr && payload_agrees(bytes, entry, *scratch)) {
      found.records.push_back(entry);
      page += entry.pages();
    } else {
      ++found.rotten;
      ++page;  // how far it was written nobody knows: the next record may begin anywhere
    }
  }
  if (window.error() != 0) found.error = window.error();
}

std::size_t verify_bytes(const FoundSegment& found) noexcept {
  std::size_t pages = 0;
  for (const FooterEntry& entry : found.records) pages += entry.pages();
  return pages * kPageBytes;
}

void verify_records(const SegmentFile& file, FoundSegment& found, BytesRead& read) {
  Share share(verify_bytes(found), read);
  Window window(file, found.end_page, share);
  const auto scratch = std::make_unique_for_overwrite<CopyScratch>();
  std::vector<FooterEntry> good;
  good.reserve(found.records.size());
  for (const FooterEntry& entry : found.records) {
    const std::uint8_t* bytes = window.at(entry.page, entry.pages());
    RecordHeader header;
    const bool as_told = bytes != nullptr && decode(bytes, header) && is_of(header, file.header) &&
                         same(footer_entry(header, entry.page), entry) && payload_agrees(bytes, entry, *scratch);
    if (as_told) good.push_back(entry);
  }
  found.rotten += static_cast<std::uint32_t>(found.records.size() - good.size());
  found.records = std::move(good);
  if (window.error() != 0) found.error = window.error();
}

}  // namespace kv
