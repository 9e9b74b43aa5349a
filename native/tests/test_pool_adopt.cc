// A pool whose process is gone, and the one that goes on with its arena: random lives cut at random moments,
// compared with what the naive reading of the last moment says must be left.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "kept.h"
#include "pool.h"

using namespace kv;
using test::format_of_pages;
using test::key_of;
using test::keys_of;
using test::Random;
using test::write_block;

namespace {

constexpr std::size_t kSlabs = 6;
constexpr std::uint64_t kAside = 999'999'999;

// One boot of a daemon on an arena.
struct Boot {
  explicit Boot(std::size_t slabs = kSlabs, std::size_t nodes_max = 5000)
      : index(nodes_max), arena(Arena::create("test", slabs * kHugeBytes)),
        ledger(Ledger::create("test", arena->pages())), pool(index, arena, kHugeBytes, ledger) {}

  // The next boot: what it has of `before` are two descriptors.
  explicit Boot(const Boot& before, std::size_t nodes_max = 5000)
      : index(nodes_max), arena(Arena::adopt("test", before.arena->data_fd(), before.arena->capacity_bytes())),
        ledger(Ledger::adopt(before.ledger->fd(), arena->pages())), pool(index, arena, kHugeBytes, ledger) {
    Survey survey(ledger, arena);
    survey.verify(2);
    adopted = pool.adopt(survey, index.root(key_of(kAside)));
    pool.check();
    index.check();
  }

  Reserved reserve(NodeId parent, const std::vector<Key>& keys, const SlotFormat& format, Owner owner = {}) {
    return pool.reserve(parent, keys, format, {0, 1000.0, owner});
  }
  // Writes and publishes what a reserve gave; the nodes.
  std::vector<NodeId> finish(const Reserved& r, const SlotFormat& format, std::uint32_t checked = 1) {
    for (std::size_t i = 0; i < r.slots.size(); ++i) {
      if (r.slots[i] == kNone) continue;
      const std::uint32_t crc = write_block(*arena, r.slots[i], format, index.node(r.nodes[i]).key);
      pool.publish({&r.nodes[i], 1}, {&r.slots[i], 1}, {{&crc, 1}, format.length(), checked});
    }
    return r.nodes;
  }
  std::vector<NodeId> save(NodeId parent, const std::vector<Key>& keys, const SlotFormat& format) {
    return finish(reserve(parent, keys, format), format);
  }
  SlotId slot_of(const Key& key) const {
    const NodeId node = index.find(key);
    return node == kNone ? kNone : index.node(node).host_slot;
  }
  std::uint64_t generation(SlotId slot) const { return arena->control(slot).generation; }

  Index index;
  std::shared_ptr<Arena> arena;
  std::shared_ptr<Ledger> ledger;
  HostPool pool;
  Adopted adopted;
};

const SlotFormat kFormats[] = {format_of_pages(2), format_of_pages(5), format_of_pages(64)};

struct Expected {
  std::map<SlotId, std::pair<Key, std::uint64_t>> ready;  // slot -> key, generation
  std::map<SlotId, std::pair<Owner, std::uint64_t>> filling;
  std::map<SlotId, std::uint64_t> generations;  // of every page that ever had one
};

// The naive reading: every READY, summed slot whose chain is READY and summed up to the root; every FILLING one.
Expected expected_of(const Boot& boot, const std::map<SlotId, Owner>& owners) {
  Expected out;
  const auto kept = [&](NodeId node) {
    for (; boot.index.node(node).depth > 0; node = boot.index.node(node).parent) {
      const SlotId slot = boot.index.node(node).host_slot;
      if (slot == kNone || boot.arena->control(slot).checked == 0) return false;
    }
    return true;
  };
  for (SlotId slot = 0; slot < boot.arena->pages(); ++slot) {
    const std::uint64_t generation = boot.generation(slot);
    if (generation > 0) out.generations[slot] = generation;
    if (boot.arena->control(slot).state == static_cast<std::uint32_t>(SlotState::kFilling))
      out.filling[slot] = {owners.at(slot), generation};
  }
  for (NodeId node : boot.pool.ready_nodes())
    if (kept(node)) {
      const SlotId slot = boot.index.node(node).host_slot;
      out.ready[slot] = {boot.index.node(node).key, boot.generation(slot)};
    }
  return out;
}

void compare(const Boot& boot, const Expected& expected) {
  CHECK(boot.adopted.ready == expected.ready.size());
  CHECK(boot.adopted.torn == 0);
  CHECK(boot.adopted.rotten == 0);
  CHECK(boot.adopted.no_room == 0);
  CHECK(boot.pool.counts().ready == expected.ready.size());
  CHECK(boot.pool.counts().filling == expected.filling.size());
  CHECK(boot.pool.counts().draining == 0);
  for (const auto& [slot, block] : expected.ready) {
    CHECK(boot.slot_of(block.first) == slot);
    CHECK(boot.generation(slot) == block.second);
    const auto scratch = std::make_unique<CopyScratch>();
    const SlotFormat format = boot.ledger->entry(slot).format;
    CHECK(verify_slot(*boot.arena, format, slot, block.first, *scratch) == BlockStatus::kOk);
  }
  REQUIRE(boot.adopted.slots.size() == expected.filling.size());
  for (std::size_t i = 0; i < boot.adopted.slots.size(); ++i) {
    const SlotId slot = boot.adopted.slots[i];
    REQUIRE(expected.filling.contains(slot));
    CHECK(boot.adopted.owners[i] == expected.filling.at(slot).first);
    CHECK(boot.generation(slot) == expected.filling.at(slot).second);
    CHECK(boot.index.live(boot.adopted.nodes[i]));
  }
  for (const auto& [slot, generation] : expected.generations) CHECK(boot.generation(slot) >= generation);
}

// Random reserves, publishes, aborts, rot, evictions and pins on a few forked chains.
struct Life {
  explicit Life(std::uint64_t seed) : random(seed) {
    parent.push_back(0);
    for (std::uint32_t name = 1; name < 120; ++name)
      parent.push_back(name < 4 ? 0 : random.chance(70) ? name - 1 : random.below(name));
  }

  std::uint64_t root_of(std::uint32_t name) const { return 1'000'000 + seed_root(name); }
  std::uint32_t seed_root(std::uint32_t name) const {
    while (parent[name] != 0) name = parent[name];
    return name % 2;
  }

  void step(Boot& boot) {
    const std::uint32_t what = random.below(100);
    if (what < 55) return reserve(boot);
    if (what < 80) return finish(boot, true);
    if (what < 88) return finish(boot, false);
    const auto ready = boot.pool.ready_nodes();
    if (ready.empty()) return;
    const NodeId node = ready[random.below(ready.size())];
    if (what < 92) boot.pool.drop(node);
    else if (what < 96) boot.pool.evict(kFormats[random.below(3)], 1 + random.below(3));
    else if (pins.size() < 3) boot.index.pin(node), pins.push_back(node);
    else boot.index.unpin(pins.back()), pins.pop_back();
  }

  void reserve(Boot& boot) {
    const std::uint32_t last = 1 + random.below(119);
    std::vector<std::uint32_t> path;
    for (std::uint32_t name = last; name != 0; name = parent[name]) path.insert(path.begin(), name);
    std::vector<Key> keys;
    for (std::uint32_t name : path) keys.push_back(key_of(name));
    // A chain has one block size; forks share it.
    const SlotFormat& format = kFormats[seed_root(last)];
    Owner owner{};
    owner[0] = static_cast<std::uint8_t>(1 + random.below(3));
    const Reserved r = boot.reserve(boot.index.root(key_of(root_of(last))), keys, format, owner);
    for (std::size_t i = 0; i < r.slots.size(); ++i) {
      if (r.slots[i] == kNone) continue;
      open.push_back({r.nodes[i], r.slots[i], format});
      owners[r.slots[i]] = owner;
    }
  }

  void finish(Boot& boot, bool publish) {
    for (std::size_t n = std::min<std::size_t>(open.size(), 1 + random.below(12)); n > 0; --n) {
      const std::size_t i = random.chance(80) ? 0 : random.below(open.size());
      const auto [node, slot, format] = open[i];
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
      if (publish) {
        const std::uint32_t crc = write_block(*boot.arena, slot, format, boot.index.node(node).key);
        boot.pool.publish({&node, 1}, {&slot, 1}, {{&crc, 1}, format.length(), random.chance(95) ? 1u : 0u});
      } else {
        boot.pool.abort({&node, 1}, {&slot, 1});
      }
    }
  }

  struct Open {
    NodeId node;
    SlotId slot;
    SlotFormat format;
  };
  Random random;
  std::vector<std::uint32_t> parent;
  std::vector<Open> open;
  std::map<SlotId, Owner> owners;
  std::vector<NodeId> pins;
};

}  // namespace

TEST_CASE("pool adopt: random lives go on where they were cut") {
  std::size_t ready = 0, filling = 0, orphaned = 0;
  for (std::uint64_t seed = 1; seed <= 25; ++seed) {
    CAPTURE(seed);
    Life life(seed);
    auto boot = std::make_unique<Boot>();
    for (int round = 0; round < 3; ++round) {
      for (std::uint32_t steps = 20 + life.random.below(150); steps > 0; --steps) life.step(*boot);
      const Expected expected = expected_of(*boot, life.owners);
      auto next = std::make_unique<Boot>(*boot);
      compare(*next, expected);
      ready += expected.ready.size(), filling += expected.filling.size(), orphaned += next->adopted.orphaned;
      boot = std::move(next);
      // The new daemon knows the old fillings by stand-ins; some of their writers are gone now, some stay.
      life.open.clear(), life.pins.clear();
      for (std::size_t i = 0; i < boot->adopted.slots.size(); ++i)
        if (life.random.chance(70)) boot->pool.abort({&boot->adopted.nodes[i], 1}, {&boot->adopted.slots[i], 1});
      boot->pool.check();
      boot->index.check();
    }
  }
  CHECK(ready > 1000);  // the lives were worth comparing
  CHECK(filling > 300);
  CHECK(orphaned > 20);
}

TEST_CASE("pool adopt: eviction goes on in the order of the last uses") {
  Boot first;
  const SlotFormat& format = kFormats[2];
  const NodeId root = first.index.root(key_of(0));
  for (std::uint64_t name : {9, 5, 3, 9, 1}) first.save(root, {key_of(name)}, format);
  for (std::uint64_t name : {9, 1}) first.pool.touch(first.index.find(key_of(name)));
  Boot next(first);
  for (std::uint64_t name : {5, 3, 9, 1}) {
    REQUIRE(next.slot_of(key_of(name)) != kNone);
    CHECK(next.pool.evict(format, 1) == 1);
    CHECK(next.slot_of(key_of(name)) == kNone);
  }
}

TEST_CASE("pool adopt: rot takes its descendants along, a refilled hollow block keeps them") {
  Boot first;
  const SlotFormat& format = kFormats[0];
  const NodeId root = first.index.root(key_of(0));
  const auto nodes = first.save(root, keys_of(1, 6), format);
  first.pool.drop(nodes[1]);                        // hollow now, its children have bytes
  first.save(nodes[0], {key_of(2)}, format);        // and filled again: younger than its children
  first.arena->slot(first.slot_of(key_of(5)))[9] ^= 1;
  Boot next(first);
  CHECK(next.adopted.ready == 4);
  CHECK(next.adopted.rotten == 1);
  CHECK(next.adopted.orphaned == 1);
  CHECK(next.slot_of(key_of(4)) != kNone);
  CHECK(next.index.find(key_of(5)) == kNone);
  CHECK(next.index.find(key_of(6)) == kNone);
  // What was dropped is FREE for good, in a later generation.
  Boot third(next);
  CHECK(third.adopted.ready == 4);
  CHECK(third.adopted.rotten + third.adopted.orphaned == 0);
  const SlotId slot = first.slot_of(key_of(5));
  CHECK(third.generation(slot) > first.generation(slot));
}

TEST_CASE("pool adopt: an adoption that is cut short is begun again") {
  Boot first;
  const auto nodes = first.save(first.index.root(key_of(0)), keys_of(1, 50), kFormats[0]);
  const Reserved open = first.reserve(nodes.back(), keys_of(100, 5), kFormats[0], {7});
  const Expected expected = expected_of(first, {{open.slots[0], {7}}, {open.slots[1], {7}}, {open.slots[2], {7}},
                                                {open.slots[3], {7}}, {open.slots[4], {7}}});
  {
    const auto arena = Arena::adopt("test", first.arena->data_fd(), first.arena->capacity_bytes());
    Survey survey(Ledger::adopt(first.ledger->fd(), arena->pages()), arena);
    survey.verify(1);
  }
  for (int i = 0; i < 3; ++i) compare(Boot(first), expected);
}

TEST_CASE("pool adopt: a smaller index keeps what it can, heads first") {
  Boot first;
  first.save(first.index.root(key_of(0)), keys_of(1, 30), kFormats[0]);
  Boot next(first, 20);
  CHECK(next.adopted.ready == 20);
  CHECK(next.adopted.no_room + next.adopted.orphaned == 10);
  CHECK(next.slot_of(key_of(20)) != kNone);
}

TEST_CASE("pool adopt: what stood aside is not kept, and misuse is refused") {
  Boot first;
  const NodeId aside = first.index.root(key_of(kAside));
  first.save(aside, {key_of(1)}, kFormats[0]);
  const auto old_slot = first.slot_of(key_of(1));
  Boot next(first);
  CHECK(next.adopted.ready == 0);
  CHECK(next.adopted.orphaned == 0);
  CHECK(next.generation(old_slot) == 2);
  CHECK(next.pool.counts().free_slabs == kSlabs);

  Survey survey(first.ledger, first.arena);
  CHECK_THROWS_WITH_AS(next.pool.adopt(survey, next.index.root(key_of(kAside))), doctest::Contains("ledger"), Invalid);
  Survey own(next.ledger, next.arena);
  next.save(next.index.root(key_of(0)), {key_of(2)}, kFormats[0]);
  CHECK_THROWS_WITH_AS(next.pool.adopt(own, next.index.root(key_of(kAside))), doctest::Contains("in use"), Invalid);
}

TEST_CASE("pool adopt: two slots being filled in one place make the arena unusable") {
  Boot first;
  first.ledger->filling(0, 1, {}, kFormats[1]);
  first.ledger->filling(2, 1, {}, kFormats[0]);
  const auto arena = Arena::adopt("test", first.arena->data_fd(), first.arena->capacity_bytes());
  const auto ledger = Ledger::adopt(first.ledger->fd(), arena->pages());
  Index index(100);
  HostPool pool(index, arena, kHugeBytes, ledger);
  Survey survey(ledger, arena);
  CHECK_THROWS_WITH_AS(pool.adopt(survey, index.root(key_of(kAside))), doctest::Contains("another slot lies"), Invalid);
}

TEST_CASE("arena adopt: the bytes stay, control starts anew and is sealed") {
  const auto first = Arena::create("test", kHugeBytes);
  first->slot(3)[5] = 42;
  first->control(3).generation = 9;
  const auto next = Arena::adopt("test", first->data_fd(), kHugeBytes);
  CHECK(next->slot(3)[5] == 42);
  CHECK(next->control(3).generation == 0);
  CHECK(next->control_fd() != first->control_fd());
  next->slot(3)[6] = 43;
  CHECK(first->slot(3)[6] == 43);  // one memory: an old client goes on seeing, and writing, it
  const auto client = Arena::attach(next->data_fd(), next->control_fd(), kHugeBytes);
  CHECK(client->slot(3)[5] == 42);
  CHECK(next->prefault(1, false, false) == false);
  CHECK(next->slot(3)[5] == 42);
  CHECK_THROWS_AS(Arena::adopt("test", first->control_fd(), kHugeBytes), Invalid);
  CHECK_THROWS_AS(Arena::adopt("test", first->data_fd(), 2 * kHugeBytes), Invalid);
  CHECK_THROWS_AS(Arena::adopt("test", first->data_fd(), kHugeBytes + 1), Invalid);
}
