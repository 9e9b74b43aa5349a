// The device pool beside a naive twin that scans everything: same victims, same answers, after every step of
// random lives.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <set>

#include "device_pool.h"
#include "kit.h"

using namespace kv;
using test::format_of_pages;
using test::key_of;
using test::Random;

namespace {

using Name = std::uint32_t;
using Blocks = std::vector<BlockId>;

constexpr Name kNames = 40;
constexpr BlockId kBlocks = 14;

// A naive twin over a fixed forest of names; the parent of a name is smaller, 0 is the root.
struct NaiveDevice {
  struct B {
    int state = 0;  // 0 free, 1 used, 2 draining
    Name name = 0;
    std::uint32_t pins = 0;
    std::uint64_t stamp = 0;
  };
  std::vector<Name> parent;
  std::vector<B> blocks;
  std::set<Name> host, index_pins;
  std::uint64_t clock = 0;

  BlockId block_of(Name name) const {
    for (BlockId b = 0; b < blocks.size(); ++b)
      if (name != 0 && blocks[b].state == 1 && blocks[b].name == name) return b;
    return kNone;
  }
  std::size_t count(int state) const {
    return static_cast<std::size_t>(std::count_if(blocks.begin(), blocks.end(), [&](auto& b) { return b.state == state; }));
  }
  std::size_t idle() const {
    return static_cast<std::size_t>(
        std::count_if(blocks.begin(), blocks.end(), [](auto& b) { return b.state == 1 && b.pins == 0; }));
  }
  // The oldest idle leaf leaves; kNone if there is none. Sets draining if its bytes are nowhere else.
  BlockId evict(bool& draining) {
    BlockId found = kNone;
    for (BlockId b = 0; b < blocks.size(); ++b) {
      const B& x = blocks[b];
      if (x.state != 1 || x.pins > 0 || x.name == 0 || index_pins.contains(x.name)) continue;
      const bool child = std::any_of(blocks.begin(), blocks.end(), [&](auto& y) {
        return y.state == 1 && y.name != 0 && parent[y.name] == x.name;
      });
      if (!child && (found == kNone || x.stamp < blocks[found].stamp)) found = b;
    }
    if (found == kNone) return kNone;
    leave(found);
    draining = !host.contains(blocks[found].name);
    if (draining)
      blocks[found].state = 2;
    else
      blocks[found] = B{};
    return found;
  }
  void leave(BlockId block) {
    const BlockId up = block_of(parent[blocks[block].name]);
    if (up != kNone) blocks[up].stamp = std::max(blocks[up].stamp, blocks[block].stamp);
  }
};

// One random life of a pool, a host pool below it, and the twin.
struct Life {
  explicit Life(std::uint64_t seed)
      : random(seed), index(1000), root(index.root(key_of(0))),
        host(index, Arena::create("test", 2 * kHugeBytes), kHugeBytes), pool(index, &host, kBlocks, 2) {
    naive.blocks.resize(kBlocks);
    naive.parent = {0};
    for (Name name = 1; name < kNames; ++name)
      naive.parent.push_back(random.chance(50) ? name - 1 : random.below(name));
  }

  NodeId node(Name name) const { return index.find(key_of(name)); }

  void allocate() {
    const std::size_t wanted = 1 + random.below(4);
    const Allocation a = pool.allocate(wanted);
    Blocks draining;
    if (naive.count(0) + naive.idle() + naive.count(2) >= wanted)
      while (naive.count(0) + draining.size() < wanted) {
        bool drains = false;
        const BlockId victim = naive.evict(drains);
        if (victim == kNone) break;
        if (drains) draining.push_back(victim);
      }
    REQUIRE(a.draining == draining);
    REQUIRE(a.blocks.size() == (naive.count(0) >= wanted ? wanted : 0));
    for (BlockId b : a.blocks) {
      REQUIRE(naive.blocks[b].state == 0);
      naive.blocks[b] = {1, 0, 1, 0};
    }
  }

  // The chain to a name gets the private blocks there are.
  void commit(Name name) {
    std::vector<Name> chain;
    for (; name != 0; name = naive.parent[name]) chain.insert(chain.begin(), name);
    Blocks blocks;
    for (BlockId b = 0; b < kBlocks && blocks.size() < chain.size(); ++b)
      if (naive.blocks[b].state == 1 && naive.blocks[b].name == 0) blocks.push_back(b);
    chain.resize(blocks.size());
    std::vector<Key> keys;
    for (Name n : chain) keys.push_back(key_of(n));
    const auto indexed = pool.commit(blocks, root, keys);
    for (std::size_t i = 0; i < chain.size(); ++i) {
      const Name up = naive.parent[chain[i]];
      const bool links = naive.block_of(chain[i]) == kNone && (up == 0 || naive.block_of(up) != kNone);
      REQUIRE(indexed[i] == links);
      if (links) naive.blocks[blocks[i]].name = chain[i];
    }
  }

  void pin(BlockId block) {
    if (naive.blocks[block].state != 1) {
      CHECK_THROWS_AS(pool.pin(Blocks{block}), Invalid);
      return;
    }
    pool.pin(Blocks{block});
    ++naive.blocks[block].pins;
  }

  // A table of an engine that was there before: free blocks, used ones, sometimes one that drains.
  void adopt(BlockId first) {
    Blocks table;
    bool drains = false;
    for (BlockId b = first; b < std::min(first + 3, kBlocks); ++b) {
      drains |= naive.blocks[b].state == 2;
      table.push_back(b);
    }
    if (drains) {
      CHECK_THROWS_AS(pool.adopt(table), Invalid);
      return;
    }
    pool.adopt(table);
    for (BlockId b : table) {
      naive.blocks[b].state = 1;
      ++naive.blocks[b].pins;
    }
  }

  void unpin(BlockId block) {
    auto& b = naive.blocks[block];
    if (b.pins == 0) {
      CHECK_THROWS_AS(pool.unpin(Blocks{block}), Invalid);
      return;
    }
    pool.unpin(Blocks{block});
    if (--b.pins > 0) return;
    if (b.name == 0)
      b = {};
    else
      b.stamp = ++naive.clock;
  }

  void touch(Name name) {
    if (naive.block_of(name) == kNone) return;
    pool.touch(node(name));
    naive.blocks[naive.block_of(name)].stamp = ++naive.clock;
  }

  void rot_or_drained(Name name, BlockId block) {
    if (naive.blocks[block].state == 2) {
      pool.drained(Blocks{block});
      naive.blocks[block] = {};
      return;
    }
    if (random.chance(70)) return;
    const BlockId held = naive.block_of(name);
    REQUIRE(pool.drop(node(name)) == (held != kNone));
    if (held == kNone) return;
    naive.leave(held);
    naive.blocks[held].name = 0;
    if (naive.blocks[held].pins == 0) naive.blocks[held] = {};
  }

  // Never more than the host has room for: its own eviction is tested elsewhere.
  void host_gains_or_loses(Name name) {
    if (naive.host.contains(name)) {
      if (!random.chance(50)) return;
      REQUIRE(host.drop(node(name)));
      naive.host.erase(name);
      return;
    }
    const Name up = naive.parent[name];
    if (naive.host.size() == 8 || node(name) == kNone || (up != 0 && !naive.host.contains(up))) return;
    const SlotFormat format = format_of_pages(128);
    const Key key = key_of(name);
    const Reserved r = host.reserve(up == 0 ? root : node(up), {&key, 1}, format, {0, 1});
    if (r.slots.empty()) return;  // slots that drain under a pin
    const std::uint32_t crc = 0;
    REQUIRE(host.publish(r.nodes, r.slots, {{&crc, 1}, format.length(), 0})[0] == 1);
    naive.host.insert(name);
  }

  void index_pin(Name name) {
    if (node(name) == kNone) return;
    if (naive.index_pins.erase(name) == 1) {
      index.unpin(node(name));
    } else if (naive.host.empty()) {
      index.pin(node(name));
      naive.index_pins.insert(name);
    }
  }

  void step() {
    const Name name = 1 + random.below(kNames - 1);
    const BlockId block = random.below(kBlocks);
    switch (random.below(10)) {
      case 0:
      case 1: return allocate();
      case 2: return commit(name);
      case 3: return random.chance(40) ? pin(block) : void();
      case 4:
        for (BlockId b = block; b < std::min(block + 4, kBlocks); ++b) unpin(b);
        return;
      case 5: return touch(name);
      case 6: return rot_or_drained(name, block);
      case 7: return host_gains_or_loses(name);
      case 8: return random.chance(30) ? adopt(block) : void();
      default: return index_pin(name);
    }
  }

  void compare() const {
    pool.check();
    host.check();
    index.check();
    const DeviceCounts c = pool.counts();
    REQUIRE(c.free == naive.count(0));
    REQUIRE(c.idle == naive.idle());
    REQUIRE(c.draining == naive.count(2));
    for (Name n = 1; n < kNames; ++n) {
      const NodeId id = node(n);
      const BlockId held = id == kNone ? kNone : pool.blocks_of(std::vector<NodeId>{id})[0];
      REQUIRE(held == naive.block_of(n));
    }
  }

  Random random;
  Index index;
  NodeId root;
  HostPool host;
  DevicePool pool;
  NaiveDevice naive;
};

}  // namespace

TEST_CASE("device pool model: same victims and answers as the naive twin") {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    CAPTURE(seed);
    Life life(seed);
    for (int step = 0; step < 500; ++step) {
      CAPTURE(step);
      life.step();
      life.compare();
    }
    life.pool.close();
    life.host.check();
    life.index.check();
  }
}
