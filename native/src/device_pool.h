// The blocks of one engine's device pool: one pool, two labels. L1 = pins > 0 (running sequences use it),
// L2 = indexed with pins == 0 (idle, may leave).
//
//   block  FREE -allocate, adopt-> USED (pinned once) -last unpin, no node-> FREE
//          USED -adopt-> USED (one pin more: tables that share a prefix)
//          USED, node, no pins (idle) -evict, bytes READY on the host-> FREE
//                                     -evict, bytes nowhere else-> DRAINING -drained-> FREE
//
// Leaf-first within the pool: a block is evicted only when no child of its node has a block here. A
// DRAINING block can no longer be matched, but its node stays until drained(). Since a host copy needs its
// parent's host copy, whoever copies a draining block down saves the missing part of its chain first; the
// parents are still here, because leaves leave first.
// Readers pin blocks, every block of a sequence; an index pin protects the block of that one node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "free_ids.h"
#include "id_map.h"
#include "index.h"
#include "pool.h"
#include "types.h"

namespace kv {

inline constexpr std::size_t kBlocksMax = std::size_t{1} << 26;

struct Allocation {
  std::vector<BlockId> blocks;         // fresh, pinned once: all that were wanted, or none
  std::vector<BlockId> draining;       // copy down, then drained(); ask again
  std::vector<NodeId> draining_nodes;  // their nodes, valid until drained()
};

struct DeviceCounts {
  std::size_t free = 0, mapped = 0, idle = 0, draining = 0;
  std::size_t events_lost = 0;  // keys that take_removed/take_stored could not keep: observers resync
};

class DevicePool final : public Place {
 public:
  // host: where evicted bytes may already be; null = nowhere, evicted blocks are FREE at once.
  DevicePool(Index& index, HostPool* host, std::size_t blocks, std::size_t idle_max);
  ~DevicePool();
  DevicePool(const DevicePool&) = delete;
  DevicePool& operator=(const DevicePool&) = delete;

  std::size_t match(const Walk& walk) const noexcept;
  std::vector<BlockId> blocks_of(std::span<const NodeId> nodes) const;
  // Every node with one of the blocks [start, start + most): O(most), for snapshots.
  std::vector<NodeId> indexed_nodes(std::size_t start, std::size_t most) const {
    std::vector<NodeId> nodes;
    for (std::size_t id = start; id < blocks_.size() && id - start < most; ++id)
      if (blocks_[id].state == State::kUsed && blocks_[id].node != kNone) nodes.push_back(blocks_[id].node);
    return nodes;
  }
  void touch(NodeId node);

  // Each call that changes something checks all its arguments first: Invalid changes nothing.
  void pin(std::span<const BlockId> blocks);
  void unpin(std::span<const BlockId> blocks);
  // A table that the engine was using before: FREE blocks become USED, those of other tables get a pin more.
  void adopt(std::span<const BlockId> blocks);
  // Both parts empty = busy: nothing is free and nothing may leave.
  Allocation allocate(std::size_t wanted);
  Allocation trim(std::size_t most);
  void drained(std::span<const BlockId> blocks);
  // (n,) 1 = indexed here; 0 = the block stays private: its key has a block here already, its parent has
  // none, or the index is full.
  std::vector<std::uint8_t> commit(std::span<const BlockId> blocks, NodeId parent, std::span<const Key> keys);
  bool drop(NodeId node);

  // Keys that came or left since the last call and are (stored) or are not (removed) here now: whatever
  // happened in between, applying both in any order gives the truth.
  std::vector<Key> take_removed();
  std::vector<Key> take_stored();
  DeviceCounts counts() const noexcept;
  std::size_t memory_bytes() const noexcept;
  // The engine is gone: nothing is found here any more, any later change is Invalid, and blocks leave the index,
  // until `most` blocks and nodes have gone (and the rest of a chain that goes); true when none is left.
  bool close_some(std::size_t most);
  void close() { close_some(kBlocksMax); }
  void check() const;

  void pinned(NodeId) override {}
  void unpinned(NodeId node) override;
  std::uint32_t holders(std::uint32_t start, std::uint32_t most, const HolderOf& each) const override;

 private:
  friend class DeviceChecker;

  enum class State : std::uint8_t { kFree, kUsed, kDraining };
  struct Block {
    NodeId node = kNone;
    std::uint32_t pins = 0;
    State state = State::kFree;
  };

  void require_open() const;
  void require_call(std::span<const BlockId> blocks) const;
  void require_blocks(std::span<const BlockId> blocks, State state, const char* is_not) const;
  void require_room_for_pin(std::span<const BlockId> blocks) const;
  void require_once(std::span<const BlockId> blocks) const;
  bool candidate(BlockId block) const noexcept;
  void offer_if_candidate(BlockId block);
  void link(BlockId block, NodeId node);
  void unlink(BlockId block);
  void let_go(NodeId node);
  void make_free(BlockId block);
  bool evict_one(Allocation& out);
  void pin_once(BlockId block) noexcept;
  bool unpin_once(BlockId block) noexcept;
  bool holds(NodeId node) const noexcept;
  void note(std::vector<Key>& events, NodeId node);

  Index& index_;
  HostPool* host_;
  std::size_t idle_max_;
  std::vector<Block> blocks_;
  FreeIds free_;
  BlockId cursor_ = 0;
  Policy policy_;      // ids are blocks, one queue
  IdMap by_node_;      // node -> its block (not of DRAINING blocks)
  IdMap children_;     // node -> its children with a block in by_node_
  std::size_t mapped_ = 0, idle_ = 0, draining_ = 0;
  bool closed_ = false;
  std::size_t emptied_ = 0;  // of a closed pool: blocks before it have left the index
  std::vector<Key> removed_, stored_;
  std::size_t events_lost_ = 0;
};

}  // namespace kv
