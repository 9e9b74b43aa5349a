// The host pool: the slots of one arena, which node's bytes each holds, and who leaves first.
//
//   slot   FREE -reserve-> FILLING -publish-> READY -evict-> FREE          every hand-out bumps the slot's
//          FILLING -abort-> FREE              READY -drop-> FREE           generation first
//                                             READY -drop-> DRAINING -last reader gone-> FREE
//
// host_refs, the one number behind leaf-first (LAWS C12): a node's host_refs counts its own slots, its
// children with host_refs > 0, 1 while it is pinned, and 1 while a running reserve() stands on it. So:
//   * a node may be evicted <=> it has a READY slot and host_refs == 1: no child below it has bytes, is
//     being filled, is read or is pinned, however many hollow nodes lie between;
//   * one pin protects the bytes of the node and of *all* its ancestors, holes included;
//   * a FILLING slot protects the whole chain it continues until it is published or aborted.
//
// Who makes room. Victims go in the order of their last use, whoever's they are. An account with a limit that has
// reached it makes room among its own blocks, and takes none from others: see usage.h.
//
// Rot under a reader. drop() makes the bytes unmatchable at once. If no pinned node lies at or below the
// node, nobody may be reading them and the slot is FREE; otherwise it is DRAINING until every node that was
// pinned then has been seen without pins once: later readers cannot have been given the slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "id_map.h"
#include "index.h"
#include "ledger.h"
#include "lru.h"
#include "slabs.h"
#include "survey.h"
#include "types.h"
#include "usage.h"

namespace kv {

using Policy = Lru;  // the live eviction policy of every pool

inline constexpr std::size_t kRemovedMax = std::size_t{1} << 20;       // keys kept for events: 32 MiB
inline constexpr std::size_t kForeignEvictionsMax = 8192;  // of other classes in one call: bounds its pause
inline constexpr std::size_t kNodeEvictionsMax = 64;       // tries to make room for one node
static_assert(kLanesMax * kClassesMax <= kQueuesMax);

// Which of the 16 transitions exist.
bool slot_may_move(SlotState from, SlotState to) noexcept;

struct Reserved {
  std::vector<NodeId> nodes;  // (m,) of the first m keys
  std::vector<SlotId> slots;  // (m,) to fill; kNone where READY or filled by someone else
  std::size_t filled = 0;
  std::size_t elsewhere = 0;
  std::size_t dropped = 0;    // keys beyond m: no room
  bool over_limit = false;    // because of the account's limit: it has nothing more that may leave
};

struct HostCounts {
  std::size_t free = 0, filling = 0, ready = 0, draining = 0;  // slots
  std::size_t free_slabs = 0;
  std::size_t used_bytes = 0;  // of slots that are not FREE
};

// Since the last take_dropped().
struct HostDropped {
  std::size_t evicted = 0, orphaned = 0, lost = 0, no_room = 0, over_limit = 0, rot = 0, events_lost = 0;
};

// Who reserves, and when: a slot FILLING for longer than stall_s no longer keeps others from filling.
struct Filler {
  double now_s = 0;
  double stall_s = 0;
  Owner owner{};
};

// What became of the slots of a kept arena.
struct Adopted {
  std::size_t ready = 0;     // served again
  std::size_t torn = 0;      // ledger entries that cannot be true
  std::size_t rotten = 0;    // blocks whose bytes do not match their sums
  std::size_t orphaned = 0;  // blocks without a readable block before them
  std::size_t no_room = 0;   // more blocks than the index may know, or a slab of another slot size
  // FILLING: stand-in nodes, slots and who may be writing.
  std::vector<NodeId> nodes;
  std::vector<SlotId> slots;
  std::vector<Owner> owners;
};

class HostPool final : public Place {
 public:
  // With a ledger, what happens to slots is written there too, for a daemon that comes after this one.
  HostPool(Index& index, std::shared_ptr<Arena> arena, std::size_t slab_bytes,
           std::shared_ptr<Ledger> ledger = nullptr);
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  // Leading blocks of the walk that had READY bytes here when it was made: to be asked before anything changes.
  std::size_t match(const Walk& walk) const noexcept;
  std::vector<SlotId> slots(std::span<const NodeId> nodes) const;
  void touch(NodeId node);
  // The blocks above and including node without READY bytes here, up to the nearest that has, chain order.
  std::vector<NodeId> missing(NodeId node) const;
  // Every node with READY bytes in the slabs [start, start + most): O(their slots), for snapshots.
  std::vector<NodeId> ready_nodes(std::size_t start = 0, std::size_t most = kNone) const;
  std::size_t slabs() const noexcept { return records_.size(); }

  // Strong guarantee: Invalid changes nothing. Never evicts the chain of parent, nor what it passed; what the chain
  // has further down is the last to leave.
  Reserved reserve(NodeId parent, std::span<const Key> keys, const SlotFormat& format, Filler filler);
  // What a filled slot holds.
  struct Content {
    std::span<const std::uint32_t> crcs;  // one per slot: CRC32C of its CRC table
    std::size_t length = 0;               // bytes of every block
    std::uint32_t checked = 0;            // 1 = the writer's CPU summed the cells
  };
  std::vector<std::uint8_t> publish(std::span<const NodeId> nodes, std::span<const SlotId> slots,
                                    const Content& content);
  void abort(std::span<const NodeId> nodes, std::span<const SlotId> slots);

  // A place below this one: a block may be published when its parent's bytes are there, though they left here.
  void set_lower(const Place* lower) noexcept { lower_ = lower; }

  // Goes on with a kept arena, once, before anything was reserved. Generations continue. A verified block is
  // READY again if the one before it is; FILLING slots stay so, for stand-in nodes under the root `aside`, until
  // they are aborted; everything else, what stood under `aside` included, is FREE.
  // Invalid when the FILLING slots contradict each other: the pool and its index are of no use then.
  Adopted adopt(const Survey& survey, NodeId aside);

  bool drop(NodeId node);    // rot, counted
  bool forget(NodeId node);  // the same for bytes that nobody will miss
  std::size_t evict(const SlotFormat& format, std::size_t slots);
  // Whose a root is, and how many bytes of slots an account may have. What it has already stays until it saves more.
  // Then settle_lanes(), once for all of them and before anything else: where blocks have to move between lanes that
  // is one pass over all slots, 0.1 us each.
  void claim(NodeId root, Account account);
  void set_limit(Account account, std::size_t bytes);
  void settle_lanes();
  const Usage& usage() const noexcept { return usage_; }

  // Evicts oldest leaves until the index has room for one more node; false if that did not help.
  bool make_node_room();

  // Keys whose bytes left since the last call and are not back.
  std::vector<Key> take_removed();
  HostDropped take_dropped();
  std::size_t capacity_slots() const noexcept { return slabs_.capacity_slots(); }
  HostCounts counts() const noexcept;
  std::size_t memory_bytes() const noexcept;
  void check() const;

  void pinned(NodeId node) override;
  void unpinned(NodeId node) override;
  std::uint32_t holders(std::uint32_t start, std::uint32_t most, const HolderOf& each) const override;

 private:
  friend class Checker;
  friend struct HostPoolProbe;  // tests reach move()

  struct Record {
    NodeId node = kNone;
    NodeId root = kNone;      // of that node: who has to pay
    SlotState state = SlotState::kFree;
    SlotId older = kNone;     // FILLING: the node's next older FILLING slot
    double since_s = 0;       // FILLING: when it was handed out
  };

  Record& record(SlotId slot) { const Slabs::Spot p = slabs_.locate(slot); return records_[p.slab][p.index]; }
  const Record& record(SlotId slot) const { return const_cast<HostPool*>(this)->record(slot); }
  void move(SlotId slot, SlotState from, SlotState to);

  std::size_t queue_of(SlotId slot) const;
  bool candidate(NodeId node, std::size_t queue) const;
  void offer_if_candidate(NodeId node);
  void ref(NodeId node);
  void unref(NodeId node);

  void stand_on(NodeId node);
  void step_off(NodeId node);
  // What one reserve() has evicted where it helps only indirectly, or much at once.
  struct Evictions {
    std::size_t foreign = 0, own = 0;
  };
  SlotId take_slot(std::size_t size_class, Evictions& evictions);
  bool make_own_room(NodeId root, std::size_t bytes, Evictions& evictions);
  SlotId hand_out(NodeId node, SlotId slot, const Filler& filler, const SlotFormat& format);
  void take_back(NodeId node, SlotId slot, SlotState from);
  void forget_fill(NodeId node, SlotId slot);
  bool being_filled(NodeId node, const Filler& filler) const;
  bool publish_one(NodeId node, SlotId slot, const Content& content, std::uint32_t crc);
  void adopt_filling(SlotId slot, NodeId aside, const LedgerEntry& entry, Adopted& out);
  NodeId adopt_ready(SlotId slot, NodeId aside, const LedgerEntry& entry, Adopted& out);
  void require_filling(std::span<const NodeId> nodes, std::span<const SlotId> slots) const;

  Victim oldest(std::size_t queue);
  // Whose oldest is sought: of every lane and class, or of one.
  struct Among {
    std::size_t lane = kLanesMax, size_class = kClassesMax;
  };
  std::size_t oldest_queue(Among among);
  void evict_victim(NodeId node);
  void removed(NodeId node);

  Index& index_;
  std::shared_ptr<Arena> arena_;
  const Place* lower_ = nullptr;
  std::shared_ptr<Ledger> ledger_;            // null: nothing outlives this pool
  Slabs slabs_;
  std::vector<std::vector<Record>> records_;  // by slab, by index: 24 B per slot
  Policy policy_;                             // ids are nodes, queues are lanes of size classes
  Usage usage_;                               // slots that are not FREE
  bool lanes_moved_ = false;
  IdMap fills_;                               // node -> its newest FILLING slot
  IdMap draining_;                            // DRAINING slot -> how many of its readers are left
  // Reader -> the slots that wait for it: it was pinned when they were dropped, and has been ever since.
  std::unordered_map<NodeId, std::vector<SlotId>> drains_;
  std::size_t by_state_[4] = {};              // FREE is not counted here: slabs_ knows
  std::size_t used_bytes_ = 0;
  std::vector<Key> removed_;
  HostDropped dropped_;
};

}  // namespace kv
