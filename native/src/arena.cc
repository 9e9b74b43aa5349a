#include "arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "fd.h"
#include "headroom.h"

// Older C libraries do not know all of these; the kernel is asked and may say EINVAL.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace kv {
namespace {

constexpr int kThreadsMax = 256;
constexpr std::size_t kNameMax = 200;                // the kernel allows 249 with our prefix
constexpr std::size_t kPopulateBytes = 32u << 20;    // one call's work: ~6 ms, so that threads share evenly
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

std::size_t control_bytes(std::size_t capacity) { return capacity / kPageBytes * sizeof(ControlEntry); }

Fd make_memfd(const std::string& name, std::size_t bytes) {
  Fd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd = Fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));  // Linux < 6.3
  if (!fd) fail("arena: memfd_create");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    fail("arena: cannot size " + name + " to " + std::to_string(bytes) + " bytes");
  return fd;
}

void add_seals(int fd, int seals) {
  if (fcntl(fd, F_ADD_SEALS, seals) != 0) fail("arena: cannot seal the memfd");
}

// Huge pages need 2 MiB alignment, which mmap alone does not promise: reserve more, map inside, give back.
std::uint8_t* map_aligned(int fd, std::size_t bytes, int protection) {
  const std::size_t reserved = bytes + kHugeBytes;
  void* start = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) fail("arena: cannot reserve " + std::to_string(reserved) + " bytes of address space");
  auto* base = static_cast<std::uint8_t*>(start);
  const std::size_t lead = round_up(reinterpret_cast<std::uintptr_t>(base), kHugeBytes) -
                           reinterpret_cast<std::uintptr_t>(base);
  std::uint8_t* aligned = base + lead;
  if (mmap(aligned, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(start, reserved);
    errno = error;
    fail("arena: cannot map the memfd");
  }
  if (lead > 0) munmap(base, lead);
  munmap(aligned + bytes, reserved - lead - bytes);
  if (madvise(aligned, bytes, MADV_DONTFORK) != 0) {
    const int error = errno;
    munmap(aligned, bytes);
    errno = error;
    fail("arena: MADV_DONTFORK");
  }
  madvise(aligned, bytes, MADV_DONTDUMP);  // tenants' bytes do not belong in a core file; best effort
  return aligned;
}

// Runs work(0) … work(pieces - 1) on `threads` threads; the first exception is thrown after all have ended.
void for_pieces(int threads, std::size_t pieces, const std::function<void(std::size_t)>& work) {
  if (threads < 1 || threads > kThreadsMax)
    throw Invalid("threads: must be in [1, " + std::to_string(kThreadsMax) + "], got " + std::to_string(threads));
  std::atomic<std::size_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto run = [&] {
    try {
      for (std::size_t i = next.fetch_add(1); i < pieces; i = next.fetch_add(1)) work(i);
    } catch (...) {
      next.store(pieces);
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    for (std::size_t i = 1; i < std::min<std::size_t>(static_cast<std::size_t>(threads), pieces); ++i)
      others.emplace_back(run);
    run();
  }
  if (error) std::rethrow_exception(error);
}

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

void populate_piece(std::uint8_t* piece, std::size_t bytes) {
  while (madvise(piece, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) fail("arena: cannot populate memory; lower capacity_bytes or free memory");
    for (std::size_t i = 0; i < bytes; i += kPageBytes) touch(piece + i);  // Linux < 5.14
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

void check_received(int fd, const char* what, std::size_t bytes, int seals) {
  struct stat info{};
  if (fstat(fd, &info) != 0) fail(std::string("arena: the ") + what + " fd");
  if (info.st_size != static_cast<off_t>(bytes))
    throw Invalid(std::string("arena: the ") + what + " fd has " + std::to_string(info.st_size) + " bytes, expected " +
                  std::to_string(bytes) + "; attach with the capacity the daemon announced");
  const int found = fcntl(fd, F_GET_SEALS);
  if (found < 0) throw Invalid(std::string("arena: the ") + what + " fd is not a memfd; it must come from the daemon");
  // Without these the other side could cut the file under our mapping (SIGBUS) or forge control entries.
  if ((found & seals) != seals)
    throw Invalid(std::string("arena: the ") + what + " fd is not sealed as the daemon seals it; refused");
}

}  // namespace

std::shared_ptr<Arena> Arena::create(const std::string& name, std::size_t capacity_bytes) {
  if (name.size() > kNameMax || name.find('\0') != std::string::npos)
    throw Invalid("arena name: at most " + std::to_string(kNameMax) + " bytes and no NUL");
  const std::size_t capacity = std::max(capacity_bytes / kHugeBytes, std::size_t{1}) * kHugeBytes;
  if (capacity / kPageBytes >= kNone) throw Invalid("capacity_bytes: an arena holds less than 16 TiB");
  const std::string suffix = name.empty() ? "" : ":" + name;
  Fd data = make_memfd("kvstore-arena" + suffix, capacity);
  Fd control = make_memfd("kvstore-control" + suffix, control_bytes(capacity));

  std::shared_ptr<Arena> arena(new Arena());
  arena->capacity_ = capacity;
  arena->owner_ = true;
  arena->map_regions(data.get(), control.get());
  // F_SEAL_SEAL: a client holds the fds and could otherwise add seals that lock the next client out.
  add_seals(data.get(), kSizeSeals | F_SEAL_SEAL);
  // Only now, with our own writable mapping in place, is control closed to every other writer.
  add_seals(control.get(), kSizeSeals | F_SEAL_FUTURE_WRITE);
  add_seals(control.get(), F_SEAL_SEAL);
  arena->data_fd_ = data.release();
  arena->control_fd_ = control.release();
  return arena;
}

std::shared_ptr<Arena> Arena::attach(int data_fd, int control_fd, std::size_t capacity_bytes) {
  if (capacity_bytes == 0 || capacity_bytes % kHugeBytes != 0 || capacity_bytes / kPageBytes >= kNone)
    throw Invalid("capacity_bytes: must be a multiple of 2 MiB below 16 TiB, as the daemon announced it");
  check_received(data_fd, "data", capacity_bytes, kSizeSeals);
  check_received(control_fd, "control", control_bytes(capacity_bytes), kSizeSeals | F_SEAL_FUTURE_WRITE);
  std::shared_ptr<Arena> arena(new Arena());
  arena->capacity_ = capacity_bytes;
  arena->map_regions(data_fd, control_fd);
  return arena;
}

void Arena::map_regions(int data_fd, int control_fd) {
  pid_ = getpid();
  data_ = map_aligned(data_fd, capacity_, PROT_READ | PROT_WRITE);
  const int protection = owner_ ? PROT_READ | PROT_WRITE : PROT_READ;
  control_ = reinterpret_cast<ControlEntry*>(map_aligned(control_fd, control_bytes(capacity_), protection));
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
  struct stat info{};
  if (fstat(data_fd_, &info) != 0) fail("arena: fstat");
  const std::size_t present = static_cast<std::size_t>(info.st_blocks) * 512;
  // What is missing of the arena, its control region (1/64), and page tables should huge pages fail (1/512).
  const std::size_t missing = capacity_ - std::min(present, capacity_);
  const std::size_t needed = missing + missing / 64 + missing / 512;
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
    prefaulted_.fetch_add(kHugeBytes, std::memory_order_relaxed);
  });
  if (lock && mlock(data_, capacity_) != 0) refuse_lock(capacity_);
  return all_huge.load();
}

void Arena::populate(int threads) {
  prefaulted_.store(0, std::memory_order_relaxed);
  for_pieces(threads, (capacity_ + kPopulateBytes - 1) / kPopulateBytes, [&](std::size_t i) {
    const std::size_t start = i * kPopulateBytes;
    const std::size_t bytes = std::min(kPopulateBytes, capacity_ - start);
    populate_piece(data_ + start, bytes);
    first_use(data_ + start, bytes);
    prefaulted_.fetch_add(bytes, std::memory_order_relaxed);
  });
}

}  // namespace kv
