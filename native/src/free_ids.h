// A set of small ids that answers "the first member at or after i" in a few instructions: a bitmap, a
// bitmap of its non-empty words, and so on. Handing out neighbours in ascending order is what makes the
// slots of one save one run, and the nodes of one save one stretch of memory.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "types.h"

namespace kv {

class FreeIds {
 public:
  FreeIds() = default;
  // An empty set over [0, limit).
  explicit FreeIds(std::size_t limit) : limit_(limit) {
    for (std::size_t words = limit; words > 1 || levels_.empty();) {
      words = (words + 63) / 64;
      levels_.emplace_back(words, 0);
    }
  }

  std::size_t limit() const noexcept { return limit_; }
  std::size_t count() const noexcept { return count_; }
  bool has(std::size_t id) const noexcept { return id < limit_ && (levels_[0][id / 64] >> (id % 64) & 1) != 0; }

  void add(std::size_t id) noexcept {
    if (has(id)) return;
    ++count_;
    for (auto& level : levels_) {
      const std::uint64_t before = level[id / 64];
      level[id / 64] = before | std::uint64_t{1} << (id % 64);
      if (before != 0) return;
      id /= 64;
    }
  }

  // Adds [start, stop), a word at a time.
  void add_range(std::size_t start, std::size_t stop) noexcept {
    for (std::size_t k = 0; k < levels_.size() && start < stop; ++k) {
      for (std::size_t w = start / 64; w <= (stop - 1) / 64; ++w) {
        std::uint64_t mask = ~std::uint64_t{0};
        if (w == start / 64) mask &= ~std::uint64_t{0} << (start % 64);
        if (w == (stop - 1) / 64) mask &= ~std::uint64_t{0} >> (63 - (stop - 1) % 64);
        if (k == 0) count_ += static_cast<std::size_t>(std::popcount(mask & ~levels_[k][w]));
        levels_[k][w] |= mask;
      }
      start /= 64;
      stop = (stop - 1) / 64 + 1;
    }
  }

  void remove(std::size_t id) noexcept {
    if (!has(id)) return;
    --count_;
    for (auto& level : levels_) {
      level[id / 64] &= ~(std::uint64_t{1} << (id % 64));
      if (level[id / 64] != 0) return;
      id /= 64;
    }
  }

  // First member >= from, or kNone. At most two steps per level (a level per factor of 64).
  std::uint32_t next(std::size_t from) const noexcept {
    if (from >= limit_) return kNone;
    std::size_t k = 0, i = from;  // looking in level k for a set bit at or after i
    for (;;) {
      if (i / 64 < levels_[k].size()) {
        const std::uint64_t word = levels_[k][i / 64] >> (i % 64);
        if (word != 0) {
          i += static_cast<std::size_t>(std::countr_zero(word));
          break;
        }
      }
      if (++k == levels_.size()) return kNone;
      i = i / 64 + 1;
    }
    while (k > 0) i = i * 64 + static_cast<std::size_t>(std::countr_zero(levels_[--k][i]));
    return static_cast<std::uint32_t>(i);
  }

  // First member at or after the last one taken, then from the start (next fit); removes it. Or kNone.
  std::uint32_t take(std::size_t from) noexcept {
    std::uint32_t id = next(from);
    if (id == kNone) id = next(0);
    if (id != kNone) remove(id);
    return id;
  }

  std::size_t memory_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const auto& level : levels_) bytes += level.capacity() * sizeof(std::uint64_t);
    return bytes;
  }

 private:
  std::size_t limit_ = 0;
  std::size_t count_ = 0;
  std::vector<std::vector<std::uint64_t>> levels_;
};

}  // namespace kv
