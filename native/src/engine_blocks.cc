#include "engine_blocks.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kv {

EngineBlocks::EngineBlocks(std::size_t blocks_max)
    : hashes_(blocks_max, 2, "blocks_max"), prints_(blocks_max, kRouterTiers, "blocks_max") {}

void EngineBlocks::check_call(const Fingerprints& hashes, std::uint32_t tier) {
  if (hashes.size() > kRouterKeysMax)
    throw Invalid("hashes: " + std::to_string(hashes.size()) + " in one call, the most is " +
                  std::to_string(kRouterKeysMax));
  if (tier >= kRouterTiers)
    throw Invalid("tier: must be in [0, " + std::to_string(kRouterTiers) + "), got " + std::to_string(tier));
}

std::vector<std::uint64_t> EngineBlocks::stored(std::optional<std::uint64_t> parent, const Fingerprints& hashes,
                                                const TokenChain& chain, std::uint32_t tier) {
  check_call(hashes, tier);
  for (const std::vector<std::uint64_t>& left : left_)
    if (left.size() > std::max(blocks_max(), kRouterKeysMax))
      throw Invalid("take_evicted: " + std::to_string(left.size()) + " fingerprints wait for it; call it after stored()");
  if (chain.tokens.empty()) return known(hashes, tier);
  if (chain.tokens.size() != hashes.size() * chain.block_tokens)
    throw Invalid("tokens: expected " + std::to_string(hashes.size()) + " blocks of " +
                  std::to_string(chain.block_tokens) + ", got " + std::to_string(chain.tokens.size()) + " tokens");
  TokenChain continued = chain;
  continued.parent = 0;
  if (parent) {
    const std::uint32_t above = hashes_.find(*parent);
    if (above == kNone) {
      orphans_ += hashes.size();
      return {};
    }
    continued.parent = hashes_.payload(above)[kPrint];
  }
  std::vector<std::uint64_t> prints = token_fingerprints(continued);
  std::uint32_t before = kNone;
  for (std::size_t i = 0; i < prints.size(); ++i) {
    std::uint32_t id = hashes_.find(hashes[i]);
    if (id != kNone && hashes_.payload(id)[kPrint] != prints[i]) {
      let_go_everywhere(id);
      hashes_.payload(id)[kPrint] = prints[i];
    }
    if (id == kNone) {
      if (!take_room(before)) {
        prints.resize(i);
        break;
      }
      id = hashes_.insert(hashes[i]);
      hashes_.payload(id)[kPrint] = prints[i];
    }
    hold(id, tier);
    hashes_.place(id, before);
    before = id;
  }
  return prints;
}

// Blocks that are known from another tier.
std::vector<std::uint64_t> EngineBlocks::known(const Fingerprints& hashes, std::uint32_t tier) {
  std::vector<std::uint64_t> prints;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const std::uint32_t id = hashes_.find(hashes[i]);
    if (id == kNone) {
      ++orphans_;
      continue;
    }
    hold(id, tier);
    prints.push_back(hashes_.payload(id)[kPrint]);
  }
  return prints;
}

std::vector<std::uint64_t> EngineBlocks::removed(const Fingerprints& hashes, std::uint32_t tier) {
  check_call(hashes, tier);
  std::vector<std::uint64_t> gone;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const std::uint32_t id = hashes_.find(hashes[i]);
    if (id == kNone || !(hashes_.payload(id)[kTiers] >> tier & 1)) continue;
    const std::uint64_t print = hashes_.payload(id)[kPrint];
    if (let_go(id, tier)) gone.push_back(print);
    if (hashes_.payload(id)[kTiers] == 0) hashes_.erase(id);
  }
  return gone;
}

std::vector<std::uint64_t> EngineBlocks::take_evicted(std::uint32_t tier) {
  check_call({}, tier);
  std::vector<std::uint64_t> out = std::exchange(left_[tier], {});
  std::erase_if(out, [&](std::uint64_t print) {
    const std::uint32_t id = prints_.find(print);
    return id != kNone && prints_.payload(id)[tier] > 0;
  });
  return out;
}

void EngineBlocks::clear(std::uint32_t tier) {
  for (std::uint32_t t = 0; t < kRouterTiers; ++t) {
    if (tier != kRouterTiers && t != tier) continue;
    for (std::uint32_t id = 0; id < hashes_.ids(); ++id) {
      if (!hashes_.live(id) || !(hashes_.payload(id)[kTiers] >> t & 1)) continue;
      let_go(id, t);
      if (hashes_.payload(id)[kTiers] == 0) hashes_.erase(id);
    }
    left_[t].clear();
  }
}

// Room for one more hash. False: only by giving up the block before this one.
bool EngineBlocks::take_room(std::uint32_t before) {
  if (!hashes_.full()) return true;
  const std::uint32_t id = hashes_.oldest();
  if (id == before) return false;
  let_go_everywhere(id);
  hashes_.erase(id);
  ++evicted_;
  return true;
}

void EngineBlocks::hold(std::uint32_t id, std::uint32_t tier) {
  std::uint64_t* entry = hashes_.payload(id);
  if (entry[kTiers] >> tier & 1) return;
  std::uint32_t print = prints_.find(entry[kPrint]);
  if (print == kNone) print = prints_.insert(entry[kPrint]);
  ++prints_.payload(print)[tier];
  entry[kTiers] |= std::uint64_t{1} << tier;
}

// True if it was the last hash of its fingerprint there.
bool EngineBlocks::let_go(std::uint32_t id, std::uint32_t tier) {
  std::uint64_t* entry = hashes_.payload(id);
  const std::uint32_t print = prints_.find(entry[kPrint]);
  std::uint64_t* holders = prints_.payload(print);
  entry[kTiers] &= ~(std::uint64_t{1} << tier);
  const bool last = --holders[tier] == 0;
  if (std::all_of(holders, holders + kRouterTiers, [](std::uint64_t n) { return n == 0; })) prints_.erase(print);
  return last;
}

void EngineBlocks::let_go_everywhere(std::uint32_t id) {
  const std::uint64_t print = hashes_.payload(id)[kPrint];
  for (std::uint32_t tier = 0; tier < kRouterTiers; ++tier)
    if (hashes_.payload(id)[kTiers] >> tier & 1 && let_go(id, tier)) left_[tier].push_back(print);
}

void EngineBlocks::check() const {
  hashes_.check("engine hashes");
  prints_.check("engine fingerprints");
  std::array<std::uint64_t, kRouterTiers> held{}, counted{};
  hashes_.each_live([&](std::uint32_t id) {
    const std::uint64_t* entry = hashes_.payload(id);
    const std::uint32_t print = prints_.find(entry[kPrint]);
    for (std::size_t tier = 0; tier < kRouterTiers; ++tier) {
      if (!(entry[kTiers] >> tier & 1)) continue;
      ++held[tier];
      if (print == kNone || prints_.payload(print)[tier] == 0)
        throw Broken("engine blocks: hash " + std::to_string(id) + " has a fingerprint that nobody counts");
    }
    if (entry[kTiers] == 0) throw Broken("engine blocks: hash " + std::to_string(id) + " is on no tier");
  });
  prints_.each_live([&](std::uint32_t id) {
    for (std::size_t tier = 0; tier < kRouterTiers; ++tier) counted[tier] += prints_.payload(id)[tier];
  });
  if (held != counted) throw Broken("engine blocks: hashes by tier do not add up");
}

}  // namespace kv
