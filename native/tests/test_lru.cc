#include <doctest/doctest.h>

#include <map>
#include <set>

#include "kit.h"
#include "lru.h"

using namespace kv;
using test::Random;

namespace {

// The policy under test: another policy with exact LRU semantics would pass as well.
using Tested = Lru;

// The obvious implementation: scan everything.
struct Naive {
  std::map<std::uint32_t, std::uint64_t> stamp;
  std::map<std::uint32_t, std::size_t> candidates;  // id -> queue
  std::uint64_t clock = 0;

  std::uint32_t oldest(std::size_t queue) const {
    std::uint32_t found = kNone;
    std::uint64_t age = 0;
    for (auto [id, q] : candidates) {
      const std::uint64_t s = stamp.contains(id) ? stamp.at(id) : 0;
      if (q == queue && (found == kNone || s < age)) found = id, age = s;
    }
    return found;
  }
};

}  // namespace

TEST_CASE("lru: the least recently used candidate leaves first") {
  Tested lru;
  const auto all = [](std::uint32_t) { return true; };
  for (std::uint32_t id : {3u, 1u, 2u}) lru.touch(id), lru.offer(id, 0);
  lru.touch(3);
  CHECK(lru.oldest(0, all).id == 1);
  lru.remove(1);
  CHECK(lru.oldest(0, all).id == 2);
  lru.remove(2);
  CHECK(lru.oldest(0, all).id == 3);
  lru.remove(3);
  CHECK(lru.oldest(0, all).id == kNone);
  CHECK(lru.oldest(7, all).id == kNone);
}

TEST_CASE("lru: a parent inherits its child's last use") {
  Tested lru;
  const auto all = [](std::uint32_t) { return true; };
  lru.touch(1);                     // parent, long ago
  lru.touch(2), lru.offer(2, 0);    // bystander
  lru.touch(3);                     // child
  lru.inherit(1, 3);
  lru.offer(1, 0);
  CHECK(lru.oldest(0, all).id == 2);
  lru.inherit(1, 2);  // an older use changes nothing
  lru.remove(2);
  CHECK(lru.oldest(0, all).id == 1);
}

TEST_CASE("lru: removing anything but the oldest is a bug") {
  Tested lru;
  for (std::uint32_t id : {1u, 2u}) lru.touch(id), lru.offer(id, 0);
  CHECK_THROWS_AS(lru.remove(2), Broken);
  CHECK_THROWS_AS(lru.remove(9), Broken);
}

TEST_CASE("lru: memory stays bounded under touches, offers and changes of queue") {
  Tested lru;
  constexpr std::uint32_t ids = 100;
  for (int round = 0; round < 20000; ++round) {
    const std::uint32_t id = static_cast<std::uint32_t>(round) % ids;
    lru.touch(id);
    lru.offer(id, static_cast<std::size_t>(round / 7) % 3);
  }
  for (std::size_t queue = 0; queue < 3; ++queue) CHECK(lru.entries(queue) <= 2 * ids + 64);
}

TEST_CASE("lru: same victims as a scan over everything") {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Tested lru;
    Naive naive;
    constexpr std::uint32_t ids = 24;
    for (int step = 0; step < 4000; ++step) {
      const std::uint32_t id = random.below(ids);
      const std::size_t queue = random.below(3);
      const auto candidate = [&](std::uint32_t c) {
        return naive.candidates.contains(c) && naive.candidates.at(c) == queue;
      };
      switch (random.below(6)) {
        case 0:
        case 1:
          lru.touch(id);
          naive.stamp[id] = ++naive.clock;
          break;
        case 2:  // becomes a candidate; as in the pools, after a use
          if (naive.candidates.contains(id)) break;
          lru.touch(id);
          naive.stamp[id] = ++naive.clock;
          lru.offer(id, queue);
          naive.candidates[id] = queue;
          break;
        case 3:  // stops being one without a word, and comes back in any queue
          naive.candidates.erase(id);
          break;
        case 4: {
          const std::uint32_t child = random.below(ids);
          if (naive.stamp[child] <= naive.stamp[id] || naive.candidates.contains(child)) break;
          lru.inherit(id, child);
          naive.stamp[id] = naive.stamp[child];
          lru.touch(child);  // stamps stay unique among those that compete
          naive.stamp[child] = ++naive.clock;
          break;
        }
        case 5: {
          const std::uint64_t bound = lru.bound(queue);
          const Victim victim = lru.oldest(queue, candidate);
          REQUIRE(victim.id == naive.oldest(queue));
          CHECK(lru.bound(queue) == (victim.id == kNone ? kNever : victim.age));
          if (victim.id == kNone) break;
          CHECK(bound <= victim.age);
          CHECK(victim.age == naive.stamp[victim.id]);
          CHECK(lru.queue_of(victim.id) == queue);
          if (random.chance(50)) break;  // a look has no effect
          lru.remove(victim.id);
          naive.candidates.erase(victim.id);
          break;
        }
      }
      for (std::size_t q = 0; q < 3; ++q) REQUIRE(lru.entries(q) <= 2 * ids + 65);
    }
  }
}
