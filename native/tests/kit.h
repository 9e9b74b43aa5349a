// What the metadata tests share: reproducible keys, a random stream, a small layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "types.h"

namespace kv::test {

// SplitMix64: a full-period stream from any seed, so a failing seed is a complete bug report.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  // Uniform in [0, n), n > 0.
  std::uint32_t below(std::size_t n) { return static_cast<std::uint32_t>(next() % n); }
  bool chance(std::uint32_t percent) { return below(100) < percent; }

 private:
  std::uint64_t state_;
};

// The key named by a number: as good as a hash, and the same in every run.
inline Key key_of(std::uint64_t name) {
  Random random(name * 2 + 1);
  Key key;
  for (std::size_t i = 0; i < key.bytes.size(); i += 8) {
    const std::uint64_t word = random.next();
    std::memcpy(key.bytes.data() + i, &word, sizeof word);
  }
  return key;
}

inline std::vector<Key> keys_of(std::uint64_t first, std::size_t n) {
  std::vector<Key> keys;
  for (std::size_t i = 0; i < n; ++i) keys.push_back(key_of(first + i));
  return keys;
}

// A layout whose slot has exactly that many pages: one cell and its four bytes of CRC.
inline SlotFormat format_of_pages(std::size_t pages) {
  return SlotFormat{1, 1, static_cast<std::uint32_t>(pages * kPageBytes - kCellAlign)};
}

}  // namespace kv::test
