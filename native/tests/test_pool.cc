#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "pool_fixture.h"

using namespace kv;
using namespace kv::test;

namespace kv {
// Reaches the one private verb whose table is tested.
struct HostPoolProbe {
  static void move(HostPool& pool, SlotId slot, SlotState from, SlotState to) { pool.move(slot, from, to); }
};
}  // namespace kv

TEST_CASE("pool: all sixteen slot transitions, six of them legal") {
  using enum SlotState;
  const std::set<std::pair<SlotState, SlotState>> legal = {{kFree, kFilling}, {kFilling, kReady},
                                                           {kFilling, kFree}, {kReady, kFree},
                                                           {kReady, kDraining}, {kDraining, kFree}};
  const std::map<SlotState, std::vector<SlotState>> way = {
      {kFree, {kFilling, kFree}}, {kFilling, {kFilling}}, {kReady, {kFilling, kReady}},
      {kDraining, {kFilling, kReady, kDraining}}};
  for (const auto& [from, path] : way)
    for (SlotState to : {kFree, kFilling, kReady, kDraining})
      for (SlotState claimed : {kFree, kFilling, kReady, kDraining}) {
        CAPTURE(static_cast<int>(from));
        CAPTURE(static_cast<int>(to));
        CAPTURE(static_cast<int>(claimed));
        auto f = std::make_unique<Fixture>(1);
        const SlotId slot = f->reserve(f->root, {key_of(1)}).slots[0];  // FILLING
        for (std::size_t i = 1; i < path.size(); ++i) HostPoolProbe::move(f->pool, slot, path[i - 1], path[i]);
        const std::uint64_t generation = f->arena->control(slot).generation;
        if (claimed == from && legal.contains({from, to})) {
          HostPoolProbe::move(f->pool, slot, from, to);
          CHECK(f->arena->control(slot).state == static_cast<std::uint32_t>(to));
          CHECK(f->arena->control(slot).generation == generation + (from == kFree));
        } else {
          CHECK_THROWS_AS(HostPoolProbe::move(f->pool, slot, claimed, to), Broken);
          CHECK(f->arena->control(slot).state == static_cast<std::uint32_t>(from));
        }
      }
}

TEST_CASE("pool: read your writes, and the control entry tells the truth") {
  Fixture f;
  const auto keys = keys_of(1, 3);
  const Reserved r = f.reserve(f.root, keys);
  CHECK(r.slots == std::vector<SlotId>{0, 128, 256});  // one run
  CHECK(f.pool.counts().filling == 3);
  CHECK(f.arena->control(0).generation == 1);
  CHECK(f.arena->control(0).state == static_cast<std::uint32_t>(SlotState::kFilling));
  const std::uint32_t position = 2;
  CHECK(f.pool.match(f.index.walk(key_of(0), 3, {&position, 1}, {&keys[2], 1})) == 0);  // not READY: no match
  CHECK(count(f.publish(r)) == 3);
  CHECK(f.pool.match(f.index.walk(key_of(0), 3, {&position, 1}, {&keys[2], 1})) == 3);
  const ControlEntry& c = f.arena->control(128);
  CHECK(c.state == static_cast<std::uint32_t>(SlotState::kReady));
  CHECK(c.length == kFormat.length());
  CHECK(c.crc == 42);
  CHECK(c.checked == 1);
  CHECK(std::memcmp(c.fingerprint, keys[1].bytes.data(), 16) == 0);
  const Reserved again = f.reserve(f.root, keys_of(1, 5));
  CHECK(again.filled == 3);
  CHECK(again.slots[2] == kNone);
  CHECK(again.slots[3] == 384);
  CHECK(f.pool.counts().used_bytes == 5 * kFormat.slot_bytes());
}

TEST_CASE("pool: an invalid call changes nothing") {
  Fixture f;
  const auto nodes = f.save(f.root, keys_of(1, 3));
  const Reserved r = f.reserve(nodes[2], {key_of(4), key_of(5)});
  const auto reserve = [&](NodeId parent, const std::vector<Key>& keys, const SlotFormat& format) {
    return f.pool.reserve(parent, keys, format, {0, 10});
  };
  CHECK_THROWS_WITH_AS(reserve(f.root, {key_of(9), key_of(8), key_of(9)}, kFormat), doctest::Contains("keys[2]"), Invalid);
  CHECK_THROWS_WITH_AS(reserve(f.root, {key_of(2)}, kFormat), doctest::Contains("another parent"), Invalid);
  CHECK_THROWS_WITH_AS(reserve(f.root, {key_of(9)}, format_of_pages(513)), doctest::Contains("slab_bytes"), Invalid);
  CHECK_THROWS_WITH_AS(f.pool.reserve(f.root, keys_of(9, 1), kFormat, {0, -1}), doctest::Contains("stall_s"), Invalid);
  const std::uint32_t crcs[] = {1, 2};
  const std::size_t length = kFormat.length();
  using N = std::vector<NodeId>;
  using S = std::vector<SlotId>;
  const auto publish = [&](const N& n, const S& s, std::size_t len, std::uint32_t checked) {
    return f.pool.publish(n, s, {{crcs, n.size()}, len, checked});
  };
  CHECK_THROWS_WITH_AS(publish({r.nodes[0], nodes[2]}, {r.slots[0], r.slots[1]}, length, 0), doctest::Contains("slots[1]"), Invalid);
  CHECK_THROWS_WITH_AS(publish({r.nodes[0], r.nodes[0]}, {r.slots[0], r.slots[0]}, length, 0), doctest::Contains("twice"), Invalid);
  CHECK_THROWS_WITH_AS(publish({nodes[2]}, {256}, length, 0), doctest::Contains("slots[0]"), Invalid);     // READY
  CHECK_THROWS_WITH_AS(publish({r.nodes[0]}, {1}, length, 0), doctest::Contains("slots[0]"), Invalid);     // no slot
  CHECK_THROWS_WITH_AS(publish({kNone}, {896}, length, 0), doctest::Contains("slots[0]"), Invalid);        // FREE
  CHECK_THROWS_WITH_AS(publish({r.nodes[0]}, {kNone}, length, 0), doctest::Contains("slots[0]"), Invalid);
  CHECK_THROWS_WITH_AS(publish({r.nodes[0]}, {r.slots[0]}, 0, 0), doctest::Contains("length"), Invalid);
  CHECK_THROWS_WITH_AS(publish({r.nodes[0]}, {r.slots[0]}, kFormat.slot_bytes() + 1, 0), doctest::Contains("length"), Invalid);
  CHECK_THROWS_WITH_AS(publish({r.nodes[0]}, {r.slots[0]}, length, 2), doctest::Contains("checked"), Invalid);
  CHECK_THROWS_WITH_AS(publish({r.nodes[0]}, {}, length, 0), doctest::Contains("slots"), Invalid);
  CHECK_THROWS_WITH_AS(f.pool.abort(N{r.nodes[0], r.nodes[1]}, S{r.slots[0], 7}), doctest::Contains("slots[1]"), Invalid);
  f.check();
  CHECK(f.pool.counts().filling == 2);
  CHECK(f.pool.counts().ready == 3);
  CHECK(f.index.size() == 5);
  CHECK(count(f.publish(r)) == 2);
  CHECK_THROWS_AS(publish({r.nodes[0]}, {r.slots[0]}, length, 0), Invalid);  // stale: already published
  CHECK_THROWS_AS(HostPool(f.index, f.arena, kHugeBytes), Invalid);          // one host pool an index
}

TEST_CASE("pool: a reserve makes room inline, leaves first, and never from its own chain") {
  Fixture f;  // 8 slots
  const auto a = f.save(f.root, keys_of(100, 4));
  const auto b = f.save(f.root, keys_of(200, 4));
  f.pool.touch(a[3]);
  const Reserved r = f.reserve(f.root, keys_of(300, 2));
  CHECK(r.slots.size() == 2);
  CHECK(!f.ready(key_of(203)));
  CHECK(!f.ready(key_of(202)));  // the tail of the chain that was used least recently
  CHECK(f.ready(key_of(201)));
  CHECK(f.pool.take_removed() == std::vector<Key>{key_of(203), key_of(202)});
  CHECK(f.index.find(key_of(203)) == kNone);  // hollow leaves are gone
  f.publish(r);
  // Six more on a's chain: everything else leaves, then there is no room.
  const Reserved more = f.reserve(a[3], keys_of(104, 6));
  CHECK(more.slots.size() == 4);
  CHECK(more.dropped == 2);
  CHECK(f.pool.take_dropped().no_room == 2);
  for (NodeId node : a) CHECK(f.ready(node));
  CHECK(f.pool.counts().filling == 4);
  // A chain longer than the pool: what was passed stays, also where it was there already.
  f.publish(more);
  const Reserved whole = f.reserve(f.root, keys_of(100, 12));
  CHECK(whole.filled == 8);
  CHECK(whole.dropped == 4);
  CHECK(b.size() == 4);
}

TEST_CASE("pool: a chain in the making protects what it continues, until published or aborted") {
  Fixture f;
  const auto a = f.save(f.root, keys_of(100, 2));
  const Reserved r = f.reserve(a[1], {key_of(102)});
  CHECK(f.pool.evict(kFormat, 8) == 0);
  f.pool.abort(std::vector<NodeId>{r.nodes[0]}, std::vector<SlotId>{r.slots[0]});
  f.check();
  CHECK(f.index.find(key_of(102)) == kNone);
  CHECK(f.pool.evict(kFormat, 8) == 2);
  CHECK(f.index.size() == 0);
  f.check();
}

TEST_CASE("pool: parents publish first, orphans and losers are freed and counted") {
  Fixture f;
  const Reserved parent = f.reserve(f.root, {key_of(1)});
  const Reserved child = f.reserve(parent.nodes[0], {key_of(2)});
  CHECK(count(f.publish(child)) == 0);
  CHECK(f.pool.take_dropped().orphaned == 1);
  CHECK(f.index.find(key_of(2)) == kNone);
  CHECK(count(f.publish(parent)) == 1);

  const Reserved slow = f.reserve(f.root, keys_of(10, 2), 0);
  const Reserved none = f.reserve(f.root, keys_of(10, 2), 9.9);
  CHECK(none.elsewhere == 2);
  CHECK(none.slots == std::vector<SlotId>{kNone, kNone});
  const Reserved second = f.reserve(f.root, keys_of(10, 2), 10.0);  // stalled: another may fill
  CHECK(second.elsewhere == 0);
  CHECK(f.reserve(f.root, keys_of(10, 2), 19.0).elsewhere == 2);    // the second is not stalled
  CHECK(count(f.publish(second)) == 2);
  CHECK(count(f.publish(slow)) == 0);
  CHECK(f.pool.take_dropped().lost == 2);
  CHECK(f.pool.counts().filling == 0);

  // In the wrong order in one call: still parents first.
  Reserved chain = f.reserve(f.root, keys_of(20, 3));
  std::reverse(chain.nodes.begin(), chain.nodes.end());
  std::reverse(chain.slots.begin(), chain.slots.end());
  CHECK(count(f.publish(chain)) == 3);
}

TEST_CASE("pool: abort of the older of two fillings, then of the newer") {
  Fixture f;
  const Reserved first = f.reserve(f.root, {key_of(1)}, 0);
  const Reserved second = f.reserve(f.root, {key_of(1)}, 20);
  const Reserved third = f.reserve(f.root, {key_of(1)}, 40);
  for (const Reserved* r : {&second, &first, &third}) {
    f.pool.abort(r->nodes, r->slots);
    f.check();
  }
  CHECK(f.index.size() == 0);
}

TEST_CASE("pool: one pin protects the whole chain, rot or not") {
  Fixture f;
  const auto a = f.save(f.root, keys_of(100, 4));
  f.index.pin(a[2]);
  CHECK(f.pool.evict(kFormat, 8) == 1);  // a[3] only
  CHECK(f.pool.drop(a[1]));              // a hole under the reader
  f.check();
  CHECK(f.pool.counts().draining == 1);
  CHECK(!f.ready(a[1]));
  CHECK(!f.pool.drop(a[1]));
  CHECK(f.pool.evict(kFormat, 8) == 0);  // a[0] is still being read, though its only child is hollow
  const Reserved r = f.reserve(f.root, keys_of(200, 8));
  CHECK(r.slots.size() == 5);            // 8 - READY a[0], a[2] - DRAINING a[1]
  f.pool.abort(r.nodes, r.slots);
  f.check();
  f.index.unpin(a[2]);
  f.check();
  CHECK(f.pool.counts().draining == 0);
  CHECK(f.pool.evict(kFormat, 8) == 2);
  CHECK(f.index.size() == 0);
  CHECK(f.pool.take_dropped().rot == 1);
  CHECK(f.pool.take_removed().size() == 4);
}

TEST_CASE("pool: a pin on a hollow node protects the bytes above it") {
  Fixture f;
  const auto a = f.save(f.root, keys_of(100, 4));
  f.index.pin(a[3]);
  CHECK(f.pool.drop(a[3]));
  CHECK(f.pool.drop(a[2]));
  f.check();
  CHECK(f.pool.evict(kFormat, 8) == 0);
  f.index.pin(a[0]);  // a reader that came after the rot keeps only what it was given
  f.index.unpin(a[3]);
  f.check();
  CHECK(f.pool.counts().draining == 0);
  CHECK(f.pool.evict(kFormat, 8) == 1);
  CHECK(f.ready(key_of(100)));
  f.index.unpin(a[0]);
  f.check();
}

TEST_CASE("pool: rot without readers frees at once, and a later save fills the hole") {
  Fixture f;
  const auto a = f.save(f.root, keys_of(100, 3));
  CHECK(f.pool.drop(a[1]));
  f.check();
  CHECK(f.pool.counts().draining == 0);
  CHECK(f.index.live(a[1]));  // a[2] hangs below
  CHECK(f.pool.evict(kFormat, 0) == 0);
  const Reserved r = f.reserve(f.root, keys_of(100, 3));
  CHECK(r.filled == 2);
  CHECK(r.slots[1] != kNone);
  CHECK(count(f.publish(r)) == 1);
  CHECK(f.pool.take_removed().empty());  // it is back
  CHECK(!f.pool.drop(4711));
  CHECK(!f.pool.drop(kNone));
  CHECK(f.pool.drop(a[2]));
  CHECK(f.index.find(key_of(102)) == kNone);
  f.check();
}

TEST_CASE("pool: what a chain misses, what is ready, and bytes that nobody misses") {
  Fixture f;
  const auto a = f.save(f.root, keys_of(100, 4));
  CHECK(f.pool.missing(a[3]).empty());
  CHECK(f.pool.drop(a[1]));
  CHECK(f.pool.forget(a[3]));  // a leaf: its node goes as well
  CHECK(!f.pool.forget(a[3]));
  f.check();
  CHECK(f.pool.take_dropped().rot == 1);
  CHECK(f.pool.missing(a[1]) == std::vector<NodeId>{a[1]});
  CHECK(f.pool.missing(a[2]).empty());
  CHECK(f.pool.missing(f.root).empty());
  CHECK(f.pool.ready_nodes() == std::vector<NodeId>{a[0], a[2]});
  CHECK_THROWS_AS(f.pool.missing(a[3]), Invalid);
  CHECK(f.pool.take_removed().size() == 2);
}

TEST_CASE("pool: the uses of a leaf were uses of its chain, also when the leaf rots") {
  Fixture f;
  const auto a = f.save(f.root, keys_of(100, 2)), b = f.save(f.root, keys_of(200, 1));
  f.pool.touch(a[1]);
  CHECK(f.pool.drop(a[1]));
  CHECK(f.pool.evict(kFormat, 1) == 1);
  CHECK(!f.ready(key_of(200)));
  CHECK(f.ready(key_of(100)));
  CHECK(b.size() == 1);
}

TEST_CASE("pool: a new layout is never starved by an old one") {
  Fixture f(4);  // 16 slots of the old layout, pages 128
  for (std::uint64_t i = 0; i < 4; ++i) f.save(f.root, keys_of(100 + 10 * i, 4));
  const SlotFormat fresh = format_of_pages(256);
  for (std::uint64_t i = 0; i < 8; ++i) {
    const Reserved r = f.pool.reserve(f.root, keys_of(1000 + i, 1), fresh, {0, 10});
    REQUIRE(r.slots.size() == 1);
    const std::uint32_t crc = 1;
    CHECK(f.pool.publish(r.nodes, r.slots, {{&crc, 1}, fresh.length(), 0})[0] == 1);
    f.check();
  }
  CHECK(f.pool.counts().ready == 8);  // the arena belongs to the layout that is used
  const Reserved back = f.reserve(f.root, keys_of(500, 16));
  CHECK(back.slots.size() == 16);
  f.pool.abort(back.nodes, back.slots);
  f.check();
}

TEST_CASE("pool: nodes_max is made room for, and honest when that does not help") {
  Fixture f(2, 5);
  f.save(f.root, keys_of(100, 4));
  const Reserved r = f.reserve(f.root, keys_of(200, 7));
  CHECK(r.slots.size() == 5);
  CHECK(r.dropped == 2);
  CHECK(f.index.size() == 5);
  f.pool.abort(r.nodes, r.slots);
  f.check();
}

TEST_CASE("pool: when it goes, the index goes on without it") {
  Index index(100);
  const NodeId root = index.root(key_of(0));
  auto arena = Arena::create("test", kHugeBytes);
  NodeId pinned;
  {
    HostPool pool(index, arena, kHugeBytes);
    const Reserved r = pool.reserve(root, keys_of(1, 3), kFormat, {0, 1});
    pinned = r.nodes[1];
    index.pin(pinned);
  }
  index.check();
  CHECK(index.size() == 2);
  HostPool next(index, arena, kHugeBytes);
  next.check();
  index.unpin(pinned);
  next.check();
  index.check();
  CHECK(index.size() == 0);
}
