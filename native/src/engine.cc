#include "engine.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <limits>
#include <string>
#include <system_error>
#include <utility>

namespace kv {
namespace {

using Clock = std::chrono::steady_clock;

// One claim's work: ~100 us at 5 GB/s, so that a cancel is prompt and threads share evenly, yet two orders
// above the cost of claiming.
constexpr std::size_t kRunBytes = 512 << 10;

constexpr double kTimeoutMax = 1e6;  // seconds; keeps deadlines far from the clock's end

// A block's word holds a BlockStatus once it has ended, and one of these before.
constexpr std::uint8_t kQueued = 0xFF;
constexpr std::uint8_t kCopying = 0xFE;
constexpr std::uint8_t word(BlockStatus status) { return static_cast<std::uint8_t>(status); }

Clock::time_point deadline_after(double timeout_s) {
  if (!(timeout_s >= 0)) throw Invalid("timeout_s: must be a number of seconds >= 0");
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(timeout_s, kTimeoutMax)));
}

// The process's signals are for the program's own threads: a handler must not run in the middle of a copy.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

struct Copier::Job {
  using Generations = std::vector<std::uint64_t>;
  Job(Route r, std::vector<BlockId> b, std::vector<SlotId> s, std::vector<Key> k, std::optional<Generations> g)
      : route(std::move(r)), blocks(std::move(b)), slots(std::move(s)), keys(std::move(k)), generations(std::move(g)),
        words(std::make_unique<std::atomic<std::uint8_t>[]>(blocks.size())), remaining(blocks.size()) {
    for (std::size_t i = 0; i < blocks.size(); ++i) words[i].store(kQueued, std::memory_order_relaxed);
    completion.statuses.resize(blocks.size());  // now, so that a worker never allocates
  }

  JobId id = 0;
  Route route;
  const std::vector<BlockId> blocks;
  const std::vector<SlotId> slots;
  const std::vector<Key> keys;                   // of a load
  const std::optional<Generations> generations;  // present: a store
  const std::unique_ptr<std::atomic<std::uint8_t>[]> words;
  std::atomic<std::size_t> remaining;           // blocks that have not ended
  mutable std::atomic<std::size_t> leading{0};  // progress() starts looking here

  // Under the copier's mutex:
  std::size_t claimed = 0;
  std::optional<Clock::time_point> begun;
  Completion completion;
  bool complete = false;
  bool taken = false;

  std::size_t size() const { return blocks.size(); }
};

Copier::Copier(int threads, std::size_t queue_max)
    : queue_max_(queue_max), event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (threads < 1 || threads > kThreadsMax)
    throw Invalid("threads: must be in [1, " + std::to_string(kThreadsMax) + "], got " + std::to_string(threads));
  if (queue_max < 1 || queue_max > kQueueMax)
    throw Invalid("queue_max: must be in [1, " + std::to_string(kQueueMax) + "], got " + std::to_string(queue_max));
  if (!event_) throw std::system_error(errno, std::generic_category(), "copier: eventfd");
  completed_.reserve(queue_max);
  for (int i = 0; i < threads; ++i) scratch_.push_back(std::make_unique<CopyScratch>());
  const SignalsBlocked blocked;  // inherited by the threads
  try {
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back([this, i] { run(*scratch_[static_cast<std::size_t>(i)]); });
      pthread_setname_np(threads_.back().native_handle(), ("kv-copy-" + std::to_string(i)).c_str());
    }
  } catch (const std::system_error&) {
    close();
    throw;
  }
}

Copier::~Copier() { close(); }

// ---- submission ----------------------------------------------------------------------------------------

JobId Copier::store(Route route, std::vector<BlockId> blocks, std::vector<SlotId> slots,
                    std::vector<std::uint64_t> generations) {
  if (generations.size() != slots.size()) throw Invalid("generations: expected one per slot");
  return submit(std::make_shared<Job>(std::move(route), std::move(blocks), std::move(slots), std::vector<Key>{},
                                      std::move(generations)));
}

JobId Copier::load(Route route, std::vector<BlockId> blocks, std::vector<SlotId> slots, std::vector<Key> keys) {
  if (keys.size() != blocks.size()) throw Invalid("keys: expected one per block");
  return submit(
      std::make_shared<Job>(std::move(route), std::move(blocks), std::move(slots), std::move(keys), std::nullopt));
}

JobId Copier::submit(std::shared_ptr<Job> job) {
  if (job->size() > kJobBlocksMax)
    throw Invalid("blocks: at most " + std::to_string(kJobBlocksMax) + " in a job, got " + std::to_string(job->size()));
  if (job->slots.size() != job->size()) throw Invalid("slots: expected one per block");
  if (!job->route.arena) throw Invalid("arena: closed");
  job->route.check();
  check_blocks(job->route.layout, job->blocks);
  check_slots(*job->route.arena, job->route.format, job->slots);
  {
    const std::lock_guard lock(mutex_);
    if (closing_) throw Invalid("copier: closed");
    if (quiescing_ > 0) throw Full("copier: quiescing; submit again afterwards");
    if (jobs_.size() >= queue_max_)
      throw Full("copier: queue_max = " + std::to_string(queue_max_) + " jobs are out; take completions() first");
    job->id = next_id_++;
    job->completion.job = job->id;
    jobs_.emplace(job->id, job);
    if (job->size() > 0) queue_.push_back(job);
  }
  if (job->size() == 0) {
    complete(job);
  } else if (job->size() * job->route.layout.block_bytes() > kRunBytes) {
    work_.notify_all();
  } else {
    work_.notify_one();
  }
  return job->id;
}

// ---- workers -------------------------------------------------------------------------------------------

void Copier::run(CopyScratch& scratch) {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    ++copying_;
    {
      const Claim mine = claim();
      lock.unlock();
      copy(mine, scratch);
    }  // the job, and perhaps with it the arena, is let go outside the lock
    lock.lock();
    if (--copying_ == 0) idle_.notify_all();
  }
}

Copier::Claim Copier::claim() {
  const std::shared_ptr<Job> job = queue_.front();
  const std::size_t most = std::max<std::size_t>(1, kRunBytes / job->route.layout.block_bytes());
  const std::size_t start = job->claimed;
  job->claimed = std::min(job->size(), start + most);
  if (!job->begun) job->begun = Clock::now();
  if (job->claimed == job->size()) queue_.pop_front();
  return {job, start, job->claimed};
}

void Copier::copy(const Claim& claim, CopyScratch& scratch) {
  Job& job = *claim.job;
  std::size_t ended = 0;
  for (std::size_t i = claim.start; i < claim.stop; ++i) {
    std::uint8_t expected = kQueued;
    if (!job.words[i].compare_exchange_strong(expected, kCopying, std::memory_order_acq_rel)) continue;
    const BlockStatus status =
        job.generations ? store_block(job.route, job.blocks[i], {job.slots[i], (*job.generations)[i]}, scratch)
                        : load_block(job.route, job.blocks[i], job.slots[i], job.keys[i], scratch);
    job.words[i].store(word(status), std::memory_order_release);
    ++ended;
  }
  finish(claim.job, ended);
}

void Copier::finish(const std::shared_ptr<Job>& job, std::size_t blocks) {
  if (blocks > 0 && job->remaining.fetch_sub(blocks, std::memory_order_acq_rel) == blocks) complete(job);
}

// Exactly one caller per job: whoever took `remaining` to 0.
void Copier::complete(const std::shared_ptr<Job>& job) {
  std::shared_ptr<Arena> arena;  // unmapped, if this was its last user, after the lock is released
  const std::lock_guard lock(mutex_);
  Completion& completion = job->completion;
  std::size_t ok = 0;
  for (std::size_t i = 0; i < job->size(); ++i) {
    completion.statuses[i] = static_cast<BlockStatus>(job->words[i].load(std::memory_order_acquire));
    if (completion.statuses[i] == BlockStatus::kOk) ++ok;
  }
  completion.bytes = ok * job->route.layout.block_bytes();
  if (job->begun) completion.seconds = std::chrono::duration<double>(Clock::now() - *job->begun).count();
  std::erase(queue_, job);  // still there when cancel dropped what nobody had claimed
  arena = std::move(job->route.arena);
  job->complete = true;
  completed_.push_back(job);
  if (completed_.size() == 1) {
    const std::uint64_t one = 1;
    if (::write(event_.get(), &one, sizeof one) != sizeof one) std::terminate();  // a counter at 0 takes a 1
  }
  finished_.notify_all();
  idle_.notify_all();
}

// ---- questions and cancelling --------------------------------------------------------------------------

std::shared_ptr<Copier::Job> Copier::find(JobId id) const {
  if (id == 0 || id >= next_id_) throw Invalid("job: " + std::to_string(id) + " was never issued here");
  const auto found = jobs_.find(id);
  return found == jobs_.end() ? nullptr : found->second;
}

std::size_t Copier::progress(JobId id) const {
  std::shared_ptr<Job> job;
  {
    const std::lock_guard lock(mutex_);
    job = find(id);
  }
  if (!job) throw Invalid("job: the completion of " + std::to_string(id) + " was taken");
  std::size_t n = job->leading.load(std::memory_order_relaxed);
  while (n < job->size() && job->words[n].load(std::memory_order_acquire) == word(BlockStatus::kOk)) ++n;
  job->leading.store(n, std::memory_order_relaxed);  // a racing smaller value only costs a longer look
  return n;
}

void Copier::drop_queued(const std::shared_ptr<Job>& job) {
  std::size_t dropped = 0;
  // From the back, against the direction of the copies: what is kept is a prefix without holes.
  for (std::size_t i = job->size(); i-- > 0;) {
    std::uint8_t expected = kQueued;
    if (job->words[i].compare_exchange_strong(expected, word(BlockStatus::kDropped), std::memory_order_acq_rel))
      ++dropped;
  }
  finish(job, dropped);
}

void Copier::cancel(JobId id) {
  std::shared_ptr<Job> job;
  {
    const std::lock_guard lock(mutex_);
    job = find(id);
  }
  if (job) drop_queued(job);
}

// ---- completions ---------------------------------------------------------------------------------------

Completion Copier::take(const std::shared_ptr<Job>& job) {
  job->taken = true;
  jobs_.erase(job->id);
  return std::move(job->completion);
}

void Copier::clear_event() {
  std::uint64_t count = 0;
  if (::read(event_.get(), &count, sizeof count) != sizeof count) std::terminate();  // it was readable
}

std::vector<Completion> Copier::completions() {
  std::vector<Completion> taken;
  const std::lock_guard lock(mutex_);
  if (completed_.empty()) return taken;
  taken.reserve(completed_.size());
  for (const auto& job : completed_) taken.push_back(take(job));
  completed_.clear();
  clear_event();
  finished_.notify_all();  // a wait() for one of these must not sleep on
  return taken;
}

std::optional<Completion> Copier::wait(JobId id, double timeout_s) {
  const Clock::time_point deadline = deadline_after(timeout_s);
  std::unique_lock lock(mutex_);
  const std::shared_ptr<Job> job = find(id);
  if (job && !finished_.wait_until(lock, deadline, [&] { return job->complete; })) return std::nullopt;
  if (!job || job->taken) throw Invalid("job: the completion of " + std::to_string(id) + " was taken");
  Completion completion = take(job);
  std::erase(completed_, job);
  if (completed_.empty()) clear_event();
  finished_.notify_all();
  return completion;
}

// ---- ending --------------------------------------------------------------------------------------------

std::vector<std::shared_ptr<Copier::Job>> Copier::unfinished() const {
  std::vector<std::shared_ptr<Job>> jobs;
  for (const auto& [id, job] : jobs_)
    if (!job->complete) jobs.push_back(job);
  return jobs;
}

bool Copier::quiesce(double timeout_s) {
  const Clock::time_point deadline = deadline_after(timeout_s);
  std::unique_lock lock(mutex_);
  ++quiescing_;
  const auto jobs = unfinished();
  lock.unlock();
  for (const auto& job : jobs) drop_queued(job);
  lock.lock();
  const bool quiet = idle_.wait_until(lock, deadline, [&] {
    return copying_ == 0 && std::all_of(jobs.begin(), jobs.end(), [](const auto& job) { return job->complete; });
  });
  --quiescing_;
  return quiet;
}

void Copier::close() {
  const std::lock_guard closing(close_mutex_);
  std::unique_lock lock(mutex_);
  closing_ = true;
  const auto jobs = unfinished();
  lock.unlock();
  for (const auto& job : jobs) drop_queued(job);
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace kv
