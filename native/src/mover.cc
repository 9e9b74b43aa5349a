#include "mover.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "engine.h"
#include "mover_state.h"

namespace kv {

using moves::Clock;
using moves::Ended;
using moves::Job;
using moves::Lanes;
using moves::Run;

namespace {

constexpr double kTimeoutMax = 1e6;  // seconds; keeps deadlines far from the clock's end

}  // namespace

// ---- submission and cancelling -------------------------------------------------------------------------------

MoveId Mover::State::submit(std::unique_ptr<Job> job) {
  const std::lock_guard lock(mutex);
  if (closing) throw Invalid("mover: closed");
  if (jobs.size() >= kJobsMax)
    throw Full("mover: " + std::to_string(kJobsMax) + " jobs are out; take notices() first");
  const std::size_t runs = job->runs.size();
  const std::size_t entries = std::max<std::size_t>(runs, 1);
  if (ended.capacity() < ended_max + entries) ended.reserve(std::max(ended_max + entries, 2 * ended.capacity()));
  Job& mine = *job;
  mine.id = next_id;
  mine.runs_left = runs;
  Lanes& mine_lanes = *lanes[static_cast<std::size_t>(mine.share)];
  auto& waiting = mine_lanes.waiting;
  mine.place = mine_lanes.places++;
  if (runs > 0) waiting.emplace_hint(waiting.end(), mine.place, &mine);
  try {
    jobs.emplace(mine.id, std::move(job));
  } catch (...) {
    waiting.erase(mine.place);
    throw;
  }
  ended_max += entries;
  ++next_id;
  ++open;
  if (runs == 0) report(mine, {0, 0, 0}, 0);
  else wake_disk();
  return mine.id;
}

void Mover::State::cancel(Job& job) {
  job.cancelled.store(true, std::memory_order_relaxed);
  const std::size_t begun = job.runs_begun, runs = job.runs.size();
  if (begun == runs) return;
  const Run rest{job.runs[begun].first, job.runs.back().stop, 0};
  std::fill(job.statuses.begin() + rest.first, job.statuses.begin() + rest.stop, MoveStatus::kDropped);
  lanes[static_cast<std::size_t>(job.share)]->waiting.erase(job.place);
  job.runs_begun = runs;
  job.runs_left -= runs - begun;
  report(job, rest, 0);
}

// ---- notices -------------------------------------------------------------------------------------------------

void Mover::State::report(Job& job, const Run& orders, int error) {
  const bool last = job.runs_left == 0;
  const bool begun = job.begun != Clock::time_point{};
  const double seconds = begun ? std::chrono::duration<double>(Clock::now() - job.begun).count() : 0;
  ended.push_back({&job, orders.first, orders.stop, last, error, seconds});  // has room: see submit()
  if (!told && (last || error != 0 || Clock::now() - taken_at >= moves::kTellEvery)) {
    told = true;
    const std::uint64_t one = 1;
    if (::write(event.get(), &one, sizeof one) != sizeof one) std::terminate();  // a counter at 0 takes a 1
  }
  if (last && --open == 0) idle.notify_all();
}

std::vector<Notice> Mover::State::notices() {
  std::vector<std::unique_ptr<Job>> gone;  // freed after the lock is released
  std::vector<Notice> taken;
  const std::lock_guard lock(mutex);
  if (ended.empty()) return taken;
  taken.reserve(ended.size());
  gone.reserve(ended.size());
  for (const Ended& one : ended) {
    Notice notice{one.job->id, one.first, {}, one.last, one.error, 0, one.seconds};
    notice.statuses.assign(one.job->statuses.begin() + one.first, one.job->statuses.begin() + one.stop);
    for (std::size_t i = 0; i < notice.statuses.size(); ++i)
      if (notice.statuses[i] == MoveStatus::kOk) notice.bytes += one.job->payload_bytes(one.first + i);
    taken.push_back(std::move(notice));
  }
  for (const Ended& one : ended) {
    if (!one.last) continue;
    const auto found = jobs.find(one.job->id);
    ended_max -= std::max<std::size_t>(found->second->runs.size(), 1);
    gone.push_back(std::move(found->second));
    jobs.erase(found);
  }
  ended.clear();
  taken_at = Clock::now();
  std::uint64_t count = 0;
  if (std::exchange(told, false) && ::read(event.get(), &count, sizeof count) != sizeof count)
    std::terminate();  // it was readable
  return taken;
}

// ---- the public face -----------------------------------------------------------------------------------------

Mover::Mover(std::unique_ptr<Disk> disk, std::shared_ptr<Arena> arena, Limits limits) {
  if (!disk || disk->depth() < kDepthMin) throw Invalid("depth: must be at least " + std::to_string(kDepthMin));
  if (!arena) throw Invalid("arena: closed");
  if (limits.verify_threads < 1 || limits.verify_threads > kVerifyThreadsMax)
    throw Invalid("threads: must be in [1, " + std::to_string(kVerifyThreadsMax) + "], got " +
                  std::to_string(limits.verify_threads));
  state_ = std::make_unique<State>(std::move(disk), std::move(arena), limits);
}

Mover::~Mover() { close(); }

int Mover::eventfd() const noexcept { return state_->event.get(); }
std::string_view Mover::disk_kind() const noexcept { return state_->kind; }

MoveId Mover::read(std::vector<ReadOrder> orders) {
  return state_->submit(moves::read_job(*state_->arena, std::move(orders)));
}
MoveId Mover::write(std::vector<WriteOrder> orders) {
  return state_->submit(moves::write_job(*state_->arena, std::move(orders)));
}
MoveId Mover::relocate(std::vector<RelocateOrder> orders) {
  return state_->submit(moves::relocate_job(std::move(orders)));
}
MoveId Mover::pages(int fd, std::uint32_t page, const std::vector<std::uint8_t>& bytes) {
  return state_->submit(moves::pages_job(fd, page, bytes));
}
MoveId Mover::sync(int fd) { return state_->submit(moves::sync_job(fd)); }
MoveId Mover::create(int fd, std::uint32_t pages, const SegmentHeader& header) {
  return state_->submit(moves::create_job(fd, pages, header, state_->zeros.data()));
}

void Mover::cancel(MoveId job) {
  const std::lock_guard lock(state_->mutex);
  if (job == 0 || job >= state_->next_id) throw Invalid("job: " + std::to_string(job) + " was never issued here");
  const auto found = state_->jobs.find(job);
  if (found != state_->jobs.end()) state_->cancel(*found->second);
}

std::vector<Notice> Mover::notices() { return state_->notices(); }

std::size_t Mover::under_way() const {
  const std::lock_guard lock(state_->mutex);
  return state_->open;
}

bool Mover::drain(double timeout_s) {
  if (!(timeout_s >= 0)) throw Invalid("timeout_s: must be a number of seconds >= 0");
  const std::chrono::duration<double> timeout(std::min(timeout_s, kTimeoutMax));
  std::unique_lock lock(state_->mutex);
  return state_->idle.wait_until(lock, Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout),
                                 [this] { return state_->open == 0; });
}

void Mover::close() { state_->close(); }

}  // namespace kv
