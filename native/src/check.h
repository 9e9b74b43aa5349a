// The laws, recomputed from scratch, in slices: an event loop that checks itself holds its clients for one
// slice at a time, not for the whole of a million nodes (0.15 s).
//
// What a slice proves. Between two calls of the core every law holds, so a law about one node, slot or block
// and its neighbours is simply asked when the cursor gets there: it held (or not) at that moment. Counts
// (children, holders, host_refs, sums of pins and states) need all contributions of one moment. They are added
// up along the way and compared at the end if Index::version() stayed what it was in the first slice
// (`settled`); if something changed meanwhile they are left out. A settled check has proven exactly what one
// atomic check proves; Index::check() and the pools' check() are that: one slice of everything.
//
// Memory while a check is under way: 12 B a node (4 B for a device pool), given back at its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "types.h"
#include "zeroed.h"

namespace kv {

class DevicePool;
class HostPool;
class Index;
struct Node;

inline constexpr std::size_t kCheckAll = std::size_t{1} << 40;  // one slice of everything

// Laws of an index and, if host is not null, of its host pool. Both must outlive it.
class Checker {
 public:
  explicit Checker(const Index& index, const HostPool* host = nullptr);

  // Looks at about `most` more slots, holders and nodes; true when all is done. Throws Broken, naming the
  // first law that does not hold.
  bool step(std::size_t most);
  // Nothing has changed since the checker was made, so counts are compared as well.
  bool settled() const noexcept;

 private:
  enum class Phase { kSlots, kHolders, kNodes, kCounts, kDone };

  void slots(std::size_t most);
  void slot(std::uint32_t slab, std::uint32_t index);
  void ready(SlotId slot, NodeId node) const;
  void filling(SlotId slot, NodeId node);
  void holders(std::size_t most);
  void nodes(std::size_t most);
  void node(NodeId id);
  void tree(NodeId id, const Node& node) const;
  void bytes(NodeId id, const Node& node) const;
  void counts(std::size_t most);
  void sums() const;

  const Index& index_;
  const HostPool* host_;
  std::uint64_t version_;
  Phase phase_ = Phase::kSlots;
  std::size_t ids_;                  // those that count: all there were at the start
  std::uint32_t slab_ = 0, at_ = 0;  // next slot; next holder of places_[slab_]; next node
  Zeroed<std::uint32_t> children_, held_, refs_;  // (ids_,) as counted
  std::size_t by_state_[4] = {}, used_bytes_ = 0, newest_fills_ = 0;
  std::unordered_map<NodeId, std::size_t> bytes_;  // root -> bytes of its slots
  std::size_t* sum_ = nullptr;                     // those of sum_root_
  NodeId sum_root_ = kNone;
  std::size_t live_ = 0, roots_ = 0, pins_ = 0, pinned_ = 0;
};

// Laws of one engine's device pool, which must outlive it.
class DeviceChecker {
 public:
  explicit DeviceChecker(const DevicePool& pool);

  bool step(std::size_t most);  // of blocks and nodes
  bool settled() const noexcept;

 private:
  void block(BlockId id);
  void sums() const;

  const DevicePool& pool_;
  std::uint64_t version_;
  std::size_t ids_;
  std::size_t at_ = 0;               // [0, blocks): blocks, then nodes
  Zeroed<std::uint32_t> children_;   // (ids_,) as counted
  std::size_t mapped_ = 0, idle_ = 0, draining_ = 0, linked_ = 0, parents_ = 0;
};

}  // namespace kv
