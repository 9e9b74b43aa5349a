#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <set>
#include <vector>

#include "engine_blocks.h"
#include "fingerprint.h"
#include "kit.h"
#include "msgpack.h"

using namespace kv;
using test::Random;

namespace {

using Prints = std::vector<std::uint64_t>;
using Bytes = std::vector<std::uint8_t>;

std::vector<std::uint32_t> tokens_of(std::uint32_t start, std::size_t n) {
  std::vector<std::uint32_t> tokens(n);
  std::iota(tokens.begin(), tokens.end(), start);
  return tokens;
}

Prints store(EngineBlocks& blocks, std::optional<std::uint64_t> parent, const Prints& hashes,
             const std::vector<std::uint32_t>& tokens, std::uint32_t tier = 0) {
  return blocks.stored(parent, Fingerprints::of(hashes), {tokens, 16, 5}, tier);
}

}  // namespace

TEST_CASE("token fingerprints: chained, seeded, cut anywhere") {
  const auto tokens = tokens_of(0, 100);
  const Bytes extra{1, 2, 3};
  const Prints all = token_fingerprints({tokens, 16, 5});
  CHECK(all.size() == 6);
  CHECK(std::set(all.begin(), all.end()).size() == 6);
  CHECK(token_fingerprints({tokens, 16, 6}) != all);
  CHECK(token_fingerprints({tokens, 16, 5, extra})[0] != all[0]);
  CHECK(token_fingerprints({tokens, 32, 5})[0] != all[1]);
  const Prints rest = token_fingerprints({std::span(tokens).subspan(48), 16, 5, extra, all[2]});
  CHECK(rest == Prints(all.begin() + 3, all.end()));  // extra belongs to the first block of a chain
  auto other = tokens;
  other[20] ^= 1;
  const Prints changed = token_fingerprints({other, 16, 5});
  CHECK(changed[0] == all[0]);
  for (std::size_t i = 1; i < 6; ++i) CHECK(changed[i] != all[i]);
  CHECK_THROWS_WITH_AS(token_fingerprints({tokens, 0, 5}), doctest::Contains("block_tokens"), Invalid);
}

TEST_CASE("token fingerprints: one bit of one token turns half of the bits, wherever it is") {
  for (const std::uint32_t block_tokens : {1u, 3u, 16u, 17u}) {
    const auto tokens = tokens_of(77, block_tokens);
    const std::uint64_t before = token_fingerprints({tokens, block_tokens, 9})[0];
    std::array<std::size_t, 64> turned{};
    const std::size_t flips = std::size_t{block_tokens} * 32;
    for (std::size_t flip = 0; flip < flips; ++flip) {
      auto other = tokens;
      other[flip / 32] ^= 1u << (flip % 32);
      const std::uint64_t difference = before ^ token_fingerprints({other, block_tokens, 9})[0];
      CHECK(difference != 0);
      for (std::size_t bit = 0; bit < 64; ++bit) turned[bit] += difference >> bit & 1;
    }
    if (flips >= 512)
      for (const std::size_t n : turned) CHECK((n > flips * 2 / 5 && n < flips * 3 / 5));
  }
}

TEST_CASE("engine blocks: a chain continues its parent; what has no known parent is an orphan") {
  EngineBlocks blocks(100);
  const auto tokens = tokens_of(0, 64);
  const Prints prompt = token_fingerprints({tokens, 16, 5});
  CHECK(store(blocks, std::nullopt, {1, 2}, tokens_of(0, 32)) == Prints{prompt[0], prompt[1]});
  CHECK(store(blocks, 2, {3, 4}, tokens_of(32, 32)) == Prints{prompt[2], prompt[3]});
  CHECK(store(blocks, 2, {3, 4}, tokens_of(32, 32)) == Prints{prompt[2], prompt[3]});  // again
  CHECK(blocks.size() == 4);
  CHECK(store(blocks, 99, {5}, tokens_of(64, 16)).empty());
  CHECK(blocks.orphans() == 1);
  const Prints gone{4, 77, 4};
  CHECK(blocks.removed(Fingerprints::of(gone), 0) == Prints{prompt[3]});
  CHECK(blocks.size() == 3);
  CHECK_THROWS_WITH_AS(store(blocks, 2, {3, 4}, tokens_of(0, 16)), doctest::Contains("tokens"), Invalid);
  blocks.check();
  blocks.clear(kRouterTiers);
  CHECK(blocks.size() == 0);
  CHECK(store(blocks, 2, {3}, tokens_of(32, 16)).empty());
  blocks.check();
}

TEST_CASE("engine blocks: a fingerprint is there until its last hash on the tier has left") {
  EngineBlocks blocks(100);
  const Prints print = store(blocks, std::nullopt, {1}, tokens_of(0, 16));
  CHECK(store(blocks, std::nullopt, {2}, tokens_of(0, 16)) == print);  // the same tokens under another salt
  CHECK(store(blocks, std::nullopt, {1}, {}, 1) == print);              // and on a second tier, named by hash alone
  CHECK(store(blocks, std::nullopt, {7}, {}, 1).empty());
  CHECK(blocks.orphans() == 1);
  const Prints one{1}, two{2};
  CHECK(blocks.removed(Fingerprints::of(one), 0).empty());
  CHECK(blocks.removed(Fingerprints::of(two), 0) == print);
  CHECK(blocks.removed(Fingerprints::of(one), 1) == print);
  CHECK(blocks.size() == 0);
  blocks.check();
}

TEST_CASE("engine blocks: a full table tells what it forgot, unless it came back") {
  EngineBlocks blocks(4);
  const Prints first = store(blocks, std::nullopt, {1, 2}, tokens_of(0, 32));
  store(blocks, std::nullopt, {3, 4}, tokens_of(100, 32));
  CHECK(store(blocks, std::nullopt, {5, 6}, tokens_of(200, 32)).size() == 2);
  CHECK(blocks.evicted() == 2);
  CHECK(store(blocks, std::nullopt, {9}, tokens_of(0, 16)).size() == 1);  // the fingerprint of hash 1
  const Prints forgotten = blocks.take_evicted(0);
  CHECK(forgotten.front() == first[1]);
  CHECK(std::find(forgotten.begin(), forgotten.end(), first[0]) == forgotten.end());
  CHECK(blocks.take_evicted(0).empty());
  CHECK(store(blocks, std::nullopt, {11, 12, 13, 14, 15, 16}, tokens_of(300, 96)).size() == 4);  // heads
  blocks.check();

  EngineBlocks again(4);
  const Prints was = store(again, std::nullopt, {1}, tokens_of(0, 16));
  store(again, std::nullopt, {1}, tokens_of(50, 16));  // the hash has other tokens now
  CHECK(again.take_evicted(0) == was);
  again.check();
}

TEST_CASE("msgpack: arrays of tokens and hashes, every width, and nothing else") {
  CHECK(unpack_tokens(Bytes{0x95, 0, 0x7F, 0xCC, 0xFF, 0xCD, 1, 0, 0xCE, 0xFF, 0xFF, 0xFF, 0xFF}) ==
        std::vector<std::uint32_t>{0, 127, 255, 256, 0xFFFFFFFFu});
  CHECK(unpack_tokens(Bytes{0xDC, 0, 1, 5}) == std::vector<std::uint32_t>{5});
  CHECK(unpack_tokens(Bytes{0xDD, 0, 0, 0, 1, 5}) == std::vector<std::uint32_t>{5});
  const Bytes hashes{0x94, 0xFF, 0xD0, 0x80, 0xCF, 1, 2, 3, 4, 5, 6, 7, 8, 0xC4, 9, 1, 0, 0, 0, 0, 0, 0, 0, 9};
  CHECK(unpack_hashes(hashes) == Prints{~std::uint64_t{0}, ~std::uint64_t{127}, 0x0102030405060708ull, 1});
  for (std::size_t n = 0; n < hashes.size(); ++n)
    CHECK_THROWS_AS(unpack_hashes(std::span(hashes).first(n)), Invalid);
  CHECK_THROWS_AS(unpack_tokens(Bytes{0x91, 0xFF}), Invalid);                       // negative
  CHECK_THROWS_AS(unpack_tokens(Bytes{0x91, 0xC0}), Invalid);                       // nil
  CHECK_THROWS_AS(unpack_tokens(Bytes{0x91, 1, 2}), Invalid);                       // something behind it
  CHECK_THROWS_AS(unpack_tokens(Bytes{0xDD, 0xFF, 0xFF, 0xFF, 0xFF}), Invalid);     // four billion
  CHECK_THROWS_AS(unpack_hashes(Bytes{0x91, 0xC4, 4, 1, 2, 3, 4}), Invalid);        // too short for a hash
  Random random(1);
  for (int i = 0; i < 20000; ++i) {  // whatever comes: a value or Invalid, under sanitizers
    Bytes noise(random.below(24));
    for (auto& byte : noise) byte = static_cast<std::uint8_t>(random.next());
    if (!noise.empty() && random.chance(70)) noise[0] = static_cast<std::uint8_t>(0x90 | random.below(8));
    try {
      unpack_tokens(noise);
      unpack_hashes(noise);
    } catch (const Invalid&) {
    }
  }
}
