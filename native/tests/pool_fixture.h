// A small host pool over an index of its own, every law checked after each call.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "kit.h"
#include "pool.h"

namespace kv::test {

inline const SlotFormat kFormat = format_of_pages(128);  // 4 slots in a slab of 2 MiB

struct Fixture {
  explicit Fixture(std::size_t slabs = 2, std::size_t nodes_max = 1000)
      : index(nodes_max), arena(Arena::create("test", slabs * kHugeBytes)), pool(index, arena, kHugeBytes),
        root(index.root(key_of(0))) {}

  Reserved reserve(NodeId parent, const std::vector<Key>& keys, double now_s = 0) {
    Reserved r = pool.reserve(parent, keys, kFormat, {now_s, 10.0});
    check();
    return r;
  }
  std::vector<std::uint8_t> publish(const Reserved& r) {
    std::vector<NodeId> nodes;
    std::vector<SlotId> slots;
    for (std::size_t i = 0; i < r.slots.size(); ++i)
      if (r.slots[i] != kNone) nodes.push_back(r.nodes[i]), slots.push_back(r.slots[i]);
    const std::vector<std::uint32_t> crcs(slots.size(), 42);
    auto ready = pool.publish(nodes, slots, {crcs, kFormat.length(), 1});
    check();
    return ready;
  }
  // Saves a chain; the nodes that are READY now.
  std::vector<NodeId> save(NodeId parent, const std::vector<Key>& keys) {
    const Reserved r = reserve(parent, keys);
    publish(r);
    return r.nodes;
  }
  bool ready(NodeId node) { return pool.slots(std::vector<NodeId>{node})[0] != kNone; }
  bool ready(const Key& key) { return index.find(key) != kNone && ready(index.find(key)); }
  void check() {
    pool.check();
    index.check();
  }

  Index index;
  std::shared_ptr<Arena> arena;
  HostPool pool;
  NodeId root;
};

inline std::size_t count(const std::vector<std::uint8_t>& flags) {
  return static_cast<std::size_t>(std::count(flags.begin(), flags.end(), 1));
}

}  // namespace kv::test
