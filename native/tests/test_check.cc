#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "device_pool.h"
#include "kit.h"
#include "pool.h"

using namespace kv;
using test::key_of;
using test::keys_of;
using test::Random;

namespace {

const SlotFormat kFormat = test::format_of_pages(1);

struct Fixture {
  Fixture() : index(5000), arena(Arena::create("check", 4 * kHugeBytes)), pool(index, arena, kHugeBytes) {
    root = index.root(key_of(0));
  }

  std::vector<NodeId> save(NodeId parent, const std::vector<Key>& keys) {
    const Reserved r = pool.reserve(parent, keys, kFormat, {0, 1});
    publish(r);
    return r.nodes;
  }
  void publish(const Reserved& r) {
    std::vector<NodeId> nodes;
    std::vector<SlotId> slots;
    for (std::size_t i = 0; i < r.nodes.size(); ++i)
      if (r.slots[i] != kNone) nodes.push_back(r.nodes[i]), slots.push_back(r.slots[i]);
    const std::vector<std::uint32_t> crcs(slots.size(), 0);
    pool.publish(nodes, slots, {crcs, kFormat.length(), 0});
  }

  Index index;
  std::shared_ptr<Arena> arena;
  HostPool pool;
  NodeId root;
};

std::size_t slices(Checker& checker, std::size_t most) {
  std::size_t n = 1;
  while (!checker.step(most)) ++n;
  return n;
}

}  // namespace

TEST_CASE("check: slices of any size come to the same end, and their number is bounded by what there is") {
  Fixture f;
  f.save(f.root, keys_of(100, 700));
  const auto tail = f.save(f.root, keys_of(5000, 40));
  f.index.pin(tail[20]);
  f.pool.reserve(tail.back(), keys_of(9000, 5), kFormat, {0, 1});
  f.pool.check();
  f.index.check();
  for (std::size_t most : {1u, 7u, 100u, 1000u, 100000u}) {
    Checker checker(f.index, &f.pool);
    const std::size_t n = slices(checker, most);
    CHECK(checker.settled());
    const std::size_t work = f.arena->pages() + 2 * f.index.ids() + 16;
    CHECK(n <= work / most + 16);
    if (most == 1) CHECK(n > 700);
  }
}

TEST_CASE("check: every broken law is named, in slices as in one piece") {
  using Break = std::function<void(Fixture&, NodeId)>;
  const std::vector<std::pair<const char*, Break>> laws = {
      {"wrong child count", [](Fixture& f, NodeId id) { ++f.index.node(id).children; }},
      {"holders differ", [](Fixture& f, NodeId id) { ++f.index.node(id).holders; }},
      {"wrong host_refs", [](Fixture& f, NodeId id) { f.index.node(id).host_refs += 2; }},
      {"depth is not its parent's + 1", [](Fixture& f, NodeId id) { ++f.index.node(id).depth; }},
      {"wrong jump", [](Fixture& f, NodeId id) { f.index.node(id).jump = id; }},
      {"pinned nodes disagree", [](Fixture& f, NodeId id) { ++f.index.node(id).pins; }},
      {"READY for a node that does not name it", [](Fixture& f, NodeId id) { f.index.node(id).host_slot = kNone; }},
      {"another key's fingerprint",
       [](Fixture& f, NodeId id) { ++f.arena->control(f.index.node(id).host_slot).fingerprint[0]; }},
      {"says another state",
       [](Fixture& f, NodeId id) { f.arena->control(f.index.node(id).host_slot).state.store(1); }},
      {"has bytes or pins but no host_refs", [](Fixture& f, NodeId id) { f.index.node(f.index.node(id).parent).host_refs = 0; }},
  };
  for (const auto& [law, breaks] : laws) {
    CAPTURE(law);
    Fixture f;
    const NodeId id = f.save(f.root, keys_of(100, 200))[77];
    f.pool.check();
    const SlotId slot = f.index.node(id).host_slot;
    const NodeId parent = f.index.node(id).parent;
    const Node mine = f.index.node(id), above = f.index.node(parent);
    const std::uint8_t first = f.arena->control(slot).fingerprint[0];
    breaks(f, id);
    CHECK_THROWS_WITH_AS(f.pool.check(), doctest::Contains(law), Broken);
    Checker checker(f.index, &f.pool);
    CHECK_THROWS_WITH_AS(slices(checker, 10), doctest::Contains(law), Broken);
    f.index.node(id) = mine, f.index.node(parent) = above;
    f.arena->control(slot).fingerprint[0] = first;
    f.arena->control(slot).state.store(static_cast<std::uint32_t>(SlotState::kReady));
    f.pool.check();
  }
  Index index(10);
  const NodeId root = index.root(key_of(0));
  index.node(root).key = key_of(1);
  CHECK_THROWS_WITH_AS(index.check(), doctest::Contains("its key finds another node"), Broken);
}

TEST_CASE("check: a change in between leaves the counts out, and nothing else") {
  Fixture f;
  const auto nodes = f.save(f.root, keys_of(100, 300));
  Checker checker(f.index, &f.pool);
  checker.step(50);
  CHECK(checker.settled());
  f.pool.evict(kFormat, 1);
  slices(checker, 50);
  CHECK(!checker.settled());

  Checker second(f.index, &f.pool);
  second.step(50);
  f.pool.evict(kFormat, 1);
  const NodeId jump = std::exchange(f.index.node(nodes[200]).jump, nodes[200]);
  CHECK_THROWS_WITH_AS(slices(second, 50), doctest::Contains("wrong jump"), Broken);  // of one node: still seen
  f.index.node(nodes[200]).jump = jump;
}

TEST_CASE("check: no false alarm while everything changes between slices") {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Fixture f;
    auto device = std::make_unique<DevicePool>(f.index, &f.pool, 400, 400);
    std::vector<NodeId> pins;
    std::vector<Reserved> open;
    std::uint64_t name = 10;
    std::size_t settled = 0, unsettled = 0;
    for (int round = 0; round < 60; ++round) {
      Checker checker(f.index, &f.pool);
      DeviceChecker devices(*device);
      const bool busy = round % 3 != 0;
      for (bool done = false, device_done = false; !done || !device_done;) {
        if (!done) done = checker.step(1 + random.below(400));
        if (!device_done) device_done = devices.step(1 + random.below(400));
        if (!busy) continue;
        const std::vector<NodeId> ready = f.pool.ready_nodes();
        const NodeId any = ready.empty() ? f.root : ready[random.below(ready.size())];
        switch (random.below(8)) {
          case 0: f.save(any, keys_of(name, 1 + random.below(90))), name += 90; break;
          case 1: f.pool.evict(kFormat, random.below(60)); break;
          case 2: f.pool.drop(any); break;
          case 3: f.index.pin(any), pins.push_back(any); break;
          case 4:
            if (!pins.empty()) f.index.unpin(pins.back()), pins.pop_back();
            break;
          case 5: open.push_back(f.pool.reserve(any, keys_of(name, 20), kFormat, {0, 1})), name += 20; break;
          case 6:
            if (!open.empty()) f.publish(open.back()), open.pop_back();
            break;
          case 7: {
            const Allocation got = device->allocate(random.below(30));
            device->commit(got.blocks, f.root, keys_of(name, got.blocks.size())), name += 30;
            device->unpin(got.blocks);
            device->drained(got.draining);
            if (random.chance(5)) device->close(), device = std::make_unique<DevicePool>(f.index, &f.pool, 400, 400);
            device_done = true;  // its checker may be of a pool that is gone
            break;
          }
        }
      }
      ++(checker.settled() ? settled : unsettled);
    }
    CHECK(settled >= 20);
    CHECK(unsettled > 10);
    f.index.check(), f.pool.check(), device->check();
    for (NodeId id : pins) f.index.unpin(id);
    for (const Reserved& r : open) f.publish(r);
  }
}
