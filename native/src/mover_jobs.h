// The kinds of job of a mover, each a life cycle of its own: what travels in one request, what is checked, what
// follows. mover.cc has the threads and the queues, and knows none of them.
//
// A job falls into runs of orders that travel together. A run occupies a lane from its begin to its end:
//
//   begin() ─ kDisk → [the disk] → went() ─ kDisk → …
//                                         ─ kVerify → [a verify thread] verify() ─ kDisk → …
//                                         ─ kEnd                                 ─ kEnd
//
// begin() and went() are called by the disk's thread, verify() by a verify thread, one at a time for a lane.
// None of them allocates or throws (but see mover.h on large relocations).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "arena.h"
#include "copy.h"
#include "disk.h"
#include "mover.h"
#include "record.h"
#include "zeroed.h"

namespace kv::moves {

// Of one request: bounds a lane's memory for header pages, and is two pieces each.
inline constexpr std::size_t kRunRecordsMax = 64;

enum class Share : std::uint8_t { kReads, kWrites, kPages, kRelocations, kCreations };
inline constexpr std::size_t kShares = 5;

enum class Next { kDisk, kVerify, kEnd };

struct Run {
  std::uint32_t first = 0;  // orders [first, stop)
  std::uint32_t stop = 0;
  std::size_t bytes = 0;    // at the disk
};

class Job;

// What one run needs while it is under way.
struct Lane {
  Job* job = nullptr;
  Run run;
  DiskRequest request;             // for the disk's thread to submit, after kDisk
  std::span<iovec> pieces;         // 2 * kRunRecordsMax
  std::uint8_t* memory = nullptr;  // kRunRecordsMax header pages; for relocations kMergeBytes
  Zeroed<std::uint8_t> large;      // for a relocation that needs more
  bool whole = true;               // else record `at` of the run travels by itself
  bool writing = false;            // the second half of a relocation
  std::uint32_t at = 0;            // or the step of a creation
  int error = 0;                   // the last errno
};

class Job {
 public:
  Job(Share kind, std::size_t orders) : share(kind), statuses(orders, MoveStatus::kOk) {}
  virtual ~Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  virtual Next begin(Lane& lane) noexcept = 0;
  // The lane's request has ended.
  virtual Next went(Lane& lane, int error) noexcept = 0;
  virtual Next verify(Lane&, CopyScratch&) noexcept { return Next::kEnd; }
  virtual std::size_t payload_bytes(std::size_t order) const noexcept = 0;

  const Share share;
  std::vector<Run> runs;             // does not change once the job was submitted
  std::vector<MoveStatus> statuses;  // of each order; whoever has the run's lane writes it
  std::atomic<bool> cancelled{false};

  // Under the mover's mutex:
  MoveId id = 0;
  std::uint64_t place = 0;  // in its queue
  std::size_t runs_begun = 0;
  std::size_t runs_left = 0;  // that have not ended
  std::chrono::steady_clock::time_point begun{};
};

// All throw Invalid as mover.h says.
std::unique_ptr<Job> read_job(const Arena& arena, std::vector<ReadOrder> orders);
std::unique_ptr<Job> write_job(const Arena& arena, std::vector<WriteOrder> orders);
std::unique_ptr<Job> relocate_job(std::vector<RelocateOrder> orders);
std::unique_ptr<Job> pages_job(int fd, std::uint32_t page, const std::vector<std::uint8_t>& bytes);
std::unique_ptr<Job> sync_job(int fd);
// `zeros`: kZeroBytes of them, which outlive the job.
inline constexpr std::size_t kZeroBytes = std::size_t{1} << 20;
std::unique_ptr<Job> create_job(int fd, std::uint32_t pages, const SegmentHeader& header, std::uint8_t* zeros);

}  // namespace kv::moves
