// A disk that fails as disks do: on purpose, by a seed, on top of another one. For tests, and for a daemon
// that is tested (`faults` in its configuration).
//
// What goes wrong by chance is a FaultSpec. What goes wrong by command (every write says ENOSPC from now on,
// reads hang until they are released, one sector is bad) is said to Faults at run time, from any thread. It
// also records what reached the file, for tests of crashes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "disk.h"

namespace kv {

// How often what happens: the chance of each for one request. The n-th request of a Faults has the same fate
// in every run with that seed, whatever the other numbers are.
struct FaultSpec {
  std::uint64_t seed = 0;
  double read_eio = 0;      // fails, and nothing was read
  double write_eio = 0;     // fails, and nothing was written
  double write_enospc = 0;  // the same, for allocations too
  double sync_eio = 0;      // fails, and nothing was synced
  double torn = 0;          // only the first sectors of a write reach the file; it fails with EIO
  double shortened = 0;     // "short": the disk takes the request in two parts, one after the other
  double flip_read = 0;     // succeeds, but one bit of the memory is wrong
  double flip_write = 0;    // succeeds, but one bit of the file is wrong
  double slow = 0;          // "slow_ms=most:chance": waits up to slow_ms before it begins
  double slow_ms = 0;
  double stall = 0;         // "stall_ms=time:chance": waits stall_ms before it begins
  double stall_ms = 0;
};

// "seed=7,read_eio=0.01,short=0.02,slow_ms=5:0.1": names as above, in any order, each at most once. Invalid,
// naming the part, on an unknown name, a chance outside [0, 1] or a time outside [0, 1e6] ms.
FaultSpec parse_faults(std::string_view text);

// How many there were so far.
struct FaultCounts {
  std::size_t requests = 0, errors = 0, torn = 0, shortened = 0, flipped_reads = 0, flipped_writes = 0, delayed = 0;
};

// A write, allocation or sync as the disk below was given it. Moments count what begins and ends, over all
// files: a write W is safe once there is a sync S of its file with W.ended < S.begun that ended without error;
// at any earlier moment nothing, any part or all of it may be on the medium, in any order with others.
struct LoggedWrite {
  static constexpr std::size_t kNotEnded = ~std::size_t{0};
  DiskOp op = DiskOp::kWrite;  // never kRead
  int fd = -1;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;         // of a write: bytes.size()
  std::vector<std::uint8_t> bytes;  // flips included
  std::size_t begun = 0;
  std::size_t ended = kNotEnded;
  int error = 0;
};

class Faults {
 public:
  explicit Faults(FaultSpec spec = {}) : spec_(spec) {}
  Faults(const Faults&) = delete;
  Faults& operator=(const Faults&) = delete;

  // ---- any thread; for requests that are submitted from now on ---------------------------------------------
  void set(const FaultSpec& spec);
  // Every request of this kind fails with this errno; 0: no more. The disk below sees none of them.
  void fail(DiskOp op, int error);
  // Reads of any byte of [start, stop) of a file fail with EIO.
  void spoil(int fd, std::uint64_t start, std::uint64_t stop);
  // Requests of this kind (of one file, or of any) wait; after release() they go on, in order.
  void hold(DiskOp op, std::optional<int> fd = std::nullopt);
  void release(DiskOp op);
  // Requests that wait, for a release or for their time.
  std::size_t held() const;
  FaultCounts counts() const;

  // Everything that the disk below is given from now on goes to the log, with a copy of every byte written.
  void record();
  // The number of the next thing that begins or ends: whoever learned of something before asking, learned of
  // it before that moment.
  std::size_t moment() const;
  // In the order in which they began.
  std::vector<LoggedWrite> log() const;

 private:
  friend class FaultyDisk;
  // What will become of one request.
  struct Fate {
    int error = 0;
    bool torn = false, shortened = false, flipped = false;
    double delay_s = 0;
    std::uint64_t dice = 0;  // where to cut, which bit
  };
  struct Spoiled {
    int fd;
    std::uint64_t start, stop;
  };

  Fate decide(const DiskRequest& request, std::size_t bytes);
  void decide_error(const DiskRequest& request, std::size_t bytes, std::uint64_t n, Fate& fate) const;
  bool holds(const DiskRequest& request) const;
  void change_held(std::ptrdiff_t by);
  // Positions in the log; nothing when nothing is recorded.
  std::optional<std::size_t> log_begin(const DiskRequest& request);
  void log_end(std::size_t position, int error);

  mutable std::mutex mutex_;
  FaultSpec spec_;
  std::uint64_t requests_ = 0;
  std::array<int, 4> failing_{};  // by DiskOp
  std::array<bool, 4> holding_{};
  std::array<std::optional<int>, 4> held_fd_{};
  std::vector<Spoiled> spoiled_;
  std::size_t held_ = 0;
  FaultCounts counts_;
  bool recording_ = false;
  std::size_t moment_ = 0;
  std::vector<LoggedWrite> log_;
  std::vector<Disk*> disks_;  // to wake when something is released
};

// Its kind() and depth() are those of the disk below. Destroyed while it holds requests, it lets go of them:
// the disk never saw them.
std::unique_ptr<Disk> faulty_disk(std::unique_ptr<Disk> disk, std::shared_ptr<Faults> faults);
// With what parse_faults() makes of the text, and no switches.
std::unique_ptr<Disk> faulty_disk(std::unique_ptr<Disk> disk, std::string_view faults);

}  // namespace kv
