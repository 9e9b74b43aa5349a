// What a directory holds, read from the disk: footers of sealed segments, everything of the others.
//
// A segment with a whole trailer of its own life is sealed: its footer is believed (every record is verified
// when it is read anyway). Any other that was ever opened is scanned from page 1 on, page by page, because a
// failed write may have left a hole, and every record found is verified down to its cells: after a crash
// nothing is reported that cannot be read. It is read to its end: behind the last record lies whatever an earlier
// life has left, and nothing proves that no record follows.
//
// Memory: 88 B a record; each thread 4.3 MiB while it scans, or as much as the largest record if that is more.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "disk_directory.h"
#include "record.h"

namespace kv {

struct FoundSegment {
  // kUnfinished: not usable (disk_directory.h). kEmpty: never opened. An opened one without a whole footer is
  // kUnsealed, also when nothing is in it.
  enum class State : std::uint8_t { kUnfinished, kEmpty, kSealed, kUnsealed };
  State state = State::kUnfinished;
  std::uint32_t end_page = 0;  // first page after the last record that was found, good or rotten; 0 = never opened
  std::vector<FooterEntry> records;  // by page
  // Of the scan, or of verify(); damaged records are not in `records`.
  std::uint32_t rotten = 0;    // whole header, wrong bytes, or bytes that cannot be read
  int error = 0;               // errno of the last read that failed; what lies there is missing
};

class DiskSurvey {
 public:
  explicit DiskSurvey(std::shared_ptr<DiskDirectory> directory);

  // Reads it, on that many threads: of a sealed segment its footer only. Invalid unless threads is in [1, 256].
  void read(int threads);
  // After read(): reads and verifies the records of sealed segments too (kvstore check).
  void verify(int threads);

  // For a progress bar, from any thread: what read() will read to scan unsealed segments, and then verify() the sealed
  // ones, and what of it was read. Footers are not worth counting.
  std::size_t bytes_in_all() const noexcept { return in_all_.load(std::memory_order_relaxed); }
  std::size_t bytes_read() const noexcept { return read_.load(std::memory_order_relaxed); }

  const std::shared_ptr<DiskDirectory>& directory() const noexcept { return directory_; }
  // One per segment of the directory, in its order.
  const std::vector<FoundSegment>& segments() const noexcept { return segments_; }
  // Segments of which something could not be read.
  std::size_t errors() const noexcept;

  // Writes footers again: unsealed segments are sealed, footers lose the records that verify() found rotten.
  // Returns the segments written. For tools; the directory must not be in use. Leaves alone what could not be
  // read whole, since the fault may pass. std::system_error when a write fails: that segment stays unsealed.
  std::size_t repair();

 private:
  std::vector<std::size_t> in_state(FoundSegment::State state) const;  // positions

  std::shared_ptr<DiskDirectory> directory_;
  std::vector<FoundSegment> segments_;
  std::atomic<std::size_t> in_all_{0};
  std::atomic<std::size_t> read_{0};
};

}  // namespace kv
