// The index: an ancestor-closed tree of block keys (LAWS C). It holds no bytes; pools say where bytes are.
//
//   every node's parent node exists, up to the root, and depth == parent's depth + 1;
//   a node is removable <=> no child nodes, no holders (places with its bytes), no pins;
//   removable nodes are reaped at once, upwards, one by one (never recursively).
//
// Memory per node: 64 B node + 9.8..11.4 B in the hash table, growth included (tag_table.h) + 1 bit in the set
// of free ids + 8 B stamp in the host pool's policy, and 12 B in its heap if the node is, or since its last
// eviction was, a leaf: 82..95.6 B. (The host pool adds 24 B per slot, used or not.)
//
// Nothing here is copied to grow: nodes come in chunks, the table moves a few slots per insertion. A call with
// kKeysMax keys stays near a millisecond however many nodes there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "chunks.h"
#include "free_ids.h"
#include "id_map.h"
#include "tag_table.h"
#include "types.h"

namespace kv {

inline constexpr std::size_t kRootsMax = 65536;    // roots are never reaped: tenants x namespaces of a group
inline constexpr std::uint32_t kDepthMax = 262144; // blocks in one chain: 4 M tokens in blocks of 16
inline constexpr std::uint32_t kJumpStride = 64;   // a jump skips to the next multiple of this depth
inline constexpr std::size_t kNodesMax = std::size_t{1} << 31;

// One block key, one cache line. Only Index writes the upper part; `host_*` belong to the index's HostPool.
struct alignas(64) Node {
  Key key;
  NodeId parent = kNone;
  NodeId jump = kNone;         // ancestor at the largest multiple of kJumpStride strictly below depth
  std::uint32_t depth = kNone; // blocks from the root's node (0) to here; kNone = this id is free
  std::uint32_t children = 0;
  std::uint32_t pins = 0;
  std::uint32_t holders = 0;   // slots and device blocks that hold, receive or still hand on its bytes
  SlotId host_slot = kNone;    // the READY slot
  std::uint32_t host_refs = 0; // own slots + children with host_refs > 0 + (pins > 0): see pool.h
};
static_assert(sizeof(Node) == 64);

// A path from the first block of a chain to its deepest known node. A copy: it stays readable after the
// index changed, but then its nodes may be gone.
struct Walk {
  NodeId root = kNone;
  std::uint32_t depth = 0;         // blocks on the path; 0 = nothing known
  NodeId deepest = kNone;          // node at depth; the root's node at depth 0 if the root is known
  std::uint32_t gap_stop = 0;      // [depth, gap_stop) is not decided yet
  std::uint32_t ready = 0;         // leading blocks that have a READY slot in the host pool
  std::uint64_t digest = 0;        // keys_digest of the whole path
  std::vector<NodeId> nodes;       // (depth,) in chain order
  std::vector<SlotId> slots;       // (depth,) each node's READY slot in the host pool then, or kNone
};

using HolderOf = std::function<void(NodeId)>;

// A tier that holds bytes of nodes and wants to know when a pin begins or ends to matter.
class Place {
 public:
  virtual void pinned(NodeId node) = 0;    // pins went 0 -> 1
  virtual void unpinned(NodeId node) = 0;  // pins went 1 -> 0, the node still exists
  // What holds bytes here (slots, blocks), as a sequence: names the node of each of [start, start + most) that
  // holds, receives or still hands on a node's bytes. Returns where the next call goes on, or kNone at the end.
  virtual std::uint32_t holders(std::uint32_t start, std::uint32_t most, const HolderOf& each) const = 0;
  // Whether the node's bytes are readable here, so that a chain may go on behind them elsewhere.
  virtual bool reads(NodeId) const { return false; }

 protected:
  ~Place() = default;
};

class Index {
 public:
  explicit Index(std::size_t nodes_max);
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  // Nodes, roots not counted.
  std::size_t size() const noexcept { return live_ - roots_; }
  std::size_t nodes_max() const noexcept { return nodes_max_; }

  NodeId root(const Key& key);
  NodeId find(const Key& key) const noexcept;
  // positions ascending in [0, n), one key each. Invalid names a position that contradicts the tree, at or before
  // the deepest known key; what comes after that is looked at only here and there (bisection). Keys under another root
  // are unknown.
  Walk walk(const Key& root, std::uint32_t n, std::span<const std::uint32_t> positions,
            std::span<const Key> keys) const;
  // keys_digest of the first `length` keys of a walk, whose nodes must still be there.
  std::uint64_t digest(const Walk& walk, std::size_t length) const;

  // The root above id (or id, if it is one), by the ancestor jumps.
  NodeId root_of(NodeId id) const noexcept {
    while (nodes_[id].depth != 0) id = nodes_[id].jump;
    return id;
  }

  // Whether id, if it is a node at all, stands under this root.
  bool under(NodeId id, NodeId root) const noexcept { return id != kNone && root_of(id) == root; }

  // Whether id is (still) the node of this key after parent.
  bool is(NodeId id, NodeId parent, const Key& key) const noexcept {
    return live(id) && nodes_[id].parent == parent && nodes_[id].key == key;
  }

  bool live(NodeId id) const noexcept { return id < ids_ && nodes_[id].depth != kNone; }
  // Invalid if id names no node; `what` is the argument's name.
  void require(NodeId id, const char* what) const;

  void pin(NodeId id);
  void unpin(NodeId id);
  std::size_t pins() const noexcept { return pins_; }
  template <class F>
  void each_pinned(F&& f) const {  // in no order; O(pinned nodes)
    pinned_.each([&](NodeId id, std::uint32_t) { f(id); });
  }
  // Nodes with pins that are `id` or below it. O(pinned nodes * (depth / 64 + 64)).
  std::vector<NodeId> pinned_below(NodeId id) const;

  std::size_t memory_bytes() const noexcept;
  void check() const;  // throws Broken, naming the first law that does not hold (see check.h)
  // Changes with every node that comes or goes, every pin, and whatever a place tells by changed().
  std::uint64_t version() const noexcept { return version_; }
  void changed() noexcept { ++version_; }

  // ---- for pools -------------------------------------------------------------------------------------
  Node& node(NodeId id) noexcept { return nodes_[id]; }
  const Node& node(NodeId id) const noexcept { return nodes_[id]; }
  // All ids in use are below this.
  std::size_t ids() const noexcept { return ids_; }

  // The nodes of the leading known keys of a chain that continues `parent`; all further keys are unknown.
  // Invalid (and nothing changed) if a key repeats or is known elsewhere in the tree.
  std::vector<NodeId> resolve(NodeId parent, std::span<const Key> keys) const;
  // Those of the keys whose node (kNone: unknown) satisfies `keep`.
  template <class Keep>
  std::vector<Key> only(std::vector<Key> keys, Keep&& keep) const {
    const std::vector<NodeId> ids = find_all(keys);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < keys.size(); ++i)
      if (keep(ids[i])) keys[kept++] = keys[i];
    keys.resize(kept);
    return keys;
  }
  // Makes the next n calls of make() unable to throw.
  void prepare(std::size_t n);
  bool full() const noexcept { return size() >= nodes_max_; }
  bool roots_full() const noexcept { return roots_ == kRootsMax; }
  // A new node after parent, or kNone when full. The caller adds a holder or reaps it.
  NodeId make(NodeId parent, const Key& key);
  // Removes id if it is removable, then its parent, and so on.
  void reap(NodeId id);

  void join(Place* place);
  void leave(Place* place);
  // The host_* fields of a node can serve one pool: an index belongs to one trust group and its arena.
  void claim_host();
  void release_host() noexcept { host_claimed_ = false; }

 private:
  friend class Checker;
  friend struct IndexProbe;  // tests count the table's work

  std::uint32_t tag(const Key& key) const noexcept;
  NodeId find(const Key& key, std::uint32_t tag) const noexcept;
  std::vector<NodeId> find_all(std::span<const Key> keys) const;
  void reserve(std::size_t n);
  void erase(const Key& key, NodeId id);
  NodeId take_id() noexcept;
  NodeId climb(NodeId deepest, Walk& walk) const;
  std::size_t last_known(std::span<const std::uint32_t> positions, std::span<const Key> keys, Walk& walk) const;
  void check_depth(NodeId id, std::size_t i, std::uint32_t position) const;
  bool below(NodeId id, NodeId ancestor) const noexcept;

  std::size_t nodes_max_;
  std::size_t live_ = 0;   // roots included
  std::size_t roots_ = 0;
  std::size_t pins_ = 0;
  bool host_claimed_ = false;
  ChunkedArray<Node> nodes_;
  std::size_t ids_ = 0;    // [0, ids_) are live or free
  FreeIds free_;
  NodeId cursor_ = 0;      // where the last node was made: the next one goes beside it
  TagTable table_;
  std::uint64_t version_ = 0;
  std::uint64_t seed_[4];  // keys come from callers: without a secret they could be made to collide
  IdMap pinned_;           // nodes with pins > 0
  std::vector<Place*> places_;
};

}  // namespace kv
