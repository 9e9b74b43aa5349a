// A fixed array of zeroed elements straight from the kernel: a page costs memory (and time to clear) only
// when it is first written, so making an array of any size is one system call.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

#include "types.h"

namespace kv {

template <class T>
class Zeroed {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  Zeroed() = default;
  // May throw std::bad_alloc.
  explicit Zeroed(std::size_t n) : size_(n) {
    if (n == 0) return;
    void* got = ::mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(got);
  }
  Zeroed(Zeroed&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Zeroed& operator=(Zeroed&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Zeroed() {
    if (data_ != nullptr) ::munmap(data_, bytes());
  }

  // Advice: 2 MiB pages where it is touched at random and in full, so that a walk misses the TLB less often.
  void prefer_huge() noexcept {
    if (data_ != nullptr) ::madvise(data_, bytes(), MADV_HUGEPAGE);
  }

  std::size_t size() const noexcept { return size_; }
  T& operator[](std::size_t i) noexcept { return data_[i]; }
  const T& operator[](std::size_t i) const noexcept { return data_[i]; }

  // Gives the memory of [start, stop) back; whole pages only. The elements read as zeros again.
  void release(std::size_t start, std::size_t stop) noexcept {
    const std::size_t from = round_up(start * sizeof(T), kPageBytes), to = stop * sizeof(T) / kPageBytes * kPageBytes;
    if (from < to) ::madvise(reinterpret_cast<char*>(data_) + from, to - from, MADV_DONTNEED);
  }

 private:
  std::size_t bytes() const noexcept { return round_up(size_ * sizeof(T), kPageBytes); }

  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kv
