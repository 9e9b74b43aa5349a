#include "disk_faulty.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>

#include "zeroed.h"

namespace kv {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kSectorBytes = 512;  // what a disk writes whole or not at all
constexpr double kTimeoutMax = 1e6;        // seconds; keeps deadlines far from the clock's end

Clock::time_point after(double seconds) {
  const std::chrono::duration<double> span(seconds > 0 ? std::min(seconds, kTimeoutMax) : 0);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(span);
}
double seconds_until(Clock::time_point time) { return std::chrono::duration<double>(time - Clock::now()).count(); }

std::uint8_t* bytes_of(const iovec& piece) { return static_cast<std::uint8_t*>(piece.iov_base); }

void flip(std::span<const iovec> pieces, std::size_t bit) {
  for (const iovec& piece : pieces) {
    if (bit < piece.iov_len * 8) {
      bytes_of(piece)[bit / 8] ^= static_cast<std::uint8_t>(1u << (bit % 8));
      return;
    }
    bit -= piece.iov_len * 8;
  }
}

// The first n bytes, and all behind them.
std::pair<std::vector<iovec>, std::vector<iovec>> cut(std::span<const iovec> pieces, std::size_t n) {
  std::pair<std::vector<iovec>, std::vector<iovec>> parts;
  for (const iovec& piece : pieces) {
    const std::size_t here = std::min(n, piece.iov_len);
    if (here > 0) parts.first.push_back({piece.iov_base, here});
    if (here < piece.iov_len) parts.second.push_back({bytes_of(piece) + here, piece.iov_len - here});
    n -= here;
  }
  return parts;
}

Zeroed<std::uint8_t> joined(std::span<const iovec> pieces, std::size_t bytes) {
  Zeroed<std::uint8_t> memory(bytes);
  std::size_t at = 0;
  for (const iovec& piece : pieces) {
    std::memcpy(&memory[at], piece.iov_base, piece.iov_len);
    at += piece.iov_len;
  }
  return memory;
}

}  // namespace

class FaultyDisk final : public Disk {
 public:
  FaultyDisk(std::unique_ptr<Disk> disk, std::shared_ptr<Faults> faults)
      : faults_(std::move(faults)), tasks_(disk->depth()), disk_(std::move(disk)) {
    for (std::size_t i = tasks_.size(); i-- > 0;) free_.push_back(i);
    const std::lock_guard lock(faults_->mutex_);
    faults_->disks_.push_back(disk_.get());
  }

  ~FaultyDisk() override {
    {
      const std::lock_guard lock(faults_->mutex_);
      std::erase(faults_->disks_, disk_.get());
    }
    faults_->change_held(-static_cast<std::ptrdiff_t>(waiting_.size()));
    disk_.reset();  // reads and writes what tasks_ owns until now
  }

  std::string_view kind() const noexcept override { return disk_->kind(); }
  std::size_t depth() const noexcept override { return tasks_.size(); }

  void submit(const DiskRequest& request) override {
    check_request(request);
    if (free_.empty()) throw Broken("disk: more than depth requests");
    const std::size_t i = free_.back();
    free_.pop_back();
    Task& task = tasks_[i];
    task = Task{};
    task.request = request;
    task.fate = faults_->decide(request, request.bytes());
    task.due = after(task.fate.delay_s);
    if (task.fate.delay_s > 0 || faults_->holds(request)) {
      waiting_.push_back(i);
      faults_->change_held(1);
    } else {
      begin(i);
    }
  }

  void collect(std::vector<DiskDone>& done, double timeout_s) override {
    const Clock::time_point deadline = after(timeout_s);
    const std::size_t before = done.size();
    for (;;) {
      const double next_s = begin_waiting();
      const double left_s = timeout_s > 0 ? seconds_until(deadline) : 0;
      below_.clear();
      disk_->collect(below_, ended_.empty() ? std::min(left_s, next_s) : 0);
      for (const DiskDone& part : below_) take(part);
      done.insert(done.end(), ended_.begin(), ended_.end());
      ended_.clear();
      if (done.size() > before || woken_.exchange(false) || left_s <= 0) return;
    }
  }

  void wake() noexcept override {
    woken_.store(true);
    disk_->wake();
  }

 private:
  // A request on its way. What the disk below gets is `first`, then `rest`.
  struct Task {
    DiskRequest request;
    Faults::Fate fate;
    Clock::time_point due;
    std::vector<iovec> first, rest;
    Zeroed<std::uint8_t> memory;  // instead of the caller's, where the file gets other bytes
    std::size_t moved = 0;
    std::optional<std::size_t> logged;
  };

  // Begins what may begin; seconds until the next that is only slow.
  double begin_waiting() {
    double next_s = std::numeric_limits<double>::infinity();
    std::vector<std::size_t> due;
    std::erase_if(waiting_, [&](std::size_t i) {
      if (faults_->holds(tasks_[i].request)) return false;
      const double left_s = seconds_until(tasks_[i].due);
      if (left_s <= 0) due.push_back(i);
      else next_s = std::min(next_s, left_s);
      return left_s <= 0;
    });
    for (const std::size_t i : due) {
      faults_->change_held(-1);
      begin(i);
    }
    return next_s;
  }

  void begin(std::size_t i) {
    Task& task = tasks_[i];
    const std::size_t bytes = task.request.bytes();
    if (task.fate.torn) {
      tear(task, bytes);
    } else if (task.fate.error == 0) {
      task.first.assign(task.request.pieces.begin(), task.request.pieces.end());
      if (task.fate.flipped && task.request.op == DiskOp::kWrite) {
        task.memory = joined(task.request.pieces, bytes);
        task.first.assign(1, {&task.memory[0], bytes});
        flip(task.first, task.fate.dice % (bytes * 8));
      }
      if (task.fate.shortened) {
        const std::size_t places = (bytes - 1) / kPageBytes;
        std::tie(task.first, task.rest) = cut(task.first, (1 + task.fate.dice % places) * kPageBytes);
      }
    }
    const bool nothing = task.fate.error != 0 && task.first.empty();
    if (nothing) return end(i, task.fate.error);
    give(i, task.first);
  }

  // Some first sectors of the new bytes; the rest of a page of which a part was written is as it was.
  static void tear(Task& task, std::size_t bytes) {
    const std::size_t sectors = bytes / kSectorBytes;
    const std::size_t kept = sectors == 0 ? 0 : task.fate.dice % sectors * kSectorBytes;
    if (kept == 0) return;
    const std::size_t whole = kept / kPageBytes * kPageBytes, written = std::min(round_up(kept, kPageBytes), bytes);
    Zeroed<std::uint8_t> page(kPageBytes);
    const auto offset = static_cast<off_t>(task.request.offset + whole);
    // What lies behind the end of the file stays zeros.
    const ssize_t old = written > kept ? ::pread(task.request.fd, &page[0], kPageBytes, offset) : 0;
    if (old < 0) page = Zeroed<std::uint8_t>(kPageBytes);
    task.memory = joined(task.request.pieces, bytes);
    std::memcpy(&task.memory[kept], &page[kept - whole], written - kept);
    task.first.assign(1, {&task.memory[0], written});
  }

  void give(std::size_t i, std::vector<iovec>& pieces) {
    Task& task = tasks_[i];
    DiskRequest request = task.request;
    request.tag = i;
    request.offset += task.moved;
    request.pieces = pieces;
    task.moved += request.bytes();
    task.logged = faults_->log_begin(request);
    disk_->submit(request);
  }

  void take(const DiskDone& part) {
    const std::size_t i = part.tag;
    Task& task = tasks_[i];
    if (task.logged) faults_->log_end(*task.logged, part.error);
    if (part.error == 0 && !task.rest.empty()) {
      task.first = std::exchange(task.rest, {});
      return give(i, task.first);
    }
    const bool flips = part.error == 0 && task.fate.flipped && task.request.op == DiskOp::kRead;
    if (flips) flip(task.request.pieces, task.fate.dice % (task.request.bytes() * 8));
    end(i, part.error != 0 ? part.error : task.fate.error);
  }

  void end(std::size_t i, int error) {
    ended_.push_back({tasks_[i].request.tag, error});
    tasks_[i].memory = {};
    free_.push_back(i);
  }

  const std::shared_ptr<Faults> faults_;
  std::vector<Task> tasks_;
  std::vector<std::size_t> free_;     // positions in tasks_
  std::vector<std::size_t> waiting_;  // not given to the disk below, oldest first
  std::vector<DiskDone> below_;       // of the disk below
  std::vector<DiskDone> ended_;       // not collected
  std::atomic<bool> woken_{false};
  std::unique_ptr<Disk> disk_;
};

std::unique_ptr<Disk> faulty_disk(std::unique_ptr<Disk> disk, std::shared_ptr<Faults> faults) {
  return std::make_unique<FaultyDisk>(std::move(disk), std::move(faults));
}

std::unique_ptr<Disk> faulty_disk(std::unique_ptr<Disk> disk, std::string_view faults) {
  return faulty_disk(std::move(disk), std::make_shared<Faults>(parse_faults(faults)));
}

}  // namespace kv
