#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "index.h"
#include "kit.h"

using namespace kv;
using test::key_of;
using test::keys_of;
using test::Random;

namespace {

// A place that holds what the test tells it to.
struct Holder final : Place {
  explicit Holder(Index& i) : index(i) { index.join(this); }
  ~Holder() { index.leave(this); }
  void hold(NodeId id) { ++index.node(id).holders, ++held[id]; }
  void let_go(NodeId id) {
    if (--held[id] == 0) held.erase(id);
    --index.node(id).holders;
    index.reap(id);
  }
  void pinned(NodeId id) override { ++pin_calls, last = id; }
  void unpinned(NodeId id) override { ++unpin_calls, last = id; }
  std::uint32_t holders(std::uint32_t, std::uint32_t, const HolderOf& each) const override {
    for (auto [id, n] : held)
      for (std::uint32_t i = 0; i < n; ++i) each(id);
    return kNone;
  }
  // The whole chain, each node held once where it is new.
  std::vector<NodeId> chain(NodeId parent, const std::vector<Key>& keys) {
    std::vector<NodeId> nodes = index.resolve(parent, keys);
    for (std::size_t i = nodes.size(); i < keys.size(); ++i) {
      const NodeId id = index.make(i == 0 ? parent : nodes[i - 1], keys[i]);
      if (id == kNone) break;
      hold(id);
      nodes.push_back(id);
    }
    return nodes;
  }

  Index& index;
  std::map<NodeId, std::uint32_t> held;
  int pin_calls = 0, unpin_calls = 0;
  NodeId last = kNone;
};

Walk ask(const Index& index, const Key& root, const std::vector<Key>& chain, std::vector<std::uint32_t> positions) {
  std::vector<Key> keys;
  for (std::uint32_t p : positions) keys.push_back(chain[p]);
  return index.walk(root, static_cast<std::uint32_t>(chain.size()), positions, keys);
}

}  // namespace

TEST_CASE("index: a walk finds the deepest asked node and the gap above it") {
  Index index(1000);
  Holder holder(index);
  const Key root = key_of(0);
  const std::vector<Key> chain = keys_of(100, 300);
  CHECK(ask(index, root, chain, {0, 7, 299}).deepest == kNone);
  CHECK(ask(index, root, chain, {3, 7}).gap_stop == 3);
  const NodeId root_node = index.root(root);
  CHECK(index.root(root) == root_node);
  CHECK(ask(index, root, chain, {0}).deepest == root_node);
  const auto nodes = holder.chain(root_node, {chain.begin(), chain.begin() + 200});
  CHECK(index.size() == 200);

  Walk walk = ask(index, root, chain, {0, 63, 64, 128, 150, 210, 299});
  CHECK(walk.root == root_node);
  CHECK(walk.depth == 151);
  CHECK(walk.deepest == nodes[150]);
  CHECK(walk.gap_stop == 210);
  CHECK(walk.nodes == std::vector<NodeId>(nodes.begin(), nodes.begin() + 151));
  for (std::size_t length : {0, 1, 100, 150, 151}) {
    std::uint64_t digest = 0;
    for (std::size_t i = 0; i < length; ++i) digest += chain[i].hash() * (2 * i + 1);
    CHECK(index.digest(walk, length) == digest);
  }
  CHECK_THROWS_AS(index.digest(walk, 152), Invalid);
  CHECK(ask(index, root, chain, {150}).gap_stop == 300);
  CHECK(ask(index, root, chain, {}).depth == 0);
  index.check();
}

TEST_CASE("index: every length around the jumps walks the same as parent links") {
  Index index(5000);
  Holder holder(index);
  const NodeId root = index.root(key_of(0));
  const std::vector<Key> chain = keys_of(1, 2200);
  const auto nodes = holder.chain(root, chain);
  index.check();
  for (std::uint32_t n : {1u, 2u, 63u, 64u, 65u, 127u, 128u, 129u, 1023u, 1024u, 1025u, 1088u, 2113u, 2200u}) {
    CAPTURE(n);
    const Walk walk = ask(index, key_of(0), chain, {n - 1});
    CHECK(walk.nodes == std::vector<NodeId>(nodes.begin(), nodes.begin() + n));
  }
}

TEST_CASE("index: keys under another root are as unknown as those that nobody has") {
  Index index(1000);
  Holder holder(index);
  const auto a = keys_of(100, 10), b = keys_of(200, 10), nobodys = keys_of(300, 10);
  holder.chain(index.root(key_of(0)), a);
  holder.chain(index.root(key_of(1)), b);
  using U = std::vector<std::uint32_t>;
  for (const auto& others : {b, nobodys})
    for (std::uint32_t shift : {0u, 1u, 3u})  // nor is their depth told
      for (std::uint64_t root : {0u, 77u}) {
        CAPTURE(shift);
        CAPTURE(root);
        const Walk walk = index.walk(key_of(root), 20, U{4 + shift, 9 + shift}, std::vector<Key>{others[4], others[9]});
        CHECK(walk.depth == 0);
        CHECK(walk.nodes.empty());
        CHECK(walk.gap_stop == 4 + shift);
        const Walk mixed = index.walk(key_of(0), 20, U{2, 5 + shift}, std::vector<Key>{a[2], others[5]});
        CHECK(mixed.depth == 3);
        CHECK(mixed.gap_stop == 5 + shift);
        CHECK_THROWS_WITH_AS(index.walk(key_of(0), 20, U{2, 5}, std::vector<Key>{others[1], a[5]}),
                             "positions[0] = 2: this key is not on the chain of the deepest known key", Invalid);
      }
}

TEST_CASE("index: a contradiction names its position") {
  Index index(1000);
  Holder holder(index);
  const NodeId root = index.root(key_of(0));
  const NodeId other = index.root(key_of(1));
  const auto a = keys_of(100, 10), b = keys_of(200, 10);
  holder.chain(root, a);
  holder.chain(other, b);
  using U = std::vector<std::uint32_t>;
  const auto walk = [&](const U& p, const std::vector<Key>& k) { return index.walk(key_of(0), 20, p, k); };
  CHECK_THROWS_WITH_AS(walk({1, 5}, {a[1], a[6]}), doctest::Contains("positions[1] = 5"), Invalid);
  CHECK_THROWS_WITH_AS(walk({2, 5}, {b[2], a[5]}), doctest::Contains("positions[0] = 2"), Invalid);
  CHECK_THROWS_WITH_AS(walk({2, 5}, {key_of(999), a[5]}), doctest::Contains("positions[0] = 2"), Invalid);
  CHECK_THROWS_WITH_AS(walk({5, 5}, {a[5], a[5]}), doctest::Contains("ascend"), Invalid);
  CHECK_THROWS_WITH_AS(walk({20}, {a[5]}), doctest::Contains("below n"), Invalid);
  CHECK_THROWS_WITH_AS(walk({1}, {}), doctest::Contains("positions"), Invalid);
  CHECK_THROWS_WITH_AS(walk({0}, {key_of(0)}), doctest::Contains("depth 0"), Invalid);
  CHECK_THROWS_WITH_AS(index.walk(a[0], 20, {}, {}), doctest::Contains("root"), Invalid);
  CHECK_THROWS_WITH_AS(index.root(a[3]), doctest::Contains("depth 4"), Invalid);
  U many(kKeysMax + 1);
  std::iota(many.begin(), many.end(), 0u);
  CHECK_THROWS_WITH_AS(index.walk(key_of(0), kKeysMax + 1, many, keys_of(5000, kKeysMax + 1)),
                       doctest::Contains("8192"), Invalid);
  CHECK_THROWS_WITH_AS(index.walk(key_of(0), kDepthMax + 1, {}, {}), doctest::Contains("n:"), Invalid);
}

TEST_CASE("index: a chain is refused before anything changes") {
  Index index(1000);
  Holder holder(index);
  const NodeId root = index.root(key_of(0));
  const auto a = keys_of(100, 5);
  const auto nodes = holder.chain(root, a);
  const auto refuse = [&](NodeId parent, const std::vector<Key>& keys, const char* why) {
    CHECK_THROWS_WITH_AS(index.resolve(parent, keys), doctest::Contains(why), Invalid);
  };
  refuse(root, {a[0], a[2]}, "keys[1]: this key is known after another parent");
  refuse(root, {a[1]}, "keys[0]");
  refuse(nodes[1], {key_of(7), a[2]}, "keys[1]");
  refuse(nodes[4], {key_of(7), key_of(8), key_of(7)}, "keys[2]: repeats keys[0]");
  refuse(nodes[4], {key_of(0)}, "keys[0]");
  refuse(999, {key_of(7)}, "parent");
  refuse(kNone, {key_of(7)}, "parent");
  refuse(root, keys_of(5000, kKeysMax + 1), "8192");
  CHECK(index.resolve(nodes[1], std::vector<Key>{a[2], a[3], key_of(9)}) == std::vector<NodeId>{nodes[2], nodes[3]});
  CHECK(index.size() == 5);
  index.check();
}

TEST_CASE("index: nodes_max holds, and reaping goes up to the first node with a reason to stay") {
  CHECK_THROWS_WITH_AS(Index(0), doctest::Contains("nodes_max"), Invalid);
  Index index(300);
  Holder holder(index);
  const NodeId root = index.root(key_of(0));
  const auto nodes = holder.chain(root, keys_of(100, 400));
  CHECK(nodes.size() == 300);
  CHECK(index.full());
  index.check();
  for (std::size_t i = 0; i < 299; ++i)
    if (i != 100) holder.let_go(nodes[i]);  // hollow, but something hangs below
  CHECK(index.size() == 300);
  index.check();
  index.pin(nodes[200]);
  holder.let_go(nodes[299]);
  CHECK(index.size() == 201);
  index.check();
  index.unpin(nodes[200]);
  CHECK(index.size() == 101);
  holder.let_go(nodes[100]);
  CHECK(index.size() == 0);
  CHECK(index.live(root));
  index.check();
}

TEST_CASE("index: pins are counted, told to every place once, and unpinning more is refused") {
  Index index(10);
  Holder holder(index);
  const auto nodes = holder.chain(index.root(key_of(0)), keys_of(1, 3));
  index.pin(nodes[1]), index.pin(nodes[1]), index.pin(nodes[2]);
  CHECK(index.pins() == 3);
  CHECK(holder.pin_calls == 2);
  index.check();
  CHECK(index.pinned_below(nodes[0]).size() == 2);
  CHECK(index.pinned_below(nodes[2]) == std::vector<NodeId>{nodes[2]});
  index.unpin(nodes[1]);
  CHECK(holder.unpin_calls == 0);
  index.unpin(nodes[1]);
  CHECK(holder.unpin_calls == 1);
  CHECK_THROWS_WITH_AS(index.unpin(nodes[1]), doctest::Contains("not pinned"), Invalid);
  CHECK_THROWS_AS(index.pin(4711), Invalid);
  index.unpin(nodes[2]);
  CHECK(index.pins() == 0);
  index.check();
}

TEST_CASE("index: the nodes of one save lie side by side, also in reused room") {
  Index index(100000);
  Holder holder(index);
  const NodeId root = index.root(key_of(0));
  const auto first = holder.chain(root, keys_of(1000, 500));
  holder.chain(root, keys_of(5000, 10));
  for (std::size_t i = 1; i < first.size(); ++i) CHECK(first[i] == first[i - 1] + 1);
  for (std::size_t i = first.size(); i-- > 0;) holder.let_go(first[i]);
  const auto second = holder.chain(root, keys_of(20000, 400));
  for (std::size_t i = 1; i < second.size(); ++i) CHECK(second[i] == second[i - 1] + 1);
}

namespace {

// The obvious index: names, parents, and a full scan for everything else.
struct NaiveIndex {
  struct N {
    std::uint64_t parent = 0;
    std::uint32_t depth = 0, holders = 0, pins = 0;
  };
  std::map<std::uint64_t, N> nodes;  // roots 1 and 2 included

  bool has_child(std::uint64_t name) const {
    return std::any_of(nodes.begin(), nodes.end(), [&](auto& n) { return n.second.parent == name; });
  }
  void reap() {
    for (bool again = true; again;) {
      again = false;
      for (auto it = nodes.begin(); it != nodes.end(); ++it)
        if (it->second.depth > 0 && !it->second.holders && !it->second.pins && !has_child(it->first)) {
          nodes.erase(it);
          again = true;
          break;
        }
    }
  }
};

}  // namespace

TEST_CASE("index: random trees agree with the naive model after every step") {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Index index(120);
    Holder holder(index);
    NaiveIndex naive;
    naive.nodes[1] = naive.nodes[2] = {};
    index.root(key_of(1)), index.root(key_of(2));
    std::uint64_t next_name = 10;
    const auto any = [&] {
      auto it = naive.nodes.begin();
      std::advance(it, random.below(naive.nodes.size()));
      return it->first;
    };
    for (int step = 0; step < 1500; ++step) {
      const std::uint64_t name = any();
      const NodeId id = index.find(key_of(name));
      REQUIRE(id != kNone);
      auto& n = naive.nodes[name];
      switch (random.below(5)) {
        case 0: {  // a save after this node
          std::vector<Key> keys = keys_of(next_name, 1 + random.below(90));
          const auto made = holder.chain(id, keys);
          std::uint64_t parent = name;
          for (std::size_t i = 0; i < made.size(); ++i, parent = next_name++)
            naive.nodes[next_name] = {parent, naive.nodes[parent].depth + 1, 1, 0};
          REQUIRE((made.size() == keys.size() || naive.nodes.size() == 122));
          break;
        }
        case 1:
          if (n.depth == 0) break;
          ++n.holders;
          holder.hold(id);
          break;
        case 2:
          if (n.holders == 0) break;
          --n.holders;
          holder.let_go(id);
          naive.reap();
          break;
        case 3:
          if (random.chance(60) && n.pins > 0) {
            --n.pins;
            index.unpin(id);
            naive.reap();
          } else {
            ++n.pins;
            index.pin(id);
          }
          break;
        case 4: {  // a lookup: the chain to this node, then unknown keys
          std::vector<std::uint64_t> path;
          std::uint64_t top = name;
          for (; naive.nodes[top].depth > 0; top = naive.nodes[top].parent) path.insert(path.begin(), top);
          const std::size_t known = path.size();
          for (std::uint64_t i = 0; i < 5; ++i) path.push_back(1000000 + i);
          std::vector<std::uint32_t> positions;
          std::uint32_t depth = 0, gap = static_cast<std::uint32_t>(path.size());
          for (std::uint32_t p = 0; p < path.size(); ++p)
            if (random.chance(30)) {
              positions.push_back(p);
              if (p < known) depth = p + 1;
              if (p >= known) gap = std::min(gap, p);
            }
          std::vector<Key> keys;
          for (std::uint32_t p : positions) keys.push_back(key_of(path[p]));
          const Walk walk = index.walk(key_of(top), static_cast<std::uint32_t>(path.size()), positions, keys);
          REQUIRE(walk.depth == depth);
          REQUIRE(walk.gap_stop == gap);
          for (std::uint32_t p = 0; p < depth; ++p) REQUIRE(walk.nodes[p] == index.find(key_of(path[p])));
          break;
        }
      }
      index.check();
      REQUIRE(index.size() + 2 == naive.nodes.size());
      for (auto& [other, node] : naive.nodes) {
        const NodeId found = index.find(key_of(other));
        REQUIRE(found != kNone);
        REQUIRE(index.node(found).depth == node.depth);
        REQUIRE(index.node(found).pins == node.pins);
      }
    }
  }
}

TEST_CASE("index: the last known key is found wherever it is, however many are asked") {
  constexpr std::uint32_t kLongest = 120;
  Index index(1000);
  Holder holder(index);
  const Key root = key_of(0);
  const std::vector<Key> chain = keys_of(1, kLongest);
  const NodeId root_node = index.root(root);
  NodeId tip = root_node;
  for (std::uint32_t known = 0; known <= kLongest; ++known) {
    for (std::uint32_t asked = 0; asked <= kLongest; ++asked) {
      std::vector<std::uint32_t> positions;
      for (std::uint32_t i = 0; i < asked; ++i) positions.push_back(i);
      const Walk walk = ask(index, root, chain, positions);
      REQUIRE(walk.depth == std::min(known, asked));
      REQUIRE(walk.gap_stop == (asked > known ? known : kLongest));
      if (asked < 3) continue;
      positions.erase(positions.begin() + asked / 3);  // keys that are not sent leave gaps, wherever they are
      std::uint32_t depth = 0;
      for (std::uint32_t p : positions)
        if (p < known) depth = p + 1;
      REQUIRE(ask(index, root, chain, positions).depth == depth);
    }
    if (known < kLongest) tip = holder.chain(tip, {chain[known]})[0];
  }
}

TEST_CASE("index: keys that contradict the tree before the deepest known one are refused, later ones are no match") {
  Index index(1000);
  Holder holder(index);
  const Key root = key_of(0);
  const NodeId root_node = index.root(root);
  const std::vector<Key> chain = keys_of(1, 40), other = keys_of(500, 40);
  holder.chain(root_node, chain);
  holder.chain(root_node, other);
  for (std::uint32_t at = 0; at < 40; ++at) {
    std::vector<Key> mixed = chain;
    mixed[at] = key_of(9000);  // unknown
    std::vector<std::uint32_t> all(40);
    for (std::uint32_t i = 0; i < 40; ++i) all[i] = i;
    if (at < 39) {
      CHECK_THROWS_AS(index.walk(root, 40, all, mixed), Invalid);
    } else {
      CHECK(index.walk(root, 40, all, mixed).depth == 39);
    }
    mixed[at] = other[at];  // known, at this depth, on another chain
    CHECK_THROWS_AS(index.walk(root, 40, all, mixed), Invalid);
    mixed[at] = other[(at + 1) % 40];  // known at another depth
    CHECK_THROWS_AS(index.walk(root, 40, all, mixed), Invalid);
  }
}
