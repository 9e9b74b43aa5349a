// A disk of one io_uring: requests go to the kernel and come back in one system call per collect().
//
// By raw system calls: what is needed of the interface is small and older than most distributions' liburing.
//
// Buffers are not registered. What that would save is taking hold of every page of a request; an arena on huge
// pages has few. Seen at 2 MiB: fio 1.4 GB/s from 4 KiB pages, 2.25 from registered ones; this, from plain huge
// pages, 2.4, which is what the disk gives. A registered vector would also have to lie in one buffer, and the
// header pages of records do not lie in the arena.
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "disk.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#ifndef IORING_FEAT_EXT_ARG  // headers older than Linux 5.11

namespace kv {

std::unique_ptr<Disk> open_uring(std::size_t depth) {
  check_depth(depth);
  throw std::system_error(ENOSYS, std::generic_category(), "io_uring: not built in");
}

}  // namespace kv

#else

#include <linux/time_types.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "fd.h"

// Older headers do not know these; the kernel is asked and may say EINVAL.
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace kv {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kTimeoutMax = 1e6;  // seconds; keeps deadlines far from the clock's end

[[noreturn]] void fail(const char* what, int error = errno) {
  throw std::system_error(error, std::generic_category(), what);
}

// Memory shared with the kernel; a forked child has no part in it.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, std::size_t bytes, off_t what) : bytes_(bytes) {
    start_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    if (start_ == MAP_FAILED) fail("io_uring: mmap");
    ::madvise(start_, bytes, MADV_DONTFORK);
  }
  Mapping(Mapping&&) = delete;
  ~Mapping() {
    if (start_ != MAP_FAILED) ::munmap(start_, bytes_);
  }

  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::uint8_t*>(start_) + offset);
  }

 private:
  void* start_ = MAP_FAILED;
  std::size_t bytes_ = 0;
};

// The two queues. Its owner is the thread that calls enable(); the kernel holds it to that.
class Ring {
 public:
  explicit Ring(unsigned entries)
      : fd_(open(entries, params_)),
        rings_(fd_.get(),
               std::max(params_.sq_off.array + params_.sq_entries * sizeof(unsigned),
                        params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe)),
               IORING_OFF_SQ_RING),
        sqes_(fd_.get(), params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
    for (unsigned i = 0; i < params_.sq_entries; ++i) rings_.at<unsigned>(params_.sq_off.array)[i] = i;
  }

  void enable() {
    if ((params_.flags & IORING_SETUP_R_DISABLED) != 0 &&
        ::syscall(__NR_io_uring_register, fd_.get(), IORING_REGISTER_ENABLE_RINGS, nullptr, 0) != 0)
      fail("io_uring: enable");
  }

  // A zeroed entry; it travels with the next enter(). There is room for as many as `entries`.
  io_uring_sqe& push() noexcept {
    unsigned* const tail = rings_.at<unsigned>(params_.sq_off.tail);
    io_uring_sqe& entry = sqes_.at<io_uring_sqe>(0)[*tail & (params_.sq_entries - 1)];
    std::memset(&entry, 0, sizeof entry);
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);  // only read by the kernel inside enter()
    ++pushed_;
    return entry;
  }
  bool has_pushed() const noexcept { return pushed_ > 0; }

  // Submits what was pushed, then waits for `wait` completions or the timeout.
  void enter(unsigned wait, double timeout_s) {
    __kernel_timespec time{};
    time.tv_sec = static_cast<long long>(timeout_s);
    time.tv_nsec = static_cast<long long>((timeout_s - static_cast<double>(time.tv_sec)) * 1e9);
    io_uring_getevents_arg arg{};
    arg.ts = reinterpret_cast<std::uint64_t>(&time);
    constexpr unsigned kFlags = IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG;
    const long n = ::syscall(__NR_io_uring_enter, fd_.get(), pushed_, wait, kFlags, &arg, sizeof arg);
    if (n >= 0) {
      pushed_ -= static_cast<unsigned>(n);
    } else if (errno == EAGAIN || errno == EBUSY) {  // the kernel lacks memory for it now
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else if (errno != ETIME && errno != EINTR) {
      fail("io_uring: enter");
    }
  }

  bool has_ended() const noexcept { return head() != ended_tail(); }

  // Calls each(user_data, res) for all that has ended.
  template <class Each>
  void reap(Each each) {
    const unsigned tail = ended_tail();
    for (unsigned i = head(); i != tail; ++i) {
      const io_uring_cqe cqe = rings_.at<io_uring_cqe>(params_.cq_off.cqes)[i & (params_.cq_entries - 1)];
      __atomic_store_n(rings_.at<unsigned>(params_.cq_off.head), i + 1, __ATOMIC_RELEASE);
      each(cqe.user_data, cqe.res);
    }
  }

 private:
  // With DEFER_TASKRUN completions are handled when their owner asks for them, not by interrupting it. Needs
  // Linux 6.1; made disabled, because the thread that makes a disk is rarely the one that uses it.
  static Fd open(unsigned entries, io_uring_params& params) {
    constexpr unsigned kBest = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED;
    for (const unsigned flags : {kBest, 0u}) {
      params = {};
      params.flags = flags;
      Fd fd(static_cast<int>(::syscall(__NR_io_uring_setup, entries, &params)));
      if (!fd && errno == EINVAL && flags != 0) continue;
      if (!fd) fail("io_uring: setup");
      constexpr unsigned kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG;
      if ((params.features & kNeeded) != kNeeded) fail("io_uring: needs Linux 5.11", ENOSYS);
      return fd;  // close-on-exec
    }
    fail("io_uring: setup", EINVAL);
  }

  unsigned head() const noexcept { return *rings_.at<unsigned>(params_.cq_off.head); }  // ours alone
  unsigned ended_tail() const noexcept {
    return __atomic_load_n(rings_.at<unsigned>(params_.cq_off.tail), __ATOMIC_ACQUIRE);
  }

  io_uring_params params_{};
  Fd fd_;
  Mapping rings_, sqes_;
  unsigned pushed_ = 0;
};

class UringDisk final : public Disk {
 public:
  explicit UringDisk(std::size_t depth)
      : depth_(depth), ring_(static_cast<unsigned>(depth + 1)), event_(::eventfd(0, EFD_CLOEXEC)), requests_(depth) {
    if (!event_) fail("disk: eventfd");
    for (std::size_t i = depth; i-- > 0;) free_.push_back(i);
    last_done_.reserve(depth);
  }

  ~UringDisk() override {
    // The read of event_ too writes to memory of ours.
    while (under_way() > 0 || armed_) {
      if (under_way() == 0) wake();
      last_done_.clear();
      collect(last_done_, kTimeoutMax);
    }
  }

  std::string_view kind() const noexcept override { return "uring"; }
  std::size_t depth() const noexcept override { return depth_; }

  void submit(const DiskRequest& request) override {
    check_request(request);
    if (free_.empty()) throw Broken("disk: more than depth requests");
    own();
    const std::size_t i = free_.back();
    free_.pop_back();
    requests_[i] = request;
    push(i);
  }

  void collect(std::vector<DiskDone>& done, double timeout_s) override {
    own();
    const std::size_t before = done.size();
    double left_s = timeout_s > 0 ? std::min(timeout_s, kTimeoutMax) : 0;
    const auto deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(left_s));
    for (;;) {
      arm();
      if (ring_.has_pushed() || !ring_.has_ended()) ring_.enter(left_s > 0 && !ring_.has_ended() ? 1 : 0, left_s);
      ring_.reap([&](std::uint64_t i, std::int32_t answer) { take(i, answer, done); });
      if (done.size() > before || std::exchange(woken_, false)) return;
      left_s = left_s > 0 ? std::chrono::duration<double>(deadline - Clock::now()).count() : 0;
      if (left_s <= 0) return;
    }
  }

  void wake() noexcept override {
    const std::uint64_t one = 1;
    if (::write(event_.get(), &one, sizeof one) != sizeof one) std::terminate();  // a small counter takes a 1
  }

 private:
  static constexpr std::uint64_t kWakeTag = kDiskDepthMax;

  std::size_t under_way() const noexcept { return depth_ - free_.size(); }

  void own() {
    if (!std::exchange(owned_, true)) ring_.enable();
  }

  void push(std::size_t i) noexcept {
    const DiskRequest& request = requests_[i];
    io_uring_sqe& entry = ring_.push();
    entry.fd = request.fd;
    entry.user_data = i;
    entry.off = request.offset;
    switch (request.op) {
      case DiskOp::kRead:
      case DiskOp::kWrite:
        entry.opcode = request.op == DiskOp::kRead ? IORING_OP_READV : IORING_OP_WRITEV;
        entry.addr = reinterpret_cast<std::uint64_t>(request.pieces.data());
        entry.len = static_cast<std::uint32_t>(request.pieces.size());
        break;
      case DiskOp::kSync:
        entry.opcode = IORING_OP_FSYNC;
        entry.off = 0;
        entry.fsync_flags = IORING_FSYNC_DATASYNC;
        break;
      case DiskOp::kAllocate:
        entry.opcode = IORING_OP_FALLOCATE;
        entry.addr = request.length;
        break;
    }
  }

  // A read that only wake() lets end.
  void arm() noexcept {
    if (std::exchange(armed_, true)) return;
    io_uring_sqe& entry = ring_.push();
    entry.opcode = IORING_OP_READ;
    entry.fd = event_.get();
    entry.addr = reinterpret_cast<std::uint64_t>(&wakes_);
    entry.len = sizeof wakes_;
    entry.user_data = kWakeTag;
  }

  void take(std::uint64_t i, std::int32_t answer, std::vector<DiskDone>& done) {
    if (i == kWakeTag) {
      armed_ = false;
      woken_ = woken_ || answer > 0;
      return;
    }
    const int error = settle(requests_[i], answer);
    if (error == kGoOn) return push(i);
    done.push_back({requests_[i].tag, error});
    free_.push_back(i);  // has room for depth_
  }

  const std::size_t depth_;
  Ring ring_;
  Fd event_;
  std::vector<DiskRequest> requests_;
  std::vector<std::size_t> free_;   // positions in requests_
  std::vector<DiskDone> last_done_;  // of the destructor
  std::uint64_t wakes_ = 0;
  bool owned_ = false;
  bool armed_ = false;
  bool woken_ = false;
};

}  // namespace

std::unique_ptr<Disk> open_uring(std::size_t depth) {
  check_depth(depth);
  return std::make_unique<UringDisk>(depth);
}

}  // namespace kv

#endif
