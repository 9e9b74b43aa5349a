// A disk of threads, each of which carries out one request after another with ordinary system calls.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "disk.h"
#include "thread.h"

namespace kv {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kTimeoutMax = 1e6;  // seconds; keeps deadlines far from the clock's end

std::int64_t ask_kernel(const DiskRequest& request) noexcept {
  const auto offset = static_cast<off_t>(request.offset);
  const auto count = static_cast<int>(request.pieces.size());
  std::int64_t answer = -1;
  switch (request.op) {
    case DiskOp::kRead: answer = ::preadv(request.fd, request.pieces.data(), count, offset); break;
    case DiskOp::kWrite: answer = ::pwritev(request.fd, request.pieces.data(), count, offset); break;
    case DiskOp::kSync: answer = ::fdatasync(request.fd); break;
    case DiskOp::kAllocate:
      answer = ::fallocate(request.fd, 0, offset, static_cast<off_t>(request.length));
      break;
  }
  return answer < 0 ? -errno : answer;
}

class ThreadsDisk final : public Disk {
 public:
  ThreadsDisk(std::size_t depth, int threads) : depth_(depth), ring_(depth) {
    ended_.reserve(depth);
    try {
      for (int i = 0; i < threads; ++i)
        threads_.push_back(start_thread("kv-file-" + std::to_string(i), [this] { run(); }));
    } catch (...) {
      end_threads();
      throw;
    }
  }
  ~ThreadsDisk() override { end_threads(); }

  std::string_view kind() const noexcept override { return "threads"; }
  std::size_t depth() const noexcept override { return depth_; }

  void submit(const DiskRequest& request) override {
    check_request(request);
    {
      const std::lock_guard lock(mutex_);
      if (under_way_ == depth_) throw Broken("disk: more than depth requests");
      ++under_way_;
      ring_[(first_ + waiting_++) % depth_] = request;
    }
    work_.notify_one();
  }

  void collect(std::vector<DiskDone>& done, double timeout_s) override {
    std::unique_lock lock(mutex_);
    const auto something = [this] { return !ended_.empty() || woken_; };
    if (timeout_s > 0 && !something()) {
      const std::chrono::duration<double> timeout(std::min(timeout_s, kTimeoutMax));
      news_.wait_until(lock, Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout), something);
    }
    woken_ = false;
    done.insert(done.end(), ended_.begin(), ended_.end());
    under_way_ -= ended_.size();
    ended_.clear();
  }

  void wake() noexcept override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    news_.notify_one();
  }

 private:
  void run() noexcept {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return ending_ || waiting_ > 0; });
      if (waiting_ == 0) return;  // the destructor waits for all that was submitted
      DiskRequest request = ring_[first_];
      first_ = (first_ + 1) % depth_;
      --waiting_;
      lock.unlock();
      int error = kGoOn;
      while (error == kGoOn) error = settle(request, ask_kernel(request));
      lock.lock();
      ended_.push_back({request.tag, error});  // has room for depth_
      news_.notify_one();
    }
  }

  void end_threads() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const std::size_t depth_;
  std::mutex mutex_;
  std::condition_variable work_;     // waiting_ or ending_ changed
  std::condition_variable news_;     // ended_ or woken_ changed
  std::vector<DiskRequest> ring_;    // those that wait: [first_, first_ + waiting_), modulo depth_
  std::size_t first_ = 0;
  std::size_t waiting_ = 0;
  std::size_t under_way_ = 0;        // submitted, not collected
  std::vector<DiskDone> ended_;      // not collected
  bool woken_ = false;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Disk> open_threads(std::size_t depth, int threads) {
  check_depth(depth);
  if (threads < 1 || threads > kDiskThreadsMax)
    throw Invalid("threads: must be in [1, " + std::to_string(kDiskThreadsMax) + "], got " + std::to_string(threads));
  return std::make_unique<ThreadsDisk>(depth, threads);
}

}  // namespace kv
