// The router's index: which replica holds which block on which tier. A hint: the engine decides.
//
// There is no tree. A row per block, named by its fingerprint (fingerprint.h), carries for each of four tiers a bit
// mask over replicas, and a prompt is answered by going through its keys and intersecting masks until none is left.
// Keys chain their parents, so a tree would say nothing that they do not say already; without one there is no
// node to split, no branch to merge, and nothing per block but its row. What follows:
//
//   size    8 + 32 W bytes of row, 8 of order, 9.8..12.3 of table, with W = ceil(replicas_max / 64): 60 B a block for
//           64 replicas, however many of them hold it. nodes_max bounds it; what is not used is not touched.
//   full    the least recently stored or touched block leaves, tails before heads within a batch (router_rows.h).
//   empty   a block that nobody holds any more is gone at once: churn leaves nothing behind.
//   find    exact: every block is looked at, a hole ends the prefix. Side by side in memory, 2..5 ns a block; scattered,
//           10..15 ns. find_bisected() looks at O(log n) blocks per distinct answer, which is right only if a replica
//           that holds a block holds all before it. Engines give up leaves before heads, but events get lost.
//   clear   one pass through the rows (a few ms per million), none for a replica that holds nothing.
//
// A resync fills a second column from a snapshot while the first still answers; whoever maps names to columns then
// swaps them, and removes the old one: no moment without an answer, none with two truths.
//
// One thread owns it: no locks. Calls take at most kRouterKeysMax keys.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fingerprint.h"
#include "router_rows.h"
#include "types.h"

namespace kv {

inline constexpr std::size_t kRouterTiers = 4;  // GPU, HOST, NVME, REMOTE: nearest first
inline constexpr std::size_t kReplicasMax = 1024;

class RouterIndex {
 public:
  RouterIndex(std::size_t nodes_max, std::size_t replicas_max);
  RouterIndex(const RouterIndex&) = delete;
  RouterIndex& operator=(const RouterIndex&) = delete;

  // The lowest free column. Invalid when all are in use.
  std::uint32_t add_replica();
  // Forgets its blocks and frees the column.
  void remove_replica(std::uint32_t replica);

  // Keys in chain order. How many the replica was not known to hold there; they become the most recently used.
  std::size_t stored(std::uint32_t replica, std::uint32_t tier, const Fingerprints& keys);
  // How many it was known to hold there.
  std::size_t removed(std::uint32_t replica, std::uint32_t tier, const Fingerprints& keys);
  // Everything of a replica on one tier, or on all (kRouterTiers). How many bits that were.
  std::size_t cleared(std::uint32_t replica, std::uint32_t tier);
  // A chain is used: it leaves last, its tail before its head. How many of the keys are known. 5..20 ns a key.
  std::size_t touch(const Fingerprints& keys);

  // (columns(), kRouterTiers) row-major: leading blocks that the replica holds in tiers 0..t.
  std::vector<std::int32_t> find(const Fingerprints& keys) const;
  std::vector<std::int32_t> find_bisected(const Fingerprints& keys) const;

  std::size_t size() const noexcept { return rows_.size(); }
  std::size_t nodes_max() const noexcept { return rows_.rows_max(); }
  std::size_t replicas_max() const noexcept { return replicas_max_; }
  std::size_t columns() const noexcept { return counts_.size(); }  // the highest replica in use, + 1
  const std::array<std::int64_t, kRouterTiers>& blocks(std::uint32_t replica) const;
  std::uint64_t evicted() const noexcept { return evicted_; }      // nodes that left because it was full
  std::size_t memory_bytes() const noexcept { return rows_.memory_bytes() + live_.size() * 8 + counts_.size() * 32; }
  // Fingerprints that a replica holds on a tier, in no order. O(nodes).
  std::vector<std::uint64_t> keys_of(std::uint32_t replica, std::uint32_t tier) const;
  void check() const;  // throws Broken

 private:
  struct Bit {
    std::size_t word;
    std::uint64_t mask;
  };
  // Masks of the four tiers, W words each.
  using Masks = std::array<std::uint64_t, kRouterTiers * kReplicasMax / 64>;

  Bit bit(std::uint32_t replica, std::uint32_t tier) const;
  void require(std::uint32_t replica) const;
  static void check_keys(const Fingerprints& keys);
  bool empty(const std::uint64_t* masks) const noexcept;
  void evict(std::uint32_t id) noexcept;
  template <class F>
  void each_bit(const std::uint64_t* masks, F&& f) const;
  template <std::size_t kWords>
  void find_in(const Fingerprints& keys, std::vector<std::int32_t>& out) const;
  template <std::size_t kWords>
  bool step(const std::uint64_t* node, std::size_t at, Masks& left, std::vector<std::int32_t>& out) const;
  void lost(std::size_t tier, std::size_t word, std::uint64_t bits, std::size_t at, std::vector<std::int32_t>& out) const;
  void bisect(const Fingerprints& keys, std::size_t known, std::size_t stop, const Masks& before, const Masks& behind,
              std::vector<std::int32_t>& out) const;
  Masks everyone() const;
  // Of the block at a position, in tiers 0..t, of those in `left`.
  Masks held(const Fingerprints& keys, std::size_t at, const Masks& left) const;

  std::size_t replicas_max_;
  std::size_t words_;  // W
  RouterRows rows_;
  std::vector<std::uint64_t> live_;  // (W,) columns in use
  std::vector<std::array<std::int64_t, kRouterTiers>> counts_;
  std::uint64_t evicted_ = 0;
};

}  // namespace kv
