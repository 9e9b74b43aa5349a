// Whole pages between a file and memory, by the thread that asks, one call after the other: what opening, surveys
// and repairs need. (Blocks that are served move on a Disk, many at once: disk.h.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace kv {

// Memory as O_DIRECT wants it. Its bytes are undefined at first.
class PageBuffer {
 public:
  PageBuffer() = default;
  // std::bad_alloc
  explicit PageBuffer(std::size_t pages);

  std::uint8_t* data() const noexcept { return bytes_.get(); }
  std::uint8_t* page(std::size_t number) const noexcept;
  std::size_t pages() const noexcept { return pages_; }

 private:
  struct Free {
    void operator()(std::uint8_t* bytes) const noexcept { std::free(bytes); }
  };
  std::unique_ptr<std::uint8_t, Free> bytes_;
  std::size_t pages_ = 0;
};

// 0 when all of these pages were moved, else an errno; EIO where the file ends too early. `pages` > 0.
int read_pages(int fd, std::size_t page, std::uint8_t* to, std::size_t pages) noexcept;
int write_pages(int fd, std::size_t page, const std::uint8_t* from, std::size_t pages) noexcept;

}  // namespace kv
