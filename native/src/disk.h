// Reads and writes of files, many at once, in no promised order. Two implementations, one contract
// (tests/test_disk.cc): io_uring (disk_uring.cc), and threads with preadv/pwritev where there is none
// (disk_threads.cc). disk_faulty.h wraps either, and lies as a failing disk does.
//
// One thread owns a Disk: the first that submits or collects. It alone calls everything but wake(), and if
// anything was ever submitted it also destroys it. Nothing here allocates once a Disk was made, if `done` has
// room for depth() more (a FaultyDisk, which is for tests, does).
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "types.h"

namespace kv {

inline constexpr std::size_t kPiecesMax = 1024;  // IOV_MAX
inline constexpr std::size_t kDiskDepthMax = 1024;
inline constexpr int kDiskThreadsMax = 256;

enum class DiskOp : std::uint8_t {
  kRead,
  kWrite,
  kSync,      // fdatasync: what had ended when this was submitted is on the medium
  kAllocate,  // fallocate of [offset, offset + length): the file reaches to there. EOPNOTSUPP: not on this disk
};

// Consecutive bytes of one file, from or to pieces of memory. File, memory and the list of pieces are the
// caller's and stay until the request has ended; the disk may change the list. With O_DIRECT, offset,
// addresses and lengths are multiples of kPageBytes.
struct DiskRequest {
  std::uint64_t tag = 0;
  DiskOp op = DiskOp::kRead;
  int fd = -1;
  std::uint64_t offset = 0;
  std::span<iovec> pieces{};  // of kRead and kWrite: 1 to kPiecesMax, none empty
  std::uint64_t length = 0;   // of kAllocate

  std::size_t bytes() const noexcept {
    std::size_t n = 0;
    for (const iovec& piece : pieces) n += piece.iov_len;
    return n;
  }
};

// How a request ended: 0, or an errno. All of its bytes were moved, or it failed: what the kernel cut short is
// continued, and what ends at the end of the file is EIO. After a failed write anything may be on the disk.
struct DiskDone {
  std::uint64_t tag = 0;
  int error = 0;
};

class Disk {
 public:
  virtual ~Disk() = default;  // waits for what is under way: no memory is read or written afterwards
  virtual std::string_view kind() const noexcept = 0;  // a literal
  // Most requests between submit() and their collection.
  virtual std::size_t depth() const noexcept = 0;
  // Never waits for the disk. It may begin only with the next collect(). Invalid on a malformed request,
  // Broken beyond depth().
  virtual void submit(const DiskRequest& request) = 0;
  // Appends what has ended. Waits until something has, wake() was called, or the timeout (0 = only look).
  virtual void collect(std::vector<DiskDone>& done, double timeout_s) = 0;
  // Makes the collect() that runs, or else the next one, return. Any thread.
  virtual void wake() noexcept = 0;
};

// std::system_error when the kernel has none, or forbids it (containers often do).
std::unique_ptr<Disk> open_uring(std::size_t depth);
// `threads`: requests that are really under way at once. std::system_error when there can be no more threads.
std::unique_ptr<Disk> open_threads(std::size_t depth, int threads);
// "uring", "threads", or "auto" = io_uring where it works; `threads` is for open_threads. Invalid otherwise.
std::unique_ptr<Disk> open_disk(std::string_view kind, std::size_t depth, int threads);

// ---- for implementations ---------------------------------------------------------------------------------

// Invalid unless depth is in [1, kDiskDepthMax].
void check_depth(std::size_t depth);
// Invalid unless a disk could carry it out.
void check_request(const DiskRequest& request);
// Takes the first n bytes off: they were moved.
void advance(DiskRequest& request, std::size_t n) noexcept;
// What the kernel's answer (bytes, or -errno) makes of a request: 0 or an errno as in DiskDone, or kGoOn when it
// must be given to the kernel once more.
inline constexpr int kGoOn = -1;
int settle(DiskRequest& request, std::int64_t answer) noexcept;

}  // namespace kv
