#include "hash.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

namespace kv {

static_assert(std::endian::native == std::endian::little, "words and tokens are read in place, little endian");

namespace {

constexpr Blake2b::State kIv = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

constexpr std::uint8_t kSigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

#define KV_INLINE inline __attribute__((always_inline))

KV_INLINE void mix(std::uint64_t& a, std::uint64_t& b, std::uint64_t& c, std::uint64_t& d, std::uint64_t x,
                   std::uint64_t y) {
  a += b + x;
  d = std::rotr(d ^ a, 32);
  c += d;
  b = std::rotr(b ^ c, 24);
  a += b + y;
  d = std::rotr(d ^ a, 16);
  c += d;
  b = std::rotr(b ^ c, 63);
}

// The round number is a template parameter so that every message index is a constant: with the schedule
// read at run time a compression costs about twice as much.
template <std::size_t Round>
KV_INLINE void round(std::uint64_t* v, const std::uint64_t* m) {
  constexpr const std::uint8_t* s = kSigma[Round % 10];
  mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
  mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
  mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
  mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
  mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
  mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
  mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
  mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
}

template <std::size_t... Rounds>
KV_INLINE void rounds(std::uint64_t* v, const std::uint64_t* m, std::index_sequence<Rounds...>) {
  (round<Rounds>(v, m), ...);
}

std::span<const std::uint8_t> person_of_blocks() {
  static constexpr std::uint8_t person[] = {'k', 'v', 's', 't', 'o', 'r', 'e', '-', 'b', 'k', '-', 'v', '1'};
  return person;
}

void check_chain(const ChainInput& input) {
  if (input.block_tokens == 0 || input.block_tokens > kBlockTokensMax)
    throw Invalid("block_tokens: must be in [1, " + std::to_string(kBlockTokensMax) + "]");
  if (input.extra_offsets.empty()) {
    if (!input.extra.empty()) throw Invalid("extra_offsets: needed when extra is not empty");
    return;
  }
  const std::size_t wanted = input.full_blocks() + 1;
  if (input.extra_offsets.size() != wanted)
    throw Invalid("extra_offsets: expected " + std::to_string(wanted) + " entries (full blocks + 1), got " +
                  std::to_string(input.extra_offsets.size()));
  if (!std::is_sorted(input.extra_offsets.begin(), input.extra_offsets.end()))
    throw Invalid("extra_offsets: must not descend");
  if (input.extra_offsets.back() > input.extra.size())
    throw Invalid("extra_offsets: the last one lies beyond extra (" + std::to_string(input.extra.size()) + " bytes)");
}

// One block's message, compressed as it is laid out. `block` is scratch of one compression's size.
void block_key(const Blake2b::State& start, const Key& parent, std::span<const std::uint8_t> extra,
               std::span<const std::uint32_t> tokens, Key& out) {
  const auto extra_length = static_cast<std::uint32_t>(extra.size());
  const std::size_t total = sizeof(Key) + 4 + extra.size() + tokens.size_bytes();
  Blake2b::State state = start;
  if (total <= Blake2b::kBlockBytes) {
    alignas(64) std::uint8_t block[Blake2b::kBlockBytes];
    std::memcpy(block, parent.bytes.data(), sizeof(Key));
    std::memcpy(block + 32, &extra_length, 4);
    if (!extra.empty()) std::memcpy(block + 36, extra.data(), extra.size());
    std::memcpy(block + 36 + extra.size(), tokens.data(), tokens.size_bytes());
    std::memset(block + total, 0, sizeof block - total);
    Blake2b::compress(state, block, total, true);
    std::memcpy(out.bytes.data(), state.data(), sizeof(Key));
    return;
  }
  Blake2b hash({.key = {}, .person = person_of_blocks(), .digest_bytes = sizeof(Key)});
  hash.update(parent.bytes);
  hash.update({reinterpret_cast<const std::uint8_t*>(&extra_length), 4});
  hash.update(extra);
  hash.update({reinterpret_cast<const std::uint8_t*>(tokens.data()), tokens.size_bytes()});
  hash.finish(out.bytes.data());
}

}  // namespace

Blake2b::State Blake2b::initial_state(const Params& params) {
  if (params.key.size() > kKeyMax) throw Invalid("key: at most 64 bytes");
  if (params.person.size() > kPersonMax) throw Invalid("person: at most 16 bytes");
  if (params.digest_bytes == 0 || params.digest_bytes > kDigestMax)
    throw Invalid("digest_size: must be in [1, 64]");
  State state = kIv;
  state[0] ^= 0x01010000u ^ (std::uint64_t{params.key.size()} << 8) ^ params.digest_bytes;
  std::uint64_t person[2] = {0, 0};
  if (!params.person.empty()) std::memcpy(person, params.person.data(), params.person.size());
  state[6] ^= person[0];
  state[7] ^= person[1];
  return state;
}

void Blake2b::compress(State& state, const std::uint8_t* block, std::uint64_t counted, bool last) {
  std::uint64_t m[16];
  std::memcpy(m, block, sizeof m);
  std::uint64_t v[16];
  for (std::size_t i = 0; i < 8; ++i) {
    v[i] = state[i];
    v[i + 8] = kIv[i];
  }
  v[12] ^= counted;  // messages beyond 2^64 bytes do not exist here: the high counter word stays zero
  if (last) v[14] = ~v[14];
  rounds(v, m, std::make_index_sequence<12>());
  for (std::size_t i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[i + 8];
}

Blake2b::Blake2b(const Params& params) : state_(initial_state(params)), digest_bytes_(params.digest_bytes) {
  if (params.key.empty()) return;
  std::memcpy(buffer_.data(), params.key.data(), params.key.size());
  held_ = kBlockBytes;  // the key is the first block, zero-padded
}

void Blake2b::update(std::span<const std::uint8_t> data) {
  while (!data.empty()) {
    // A full buffer is kept until more data comes: the last block is compressed with the final flag.
    if (held_ == kBlockBytes) {
      counted_ += kBlockBytes;
      compress(state_, buffer_.data(), counted_, false);
      held_ = 0;
    }
    const std::size_t taken = std::min(data.size(), kBlockBytes - held_);
    std::memcpy(buffer_.data() + held_, data.data(), taken);
    held_ += taken;
    data = data.subspan(taken);
  }
}

void Blake2b::finish(std::uint8_t* digest) {
  counted_ += held_;
  std::memset(buffer_.data() + held_, 0, kBlockBytes - held_);
  compress(state_, buffer_.data(), counted_, true);
  std::memcpy(digest, state_.data(), digest_bytes_);
}

std::vector<std::uint8_t> blake2b(std::span<const std::uint8_t> data, const Blake2b::Params& params) {
  Blake2b hash(params);
  hash.update(data);
  std::vector<std::uint8_t> digest(params.digest_bytes);
  hash.finish(digest.data());
  return digest;
}

std::vector<Key> chain_keys(const Key& parent, const ChainInput& input) {
  check_chain(input);
  const Blake2b::State start =
      Blake2b::initial_state({.key = {}, .person = person_of_blocks(), .digest_bytes = sizeof(Key)});
  std::vector<Key> keys(input.full_blocks());
  const Key* previous = &parent;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    std::span<const std::uint8_t> extra;
    if (!input.extra_offsets.empty())
      extra = input.extra.subspan(input.extra_offsets[i], input.extra_offsets[i + 1] - input.extra_offsets[i]);
    const auto tokens = input.tokens.subspan(i * input.block_tokens, input.block_tokens);
    block_key(start, *previous, extra, tokens, keys[i]);
    previous = &keys[i];
  }
  return keys;
}

std::vector<std::uint64_t> keys_digests(std::span<const Key> keys) {
  std::vector<std::uint64_t> sums(keys.size());
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) sums[i] = sum += digest_term(keys[i], i);
  return sums;
}

std::uint64_t keys_digest(std::span<const Key> keys) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) sum += digest_term(keys[i], i);
  return sum;
}

}  // namespace kv
