// Chains with holes (rot) in a full pool: the head is worth more than a tail that nobody can reach.
#include <doctest/doctest.h>

#include "pool_fixture.h"

using namespace kv;
using namespace kv::test;

TEST_CASE("pool: a hole is filled at the cost of the tail behind it, and its node outlives that tail") {
  for (const std::size_t hole : {2u, 6u}) {
    CAPTURE(hole);
    Fixture f;
    const auto keys = keys_of(100, 8);
    const auto nodes = f.save(f.root, keys);
    REQUIRE(f.pool.drop(nodes[hole]));
    const auto other = f.save(f.root, keys_of(200, 1));  // takes the slot that became free, and keeps it
    f.index.pin(other[0]);
    REQUIRE(f.pool.counts().free == 0);
    // Asked up to the hole only, so that it is the last that is named.
    const Reserved r = f.reserve(f.root, {keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(hole) + 1});
    CHECK(r.filled == hole);
    CHECK(r.dropped == 0);
    REQUIRE(r.slots.back() != kNone);
    CHECK(count(f.publish(r)) == 1);
    for (std::size_t i = 0; i < keys.size(); ++i) CHECK(f.ready(keys[i]) == (i < keys.size() - 1));
    f.index.unpin(other[0]);
    f.check();
  }
}

TEST_CASE("pool: a chain with a hole and no room but its own keeps what fits, from its head on") {
  Fixture f;
  const auto keys = keys_of(100, 8);
  const auto nodes = f.save(f.root, keys);
  REQUIRE(f.pool.drop(nodes[2]));
  const auto other = f.save(f.root, keys_of(200, 1));
  f.index.pin(other[0]);
  const Reserved r = f.reserve(f.root, keys);
  CHECK(r.filled == 6);  // all but the hole, and the last, whose slot the hole got
  CHECK(r.dropped == 1);
  CHECK(count(f.publish(r)) == 1);
  for (std::size_t i = 0; i < 7; ++i) CHECK(f.ready(keys[i]));
  CHECK(f.index.find(keys[7]) == kNone);
}
