// The host pool beside a naive twin that knows only names and scans everything: same victims, same answers,
// after every step of random lives. And, with several layouts and a tight index, every law after every step.
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <set>

#include "kit.h"
#include "pool.h"

using namespace kv;
using test::format_of_pages;
using test::key_of;
using test::Random;

namespace {

using Name = std::uint32_t;  // names[0] is the root; the parent of a name is smaller
constexpr std::size_t kSlots = 12;

struct NaivePool {
  struct N {
    bool exists = false, ready = false;
    std::uint32_t fills = 0, draining = 0, pins = 0;
    std::uint64_t stamp = 0;
  };
  std::vector<Name> parent;
  std::map<Name, N> nodes;
  std::set<Name> standing;  // what a running reserve stands on
  std::uint64_t clock = 0;
  std::size_t used = 0;

  bool below(Name name, Name top) const {
    while (name > top) name = parent[name];
    return name == top;
  }
  // Slots, pins or a running reserve at or below.
  bool present(Name top) const {
    return std::any_of(nodes.begin(), nodes.end(), [&](auto& e) {
      const N& n = e.second;
      return (n.ready || n.fills || n.draining || n.pins || standing.contains(e.first)) && below(e.first, top);
    });
  }
  bool candidate(Name name) const {
    const N& n = nodes.at(name);
    if (!n.ready || n.fills || n.draining || n.pins || standing.contains(name)) return false;
    return std::none_of(nodes.begin(), nodes.end(), [&](auto& e) {
      return e.first != name && parent[e.first] == name && present(e.first);
    });
  }
  void use(Name name) { nodes[name].stamp = ++clock; }
  // A reason to be present went away at name: its last use was one of every ancestor it no longer shields.
  void inherit_from(Name name) {
    while (name != 0 && !present(name)) {
      nodes[parent[name]].stamp = std::max(nodes[parent[name]].stamp, nodes[name].stamp);
      name = parent[name];
    }
  }
  void reap() {
    for (Name name = static_cast<Name>(parent.size()); name-- > 1;) {
      const N& n = nodes[name];
      const bool child = std::any_of(nodes.begin(), nodes.end(),
                                     [&](auto& e) { return e.first > 0 && e.second.exists && parent[e.first] == name; });
      const bool kept = n.ready || n.fills || n.draining || n.pins || child || standing.contains(name);
      if (n.exists && !kept) nodes[name].exists = false;
    }
  }
  void step_off(Name name) {
    if (standing.erase(name) == 0) return;
    inherit_from(name);
    reap();
  }
  bool evict() {
    Name found = 0;
    for (auto& [name, n] : nodes)
      if (candidate(name) && (found == 0 || n.stamp < nodes[found].stamp)) found = name;
    if (found == 0) return false;
    nodes[found].ready = false;
    --used;
    inherit_from(found);
    reap();
    return true;
  }
};

struct Fill {
  Name name;
  NodeId node;
  SlotId slot;
};

// One random life of a pool and its twin.
struct Life {
  explicit Life(std::uint64_t seed)
      : random(seed), index(1000), arena(Arena::create("test", 3 * kHugeBytes)), pool(index, arena, kHugeBytes) {
    naive.parent.push_back(0);
    naive.nodes[0].exists = true;
    index.root(key_of(0));
    for (Name name = 1; name < 40; ++name)  // chains with forks, up to about a dozen deep
      naive.parent.push_back(random.chance(60) ? name - 1 : random.below(name));
    for (Name name = 1; name < 40; ++name) naive.nodes[name];
  }

  NodeId node(Name name) const { return index.find(key_of(name)); }
  std::vector<Name> path(Name name) const {
    std::vector<Name> out;
    for (; name != 0; name = naive.parent[name]) out.insert(out.begin(), name);
    return out;
  }

  void reserve() {
    const std::vector<Name> full = path(1 + random.below(39));
    std::size_t start = 0;
    while (start < full.size() && naive.nodes[full[start]].exists && random.chance(70)) ++start;
    const Name parent = start == 0 ? 0 : full[start - 1];
    std::vector<Key> keys;
    for (std::size_t i = start; i < full.size(); ++i) keys.push_back(key_of(full[i]));
    const bool stalled = random.chance(30);  // whether fillings of others count as stalled
    const Reserved r = pool.reserve(node(parent), keys, format, {0, stalled ? 0.0 : 1.0});

    Name used_last = parent, up = parent;
    for (std::size_t i = start; i < full.size() && naive.nodes[full[i]].exists; ++i) used_last = full[i];
    naive.use(used_last);
    naive.standing = {up};
    std::size_t filled = 0, elsewhere = 0, m = 0;
    for (std::size_t i = start; i < full.size(); ++i, ++m) {
      auto& n = naive.nodes[full[i]];
      if (n.exists) naive.standing.insert(full[i]);
      const bool full_here = n.ready, filling = !n.ready && n.fills > 0 && !stalled;
      filled += full_here;
      elsewhere += filling;
      REQUIRE((m < r.nodes.size() || (!full_here && !filling)));
      if (!full_here && !filling) {
        if (naive.used == kSlots && !naive.evict()) {
          naive.step_off(full[i]);
          break;
        }
        REQUIRE(m < r.nodes.size());
        REQUIRE(r.slots[m] != kNone);
        ++naive.used;
        ++n.fills;
        n.exists = true;
        naive.use(full[i]);
        fills.push_back({full[i], r.nodes[m], r.slots[m]});
      } else {
        REQUIRE(r.slots[m] == kNone);
      }
      naive.standing.insert(full[i]);
      naive.step_off(up);
      up = full[i];
      REQUIRE(r.nodes[m] == node(up));
    }
    naive.step_off(up);
    REQUIRE(r.nodes.size() == m);
    REQUIRE(r.filled == filled);
    REQUIRE(r.elsewhere == elsewhere);
    REQUIRE(r.dropped == full.size() - start - m);
  }

  // Takes a random part of the fillings out of the list, in random order of sessions.
  std::vector<Fill> some_fills() {
    std::vector<Fill> out;
    for (std::size_t i = 0; i < fills.size();)
      if (random.chance(60)) {
        out.push_back(fills[i]);
        fills.erase(fills.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    return out;
  }

  void publish_or_abort(bool publish) {
    std::vector<Fill> batch = some_fills();
    std::vector<NodeId> nodes;
    std::vector<SlotId> slots;
    for (const Fill& f : batch) nodes.push_back(f.node), slots.push_back(f.slot);
    const std::vector<std::uint32_t> crcs(batch.size(), 5);
    std::vector<std::uint8_t> ready(batch.size(), 0);
    std::vector<std::uint32_t> depth(batch.size()), order(batch.size());
    for (std::uint32_t i = 0; i < batch.size(); ++i) {
      order[i] = i;
      depth[i] = publish ? static_cast<std::uint32_t>(path(batch[i].name).size()) : 0;
    }
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return depth[a] < depth[b]; });
    if (publish)
      ready = pool.publish(nodes, slots, {crcs, format.length(), 0});
    else
      pool.abort(nodes, slots);
    for (std::uint32_t i : order) {
      const Name name = batch[i].name;
      auto& n = naive.nodes[name];
      const Name up = naive.parent[name];
      const bool wins = publish && !n.ready && (up == 0 || naive.nodes[up].ready);
      REQUIRE(ready[i] == wins);
      --n.fills;
      if (wins) {
        n.ready = true;
        naive.use(name);
      } else {
        --naive.used;
        naive.inherit_from(name);
        naive.reap();
      }
    }
  }

  void pin_or_unpin() {
    const Name name = random.below(40);
    auto& n = naive.nodes[name];
    if (!n.exists) return;
    if (n.pins > 0 && random.chance(60)) {
      index.unpin(node(name));
      if (--n.pins > 0) return;
      naive.inherit_from(name);
      for (auto it = readers.begin(); it != readers.end();) {
        it->second.erase(name);
        if (!it->second.empty()) {
          ++it;
          continue;
        }
        --naive.nodes[it->first].draining;
        --naive.used;
        naive.inherit_from(it->first);
        it = readers.erase(it);
      }
      naive.reap();
    } else {
      if (n.pins++ == 0) naive.use(name);
      index.pin(node(name));
    }
  }

  void drop() {
    const Name name = 1 + random.below(39);
    auto& n = naive.nodes[name];
    REQUIRE(pool.drop(n.exists ? node(name) : kNone) == n.ready);
    if (!n.ready) return;
    n.ready = false;
    std::set<Name> pinned;
    for (auto& [other, m] : naive.nodes)
      if (m.pins > 0 && naive.below(other, name)) pinned.insert(other);
    if (pinned.empty()) {
      --naive.used;
      naive.inherit_from(name);
      naive.reap();
    } else {
      ++n.draining;
      readers.push_back({name, pinned});
    }
  }

  void step() {
    switch (random.below(13)) {
      case 0:
      case 1:
      case 2: return reserve();
      case 3:
      case 4:
      case 5: return publish_or_abort(true);
      case 6: return publish_or_abort(false);
      case 7: return pin_or_unpin();
      case 8:
        if (random.chance(60)) return drop();
        REQUIRE(pool.evict(format, 1) == naive.evict());
        return;
      default: {
        const Name name = random.below(40);
        if (!naive.nodes[name].exists) return;
        pool.touch(node(name));
        naive.use(name);
      }
    }
  }

  void compare() {
    pool.check();
    index.check();
    std::size_t ready = 0, filling = 0, draining = 0;
    for (auto& [name, n] : naive.nodes) {
      REQUIRE((node(name) != kNone) == n.exists);
      ready += n.ready;
      filling += n.fills;
      draining += n.draining;
      if (n.exists) REQUIRE((pool.slots(std::vector<NodeId>{node(name)})[0] != kNone) == n.ready);
    }
    const HostCounts c = pool.counts();
    REQUIRE(c.ready == ready);
    REQUIRE(c.filling == filling);
    REQUIRE(c.draining == draining);
  }

  Random random;
  Index index;
  std::shared_ptr<Arena> arena;
  HostPool pool;
  SlotFormat format = format_of_pages(128);
  NaivePool naive;
  std::vector<Fill> fills;
  std::vector<std::pair<Name, std::set<Name>>> readers;  // DRAINING slots
};

}  // namespace

TEST_CASE("pool model: same victims and answers as the naive twin") {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    CAPTURE(seed);
    Life life(seed);
    for (int step = 0; step < 400; ++step) {
      CAPTURE(step);
      life.step();
      life.compare();
    }
  }
}

TEST_CASE("pool model: several layouts in a tight index keep every law") {
  std::size_t handed = 0, evicted = 0;
  for (std::uint64_t seed = 1; seed <= 15; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Index index(seed % 2 ? 30 : 500);
    auto arena = Arena::create("test", 6 * kHugeBytes);
    HostPool pool(index, arena, 2 * kHugeBytes);
    const SlotFormat formats[] = {format_of_pages(100), format_of_pages(256), format_of_pages(1000)};
    NodeId roots[3];
    for (std::uint64_t i = 0; i < 3; ++i) roots[i] = index.root(key_of(i));
    struct Save {
      std::vector<NodeId> nodes;
      std::vector<SlotId> slots;
      std::size_t layout;
    };
    std::vector<Save> saves;
    std::vector<NodeId> pins;
    std::uint64_t name = 10;
    for (int step = 0; step < 500; ++step) {
      const std::size_t layout = random.below(3);
      switch (random.below(6)) {
        case 0:
        case 1:
        case 2: {
          // A growing conversation continues one that may be gone in part.
          const std::uint64_t chain = name - std::min<std::uint64_t>(name - 10, random.below(3) * 100);
          if (chain == name) name += 100;
          const std::vector<Key> keys = test::keys_of((chain * 3) + layout * 1000000, 1 + random.below(12));
          Reserved r = pool.reserve(roots[layout], keys, formats[layout], {static_cast<double>(step), 20});
          REQUIRE(r.nodes.size() + r.dropped == keys.size());
          Save save{{}, {}, layout};
          for (std::size_t i = 0; i < r.slots.size(); ++i)
            if (r.slots[i] != kNone) save.nodes.push_back(r.nodes[i]), save.slots.push_back(r.slots[i]);
          handed += save.slots.size();
          saves.push_back(std::move(save));
          break;
        }
        case 3:
        case 4: {
          if (saves.empty()) break;
          std::swap(saves[random.below(saves.size())], saves.back());
          const Save s = std::move(saves.back());
          saves.pop_back();
          const std::vector<std::uint32_t> crcs(s.slots.size(), 1);
          if (random.chance(80))
            pool.publish(s.nodes, s.slots, {crcs, formats[s.layout].length(), 1});
          else
            pool.abort(s.nodes, s.slots);
          break;
        }
        default:
          if (!pins.empty() && random.chance(55)) {
            index.unpin(pins.back());
            pins.pop_back();
          } else if (const NodeId id = random.below(40); index.live(id)) {
            if (random.chance(20)) pool.drop(id);
            if (index.live(id)) index.pin(id), pins.push_back(id);
          }
      }
      pool.check();
      index.check();
    }
    evicted += pool.take_dropped().evicted;
  }
  CHECK(handed > 1500);  // the lives were lively
  CHECK(evicted > 150);
}
