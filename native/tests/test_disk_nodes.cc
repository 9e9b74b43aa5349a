// The tree of blocks on the disk beside a naive twin; and every law of the pool, named when broken.
#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "disk_pool_kit.h"

using namespace kv;
using test::key_of;
using test::Random;
using test::Rig;
using test::TempDir;

namespace {

// What the nodes of a tree are on the disk: by a scan of all of them.
struct Naive {
  std::vector<NodeId> parent;
  std::set<NodeId> here;

  bool below(NodeId node, NodeId top) const {
    while (node != top && parent[node] != kNone) node = parent[node];
    return node == top;
  }
  bool present(NodeId top) const {
    return std::any_of(here.begin(), here.end(), [&](NodeId node) { return below(node, top); });
  }
};

void refuses(const std::function<void()>& act, const std::string& law) {
  std::string said;
  try {
    act();
  } catch (const Broken& broken) {
    said = broken.what();
  }
  CAPTURE(said);
  CHECK(said.find(law) != std::string::npos);
}

}  // namespace

namespace kv {

struct DiskNodesProbe {
  static DiskNode& node(DiskNodes& nodes, NodeId id) { return nodes.nodes_[id]; }
};

}  // namespace kv

TEST_CASE("disk nodes: presence, stamps and walks are those of a naive twin") {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Index index(1000);
    Naive naive;
    std::vector<NodeId> ids{index.root(key_of(0))};
    for (std::uint64_t name = 1; name < 60; ++name) {
      const NodeId parent = random.chance(70) ? ids.back() : ids[random.below(ids.size())];
      ids.push_back(index.make(parent, key_of(name)));
      index.pin(ids.back());
    }
    naive.parent.resize(index.ids(), kNone);
    for (NodeId id : ids) naive.parent[id] = index.node(id).parent;
    DiskNodes nodes(index);
    nodes.grow();
    std::uint32_t clock = 0;
    for (int step = 0; step < 300; ++step) {
      const NodeId id = ids[1 + random.below(ids.size() - 1)];
      const NodeId parent = index.node(id).parent;
      if (!naive.here.contains(id) && (parent == ids[0] || naive.present(parent))) {
        nodes.place(id, {3, static_cast<std::uint32_t>(step)}, OnDisk::kReadable);
        naive.here.insert(id);
        nodes.raise(id, ++clock);
      } else if (naive.here.contains(id) && random.chance(50)) {
        nodes.remove(id);
        naive.here.erase(id);
      } else if (nodes.present(id)) {
        nodes.raise(id, ++clock);
        for (NodeId up = id; up != ids[0]; up = index.node(up).parent) REQUIRE(nodes[up].stamp == clock);
        REQUIRE(nodes.raise(id, clock) == 0);
      }
      for (NodeId other : ids) {
        nodes.check(other);
        REQUIRE(nodes.present(other) == naive.present(other));
        REQUIRE(nodes.readable(other) == naive.here.contains(other));
        NodeId deepest = other;
        while (deepest != kNone && !naive.present(deepest)) deepest = naive.parent[deepest];
        REQUIRE(nodes.deepest_present(other) == deepest);
      }
      // The walk names everything below once, children first.
      if (!nodes.present(id)) continue;
      std::vector<NodeId> walked;
      for (NodeId at = nodes.lowest(id); at != kNone; at = nodes.next_up(at, id)) walked.push_back(at);
      for (std::size_t i = 0; i < walked.size(); ++i)
        for (std::size_t j = i + 1; j < walked.size(); ++j) REQUIRE_FALSE(naive.below(walked[j], walked[i]));
      std::set<NodeId> all;
      for (NodeId other : naive.here)
        if (naive.below(other, id)) all.insert(other);
      REQUIRE(std::set<NodeId>(walked.begin(), walked.end()) == all);
      REQUIRE(walked.size() == all.size());
    }
  }
}

TEST_CASE("disk nodes: every broken law is named") {
  using Break = std::function<void(DiskNode&)>;
  const std::vector<std::pair<std::string, Break>> laws = {
      {"its entry is not empty", [](DiskNode& n) { n = DiskNode{}, n.stamp = 3; }},
      {"its state contradicts its record", [](DiskNode& n) { n.record = kNone; }},
      {"its parent does not list it", [](DiskNode& n) { n.first_child = kNone; }},
      {"its list of children is torn", [](DiskNode& n) { n.prev = n.first_child; }},
      {"used after the block above it", [](DiskNode& n) { n.stamp = 1; }},
      {"nor a hole", [](DiskNode& n) { n.state = OnDisk::kNot, n.record = kNone; }},
      {"waits for a block that is not on its way", [](DiskNode& n) { n.state = OnDisk::kHeld; }},
  };
  for (const auto& [law, act] : laws) {
    CAPTURE(law);
    Index index(100);
    const NodeId root = index.root(key_of(0)), a = index.make(root, key_of(1)), b = index.make(a, key_of(2));
    const NodeId c = index.make(b, key_of(3));
    index.pin(c);
    DiskNodes nodes(index);
    nodes.grow();
    for (NodeId id : {a, b, c}) {
      nodes.place(id, {0, id}, OnDisk::kReadable);
      nodes.raise(id, 5);
    }
    const auto check = [&] {
      for (NodeId id : {c, b, a, root}) nodes.check(id);
    };
    check();
    act(DiskNodesProbe::node(nodes, law == laws.front().first || law == laws.back().first ? c : b));
    refuses(check, law);
  }
}

TEST_CASE("disk pool: every broken law is named") {
  using Break = std::function<void(DiskPool&)>;
  using P = DiskPoolProbe;
  const std::vector<std::pair<const char*, Break>> laws = {
      {"the sums over records are off", [](DiskPool& p) { ++P::readable(p); }},
      {"counts other live records", [](DiskPool& p) { ++P::filling(p).live; }},
      {"two records overlap", [](DiskPool& p) { P::filling(p).records[1].page = P::filling(p).records[0].page + 1; }},
      {"a record lies outside", [](DiskPool& p) { P::filling(p).records[0].page = 0; }},
      {"a record lies outside", [](DiskPool& p) { P::filling(p).next_page -= 1; }},
      {"has no room for its footer", [](DiskPool& p) { P::filling(p).next_page = P::filling(p).pages; }},
      {"jobs and segments count other orders", [](DiskPool& p) { ++P::filling(p).writing; }},
      {"in another state's set", [](DiskPool& p) { P::filling(p).state = SegmentState::kSealed; }},
      {"holds a copy that nobody makes", [](DiskPool& p) { P::filling(p).records[0].copy = true; }},
      {"a record that its node does not name",
       [](DiskPool& p) { std::swap(P::filling(p).records[0].node, P::filling(p).records[1].node); }},
  };
  TempDir dir;
  Rig rig(dir.path());
  rig.save(rig.root(), 1, 5);
  rig.settle();
  for (const auto& [law, act] : laws) {
    CAPTURE(law);
    const DiskSegment segment = P::filling(*rig.pool);
    const std::size_t readable = P::readable(*rig.pool);
    act(*rig.pool);
    refuses([&] { rig.pool->check(); }, law);
    P::filling(*rig.pool) = segment;
    P::readable(*rig.pool) = readable;
    rig.check();
  }
}
