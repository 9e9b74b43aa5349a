#include "disk_survey.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "disk_pages.h"
#include "disk_scan.h"
#include "pieces.h"

namespace kv {
namespace {

using State = FoundSegment::State;

State first_look(const SegmentFile& file) {
  if (!file.usable) return State::kUnfinished;
  return file.header.sequence == 0 ? State::kEmpty : State::kUnsealed;
}

// The part of the entries that a footer has room for: one that covered a record would be worse than a record less.
// (Whoever fills a segment leaves that room; this is for files that somebody else has written.)
std::vector<FooterEntry> with_room(std::vector<FooterEntry> entries, std::uint32_t pages) {
  while (!entries.empty() && entries.back().page + entries.back().pages() + footer_pages(entries.size()) > pages)
    entries.pop_back();
  return entries;
}

[[noreturn]] void fail(const SegmentFile& file, int error) {
  throw std::system_error(error, std::generic_category(),
                          "segment " + std::to_string(file.number) + ": cannot write its footer");
}

void sync(const SegmentFile& file) {
  if (::fdatasync(file.fd.get()) != 0) fail(file, errno);
}

// Records first, then entries, then the trailer that vouches for both: cut short anywhere, the segment is
// unsealed, and its records are where they were.
void seal(const SegmentFile& file, const std::vector<FooterEntry>& records) {
  const Footer end = footer(records, file.header);
  const std::size_t pages = end.bytes.size() / kPageBytes;
  const PageBuffer buffer(pages);
  std::memcpy(buffer.data(), end.bytes.data(), end.bytes.size());
  sync(file);
  const std::size_t before = pages - 1;  // of the trailer
  int error = before == 0 ? 0 : write_pages(file.fd.get(), end.page, buffer.data(), before);
  if (error == 0) error = write_pages(file.fd.get(), end.page + before, buffer.page(before), 1);
  if (error != 0) fail(file, error);
  sync(file);
}

}  // namespace

DiskSurvey::DiskSurvey(std::shared_ptr<DiskDirectory> directory) : directory_(std::move(directory)) {}

std::vector<std::size_t> DiskSurvey::in_state(State state) const {
  std::vector<std::size_t> positions;
  for (std::size_t i = 0; i < segments_.size(); ++i)
    if (segments_[i].state == state) positions.push_back(i);
  return positions;
}

void DiskSurvey::read(int threads) {
  const std::vector<SegmentFile>& files = directory_->segments();
  segments_.assign(files.size(), {});
  in_all_ = read_ = 0;
  for (std::size_t i = 0; i < files.size(); ++i) segments_[i].state = first_look(files[i]);
  const std::vector<std::size_t> opened = in_state(State::kUnsealed);
  for_pieces(threads, opened.size(), [&](std::size_t i) { read_footer(files[opened[i]], segments_[opened[i]]); });

  const std::vector<std::size_t> unsealed = in_state(State::kUnsealed);
  for (const std::size_t i : unsealed) in_all_ += scan_bytes(files[i]);
  for_pieces(threads, unsealed.size(),
             [&](std::size_t i) { scan_records(files[unsealed[i]], segments_[unsealed[i]], read_); });
}

void DiskSurvey::verify(int threads) {
  const std::vector<SegmentFile>& files = directory_->segments();
  const std::vector<std::size_t> sealed = in_state(State::kSealed);
  for (const std::size_t i : sealed) in_all_ += verify_bytes(segments_[i]);
  for_pieces(threads, sealed.size(),
             [&](std::size_t i) { verify_records(files[sealed[i]], segments_[sealed[i]], read_); });
}

std::size_t DiskSurvey::errors() const noexcept {
  return static_cast<std::size_t>(
      std::count_if(segments_.begin(), segments_.end(), [](const FoundSegment& found) { return found.error != 0; }));
}

std::size_t DiskSurvey::repair() {
  std::size_t written = 0;
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    FoundSegment& found = segments_[i];
    const bool wanting = found.state == State::kUnsealed || (found.state == State::kSealed && found.rotten > 0);
    if (!wanting || found.error != 0) continue;
    const SegmentFile& file = directory_->segments()[i];
    found.records = with_room(std::move(found.records), file.pages);
    found.state = State::kUnsealed;  // should a write fail
    seal(file, found.records);
    found.state = State::kSealed;
    found.rotten = 0;
    ++written;
  }
  return written;
}

}  // namespace kv
