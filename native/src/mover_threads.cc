#include <sys/eventfd.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "mover_state.h"
#include "thread.h"

namespace kv {

using moves::Clock;
using moves::Job;
using moves::Lane;
using moves::Lanes;
using moves::Next;
using moves::Run;

namespace moves {

AlignedZeros::AlignedZeros(std::size_t bytes) : memory_(round_up(bytes, kHugeBytes) + kHugeBytes) {
  start_ = reinterpret_cast<std::uint8_t*>(round_up(reinterpret_cast<std::uintptr_t>(&memory_[0]), kHugeBytes));
}

void AlignedZeros::ask_for_huge_pages() const noexcept {
  ::madvise(start_, memory_.size() - kHugeBytes, MADV_HUGEPAGE);
}

Lanes::Lanes(std::size_t n, Part of_disk, std::size_t lane_bytes)
    : most(of_disk), pieces(n * 2 * kRunRecordsMax), memory(n * lane_bytes), all(n) {
  for (std::size_t i = n; i-- > 0;) {
    all[i].pieces = {&pieces[i * 2 * kRunRecordsMax], 2 * kRunRecordsMax};
    all[i].memory = memory.data() + i * lane_bytes;
    free.push_back(&all[i]);
  }
}

}  // namespace moves

namespace {

constexpr double kForever = 1e6;  // seconds

std::vector<std::unique_ptr<Lanes>> make_lanes(std::size_t depth, const Mover::Limits& limits) {
  constexpr std::size_t kHeaders = moves::kRunRecordsMax * kPageBytes;
  const std::size_t relocations = depth < 32 ? 1 : 4, pages = std::max<std::size_t>(depth / 16, 1),
                    writes = std::max<std::size_t>(depth / 4, 1), creations = 1;
  const std::size_t reads = depth - writes - pages - relocations - creations;
  std::vector<std::unique_ptr<Lanes>> lanes;  // in the order of Share
  const auto add = [&](std::size_t n, Lanes::Part most, std::size_t lane_bytes) {
    lanes.push_back(std::make_unique<Lanes>(n, most, lane_bytes));
  };
  add(2 * reads, {reads, limits.read_bytes_max}, kHeaders);
  add(writes, {writes, limits.write_bytes_max}, kHeaders);
  add(pages, {pages, limits.write_bytes_max}, 0);
  add(relocations, {relocations, relocations * kMergeBytes}, kMergeBytes);
  lanes.back()->memory.ask_for_huge_pages();
  add(creations, {creations, 0}, 0);
  return lanes;
}

}  // namespace

Mover::State::State(std::unique_ptr<Disk> d, std::shared_ptr<Arena> a, const Limits& limits)
    : kind(d->kind()), arena(std::move(a)), disk(std::move(d)), lanes(make_lanes(disk->depth(), limits)),
      event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  zeros.ask_for_huge_pages();  // never written: where there are any, the kernel's own huge page of zeros
  if (!event) throw std::system_error(errno, std::generic_category(), "mover: eventfd");
  for (const auto& kind_of : lanes)
    for (Lane& lane : kind_of->all) {
      lane.request.tag = by_tag.size();
      by_tag.push_back(&lane);
    }
  to_verify.reserve(by_tag.size());
  verified.reserve(by_tag.size());
  done.reserve(disk->depth());
  occupied.reserve(by_tag.size());
  left.reserve(by_tag.size());
  for (int i = 0; i < limits.verify_threads; ++i) scratch.push_back(std::make_unique<CopyScratch>());
  try {
    for (int i = 0; i < limits.verify_threads; ++i)
      verifiers.push_back(start_thread("kv-verify-" + std::to_string(i),
                                       [this, i] { run_verify(*scratch[static_cast<std::size_t>(i)]); }));
    disk_thread = start_thread("kv-disk", [this] { run_disk(); });
  } catch (const std::system_error&) {
    close();
    throw;
  }
}

// ---- the disk's thread ---------------------------------------------------------------------------------------

void Mover::State::wake_disk() {
  if (!std::exchange(asleep, false) || disk_gone) return;
  disk->wake();
}

void Mover::State::enter_disk(Lane& lane) {
  Lanes& kind_of = *lanes[static_cast<std::size_t>(lane.job->share)];
  ++kind_of.at_disk;
  kind_of.bytes += lane.run.bytes;
}

void Mover::State::leave_disk(Lane& lane) {
  Lanes& kind_of = *lanes[static_cast<std::size_t>(lane.job->share)];
  --kind_of.at_disk;
  kind_of.bytes -= lane.run.bytes;
}

// Gives the lane back; its run has ended.
void Mover::State::end(Lane& lane) {
  Job& job = *lane.job;
  lanes[static_cast<std::size_t>(job.share)]->free.push_back(&lane);
  --job.runs_left;
  report(job, lane.run, lane.error);
}

// Puts into `occupied` every lane that can go to the disk now. With none, the disk's thread is asleep from here on,
// and whoever makes one possible wakes it. False: the mover was closed, and all has ended.
bool Mover::State::occupy() {
  occupied.clear();
  const std::lock_guard lock(mutex);
  occupied.swap(verified);
  for (Lane* const lane : occupied) enter_disk(*lane);
  starved = false;
  for (const auto& kind_of : lanes) {
    while (!kind_of->waiting.empty()) {
      Job& job = *kind_of->waiting.begin()->second;
      const Run& run = job.runs[job.runs_begun];
      if (!kind_of->has_room(run)) {
        starved = starved || (kind_of->free.empty() && kind_of->at_disk < kind_of->most.requests);
        break;
      }
      Lane& lane = *kind_of->free.back();
      kind_of->free.pop_back();
      lane.job = &job;
      lane.run = run;
      lane.whole = true;
      lane.writing = false;
      lane.at = run.first;
      lane.error = 0;
      enter_disk(lane);
      if (job.runs_begun == 0) job.begun = Clock::now();
      kind_of->begun(job.share == moves::Share::kReads);
      occupied.push_back(&lane);
    }
  }
  asleep = occupied.empty();
  return !(closing && open == 0);
}

void Mover::State::run_disk() noexcept {
  while (occupy()) {
    if (occupied.empty()) disk->collect(done, kForever);
    for (Lane* const lane : occupied) go_on(*lane, lane->writing ? Next::kDisk : lane->job->begin(*lane));
    for (const DiskDone& one : done) {
      Lane& lane = *by_tag[one.tag];
      go_on(lane, lane.job->went(lane, one.error));
    }
    done.clear();
    hand_on();
  }
  {
    const std::lock_guard lock(mutex);
    disk_gone = true;
  }
  disk.reset();  // its owner destroys it
}

void Mover::State::go_on(Lane& lane, Next next) {
  if (next == Next::kDisk) disk->submit(lane.request);
  else left.push_back({&lane, next});
}

// The lanes that have left the disk: many under one lock.
void Mover::State::hand_on() {
  if (left.empty()) return;
  std::size_t unverified = 0;
  {
    const std::lock_guard lock(mutex);
    for (const auto& [lane, next] : left) {
      leave_disk(*lane);
      if (next == Next::kEnd) {
        end(*lane);
      } else {
        to_verify.push_back(lane);
        ++unverified;
      }
    }
  }
  left.clear();
  if (unverified == 1) check.notify_one();
  else if (unverified > 1) check.notify_all();
}

// ---- verify threads ------------------------------------------------------------------------------------------

void Mover::State::run_verify(CopyScratch& mine) noexcept {
  std::unique_lock lock(mutex);
  for (;;) {
    check.wait(lock, [this] { return verify_ends || !to_verify.empty(); });
    if (to_verify.empty()) return;
    Lane& lane = *to_verify.front();
    to_verify.erase(to_verify.begin());
    lock.unlock();
    const Next next = lane.job->verify(lane, mine);
    lock.lock();
    if (next == Next::kEnd) {
      end(lane);
      if (starved || (closing && open == 0)) wake_disk();
    } else {
      verified.push_back(&lane);
      wake_disk();
    }
  }
}

// ---- ending --------------------------------------------------------------------------------------------------

void Mover::State::close() {
  const std::lock_guard one_at_a_time(close_mutex);
  {
    const std::lock_guard lock(mutex);
    closing = true;
    for (const auto& [id, job] : jobs) cancel(*job);
    wake_disk();
  }
  if (disk_thread.joinable()) disk_thread.join();
  {
    const std::lock_guard lock(mutex);
    verify_ends = true;
  }
  check.notify_all();
  for (std::thread& thread : verifiers) thread.join();
  verifiers.clear();
}

}  // namespace kv
