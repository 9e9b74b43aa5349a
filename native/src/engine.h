// The copier: worker threads between one submission queue and one completion queue, and one eventfd.
//
// A job is a chain of blocks. Threads claim runs of blocks from the front job, so one large job is shared
// and a chain arrives in order. Per block one atomic word: QUEUED -> COPYING -> its status, or QUEUED ->
// DROPPED by cancel; whoever moves the last block of a job completes it, so each completes exactly once.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <vector>

#include "copy.h"
#include "fd.h"

namespace kv {

using JobId = std::uint64_t;

// No room now; try again after taking completions. BlockingIOError in Python.
struct Full : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Completion {
  JobId job = 0;
  std::vector<BlockStatus> statuses;  // in the order of the call
  std::size_t bytes = 0;              // of the blocks that are kOk
  double seconds = 0;                 // from the first block's start to the last one's end; no time in the queue
};

class Copier {
 public:
  static constexpr int kThreadsMax = 64;
  static constexpr std::size_t kQueueMax = 65536;
  static constexpr std::size_t kJobBlocksMax = 65536;

  // queue_max bounds jobs between their submission and the taking of their completion.
  explicit Copier(int threads, std::size_t queue_max = 1024);
  ~Copier();  // close(). A forked child, which has none of the threads, must leak its copy instead.
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Readable exactly while completions() has something.
  int eventfd() const { return event_.get(); }

  // Invalid (nothing was written) on a bad route, id or length; Full as above or while a quiesce() runs.
  // `generations`: of each slot when it was reserved; a block whose slot has another by now is kStale.
  JobId store(Route route, std::vector<BlockId> blocks, std::vector<SlotId> slots,
              std::vector<std::uint64_t> generations);
  JobId load(Route route, std::vector<BlockId> blocks, std::vector<SlotId> slots, std::vector<Key> keys);

  // Leading blocks that are finished and kOk. Invalid when the job's completion was taken.
  std::size_t progress(JobId id) const;
  // Blocks not yet begun become kDropped; no effect on a job that has ended.
  void cancel(JobId id);

  std::vector<Completion> completions();
  // Takes that job's completion; nothing at the timeout. Invalid when someone else took it.
  std::optional<Completion> wait(JobId id, double timeout_s);
  // Cancels everything and joins what runs. True when no job submitted before can write any more.
  bool quiesce(double timeout_s);
  // Quiesces without limit and ends the threads. Completions can still be taken, nothing can be submitted.
  void close();

 private:
  struct Job;
  struct Claim {
    std::shared_ptr<Job> job;
    std::size_t start;
    std::size_t stop;
  };

  JobId submit(std::shared_ptr<Job> job);
  void run(CopyScratch& scratch);
  Claim claim();  // mutex_ held, queue_ not empty
  void copy(const Claim& claim, CopyScratch& scratch);
  void drop_queued(const std::shared_ptr<Job>& job);
  void finish(const std::shared_ptr<Job>& job, std::size_t blocks);
  void complete(const std::shared_ptr<Job>& job);
  Completion take(const std::shared_ptr<Job>& job);      // mutex_ held; leaves completed_ to the caller
  void clear_event();                                    // mutex_ held, completed_ has just become empty
  std::shared_ptr<Job> find(JobId id) const;         // mutex_ held; null when taken, Invalid when never issued
  std::vector<std::shared_ptr<Job>> unfinished() const;  // mutex_ held

  const std::size_t queue_max_;
  Fd event_;

  mutable std::mutex mutex_;
  std::condition_variable work_;      // queue_ or closing_ changed
  std::condition_variable finished_;  // a job completed or was taken
  std::condition_variable idle_;      // copying_ fell to 0 or a job completed
  JobId next_id_ = 1;
  std::unordered_map<JobId, std::shared_ptr<Job>> jobs_;  // submitted, completion not taken
  std::deque<std::shared_ptr<Job>> queue_;                // with blocks nobody has claimed
  std::vector<std::shared_ptr<Job>> completed_;           // not taken; the eventfd says whether it is empty
  std::size_t copying_ = 0;                               // claims being worked on
  int quiescing_ = 0;
  bool closing_ = false;

  std::mutex close_mutex_;
  std::vector<std::unique_ptr<CopyScratch>> scratch_;
  std::vector<std::thread> threads_;
};

}  // namespace kv
