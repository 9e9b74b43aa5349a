#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <vector>

#include "kit.h"
#include "prefix_lru.h"
#include "router_index.h"

using namespace kv;
using test::Random;

namespace {

using Prints = std::vector<std::uint64_t>;

Prints chain_of(std::uint64_t name, std::size_t n) {
  Prints out;
  for (const Key& key : test::keys_of(name * 100000, n)) out.push_back(key.hash());
  return out;
}

Prints part(const Prints& chain, std::size_t start, std::size_t stop) {
  return {chain.begin() + static_cast<std::ptrdiff_t>(start), chain.begin() + static_cast<std::ptrdiff_t>(stop)};
}

std::int32_t length_of(const std::vector<std::int32_t>& found, std::size_t replica, std::size_t tier) {
  return found[replica * kRouterTiers + tier];
}

// The obvious implementation: sets, and a list that is searched.
struct Naive {
  explicit Naive(std::size_t most) : nodes_max(most) {}

  std::size_t stored(std::uint32_t replica, std::uint32_t tier, const Prints& keys) {
    std::size_t newly = 0;
    std::size_t at = 0;  // where the next one goes
    for (const std::uint64_t key : keys) {
      const auto found = std::find(order.begin(), order.end(), key);
      if (found == order.end()) {
        if (order.size() == nodes_max) {
          if (at == order.size()) break;
          holders.erase(order.back());
          order.pop_back();
        }
        order.insert(order.begin() + static_cast<std::ptrdiff_t>(at++), key);
      } else if (at == 0 || order[at - 1] != key) {
        if (found - order.begin() < static_cast<std::ptrdiff_t>(at)) --at;
        order.erase(found);
        order.insert(order.begin() + static_cast<std::ptrdiff_t>(at++), key);
      }
      newly += holders[key].insert({replica, tier}).second;
    }
    return newly;
  }

  std::size_t removed(std::uint32_t replica, std::uint32_t tier, const Prints& keys) {
    std::size_t gone = 0;
    for (const std::uint64_t key : keys) {
      const auto found = holders.find(key);
      if (found == holders.end()) continue;
      gone += found->second.erase({replica, tier});
      if (found->second.empty()) forget(key);
    }
    return gone;
  }

  std::size_t cleared(std::uint32_t replica, std::uint32_t tier) {
    Prints keys;
    for (const auto& [key, by] : holders) keys.push_back(key);
    std::size_t gone = 0;
    for (std::uint32_t t = 0; t < kRouterTiers; ++t)
      if (tier == kRouterTiers || t == tier) gone += removed(replica, t, keys);
    return gone;
  }

  std::int32_t length(std::uint32_t replica, std::uint32_t tier, const Prints& keys) const {
    std::int32_t n = 0;
    for (const std::uint64_t key : keys) {
      const auto found = holders.find(key);
      bool here = false;
      for (std::uint32_t t = 0; t <= tier && found != holders.end(); ++t) here |= found->second.contains({replica, t});
      if (!here) break;
      ++n;
    }
    return n;
  }

  void forget(std::uint64_t key) {
    holders.erase(key);
    order.erase(std::find(order.begin(), order.end(), key));
  }

  std::size_t nodes_max;
  std::map<std::uint64_t, std::set<std::pair<std::uint32_t, std::uint32_t>>> holders;
  Prints order;  // most recently used first
};

}  // namespace

TEST_CASE("router index: nested tiers, several replicas, holes") {
  RouterIndex index(1000, 64);
  const std::uint32_t a = index.add_replica(), b = index.add_replica();
  const Prints chain = chain_of(1, 100);
  const Fingerprints all = Fingerprints::of(chain);
  CHECK(index.stored(a, 0, Fingerprints::of(part(chain, 0, 20))) == 20);
  CHECK(index.stored(a, 1, Fingerprints::of(part(chain, 10, 50))) == 40);
  CHECK(index.stored(a, 3, all) == 100);
  CHECK(index.stored(b, 2, Fingerprints::of(part(chain, 0, 60))) == 60);
  CHECK(index.stored(b, 2, all) == 40);
  auto found = index.find(all);
  CHECK(found == std::vector<std::int32_t>{20, 50, 50, 100, 0, 0, 100, 100});
  CHECK(found == index.find_bisected(all));
  CHECK(index.removed(b, 2, Fingerprints::of(part(chain, 30, 31))) == 1);
  CHECK(length_of(index.find(all), b, 2) == 30);  // the rest is still there, and of no use
  CHECK(index.size() == 100);
  CHECK(index.cleared(a, 3) == 100);
  CHECK(index.blocks(a) == std::array<std::int64_t, kRouterTiers>{20, 40, 0, 0});
  index.check();
  index.remove_replica(b);
  CHECK(index.size() == 50);
  CHECK(index.columns() == 1);
  CHECK_THROWS_AS(index.blocks(b), Invalid);
  CHECK(index.add_replica() == b);
  CHECK(index.blocks(b) == std::array<std::int64_t, kRouterTiers>{});
  index.check();
}

TEST_CASE("router index: limits have names") {
  CHECK_THROWS_WITH_AS(RouterIndex(0, 64), doctest::Contains("nodes_max"), Invalid);
  CHECK_THROWS_WITH_AS(RouterIndex(10, kReplicasMax + 1), doctest::Contains("replicas_max"), Invalid);
  RouterIndex index(10, 2);
  index.add_replica(), index.add_replica();
  CHECK_THROWS_WITH_AS(index.add_replica(), doctest::Contains("replicas_max"), Invalid);
  const Prints many(kRouterKeysMax + 1, 7);
  CHECK_THROWS_WITH_AS(index.stored(0, 0, Fingerprints::of(many)), doctest::Contains("keys"), Invalid);
  CHECK_THROWS_WITH_AS(index.find(Fingerprints::of(many)), doctest::Contains("keys"), Invalid);
  CHECK_THROWS_WITH_AS(index.stored(0, 4, {}), doctest::Contains("tier"), Invalid);
  CHECK_THROWS_WITH_AS(index.stored(2, 0, {}), doctest::Contains("replica"), Invalid);
}

TEST_CASE("router index: a full one gives up tails of what was used longest ago, and keeps heads of what is too long") {
  RouterIndex index(100, 64);
  const std::uint32_t a = index.add_replica();
  const Prints old = chain_of(1, 60), other = chain_of(2, 30), fresh = chain_of(3, 50), huge = chain_of(4, 150);
  index.stored(a, 0, Fingerprints::of(old));
  index.stored(a, 0, Fingerprints::of(other));
  CHECK(index.touch(Fingerprints::of(old)) == 60);
  index.stored(a, 0, Fingerprints::of(fresh));  // 40 too many: `other` and ten of the tail of `old`
  CHECK(length_of(index.find(Fingerprints::of(old)), a, 0) == 50);
  CHECK(length_of(index.find(Fingerprints::of(other)), a, 0) == 0);
  CHECK(index.evicted() == 40);
  index.stored(a, 0, Fingerprints::of(huge));
  CHECK(length_of(index.find(Fingerprints::of(huge)), a, 0) == 100);
  CHECK(index.blocks(a)[0] == 100);
  index.check();
}

TEST_CASE("router index: chains whose rows are scattered, reversed or in runs are found as well") {
  for (const std::size_t run : {1u, 3u, 7u, 40u}) {
    Random random(run);
    RouterIndex index(100000, 64);
    const std::uint32_t a = index.add_replica();
    std::vector<Prints> chains;
    for (std::uint64_t c = 0; c < 20; ++c) chains.push_back(chain_of(c, 400));
    for (std::size_t start = 0; start < 400; start += run)
      for (std::size_t i = 0; i < 20; ++i) {
        const Prints& chain = chains[random.below(2) != 0 ? i : (i * 7 + start) % 20];
        index.stored(a, 0, Fingerprints::of(part(chain, start, std::min<std::size_t>(start + run, 400))));
      }
    for (const Prints& chain : chains) index.stored(a, 0, Fingerprints::of(chain));
    for (const Prints& chain : chains) {
      CHECK(length_of(index.find(Fingerprints::of(chain)), a, 0) == 400);
      index.removed(a, 0, Fingerprints::of(part(chain, 300, 301)));
      CHECK(length_of(index.find(Fingerprints::of(chain)), a, 0) == 300);
      Prints wrong = chain;
      wrong[123] ^= 1;
      CHECK(length_of(index.find(Fingerprints::of(wrong)), a, 0) == 123);
    }
    index.check();
  }
}

TEST_CASE("router index: like sets, whatever the order of calls, for one word of replicas and for many") {
  for (const std::size_t replicas_max : {3u, 64u, 200u, 1024u}) {
    Random random(replicas_max);
    RouterIndex index(120, replicas_max);
    Naive naive(120);
    std::vector<std::uint32_t> replicas;
    // The last column of all, so that every word of the masks is used.
    for (std::size_t i = 0; i < replicas_max; ++i) {
      const std::uint32_t replica = index.add_replica();
      if (i < 2 || i + 1 == replicas_max) replicas.push_back(replica);
    }
    std::vector<Prints> chains;
    for (std::uint64_t c = 0; c < 6; ++c) {
      chains.push_back(chain_of(c / 2, 20));  // two chains share a head
      const Prints tail = chain_of(10 + c, 30);
      chains.back().insert(chains.back().end(), tail.begin(), tail.end());
    }
    for (std::size_t turn = 0; turn < 1500; ++turn) {
      const Prints& chain = chains[random.below(chains.size())];
      const std::size_t start = random.below(chain.size()), stop = start + random.below(chain.size() - start) + 1;
      const Prints keys = part(chain, random.chance(50) ? 0 : start, stop);
      const std::uint32_t replica = replicas[random.below(replicas.size())], tier = random.below(kRouterTiers);
      switch (random.below(10)) {
        case 0: case 1: case 2: case 3: case 4:
          CHECK(index.stored(replica, tier, Fingerprints::of(keys)) == naive.stored(replica, tier, keys));
          break;
        case 5: case 6: case 7:
          CHECK(index.removed(replica, tier, Fingerprints::of(keys)) == naive.removed(replica, tier, keys));
          break;
        case 8:
          if (random.chance(20)) {
            const std::uint32_t which = random.chance(50) ? tier : static_cast<std::uint32_t>(kRouterTiers);
            CHECK(index.cleared(replica, which) == naive.cleared(replica, which));
          }
          break;
        default: {
          const auto found = index.find(Fingerprints::of(chain));
          for (const std::uint32_t r : replicas)
            for (std::uint32_t t = 0; t < kRouterTiers; ++t)
              CHECK(length_of(found, r, t) == naive.length(r, t, chain));
        }
      }
      CHECK(index.size() == naive.order.size());
      if (turn % 50 == 0) index.check();
    }
    index.check();
  }
}

TEST_CASE("router index: churn takes no more memory than the cap") {
  RouterIndex index(5000, 64);
  const std::uint32_t a = index.add_replica();
  std::size_t most = 0;
  for (std::uint64_t c = 0; c < 2000; ++c) {
    index.stored(a, 0, Fingerprints::of(chain_of(c, 100)));
    if (c == 100) most = index.memory_bytes();
  }
  CHECK(index.size() == 5000);
  CHECK(index.evicted() == 195000);
  CHECK(index.memory_bytes() <= most + most / 4);
  index.check();
}

TEST_CASE("prefix lru: what a replica of that capacity would hold") {
  PrefixLru lru(100);
  const Prints a = chain_of(1, 60), b = chain_of(2, 60), huge = chain_of(3, 150);
  CHECK(lru.touch(Fingerprints::of(a)).empty());
  const Prints left = lru.touch(Fingerprints::of(b));
  Prints expected = part(a, 40, 60);
  std::reverse(expected.begin(), expected.end());
  CHECK(left == expected);  // tail first
  CHECK(lru.match(Fingerprints::of(a)) == 40);
  CHECK(lru.match(Fingerprints::of(b)) == 60);
  CHECK(lru.touch(Fingerprints::of(part(a, 0, 40))).empty());
  CHECK(lru.touch(Fingerprints::of(huge)).size() == 100);
  CHECK(lru.match(Fingerprints::of(huge)) == 100);
  CHECK(lru.drop(Fingerprints::of(part(huge, 10, 20))) == 10);
  CHECK(lru.match(Fingerprints::of(huge)) == 10);
  lru.check();
  lru.clear();
  CHECK(lru.size() == 0);
  lru.touch(Fingerprints::of(a));
  CHECK(lru.match(Fingerprints::of(a)) == 60);
  lru.check();
}
