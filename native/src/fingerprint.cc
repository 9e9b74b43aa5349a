#include "fingerprint.h"

#include <algorithm>
#include <string>

namespace kv {

namespace {

struct Secrets {
  explicit Secrets(std::uint64_t seed) noexcept {
    for (std::uint64_t& word : words) {  // SplitMix64
      std::uint64_t z = seed += 0x9E3779B97F4A7C15ull;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
      word = z ^ (z >> 31);
    }
  }
  std::uint64_t words[6];
};

std::uint64_t word_at(const std::uint8_t* data) noexcept {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// Sixteen bytes a step; a last piece is filled up with zeros, so lengths are told apart by the caller.
std::uint64_t absorb(std::uint64_t state, std::uint64_t secret, std::span<const std::uint8_t> bytes) noexcept {
  std::size_t i = 0;
  for (; i + 16 <= bytes.size(); i += 16)
    state = fold(state ^ word_at(bytes.data() + i), secret ^ word_at(bytes.data() + i + 8));
  if (i == bytes.size()) return state;
  std::uint8_t rest[16] = {};
  std::memcpy(rest, bytes.data() + i, bytes.size() - i);
  return fold(state ^ word_at(rest), secret ^ word_at(rest + 8));
}

}  // namespace

std::vector<std::uint64_t> token_fingerprints(const TokenChain& chain) {
  if (chain.block_tokens == 0) throw Invalid("block_tokens: must be at least 1");
  if (chain.tokens.size() > kRouterTokensMax)
    throw Invalid("tokens: " + std::to_string(chain.tokens.size()) + " in one call, the most is " +
                  std::to_string(kRouterTokensMax));
  const Secrets secrets(chain.seed);
  const std::uint64_t* s = secrets.words;
  std::uint64_t above = chain.parent;
  if (above == 0)
    above = absorb(fold(s[0] ^ chain.block_tokens, s[1] ^ chain.extra.size()), s[2], chain.extra);
  std::vector<std::uint64_t> out(chain.tokens.size() / chain.block_tokens);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(chain.tokens.data());
  const std::size_t block_bytes = std::size_t{chain.block_tokens} * sizeof(std::uint32_t);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint64_t mixed = absorb(above ^ s[3], s[4], {bytes + i * block_bytes, block_bytes});
    above = std::max<std::uint64_t>(fold(mixed ^ s[5], s[0] | 1), 1);
    out[i] = above;
  }
  return out;
}

}  // namespace kv
