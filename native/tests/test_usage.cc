// Limits of accounts: what one tenant may have of the arena and of the disk.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>

#include "disk_pool_kit.h"
#include "pool_fixture.h"
#include "usage.h"

using namespace kv;
using test::Fixture;
using test::kBlock;
using test::key_of;
using test::keys_of;
using test::kFormat;
using test::Random;
using test::Rig;
using test::small;
using test::TempDir;

namespace {

constexpr Account kAlice = 1, kBob = 2;

// The host pool's fixture with a root for each of two tenants; 8 slots.
struct Shared : Fixture {
  Shared() : Fixture(2), alice(index.root(key_of(1'000'001))), bob(index.root(key_of(1'000'002))) {
    pool.claim(alice, kAlice);
    pool.claim(bob, kBob);
    pool.settle_lanes();
  }
  std::size_t used(Account account) const { return pool.usage().used(account) / kFormat.slot_bytes(); }
  void limit(Account account, std::size_t slots) {
    pool.set_limit(account, slots * kFormat.slot_bytes());
    pool.settle_lanes();
  }

  NodeId alice, bob;
};

}  // namespace

TEST_CASE("usage: roots pay for their account, also those that are claimed late") {
  Usage usage;
  usage.add(7, 100);
  usage.add(8, 10);
  CHECK(usage.used(0) == 110);
  CHECK(usage.account(7) == 0);
  CHECK(!usage.claim(7, kAlice));  // no lanes yet: nothing stands elsewhere
  CHECK(usage.used(0) == 10);
  CHECK(usage.used(kAlice) == 100);
  CHECK(usage.fits(7, 1'000'000));
  CHECK(usage.set_limit(kAlice, 150));  // its blocks are in a lane of their own now
  CHECK(usage.lane(7) == 1);
  CHECK(usage.lane(8) == 0);
  CHECK(usage.fits(7, 50));
  CHECK(!usage.fits(7, 51));
  CHECK(usage.claim(8, kAlice));
  CHECK(!usage.claim(8, kAlice));
  CHECK(usage.used(kAlice) == 110);
  usage.check({{7, 100}, {8, 10}});
  CHECK_THROWS_AS(usage.check({{7, 100}}), Broken);
  CHECK_THROWS_AS(usage.check({{7, 100}, {8, 10}, {9, 1}}), Broken);
  CHECK_THROWS_AS(usage.take(8, 11), Broken);
  CHECK_THROWS_AS(usage.take(9, 1), Broken);
  usage.take(7, 100);
  CHECK(!usage.set_limit(kAlice, kUnlimited));
  CHECK(usage.fits(8, 1'000'000));
  CHECK(usage.lane(8) == 1);  // for good
}

TEST_CASE("usage: so many accounts can have a limit, and no more") {
  Usage usage;
  for (Account a = 1; a < kLanesMax; ++a) usage.set_limit(a, 1);
  CHECK(usage.lanes() == kLanesMax);
  CHECK_THROWS_AS(usage.set_limit(kLanesMax, 1), Invalid);
  usage.set_limit(1, 2);
  CHECK(usage.limit(1) == 2);
  CHECK_THROWS_AS(usage.claim(3, kAccountsMax), Invalid);
}

TEST_CASE("limits: an account that is full makes room among its own, and takes none from others") {
  Shared f;
  f.limit(kAlice, 3);
  const auto first = f.save(f.alice, {key_of(1)});
  const auto theirs = f.save(f.bob, keys_of(100, 2));
  f.save(f.alice, {key_of(2)});
  f.save(f.alice, {key_of(3)});
  CHECK(f.used(kAlice) == 3);
  f.pool.touch(first[0]);
  f.save(f.alice, {key_of(4)});  // there are three free slots, and it may have none of them
  CHECK(f.used(kAlice) == 3);
  CHECK(f.ready(key_of(1)));
  CHECK(!f.ready(key_of(2)));  // its least recently used one
  CHECK(f.ready(key_of(4)));
  CHECK(f.ready(theirs[0]));
  CHECK(f.ready(theirs[1]));
  CHECK(f.used(kBob) == 2);
  CHECK(f.pool.counts().free == 3);
  CHECK(f.pool.take_dropped().evicted == 1);
}

TEST_CASE("limits: what may not leave is no room, and the caller is told why") {
  Shared f;
  f.limit(kAlice, 2);
  const auto mine = f.save(f.alice, keys_of(1, 2));
  f.index.pin(mine[1]);
  const Reserved r = f.reserve(f.alice, keys_of(10, 3));
  CHECK(r.nodes.empty());
  CHECK(r.dropped == 3);
  CHECK(r.over_limit);
  const HostDropped dropped = f.pool.take_dropped();
  CHECK(dropped.over_limit == 3);
  CHECK(dropped.no_room == 0);
  f.index.unpin(mine[1]);
  const Reserved more = f.reserve(f.alice, keys_of(20, 3));  // more than it may have at all
  CHECK(more.nodes.size() == 2);
  CHECK(more.over_limit);
  CHECK(!f.ready(key_of(1)));
  f.publish(more);
  CHECK(f.used(kAlice) == 2);
  // A full arena is another matter.
  const Reserved everything = f.reserve(f.bob, keys_of(100, 9));
  CHECK(everything.nodes.size() == 8);
  CHECK(!everything.over_limit);
}

TEST_CASE("limits: a full arena evicts the oldest, whoever's it is") {
  Shared f;
  f.limit(kAlice, 4);
  f.limit(kBob, 8);
  for (std::uint64_t i = 0; i < 4; ++i) {
    f.save(f.alice, {key_of(i + 1)});
    f.save(f.bob, {key_of(i + 101)});
  }
  CHECK(f.pool.counts().free == 0);
  f.save(f.bob, {key_of(200)});
  CHECK(!f.ready(key_of(1)));
  f.save(f.bob, {key_of(201)});
  CHECK(!f.ready(key_of(101)));
  CHECK(f.pool.evict(kFormat, 1) == 1);
  CHECK(!f.ready(key_of(2)));
}

TEST_CASE("limits: one that comes late, is lowered or is lifted holds for what is there") {
  Shared f;
  for (std::uint64_t i = 1; i <= 4; ++i) f.save(f.alice, {key_of(i)});
  f.limit(kAlice, 2);
  f.check();
  CHECK(f.used(kAlice) == 4);  // what is there stays until it saves more
  f.save(f.alice, {key_of(5)});
  CHECK(f.used(kAlice) == 2);
  CHECK(f.ready(key_of(4)));
  CHECK(!f.ready(key_of(3)));
  f.pool.set_limit(kAlice, kUnlimited);
  for (std::uint64_t i = 10; i < 16; ++i) f.save(f.alice, {key_of(i)});
  CHECK(f.used(kAlice) == 8);
  f.limit(kAlice, 0);
  CHECK(f.reserve(f.alice, {key_of(30)}).over_limit);
  CHECK(f.used(kAlice) == 8);  // what can never fit makes nobody leave
}

TEST_CASE("limits: a root that nobody had claimed belongs to the account that does, with its blocks") {
  Shared f;
  const NodeId root = f.index.root(key_of(1'000'003));
  f.limit(kAlice, 2);
  f.save(root, {key_of(1)});
  f.save(root, {key_of(2)});
  f.save(root, {key_of(3)});
  f.pool.claim(root, kAlice);
  f.pool.settle_lanes();
  f.check();
  CHECK(f.used(kAlice) == 3);
  f.save(f.alice, {key_of(4)});
  CHECK(f.used(kAlice) == 2);
  CHECK(!f.ready(key_of(2)));
  CHECK(f.ready(key_of(3)));
  CHECK_THROWS_AS(f.pool.claim(f.index.find(key_of(3)), kAlice), Invalid);
  CHECK_THROWS_AS(f.pool.claim(9999, kAlice), Invalid);
}

TEST_CASE("limits: against a model: nobody has more than its limit, nobody loses a block to another's") {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Shared f;  // 8 slots: limits of 3 and 4, so that the arena is never full
    f.limit(kAlice, 3);
    f.limit(kBob, 4);
    std::map<Account, std::vector<std::uint64_t>> uses = {{kAlice, {}}, {kBob, {}}};  // oldest first
    const std::map<Account, std::size_t> limits = {{kAlice, 3}, {kBob, 4}};
    for (int step = 0; step < 300; ++step) {
      const Account account = random.chance(50) ? kAlice : kBob;
      const NodeId root = account == kAlice ? f.alice : f.bob;
      auto& mine = uses[account];
      const std::uint64_t name = account * 1000 + random.below(6);
      const auto at = std::find(mine.begin(), mine.end(), name);
      if (random.chance(30) && at != mine.end()) {
        f.pool.touch(f.index.find(key_of(name)));
      } else {
        f.save(root, {key_of(name)});
      }
      if (at != mine.end()) mine.erase(at);
      mine.push_back(name);
      if (mine.size() > limits.at(account)) mine.erase(mine.begin());
      for (const auto& [whose, names] : uses) {
        REQUIRE(f.used(whose) == names.size());
        for (std::uint64_t held : names) REQUIRE(f.ready(key_of(held)));
      }
    }
  }
}

TEST_CASE("limits: on the disk an account gives up leaves, the oldest first and used ones last") {
  TempDir dir;
  const std::size_t block = kBlock.slot_bytes();
  {
    Rig rig(dir.path());
    const NodeId alice = rig.index.root(key_of(10)), bob = rig.index.root(key_of(20));
    rig.pool->claim(alice, kAlice);
    rig.pool->claim(bob, kBob);
    const auto used = rig.save(alice, 1000, 20);
    rig.save(bob, 2000, 20);
    const auto unused = rig.save(alice, 3000, 20);
    CHECK(rig.pool->usage().used(kAlice) == 40 * block);
    CHECK(rig.pool->usage().used(kBob) == 20 * block);
    CHECK(rig.pool->trim(kAlice, 1000 * block));  // no limit
    rig.pool->set_limit(kAlice, 40 * block);
    CHECK(rig.pool->trim(kAlice, 0));
    rig.pool->touch(used);
    CHECK(rig.pool->trim(kAlice, 5 * block));
    rig.check();
    CHECK(rig.pool->usage().used(kAlice) == 35 * block);  // and no block more
    CHECK(rig.readable(unused) == 15);
    CHECK(rig.holds(3014));
    CHECK(!rig.holds(3015));
    CHECK(rig.readable(used) == 20);
    CHECK(rig.pool->trim(kAlice, 10 * block, unused[12]));  // a chain that is about to go on loses nothing above that
    CHECK(rig.readable(unused) >= 13);
    CHECK(rig.pool->usage().used(kAlice) == 30 * block);
    CHECK(rig.readable(used) == 17);
    rig.index.pin(used[16]);
    while (!rig.pool->trim(kAlice, 23 * block)) continue;
    CHECK(rig.readable(used) == 17);  // somebody reads it
    CHECK(rig.readable(unused) == 0);
    CHECK(!rig.pool->trim(kAlice, 24 * block));
    rig.index.unpin(used[16]);
    CHECK(!rig.pool->trim(kAlice, 41 * block));  // never
    CHECK(rig.pool->usage().used(kAlice) == 17 * block);
    CHECK(rig.pool->trim(kAlice, 40 * block));
    CHECK(rig.pool->usage().used(kAlice) == 0);
    CHECK(rig.pool->usage().used(kBob) == 20 * block);
    CHECK(rig.holds(2019));
    CHECK(rig.pool->take_dropped().over_limit == 40);
    CHECK_THROWS_AS(rig.pool->claim(rig.node(2000), kAlice), Invalid);
    rig.save(alice, 5000, 10);
    CHECK(rig.pool->usage().used(kAlice) == 10 * block);
    CHECK(rig.flush() == 0);
  }
  Rig rig(dir.path());
  CHECK(rig.pool->usage().used(0) > 0);  // nobody has said yet whose they are
  rig.pool->claim(rig.node(20), kBob);
  CHECK(rig.pool->usage().used(kBob) == 20 * block);
}

TEST_CASE("limits: trim goes on where it stopped, a slice at a time") {
  TempDir dir;
  test::RigOptions options = small(8);
  options.pool.slice = 16;
  Rig rig(dir.path(), options);
  const NodeId alice = rig.index.root(key_of(10));
  rig.pool->claim(alice, kAlice);
  test::fill(rig, 2, 1000);
  rig.save(alice, 50000, 30);
  rig.pool->set_limit(kAlice, 30 * kBlock.slot_bytes());
  int calls = 0;
  while (!rig.pool->trim(kAlice, kBlock.slot_bytes()) && calls < 100) ++calls;
  CHECK(calls > 5);  // two segments of others were looked at first
  CHECK(calls < 100);
  CHECK(rig.holds(1000));
  CHECK(rig.holds(50028));
  CHECK(!rig.holds(50029));
}
