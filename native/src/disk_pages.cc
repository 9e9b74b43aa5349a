#include "disk_pages.h"

#include <unistd.h>

#include <cerrno>
#include <new>

#include "types.h"

namespace kv {
namespace {

// Calls move(offset in the memory, bytes, offset in the file) until everything is moved: the kernel may do less
// than it was asked for.
template <class Move>
int move_all(std::size_t page, std::size_t pages, const Move& move) noexcept {
  const std::size_t bytes = pages * kPageBytes;
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t n = move(done, bytes - done, static_cast<off_t>(page * kPageBytes + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n == 0) return EIO;
    done += static_cast<std::size_t>(n);
  }
  return 0;
}

}  // namespace

PageBuffer::PageBuffer(std::size_t pages)
    : bytes_(static_cast<std::uint8_t*>(std::aligned_alloc(kPageBytes, pages * kPageBytes))), pages_(pages) {
  if (!bytes_) throw std::bad_alloc();
}

std::uint8_t* PageBuffer::page(std::size_t number) const noexcept { return bytes_.get() + number * kPageBytes; }

int read_pages(int fd, std::size_t page, std::uint8_t* to, std::size_t pages) noexcept {
  return move_all(page, pages, [&](std::size_t at, std::size_t bytes, off_t offset) {
    return ::pread(fd, to + at, bytes, offset);
  });
}

int write_pages(int fd, std::size_t page, const std::uint8_t* from, std::size_t pages) noexcept {
  return move_all(page, pages, [&](std::size_t at, std::size_t bytes, off_t offset) {
    return ::pwrite(fd, from + at, bytes, offset);
  });
}

}  // namespace kv
