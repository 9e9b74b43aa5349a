// An array that grows in chunks, of 2^15 elements unless told otherwise: addresses are stable and growing
// copies nothing, so no insertion ever pays for all earlier ones. A chunk of 64 B elements is exactly one 2 MiB huge page, which
// keeps a walk over millions of nodes from missing the TLB at every step.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "types.h"

namespace kv {

inline constexpr std::size_t kChunkElements = std::size_t{1} << 15;

template <class T, std::size_t kElements = kChunkElements>
class ChunkedArray {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  T& operator[](std::size_t i) noexcept { return chunks_[i / kElements].get()[i % kElements]; }
  const T& operator[](std::size_t i) const noexcept {
    return chunks_[i / kElements].get()[i % kElements];
  }

  std::size_t size() const noexcept { return chunks_.size() * kElements; }
  std::size_t memory_bytes() const noexcept { return chunks_.size() * kChunkBytes; }

  // Makes [0, n) addressable, new elements value-initialised. May throw std::bad_alloc, changing nothing.
  void grow(std::size_t n) {
    while (size() < n) add_chunk();
  }

 private:
  static constexpr std::size_t kChunkBytes = kElements * sizeof(T);
  struct Free {
    void operator()(T* p) const noexcept { std::free(p); }
  };

  void add_chunk() {
    const bool huge = kChunkBytes % kHugeBytes == 0;
    const std::size_t align = huge ? kHugeBytes : kPageBytes;
    std::unique_ptr<T, Free> chunk(static_cast<T*>(std::aligned_alloc(align, round_up(kChunkBytes, align))));
    if (!chunk) throw std::bad_alloc();
    // Advice only: without transparent huge pages everything works, the walk is merely slower.
    if (huge) ::madvise(chunk.get(), kChunkBytes, MADV_HUGEPAGE);
    std::uninitialized_value_construct_n(chunk.get(), kElements);
    chunks_.push_back(std::move(chunk));
  }

  std::vector<std::unique_ptr<T, Free>> chunks_;
};

}  // namespace kv
