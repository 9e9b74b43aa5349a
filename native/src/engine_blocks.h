// What an engine's own block hashes mean in our fingerprints, for one replica.
//
// An engine's events name blocks by hashes that nobody else can compute (their algorithm, their seed), but they
// carry the token ids and the parent's hash. So stored() chains our fingerprint (fingerprint.h) from the parent's,
// and a router finds by a prompt alone what engines hold, each with hashes of its own.
//
// A hash means one fingerprint, on any number of tiers. A fingerprint may have several hashes: what an engine binds
// into a hash and the router does not know (media, a request's salt) splits one chain of tokens into many. So holders
// are counted by fingerprint and tier, and removed() returns a fingerprint when its last hash there has left.
//
// Bounded, like everything here: blocks_max is what the engine has room for. When more seem to be there, removals were
// lost; the least recently stored then leaves, and take_evicted() tells what the index must forget with it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fingerprint.h"
#include "router_index.h"
#include "router_rows.h"
#include "types.h"

namespace kv {

class EngineBlocks {
 public:
  explicit EngineBlocks(std::size_t blocks_max);
  EngineBlocks(const EngineBlocks&) = delete;
  EngineBlocks& operator=(const EngineBlocks&) = delete;

  // Blocks that continue `parent` (none: a chain begins), `chain.block_tokens` tokens each; chain.parent is not read.
  // Without tokens the hashes must be known already: the engine put blocks that it has on one more tier.
  // The fingerprints that are there now, in order; empty, and counted as orphans, where the parent or the tokens of a
  // block are not known. Again is harmless. A hash that means other tokens now has left everywhere first.
  std::vector<std::uint64_t> stored(std::optional<std::uint64_t> parent, const Fingerprints& hashes,
                                    const TokenChain& chain, std::uint32_t tier);
  // The fingerprints that have no hash left on that tier. Unknown hashes are passed over.
  std::vector<std::uint64_t> removed(const Fingerprints& hashes, std::uint32_t tier);
  // Fingerprints that left a tier for want of room or by a hash with a new meaning, since the last call, and are not back.
  std::vector<std::uint64_t> take_evicted(std::uint32_t tier);
  // Forgets a tier, or all (kRouterTiers). The index is the caller's business. O(blocks).
  void clear(std::uint32_t tier);

  std::size_t size() const noexcept { return hashes_.size(); }
  std::size_t blocks_max() const noexcept { return hashes_.rows_max(); }
  std::uint64_t orphans() const noexcept { return orphans_; }
  std::uint64_t evicted() const noexcept { return evicted_; }
  std::size_t memory_bytes() const noexcept { return hashes_.memory_bytes() + prints_.memory_bytes(); }
  void check() const;  // throws Broken

 private:
  // Payload of a hash: its fingerprint, and a bit for each tier. Payload of a fingerprint: hashes by tier.
  static constexpr std::size_t kPrint = 0, kTiers = 1;

  std::vector<std::uint64_t> known(const Fingerprints& hashes, std::uint32_t tier);
  bool take_room(std::uint32_t before);
  void hold(std::uint32_t id, std::uint32_t tier);
  bool let_go(std::uint32_t id, std::uint32_t tier);
  void let_go_everywhere(std::uint32_t id);
  static void check_call(const Fingerprints& hashes, std::uint32_t tier);

  RouterRows hashes_;  // by engine hash
  RouterRows prints_;  // by fingerprint; never more than hashes
  std::array<std::vector<std::uint64_t>, kRouterTiers> left_;  // for take_evicted(); stored() refuses before it grows
  std::uint64_t orphans_ = 0;
  std::uint64_t evicted_ = 0;
};

}  // namespace kv
