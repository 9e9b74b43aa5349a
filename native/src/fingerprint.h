// Fingerprints: 64 bits that name a block to a router.
//
// A block of ours is named by the first eight bytes (little-endian) of its 256-bit key, a block of another engine
// by its hash, and a block that the router names by itself by token_fingerprints(). A router's answer is a hint
// and the engine compares whole keys before it serves anything, so 64 bits are enough: among 10 M blocks the chance that
// any two share one is 3e-6, and all that happens then is a worse choice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "types.h"

namespace kv {

inline constexpr std::size_t kRouterKeysMax = 8 * kKeysMax;  // keys in one call: 1 M tokens in blocks of 16
inline constexpr std::size_t kRouterTokensMax = std::size_t{1} << 22;  // tokens in one call

// n keys in a row, of which the first eight bytes of each count. A view.
struct Fingerprints {
  const std::uint8_t* data = nullptr;
  std::size_t count = 0;
  std::size_t width = 8;  // bytes from one key to the next

  std::size_t size() const noexcept { return count; }
  std::uint64_t operator[](std::size_t i) const noexcept {
    std::uint64_t word;
    std::memcpy(&word, data + i * width, sizeof word);
    return word;
  }
  static Fingerprints of(std::span<const std::uint64_t> words) noexcept {
    return {reinterpret_cast<const std::uint8_t*>(words.data()), words.size(), sizeof(std::uint64_t)};
  }
};

struct TokenChain {
  std::span<const std::uint32_t> tokens;   // whatever does not fill a block at the end is ignored
  std::uint32_t block_tokens = 0;
  std::uint64_t seed = 0;                  // a secret of this router: without it nobody can make collisions
  std::span<const std::uint8_t> extra{};   // bound into the first block of a chain: adapter, salt, media
  std::uint64_t parent = 0;                // fingerprint of the block before; 0 = here a chain begins
};

// (tokens / block_tokens,) chained fingerprints, never 0. Some 10 ns a block of 16 tokens. Well mixed, but not
// cryptographic and of no fixed format: for one router process and as long as it lives. `extra` counts only where a
// chain begins, so that a chain cut anywhere and continued from its parent has the same fingerprints.
std::vector<std::uint64_t> token_fingerprints(const TokenChain& chain);

// The product of two words, folded: the mixing step of wyhash.
inline std::uint64_t fold(std::uint64_t a, std::uint64_t b) noexcept {
  __extension__ using Wide = unsigned __int128;
  const Wide product = Wide{a} * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace kv
