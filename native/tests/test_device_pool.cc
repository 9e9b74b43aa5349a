#include <doctest/doctest.h>

#include <algorithm>
#include <memory>

#include "device_pool.h"
#include "kit.h"

using namespace kv;
using test::format_of_pages;
using test::key_of;
using test::keys_of;

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
  CHECK(f.pool->indexed_nodes(0, kBlocksMax) == walk.nodes);
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
  refuse([&] { p.adopt(Blocks{1, 1}); }, "twice");
  refuse([&] { p.adopt(Blocks{5, 5}); }, "twice");
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

TEST_CASE("device pool: a pool closes in slices, and is empty from the first on") {
  Fixture f(1000);
  DevicePool& p = *f.pool;
  const Blocks blocks = p.allocate(1000).blocks;
  const std::vector<std::uint8_t> all(500, 1);
  CHECK(p.commit(Blocks(blocks.begin(), blocks.begin() + 500), f.root, keys_of(1, 500)) == all);
  CHECK(p.commit(Blocks(blocks.begin() + 500, blocks.end()), f.root, keys_of(1000, 500)) == all);
  std::size_t slices = 1, most = 0;
  for (std::size_t before = f.index.size(); !p.close_some(100); before = f.index.size(), ++slices) {
    most = std::max(most, before - f.index.size());
    CHECK(p.counts().free == 1000);
    CHECK(p.indexed_nodes(0, kBlocksMax).size() <= 1000);
    f.index.check();
  }
  CHECK(slices > 5);
  CHECK(most <= 100 + 500);  // a chain that goes is reaped to its root
  CHECK(f.index.size() == 0);
  CHECK(p.take_removed().size() == 1000);
  CHECK(p.close_some(1));
  f.check();
}

TEST_CASE("device pool: adopted tables share a prefix") {
  Fixture f(8);
  DevicePool& p = *f.pool;
  p.adopt(Blocks{0, 1, 2});
  p.commit(Blocks{0, 1}, f.root, keys_of(1, 2));
  p.adopt(Blocks{0, 1, 5});
  f.check();
  CHECK(p.counts().mapped == 4);
  CHECK(p.counts().free == 4);
  const Blocks fresh = p.allocate(4).blocks;
  CHECK(fresh == Blocks{3, 4, 6, 7});
  CHECK(p.allocate(1).blocks.empty());
  p.unpin(Blocks{0, 1, 2});  // the first table ends: what the second uses stays
  CHECK(p.counts().mapped == 7);
  CHECK(p.counts().free == 1);
  p.unpin(Blocks{0, 1, 5});
  CHECK(p.counts().idle == 2);
  p.adopt(Blocks{0, 1});  // idle: in use again
  CHECK(p.counts().idle == 0);
  f.check();
  const std::vector<NodeId> nodes{f.index.find(key_of(1)), f.index.find(key_of(2))};
  CHECK(p.blocks_of(nodes) == Blocks{0, 1});
}

TEST_CASE("device pool: a block that drains is nobody's to adopt") {
  Fixture f(2, true);
  f.pool->unpin(f.run(f.root, keys_of(1, 2)));
  const Allocation a = f.pool->allocate(1);
  REQUIRE(a.draining.size() == 1);
  CHECK_THROWS_WITH_AS(f.pool->adopt(a.draining), doctest::Contains("draining"), Invalid);
  f.check();
}

TEST_CASE("device pool: room for nodes never costs the host copies of the chain itself") {
  Fixture f(8, true, 3);
  f.save(f.root, keys_of(1, 2));
  const Blocks b = f.pool->allocate(4).blocks;
  CHECK(f.pool->commit(b, f.root, keys_of(1, 4)) == std::vector<std::uint8_t>{1, 1, 1, 0});
  CHECK(f.host->counts().ready == 2);
  f.check();
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
