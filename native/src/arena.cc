#include "arena.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "headroom.h"
#include "memfd.h"
#include "pieces.h"

// Older C libraries do not know all of these; the kernel is asked and may say EINVAL.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace kv {
namespace {

constexpr std::size_t kNameMax = 200;                // the kernel allows 249 with our prefix
constexpr std::size_t kPopulateBytes = 32u << 20;    // one call's work: ~6 ms, so that threads share evenly

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

std::size_t control_bytes(std::size_t capacity) { return capacity / kPageBytes * sizeof(ControlEntry); }

// Faults a page in without changing it: the bytes may be a kept arena's, or another process may be writing.
void touch(std::uint8_t* page) { __atomic_fetch_or(page, std::uint8_t{0}, __ATOMIC_RELAXED); }

// Full page tables are not the end of it: in a virtual machine the first access that really happens to a huge
// page was seen to take 100 to 200 us (the host fills its tables then), which no save should pay.
void first_use(std::uint8_t* start, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kHugeBytes) touch(start + i);
}

bool collapse(std::uint8_t* piece) {
  constexpr int kTries = 4;  // EAGAIN / EBUSY: a page was briefly in use elsewhere
  for (int i = 0; i < kTries; ++i) {
    if (madvise(piece, kHugeBytes, MADV_COLLAPSE) == 0) return true;
    if (errno != EAGAIN && errno != EBUSY) return false;
  }
  return false;
}

void populate_piece(std::uint8_t* piece, std::size_t bytes, bool writable = true) {
  while (madvise(piece, bytes, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) fail("arena: cannot populate memory; lower capacity_bytes or free memory");
    for (std::size_t i = 0; i < bytes; i += kPageBytes) {  // Linux < 5.14
      if (writable) touch(piece + i);
      else static_cast<void>(*static_cast<volatile std::uint8_t*>(piece + i));
    }
    return;
  }
}

[[noreturn]] void refuse_lock(std::size_t bytes) {
  const int error = errno;
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::string now = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur);
  throw Invalid("arena: cannot mlock " + std::to_string(bytes) + " bytes (" +
                std::generic_category().message(error) + ", RLIMIT_MEMLOCK is " + now +
                "); raise LimitMEMLOCK / ulimit -l to twice the arena, grant CAP_IPC_LOCK, or turn lock off");
}

// A dry run: the limit is checked for the whole range at once, before minutes of prefaulting.
void check_lockable(std::uint8_t* data, std::size_t bytes) {
  if (mlock2(data, bytes, MLOCK_ONFAULT) == 0) {
    munlock(data, bytes);
  } else if (errno != ENOSYS && errno != EINVAL) {
    refuse_lock(bytes);
  }
}

void check_name(const std::string& name) {
  if (name.size() > kNameMax || name.find('\0') != std::string::npos)
    throw Invalid("arena name: at most " + std::to_string(kNameMax) + " bytes and no NUL");
}

void check_capacity(std::size_t bytes) {
  if (bytes == 0 || bytes % kHugeBytes != 0 || bytes / kPageBytes >= kNone)
    throw Invalid("capacity_bytes: must be a multiple of 2 MiB below 16 TiB, as the daemon announced it");
}

std::string memfd_name(const char* kind, const std::string& name) {
  return name.empty() ? kind : std::string(kind) + ":" + name;
}

}  // namespace

std::shared_ptr<Arena> Arena::create(const std::string& name, std::size_t capacity_bytes) {
  check_name(name);
  const std::size_t capacity = std::max(capacity_bytes / kHugeBytes, std::size_t{1}) * kHugeBytes;
  if (capacity / kPageBytes >= kNone) throw Invalid("capacity_bytes: an arena holds less than 16 TiB");
  Fd data = make_memfd(memfd_name("kvstore-arena", name), capacity);
  // F_SEAL_SEAL: a client holds the fds and could otherwise add seals that lock the next client out.
  add_seals(data.get(), kSizeSeals | F_SEAL_SEAL);
  return open(name, std::move(data), capacity);
}

std::shared_ptr<Arena> Arena::adopt(const std::string& name, int data_fd, std::size_t capacity_bytes) {
  check_name(name);
  check_capacity(capacity_bytes);
  check_sealed(data_fd, "data", capacity_bytes, kSizeSeals | F_SEAL_SEAL);
  return open(name, duplicate(data_fd), capacity_bytes);
}

// The daemon's side of both: a control region of its own, since nobody can map a sealed one writable again.
std::shared_ptr<Arena> Arena::open(const std::string& name, Fd data, std::size_t capacity) {
  Fd control = make_memfd(memfd_name("kvstore-control", name), control_bytes(capacity));
  std::shared_ptr<Arena> arena(new Arena());
  arena->capacity_ = capacity;
  arena->owner_ = true;
  arena->map_regions(data.get(), control.get());
  // Only now, with our own writable mapping in place, is control closed to every other writer.
  add_seals(control.get(), kSizeSeals | F_SEAL_FUTURE_WRITE);
  add_seals(control.get(), F_SEAL_SEAL);
  arena->data_fd_ = data.release();
  arena->control_fd_ = control.release();
  return arena;
}

std::shared_ptr<Arena> Arena::attach(int data_fd, int control_fd, std::size_t capacity_bytes) {
  check_capacity(capacity_bytes);
  check_sealed(data_fd, "data", capacity_bytes, kSizeSeals);
  check_sealed(control_fd, "control", control_bytes(capacity_bytes), kSizeSeals | F_SEAL_FUTURE_WRITE);
  std::shared_ptr<Arena> arena(new Arena());
  arena->capacity_ = capacity_bytes;
  arena->map_regions(data_fd, control_fd);
  return arena;
}

void Arena::map_regions(int data_fd, int control_fd) {
  pid_ = getpid();
  data_ = map_memfd(data_fd, capacity_, PROT_READ | PROT_WRITE);
  const int protection = owner_ ? PROT_READ | PROT_WRITE : PROT_READ;
  control_ = reinterpret_cast<ControlEntry*>(map_memfd(control_fd, control_bytes(capacity_), protection));
}

Arena::~Arena() {
  if (pid_ == getpid()) {
    if (data_ != nullptr) munmap(data_, capacity_);
    if (control_ != nullptr) munmap(static_cast<void*>(control_), control_bytes(capacity_));
  }
  if (data_fd_ >= 0) ::close(data_fd_);
  if (control_fd_ >= 0) ::close(control_fd_);
}

void Arena::check_headroom() const {
  const auto missing_of = [](int fd, std::size_t bytes) {
    struct stat info{};
    if (fstat(fd, &info) != 0) fail("arena: fstat");
    return bytes - std::min(static_cast<std::size_t>(info.st_blocks) * 512, bytes);
  };
  // What is missing of the arena and of its control region (a kept arena has a new one), and page tables should
  // huge pages fail (1/512).
  const std::size_t missing = missing_of(data_fd_, capacity_);
  const std::size_t needed = missing + missing_of(control_fd_, control_bytes(capacity_)) + missing / 512;
  const Headroom room = memory_headroom();
  if (needed > room.bytes)
    throw Invalid("arena: capacity_bytes = " + std::to_string(capacity_) + " needs " + std::to_string(needed) +
                  " more bytes of memory but " + std::to_string(room.bytes) + " are available (" + room.limited_by +
                  "); lower capacity_bytes or raise that limit");
}

bool Arena::prefault(int threads, bool huge_pages, bool lock) {
  if (!owner_) throw Invalid("prefault: only the daemon prefaults; a client calls populate");
  if (lock) check_lockable(data_, capacity_);
  check_headroom();
  prefaulted_.store(0, std::memory_order_relaxed);
  std::atomic<bool> all_huge{huge_pages};
  for_pieces(threads, capacity_ / kHugeBytes, [&](std::size_t i) {
    std::uint8_t* piece = data_ + i * kHugeBytes;
    touch(piece);  // MADV_COLLAPSE needs something to collapse
    if (!huge_pages || !collapse(piece)) {
      all_huge.store(false, std::memory_order_relaxed);
      populate_piece(piece, kHugeBytes);
    }
    first_use(piece, kHugeBytes);
    populate_control(i * kHugeBytes, kHugeBytes);
    prefaulted_.fetch_add(kHugeBytes, std::memory_order_relaxed);
  });
  if (lock && mlock(data_, capacity_) != 0) refuse_lock(capacity_);
  return all_huge.load();
}

// The entries of large slots lie a page or more apart: left alone, every slot would fault once in every process.
void Arena::populate_control(std::size_t start, std::size_t bytes) {
  populate_piece(reinterpret_cast<std::uint8_t*>(control_) + control_bytes(start), control_bytes(bytes), owner_);
}

void Arena::populate(int threads) {
  prefaulted_.store(0, std::memory_order_relaxed);
  for_pieces(threads, (capacity_ + kPopulateBytes - 1) / kPopulateBytes, [&](std::size_t i) {
    const std::size_t start = i * kPopulateBytes;
    const std::size_t bytes = std::min(kPopulateBytes, capacity_ - start);
    populate_piece(data_ + start, bytes);
    first_use(data_ + start, bytes);
    populate_control(start, bytes);
    prefaulted_.fetch_add(bytes, std::memory_order_relaxed);
  });
}

}  // namespace kv
