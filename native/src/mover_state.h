// What a mover's threads share: lanes, jobs, notices. mover.cc is the callers' side of it, mover_threads.cc that
// of its own threads.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fd.h"
#include "mover_jobs.h"

namespace kv {
namespace moves {

using Clock = std::chrono::steady_clock;

// Zeroed memory that begins at a multiple of 2 MiB.
class AlignedZeros {
 public:
  explicit AlignedZeros(std::size_t bytes);
  std::uint8_t* data() const noexcept { return start_; }
  // A request of many small pages is cut into several, one of huge pages is not. Advice only.
  void ask_for_huge_pages() const noexcept;

 private:
  Zeroed<std::uint8_t> memory_;
  std::uint8_t* start_;
};

// A kind of jobs: its part of the disk's depth, and who waits for it. There may be more lanes than that part: a
// run that is being verified has left the disk, and the next one need not wait for its lane.
struct Lanes {
  struct Part {
    std::size_t requests;  // at the disk at once
    std::size_t bytes;     // at the disk at once; a single larger run is let through
  };
  Lanes(std::size_t n, Part of_disk, std::size_t lane_bytes);

  bool has_room(const Run& run) const noexcept {
    return !free.empty() && at_disk < most.requests && (bytes == 0 || bytes + run.bytes <= most.bytes);
  }

  const Part most;
  Zeroed<iovec> pieces;
  AlignedZeros memory;
  std::vector<Lane> all;
  // Under the mover's mutex:
  std::vector<Lane*> free;
  std::size_t at_disk = 0;
  std::size_t bytes = 0;
  std::map<std::uint64_t, Job*> waiting;  // with runs that were not begun, by place in the queue
  std::uint64_t places = 0;

  // One more run of the first one is begun. Who takes turns goes to the end then, behind those that came meanwhile.
  void begun(bool turns) {
    Job& job = *waiting.begin()->second;
    if (++job.runs_begun == job.runs.size()) {
      waiting.erase(waiting.begin());
    } else if (turns) {
      auto first = waiting.extract(waiting.begin());
      first.key() = job.place = places++;
      waiting.insert(waiting.end(), std::move(first));
    }
  }
};

// Notices of jobs that go on wait for each other so long: whoever takes them does so for many at once.
inline constexpr auto kTellEvery = std::chrono::milliseconds(1);

// What a notice will say; its statuses are read when it is taken.
struct Ended {
  Job* job;
  std::uint32_t first, stop;
  bool last;
  int error;
  double seconds;
};

}  // namespace moves

struct Mover::State {
  State(std::unique_ptr<Disk> d, std::shared_ptr<Arena> a, const Limits& limits);

  MoveId submit(std::unique_ptr<moves::Job> job);
  void cancel(moves::Job& job);  // mutex held
  std::vector<Notice> notices();
  void close();

  // The disk's thread.
  void run_disk() noexcept;
  bool occupy();
  void go_on(moves::Lane& lane, moves::Next next);
  void hand_on();
  // Verify threads.
  void run_verify(CopyScratch& scratch) noexcept;
  // Any thread, the mutex held.
  void wake_disk();
  void enter_disk(moves::Lane& lane);
  void leave_disk(moves::Lane& lane);
  void end(moves::Lane& lane);
  void report(moves::Job& job, const moves::Run& orders, int error);

  struct Left {
    moves::Lane* lane;
    moves::Next next;
  };

  const std::string_view kind;
  const std::shared_ptr<Arena> arena;
  std::unique_ptr<Disk> disk;  // the disk's thread's, but for wake() under the mutex
  const moves::AlignedZeros zeros{moves::kZeroBytes};
  const std::vector<std::unique_ptr<moves::Lanes>> lanes;  // by Share
  std::vector<moves::Lane*> by_tag;                        // all of them
  Fd event;

  // The disk's thread's, with room for all lanes:
  std::vector<DiskDone> done;
  std::vector<moves::Lane*> occupied;
  std::vector<Left> left;

  mutable std::mutex mutex;
  std::condition_variable idle;                                  // open fell to 0
  std::condition_variable check;                                 // to_verify or verify_ends changed
  std::unordered_map<MoveId, std::unique_ptr<moves::Job>> jobs;  // whose last notice was not taken
  std::vector<moves::Ended> ended;      // not taken
  bool told = false;                    // the eventfd is readable
  moves::Clock::time_point taken_at{};  // when notices() last gave some
  std::size_t ended_max = 0;            // entries that the jobs there are can still fill: reserved
  std::vector<moves::Lane*> to_verify;  // oldest first
  std::vector<moves::Lane*> verified;   // and now need the disk again
  MoveId next_id = 1;
  std::size_t open = 0;                 // jobs that have not ended
  bool asleep = false;                  // the disk's thread waits, or will before it looks here again
  bool starved = false;                 // and something waits for a lane
  bool closing = false;
  bool disk_gone = false;
  bool verify_ends = false;

  std::mutex close_mutex;
  std::vector<std::unique_ptr<CopyScratch>> scratch;
  std::vector<std::thread> verifiers;
  std::thread disk_thread;
};

}  // namespace kv
