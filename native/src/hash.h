// BLAKE2b (RFC 7693) and the block keys made with it (format v1). Python's hashlib.blake2b is the oracle,
// so any language can compute the same keys.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "types.h"

namespace kv {

// Sequential BLAKE2b with key and personalisation (fanout 1, depth 1, no salt).
class Blake2b {
 public:
  static constexpr std::size_t kBlockBytes = 128;
  static constexpr std::size_t kDigestMax = 64;
  static constexpr std::size_t kKeyMax = 64;
  static constexpr std::size_t kPersonMax = 16;
  using State = std::array<std::uint64_t, 8>;

  struct Params {
    std::span<const std::uint8_t> key{};
    std::span<const std::uint8_t> person{};  // zero-padded to 16 bytes
    std::size_t digest_bytes = 32;
  };

  // Invalid when the key, the person or the digest size is out of the ranges above.
  explicit Blake2b(const Params& params);

  void update(std::span<const std::uint8_t> data);
  // Writes digest_bytes; the object is spent afterwards.
  void finish(std::uint8_t* digest);

  // The chaining value before any data, for callers that build whole messages themselves.
  static State initial_state(const Params& params);
  // One compression of a full 128-byte block; `counted` = message bytes up to and including this block.
  static void compress(State& state, const std::uint8_t* block, std::uint64_t counted, bool last);

 private:
  State state_;
  std::uint64_t counted_ = 0;
  std::size_t digest_bytes_;
  std::size_t held_ = 0;
  std::array<std::uint8_t, kBlockBytes> buffer_{};
};

std::vector<std::uint8_t> blake2b(std::span<const std::uint8_t> data, const Blake2b::Params& params);

// What the chain's blocks are made of. `extra_offsets` has one entry per full block plus one, or is empty.
struct ChainInput {
  std::span<const std::uint32_t> tokens;
  std::uint32_t block_tokens = 16;
  std::span<const std::uint8_t> extra{};
  std::span<const std::uint32_t> extra_offsets{};

  std::size_t full_blocks() const { return tokens.size() / block_tokens; }
};

inline constexpr std::size_t kBlockTokensMax = 65536;

// Keys of the full blocks that follow `parent`: key_i = BLAKE2b-256(person "kvstore-bk-v1",
// key_{i-1} || u32le len(extra_i) || extra_i || u32le tokens...). One compression per block of 16 tokens
// with at most 28 bytes of extra. Invalid on block_tokens outside [1, kBlockTokensMax] or bad offsets.
std::vector<Key> chain_keys(const Key& parent, const ChainInput& input);

// Order-sensitive digest: sum of first8(key_i) * (2i + 1) mod 2^64.
std::uint64_t keys_digest(std::span<const Key> keys);
// That of the first i + 1 keys, for every i.
std::vector<std::uint64_t> keys_digests(std::span<const Key> keys);

}  // namespace kv
