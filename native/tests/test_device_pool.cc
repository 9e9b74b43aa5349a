#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "device_pool.h"
#include "kit.h"

using namespace kv;
using test::format_of_pages;
using test::key_of;
using test::keys_of;
using test::Random;

namespace {

using Blocks = std::vector<BlockId>;

struct Fixture {
  explicit Fixture(std::size_t blocks = 8, bool with_host = false, std::size_t nodes_max = 1000)
      : index(nodes_max), root(index.root(key_of(0))) {
    if (with_host) host = std::make_unique<HostPool>(index, Arena::create("test", 2 * kHugeBytes), kHugeBytes);
    pool = std::make_unique<DevicePool>(index, host.get(), blocks, 2);
  }
  // Allocates and commits a chain after parent; its blocks, pinned.
  Blocks run(NodeId parent, const std::vector<Key>& keys) {
    Allocation a = pool->allocate(keys.size());
    REQUIRE(a.blocks.size() == keys.size());
    for (std::uint8_t indexed : pool->commit(a.blocks, parent, keys)) CHECK(indexed == 1);
    check();
    return a.blocks;
  }
  void save(NodeId parent, const std::vector<Key>& keys) {
    const SlotFormat format = format_of_pages(128);
    const Reserved r = host->reserve(parent, keys, format, {0, 1});
    const std::vector<std::uint32_t> crcs(keys.size(), 0);
    host->publish(r.nodes, r.slots, {crcs, format.length(), 0});
  }
  void check() {
    pool->check();
    if (host) host->check();
    index.check();
  }

  Index index;
  NodeId root;
  std::unique_ptr<HostPool> host;
  std::unique_ptr<DevicePool> pool;
};

}  // namespace

TEST_CASE("device pool: mapped, idle, free") {
  Fixture f;
  const Blocks b = f.run(f.root, keys_of(1, 3));
  CHECK(b == Blocks{0, 1, 2});
  CHECK(f.pool->counts().mapped == 3);
  f.pool->pin(Blocks{1});
  f.pool->unpin(b);
  CHECK(f.pool->counts().idle == 2);
  CHECK(f.pool->counts().mapped == 1);
  f.pool->unpin(Blocks{1});
  f.check();
  CHECK(f.pool->counts().idle == 3);
  CHECK(f.pool->counts().free == 5);
  const Blocks private_blocks = f.pool->allocate(2).blocks;
  f.pool->unpin(private_blocks);
  CHECK(f.pool->counts().free == 5);
  const auto keys = keys_of(1, 4);
  const std::uint32_t position = 2;
  const Walk walk = f.index.walk(key_of(0), 4, {&position, 1}, {&keys[2], 1});
  CHECK(f.pool->match(walk) == 3);
  CHECK(f.pool->blocks_of(walk.nodes) == b);
  CHECK(f.pool->take_stored() == keys_of(1, 3));
  CHECK(f.pool->take_removed().empty());
  f.check();
}

TEST_CASE("device pool: without a lower tier, idle leaves go first and at once") {
  Fixture f(6);
  const Blocks a = f.run(f.root, keys_of(10, 3)), b = f.run(f.root, keys_of(20, 3));
  f.pool->unpin(a);
  f.pool->unpin(b);
  f.pool->touch(f.index.find(key_of(12)));
  const Allocation got = f.pool->allocate(2);
  CHECK(got.blocks == Blocks{4, 5});  // the tail of b
  CHECK(got.draining.empty());
  CHECK(f.pool->take_removed() == std::vector<Key>{key_of(22), key_of(21)});
  CHECK(f.index.find(key_of(22)) == kNone);
  f.check();
  CHECK(f.pool->allocate(5).blocks.empty());  // hopeless: two are mapped
  CHECK(f.pool->counts().idle == 4);          // so nothing left
  CHECK_THROWS_WITH_AS(f.pool->allocate(7), doctest::Contains("wanted"), Invalid);
}

TEST_CASE("device pool: bytes on no lower tier drain first") {
  Fixture f(4, true);
  const Blocks b = f.run(f.root, keys_of(1, 4));
  f.save(f.root, keys_of(1, 2));
  f.pool->unpin(b);
  const Allocation first = f.pool->allocate(1);
  CHECK(first.blocks.empty());
  CHECK(first.draining == Blocks{3});
  CHECK(f.index.node(first.draining_nodes[0]).key == key_of(4));
  CHECK(f.pool->blocks_of(first.draining_nodes) == Blocks{kNone});
  f.check();
  CHECK(f.index.live(first.draining_nodes[0]));
  f.pool->drained(first.draining);
  CHECK(f.index.find(key_of(4)) == kNone);
  CHECK(f.pool->allocate(1).blocks == Blocks{3});
  const Allocation rest = f.pool->allocate(3);  // one more drains, two are on the host
  CHECK(rest.draining == Blocks{2});
  CHECK(f.pool->counts().free == 2);
  CHECK(f.index.find(key_of(2)) != kNone);
  CHECK(f.pool->allocate(3).blocks.empty());  // busy until drained
  f.check();
  f.pool->drained(rest.draining);
  CHECK(f.pool->allocate(3).blocks.size() == 3);
  CHECK_THROWS_WITH_AS(f.pool->drained(rest.draining), doctest::Contains("not draining"), Invalid);
  f.check();
}

TEST_CASE("device pool: trim brings idle blocks down to idle_max, a bounded piece at a time") {
  Fixture f(8);
  f.pool->unpin(f.run(f.root, keys_of(1, 6)));
  CHECK(f.pool->trim(1).blocks.empty());
  CHECK(f.pool->counts().idle == 5);
  f.pool->trim(100);
  CHECK(f.pool->counts().idle == 2);
  CHECK(f.pool->counts().free == 6);
  f.check();
}

TEST_CASE("device pool: the uses of a leaf were uses of its chain, also when the leaf rots") {
  Fixture f(3);
  const Blocks a = f.run(f.root, keys_of(10, 2)), b = f.run(f.root, keys_of(20, 1));
  f.pool->unpin(a);
  f.pool->unpin(b);
  f.pool->touch(f.index.find(key_of(11)));
  CHECK(f.pool->drop(f.index.find(key_of(11))));
  f.pool->allocate(2);
  CHECK(f.index.find(key_of(20)) == kNone);
  CHECK(f.index.find(key_of(10)) != kNone);
  f.check();
}

TEST_CASE("device pool: an index pin keeps an idle block") {
  Fixture f(2);
  f.pool->unpin(f.run(f.root, keys_of(1, 2)));
  const NodeId leaf = f.index.find(key_of(2));
  f.index.pin(leaf);
  CHECK(f.pool->allocate(1).blocks.empty());
  f.check();
  f.index.unpin(leaf);
  f.check();
  CHECK(f.pool->allocate(2).blocks.size() == 2);
}

TEST_CASE("device pool: a second block for a key stays private, and so does one without its parent") {
  Fixture f(8);
  f.run(f.root, keys_of(1, 2));
  const Blocks twice = f.pool->allocate(3).blocks;
  CHECK(f.pool->commit(twice, f.root, keys_of(1, 3)) == std::vector<std::uint8_t>{0, 0, 1});
  f.pool->unpin(Blocks{twice[0], twice[1]});
  CHECK(f.pool->counts().free == 5);
  const NodeId second = f.index.find(key_of(2));
  CHECK(f.pool->drop(second));
  CHECK(!f.pool->drop(second));
  f.check();
  const Blocks late = f.pool->allocate(2).blocks;
  CHECK(f.pool->commit(late, second, keys_of(50, 2)) == std::vector<std::uint8_t>{0, 0});
  CHECK(f.index.find(key_of(50)) == kNone);
  const auto stored = f.pool->take_stored();
  CHECK(stored == std::vector<Key>{key_of(1), key_of(3)});
  CHECK(f.pool->take_removed() == std::vector<Key>{key_of(2)});
  CHECK(f.pool->commit(Blocks{late[0]}, f.index.find(key_of(1)), std::vector<Key>{key_of(2)})[0] == 1);
  f.check();
}

TEST_CASE("device pool: adopt, close, and what is refused") {
  Fixture f(8);
  f.pool->adopt(Blocks{5, 3});
  CHECK(f.pool->counts().mapped == 2);
  CHECK(f.pool->commit(Blocks{5, 3}, f.root, keys_of(1, 2)) == std::vector<std::uint8_t>{1, 1});
  const auto refuse = [&](auto&& call, const char* why) { CHECK_THROWS_WITH_AS(call(), doctest::Contains(why), Invalid); };
  DevicePool& p = *f.pool;
  refuse([&] { p.adopt(Blocks{5}); }, "not free");
  refuse([&] { p.adopt(Blocks{1, 1}); }, "twice");
  refuse([&] { p.adopt(Blocks{8}); }, "blocks[0]");
  refuse([&] { p.pin(Blocks{1}); }, "not in use");
  refuse([&] { p.unpin(Blocks{5, 1}); }, "blocks[1]");
  refuse([&] { p.unpin(Blocks{5, 3, 5}); }, "blocks[2]");
  CHECK(p.counts().mapped == 2);
  refuse([&] { p.commit(Blocks{5}, f.root, keys_of(9, 1)); }, "already holds");
  refuse([&] { p.commit(Blocks{5, 3}, f.root, keys_of(9, 1)); }, "blocks: 2 for 1");
  refuse([&] { p.commit(Blocks{0}, f.root, keys_of(9, 1)); }, "not in use");
  refuse([&] { p.commit(p.allocate(1).blocks, f.root, keys_of(2, 1)); }, "another parent");
  refuse([&] { p.drained(Blocks{5}); }, "not draining");
  refuse([&] { p.touch(999); }, "node");
  refuse([&] { DevicePool(f.index, nullptr, 0, 0); }, "blocks");
  f.check();
  p.pin(Blocks{5, 5});
  p.unpin(Blocks{5, 5, 5});
  CHECK(p.counts().idle == 1);
  f.check();
  p.close();
  f.check();
  CHECK(f.index.size() == 0);
  CHECK(p.counts().free == 8);
  auto gone = p.take_removed();
  std::reverse(gone.begin(), gone.end());  // in the order of blocks: 3, 5
  CHECK(gone == keys_of(1, 2));
  refuse([&] { p.allocate(1); }, "closed");
  p.close();
}

TEST_CASE("device pool: a full index makes room on the host, or the block stays private") {
  Fixture f(8, true, 4);
  f.save(f.root, keys_of(10, 4));
  const Blocks b = f.pool->allocate(3).blocks;
  CHECK(f.pool->commit(b, f.index.find(key_of(10)), keys_of(20, 3)) == std::vector<std::uint8_t>{0, 0, 0});
  CHECK(f.pool->commit(b, f.root, keys_of(20, 3)) == std::vector<std::uint8_t>{1, 1, 1});
  CHECK(f.index.size() == 4);
  f.check();
  const Blocks more = f.pool->allocate(3).blocks;
  CHECK(f.pool->commit(more, f.index.find(key_of(22)), keys_of(30, 3)) == std::vector<std::uint8_t>{1, 0, 0});
  f.check();
}

namespace {

using Name = std::uint32_t;

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

}  // namespace

TEST_CASE("device pool model: same victims and answers as the naive twin") {
  constexpr Name names = 40;
  for (std::uint64_t seed = 1; seed <= 25; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Fixture f(14, true);
    NaiveDevice naive;
    naive.blocks.resize(14);
    naive.parent = {0};
    for (Name name = 1; name < names; ++name)
      naive.parent.push_back(random.chance(75) ? name - 1 : random.below(name));
    const auto path = [&](Name name) {
      std::vector<Name> out;
      for (; name != 0; name = naive.parent[name]) out.insert(out.begin(), name);
      return out;
    };
    const auto node = [&](Name name) { return f.index.find(key_of(name)); };
    for (int step = 0; step < 500; ++step) {
      CAPTURE(step);
      const Name name = 1 + random.below(names - 1);
      const BlockId block = random.below(14);
      switch (random.below(9)) {
        case 0:
        case 1: {
          const std::size_t wanted = 1 + random.below(4);
          const Allocation a = f.pool->allocate(wanted);
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
            naive.blocks[b] = {1, 0, 1, naive.blocks[b].stamp};
          }
          break;
        }
        case 2: {  // a chain gets the private blocks there are
          std::vector<Name> chain = path(name);
          Blocks blocks;
          for (BlockId b = 0; b < 14; ++b)
            if (naive.blocks[b].state == 1 && naive.blocks[b].name == 0 && blocks.size() < chain.size()) blocks.push_back(b);
          chain.resize(blocks.size());
          std::vector<Key> keys;
          for (Name n : chain) keys.push_back(key_of(n));
          const auto indexed = f.pool->commit(blocks, f.root, keys);
          for (std::size_t i = 0; i < chain.size(); ++i) {
            const Name up = naive.parent[chain[i]];
            const bool links = naive.block_of(chain[i]) == kNone && (up == 0 || naive.block_of(up) != kNone);
            REQUIRE(indexed[i] == links);
            if (links) naive.blocks[blocks[i]].name = chain[i];
          }
          break;
        }
        case 3: {
          if (naive.blocks[block].state != 1) {
            CHECK_THROWS_AS(f.pool->pin(Blocks{block}), Invalid);
            break;
          }
          f.pool->pin(Blocks{block});
          ++naive.blocks[block].pins;
          break;
        }
        case 4: {
          auto& b = naive.blocks[block];
          if (b.pins == 0) {
            CHECK_THROWS_AS(f.pool->unpin(Blocks{block}), Invalid);
            break;
          }
          f.pool->unpin(Blocks{block});
          if (--b.pins > 0) break;
          if (b.name == 0)
            b = {};
          else
            b.stamp = ++naive.clock;
          break;
        }
        case 5: {  // touches
          if (naive.block_of(name) == kNone) break;
          f.pool->touch(node(name));
          naive.blocks[naive.block_of(name)].stamp = ++naive.clock;
          break;
        }
        case 6: {  // rot, or a drained block
          if (naive.blocks[block].state == 2) {
            f.pool->drained(Blocks{block});
            naive.blocks[block] = {};
            break;
          }
          if (random.chance(70)) break;
          const BlockId held = naive.block_of(name);
          REQUIRE(f.pool->drop(node(name)) == (held != kNone));
          if (held == kNone) break;
          naive.leave(held);
          naive.blocks[held].name = 0;
          if (naive.blocks[held].pins == 0) naive.blocks[held] = {};
          break;
        }
        case 7: {  // the host gains or loses a copy
          if (naive.host.contains(name)) {
            if (!random.chance(50)) break;
            REQUIRE(f.host->drop(node(name)));
            naive.host.erase(name);
          } else if (naive.host.size() < 8 && node(name) != kNone && !naive.index_pins.contains(name)) {
            const Name up = naive.parent[name];
            if (up != 0 && !naive.host.contains(up)) break;
            f.save(up == 0 ? f.root : node(up), {key_of(name)});
            naive.host.insert(name);
          }
          break;
        }
        default: {
          if (node(name) == kNone) break;
          if (naive.index_pins.erase(name) == 1) {
            f.index.unpin(node(name));
          } else if (naive.host.empty()) {
            f.index.pin(node(name));
            naive.index_pins.insert(name);
          }
        }
      }
      f.check();
      const DeviceCounts c = f.pool->counts();
      REQUIRE(c.free == naive.count(0));
      REQUIRE(c.idle == naive.idle());
      REQUIRE(c.draining == naive.count(2));
      for (Name n = 1; n < names; ++n) {
        const NodeId id = node(n);
        const BlockId held = id == kNone ? kNone : f.pool->blocks_of(std::vector<NodeId>{id})[0];
        REQUIRE(held == naive.block_of(n));
      }
    }
    f.pool->close();
    f.check();
  }
}
