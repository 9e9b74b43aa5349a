// The tree of blocks on the disk: what the pool knows of each node of the index, by node id.
//
//   present(node)  <=>  it has a record here (readable or on its way), or a present child
//
// Every present node stands in the list of its parent's children, so that a block can be given up together
// with all below it; holes (nodes without a record, left by rot) are no exception. Nothing is known of any
// other node: its entry is as new, so an id that the index gives to another key needs no cleaning.
//
// Stamps say when a block or something below it was last used, in ticks of the pool's clock (0 = never):
// a parent's stamp is never below its child's. raise() climbs until it meets one that is high enough, so a
// chain pays once per tick, not once per use.
//
// 24 B for every id of the index.
#pragma once

#include <cstddef>
#include <cstdint>

#include "chunks.h"
#include "disk_segment.h"
#include "index.h"

namespace kv {

enum class OnDisk : std::uint8_t {
  kNot,       // no record
  kWriting,   // on its way
  kHeld,      // written, but not readable before its parent is
  kReadable,
};

struct DiskNode {
  std::uint32_t record = kNone;
  std::uint16_t segment = 0;
  OnDisk state = OnDisk::kNot;
  bool hole = false;  // lost its record, kept its children
  NodeId first_child = kNone, next = kNone, prev = kNone;
  std::uint32_t stamp = 0;
};
static_assert(sizeof(DiskNode) == 24);

class DiskNodes {
 public:
  explicit DiskNodes(const Index& index) : index_(index) {}

  // Room for every id that the index uses now. May throw std::bad_alloc, changing nothing.
  void grow() { nodes_.grow(index_.ids()); }
  void clear() { nodes_ = {}; }

  const DiskNode& operator[](NodeId id) const noexcept { return nodes_[id]; }
  OnDisk state(NodeId id) const noexcept { return id < nodes_.size() ? nodes_[id].state : OnDisk::kNot; }
  bool readable(NodeId id) const noexcept { return state(id) == OnDisk::kReadable; }
  bool present(NodeId id) const noexcept {
    return id < nodes_.size() && (nodes_[id].state != OnDisk::kNot || nodes_[id].first_child != kNone);
  }
  RecordRef ref(NodeId id) const noexcept { return {nodes_[id].segment, nodes_[id].record}; }

  // Its record lies there now. Its parent is present, or a root.
  void place(NodeId id, RecordRef ref, OnDisk state);
  void set_state(NodeId id, OnDisk state) noexcept;
  // Its record is gone. A hole, if it has present children.
  void remove(NodeId id) noexcept;

  // Stamps of a present node and of all above it are at least `stamp` then. Returns the nodes it changed.
  std::size_t raise(NodeId id, std::uint32_t stamp) noexcept;
  // Its parent's stamp is at least `stamp`, and its own: for a caller who goes through all nodes, children first.
  void lift_parent(NodeId id, std::uint32_t stamp) noexcept;

  // The deepest present node at or above id, or kNone. O(depth / 64 + 64).
  NodeId deepest_present(NodeId id) const noexcept;
  // A walk of what is present at and below `top`, children before parents: it begins at lowest(top), ends
  // with kNone after top, and the node it stands on may be removed once the next one is known. It names
  // nodes with a record only.
  NodeId lowest(NodeId top) const noexcept;
  NodeId next_up(NodeId id, NodeId top) const noexcept;

  template <class F>
  void each_child(NodeId id, F&& f) const {
    for (NodeId child = nodes_[id].first_child; child != kNone; child = nodes_[child].next) f(child);
  }

  std::size_t memory_bytes() const noexcept { return nodes_.memory_bytes(); }
  std::size_t size() const noexcept { return nodes_.size(); }
  // Broken names the first law of a node that does not hold.
  void check(NodeId id) const;

 private:
  friend struct DiskNodesProbe;  // tests break laws

  void list(NodeId id) noexcept;    // it has become present
  void unlist(NodeId id) noexcept;  // it has ceased to be

  const Index& index_;
  ChunkedArray<DiskNode> nodes_;
};

}  // namespace kv
