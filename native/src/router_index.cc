#include "router_index.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace kv {

namespace {

constexpr std::size_t kPrefetch = 16;  // keys ahead in calls that change rows

std::size_t words_of(std::size_t replicas_max) {
  if (replicas_max == 0 || replicas_max > kReplicasMax)
    throw Invalid("replicas_max: must be in [1, " + std::to_string(kReplicasMax) + "], got " +
                  std::to_string(replicas_max));
  return (replicas_max + 63) / 64;
}

}  // namespace

RouterIndex::RouterIndex(std::size_t nodes_max, std::size_t replicas_max)
    : replicas_max_(replicas_max),
      words_(words_of(replicas_max)),
      rows_(nodes_max, kRouterTiers * words_, "nodes_max"),
      live_(words_, 0) {}

// ---- replicas ----------------------------------------------------------------------------------------

std::uint32_t RouterIndex::add_replica() {
  std::uint32_t replica = 0;
  while (replica < replicas_max_ && live_[replica / 64] >> (replica % 64) & 1) ++replica;
  if (replica == replicas_max_)
    throw Invalid("replicas_max: all " + std::to_string(replicas_max_) + " columns are in use; raise it");
  if (replica >= counts_.size()) counts_.resize(replica + 1);
  live_[replica / 64] |= std::uint64_t{1} << (replica % 64);
  return replica;
}

void RouterIndex::remove_replica(std::uint32_t replica) {
  cleared(replica, kRouterTiers);
  live_[replica / 64] &= ~(std::uint64_t{1} << (replica % 64));
  while (!counts_.empty() && !(live_[(counts_.size() - 1) / 64] >> ((counts_.size() - 1) % 64) & 1)) counts_.pop_back();
}

void RouterIndex::require(std::uint32_t replica) const {
  if (replica >= counts_.size() || !(live_[replica / 64] >> (replica % 64) & 1))
    throw Invalid("replica: " + std::to_string(replica) + " is not there; add_replica() names one");
}

const std::array<std::int64_t, kRouterTiers>& RouterIndex::blocks(std::uint32_t replica) const {
  require(replica);
  return counts_[replica];
}

RouterIndex::Bit RouterIndex::bit(std::uint32_t replica, std::uint32_t tier) const {
  require(replica);
  if (tier >= kRouterTiers)
    throw Invalid("tier: must be in [0, " + std::to_string(kRouterTiers) + "), got " + std::to_string(tier));
  return {tier * words_ + replica / 64, std::uint64_t{1} << (replica % 64)};
}

void RouterIndex::check_keys(const Fingerprints& keys) {
  if (keys.size() > kRouterKeysMax)
    throw Invalid("keys: " + std::to_string(keys.size()) + " in one call, the most is " +
                  std::to_string(kRouterKeysMax) + "; split them");
}

bool RouterIndex::empty(const std::uint64_t* masks) const noexcept {
  std::uint64_t any = 0;
  for (std::size_t i = 0; i < kRouterTiers * words_; ++i) any |= masks[i];
  return any == 0;
}

template <class F>
void RouterIndex::each_bit(const std::uint64_t* masks, F&& f) const {
  for (std::size_t i = 0; i < kRouterTiers * words_; ++i)
    for (std::uint64_t bits = masks[i]; bits != 0; bits &= bits - 1)
      f(i % words_ * 64 + static_cast<std::size_t>(std::countr_zero(bits)), i / words_);
}

// ---- events ------------------------------------------------------------------------------------------

std::size_t RouterIndex::stored(std::uint32_t replica, std::uint32_t tier, const Fingerprints& keys) {
  const Bit at = bit(replica, tier);
  check_keys(keys);
  std::size_t newly = 0;
  std::int64_t& count = counts_[replica][tier];
  std::uint32_t before = kNone;  // the row of the key before this one
  for (std::size_t i = 0; i < kPrefetch; ++i) rows_.prefetch(keys, i);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    rows_.prefetch(keys, i + kPrefetch);
    std::uint32_t id = rows_.find(keys[i]);
    if (id == kNone) {
      if (rows_.full()) {
        if (rows_.oldest() == before) break;  // this chain fills it: its head is worth more than its tail
        evict(rows_.oldest());
      }
      id = rows_.insert(keys[i]);
    }
    rows_.place(id, before);
    before = id;
    std::uint64_t& word = rows_.payload(id)[at.word];
    const bool is_new = (word & at.mask) == 0;
    word |= at.mask;
    newly += is_new;
    count += is_new;  // at once: a later key may find no memory, or have this one evicted
  }
  return newly;
}

std::size_t RouterIndex::removed(std::uint32_t replica, std::uint32_t tier, const Fingerprints& keys) {
  const Bit at = bit(replica, tier);
  check_keys(keys);
  std::size_t gone = 0;
  for (std::size_t i = 0; i < kPrefetch; ++i) rows_.prefetch(keys, i);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    rows_.prefetch(keys, i + kPrefetch);
    const std::uint32_t id = rows_.find(keys[i]);
    if (id == kNone) continue;
    std::uint64_t* masks = rows_.payload(id);
    if ((masks[at.word] & at.mask) == 0) continue;
    masks[at.word] &= ~at.mask;
    ++gone;
    if (empty(masks)) rows_.erase(id);
  }
  counts_[replica][tier] -= static_cast<std::int64_t>(gone);
  return gone;
}

std::size_t RouterIndex::cleared(std::uint32_t replica, std::uint32_t tier) {
  const bool all = tier == kRouterTiers;
  const Bit first = bit(replica, all ? 0 : tier);
  std::int64_t left = 0;
  for (std::size_t t = 0; t < kRouterTiers; ++t)
    if (all || t == tier) left += std::exchange(counts_[replica][t], 0);
  const auto bits = static_cast<std::size_t>(left);
  for (std::uint32_t id = 0; left > 0 && id < rows_.ids(); ++id) {
    std::uint64_t* masks = rows_.payload(id);  // of a free row: zeros
    std::int64_t found = 0;
    for (std::size_t word = first.word; word < kRouterTiers * words_; word += words_) {
      found += (masks[word] & first.mask) != 0;
      masks[word] &= ~first.mask;
      if (!all) break;
    }
    if (found > 0 && empty(masks)) rows_.erase(id);
    left -= found;
  }
  return bits;
}

std::size_t RouterIndex::touch(const Fingerprints& keys) {
  check_keys(keys);
  std::size_t known = 0;
  std::uint32_t before = kNone;
  rows_.walk(keys, [&](std::size_t, std::uint32_t id) {
    if (id == kNone) return true;
    rows_.place(id, before);
    before = id;
    ++known;
    return true;
  });
  return known;
}

void RouterIndex::evict(std::uint32_t id) noexcept {
  each_bit(rows_.payload(id), [&](std::size_t replica, std::size_t tier) { --counts_[replica][tier]; });
  rows_.erase(id);
  ++evicted_;
}

// ---- find --------------------------------------------------------------------------------------------

RouterIndex::Masks RouterIndex::everyone() const {
  Masks all{};
  for (std::size_t tier = 0; tier < kRouterTiers; ++tier)
    std::copy(live_.begin(), live_.end(), all.begin() + static_cast<std::ptrdiff_t>(tier * words_));
  return all;
}

void RouterIndex::lost(std::size_t tier, std::size_t word, std::uint64_t bits, std::size_t at,
                       std::vector<std::int32_t>& out) const {
  for (; bits != 0; bits &= bits - 1) {
    const std::size_t replica = word * 64 + static_cast<std::size_t>(std::countr_zero(bits));
    out[replica * kRouterTiers + tier] = static_cast<std::int32_t>(at);
  }
}

// Takes from `left` whoever does not hold the block at position `at`. False when nobody is left.
template <std::size_t kWords>
bool RouterIndex::step(const std::uint64_t* node, std::size_t at, Masks& left, std::vector<std::int32_t>& out) const {
  const std::size_t words = kWords != 0 ? kWords : words_;
  std::uint64_t any = 0;
  for (std::size_t w = 0; w < words; ++w) {
    std::uint64_t here = 0, gone = 0;
    for (std::size_t tier = 0; tier < kRouterTiers; ++tier) {
      here |= node[tier * words + w];
      gone |= left[tier * words + w] & ~here;
    }
    if (gone != 0) [[unlikely]] {
      here = 0;
      for (std::size_t tier = 0; tier < kRouterTiers; ++tier) {
        here |= node[tier * words + w];
        std::uint64_t& mine = left[tier * words + w];
        lost(tier, w, mine & ~here, at, out);
        mine &= here;
      }
    }
    any |= left[(kRouterTiers - 1) * words + w];  // whoever is left on fewer tiers is left on all four
  }
  return any != 0;
}

template <std::size_t kWords>
void RouterIndex::find_in(const Fingerprints& keys, std::vector<std::int32_t>& out) const {
  Masks left = everyone();
  constexpr std::array<std::uint64_t, kRouterTiers * kReplicasMax / 64> kNobody{};
  bool somebody = !counts_.empty();
  if (somebody)
    rows_.walk(keys, [&](std::size_t i, std::uint32_t id) {
      somebody = step<kWords>(id == kNone ? kNobody.data() : rows_.payload(id), i, left, out);
      return somebody;
    });
  if (somebody) step<kWords>(kNobody.data(), keys.size(), left, out);
}

std::vector<std::int32_t> RouterIndex::find(const Fingerprints& keys) const {
  check_keys(keys);
  std::vector<std::int32_t> out(columns() * kRouterTiers, 0);
  words_ == 1 ? find_in<1>(keys, out) : find_in<0>(keys, out);
  return out;
}

RouterIndex::Masks RouterIndex::held(const Fingerprints& keys, std::size_t at, const Masks& left) const {
  Masks masks{};
  const std::uint32_t id = rows_.find(keys[at]);
  if (id == kNone) return masks;
  const std::uint64_t* node = rows_.payload(id);
  for (std::size_t w = 0; w < words_; ++w) {
    std::uint64_t here = 0;
    for (std::size_t i = w; i < kRouterTiers * words_; i += words_) {
      here |= node[i];
      masks[i] = here & left[i];
    }
  }
  return masks;
}

// Whoever is in `before` holds the first `known` blocks, whoever is in `behind` those before `stop` and the one at it;
// whoever is only in `before` is lost somewhere in [known, stop].
void RouterIndex::bisect(const Fingerprints& keys, std::size_t known, std::size_t stop, const Masks& before,
                         const Masks& behind, std::vector<std::int32_t>& out) const {
  if (before == behind) return;
  if (known == stop) {
    for (std::size_t i = 0; i < kRouterTiers * words_; ++i)
      lost(i / words_, i % words_, before[i] & ~behind[i], stop, out);
    return;
  }
  const std::size_t middle = known + (stop - known) / 2;
  Masks at = held(keys, middle, before);
  Masks both;
  for (std::size_t i = 0; i < both.size(); ++i) both[i] = at[i] | behind[i];  // a hole does not bring anybody back
  bisect(keys, known, middle, before, both, out);
  bisect(keys, middle + 1, stop, both, behind, out);
}

std::vector<std::int32_t> RouterIndex::find_bisected(const Fingerprints& keys) const {
  check_keys(keys);
  std::vector<std::int32_t> out(columns() * kRouterTiers, 0);
  bisect(keys, 0, keys.size(), everyone(), Masks{}, out);
  return out;
}

// ---- for tests and resyncs -----------------------------------------------------------------------------

std::vector<std::uint64_t> RouterIndex::keys_of(std::uint32_t replica, std::uint32_t tier) const {
  const Bit at = bit(replica, tier);
  std::vector<std::uint64_t> keys;
  rows_.each_live([&](std::uint32_t id) {
    if ((rows_.payload(id)[at.word] & at.mask) != 0) keys.push_back(rows_.fingerprint(id));
  });
  return keys;
}

void RouterIndex::check() const {
  rows_.check("router index");
  std::vector<std::array<std::int64_t, kRouterTiers>> counted(counts_.size());
  rows_.each_live([&](std::uint32_t id) {
    if (empty(rows_.payload(id))) throw Broken("router index: node " + std::to_string(id) + " is held by nobody");
    each_bit(rows_.payload(id), [&](std::size_t replica, std::size_t tier) {
      if (replica >= counted.size() || !(live_[replica / 64] >> (replica % 64) & 1))
        throw Broken("router index: replica " + std::to_string(replica) + " holds a block and is not there");
      ++counted[replica][tier];
    });
  });
  if (counted != counts_) throw Broken("router index: blocks by replica and tier do not add up");
}

}  // namespace kv
