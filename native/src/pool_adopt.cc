// Going on with a kept arena: what its ledger says, as far as it was verified, becomes the state of a fresh pool.
#include <algorithm>
#include <string>
#include <utility>

#include "pool.h"

namespace kv {

namespace {

// The name of a FILLING slot's stand-in: unique among them, and under a root that nobody can name.
Key stand_in(SlotId slot, std::uint64_t generation) {
  Key key;
  std::memcpy(key.bytes.data(), &slot, sizeof slot);
  std::memcpy(key.bytes.data() + sizeof slot, &generation, sizeof generation);
  return key;
}

bool older(const Found* a, const Found* b) { return a->sequence < b->sequence; }

}  // namespace

Adopted HostPool::adopt(const Survey& survey, NodeId aside) {
  if (!ledger_ || &survey.ledger() != ledger_.get()) throw Invalid("survey: not of this pool's ledger");
  if (slabs_.taken_slots() > 0) throw Invalid("adopt: this pool has slots in use");
  index_.require(aside, "aside");
  // What is taken over stands in the ledger as it is; only what is not is written.
  const std::shared_ptr<Ledger> ledger = std::exchange(ledger_, nullptr);
  ledger->continue_after(survey.last_sequence());

  Adopted out;
  std::vector<const Found*> blocks;
  std::vector<SlotId> lost;
  for (const Found& found : survey.found()) {
    arena_->control(found.slot).generation.store(ledger->entry(found.slot).generation, std::memory_order_relaxed);
    if (found.verdict == Verdict::kReady) blocks.push_back(&found);
    out.torn += found.verdict == Verdict::kTorn;
    out.rotten += found.verdict == Verdict::kRotten || found.verdict == Verdict::kClaimed;
    if (found.verdict != Verdict::kReady && found.verdict != Verdict::kFree && found.verdict != Verdict::kFilling)
      lost.push_back(found.slot);
  }
  // Slots that are being written come first: no block may take their place.
  for (const Found& found : survey.found())
    if (found.verdict == Verdict::kFilling) adopt_filling(found.slot, aside, ledger->entry(found.slot), out);

  // Parents before children. Not by sequence alone: a hollow block that was saved again is younger than they.
  std::sort(blocks.begin(), blocks.end(), [](const Found* a, const Found* b) {
    return a->depth != b->depth ? a->depth < b->depth : older(a, b);
  });
  std::vector<std::pair<std::uint64_t, NodeId>> kept;
  for (const Found* found : blocks) {
    const NodeId node = adopt_ready(found->slot, aside, ledger->entry(found->slot), out);
    if (node == kNone)
      lost.push_back(found->slot);
    else
      kept.emplace_back(found->sequence, node);
  }
  std::sort(kept.begin(), kept.end());
  for (const auto& [sequence, node] : kept) policy_.touch(node);
  out.ready = kept.size();

  for (SlotId slot : lost) {
    ControlEntry& control = arena_->control(slot);
    ledger->free(slot, control.generation.fetch_add(1, std::memory_order_relaxed) + 1);
  }
  ledger_ = ledger;
  return out;
}

void HostPool::adopt_filling(SlotId slot, NodeId aside, const LedgerEntry& entry, Adopted& out) {
  if (!slabs_.adopt(slot, entry.format.slot_bytes()))
    throw Invalid("ledger: slot " + std::to_string(slot) + " is being filled where another slot lies");
  const NodeId node = index_.make(aside, stand_in(slot, entry.generation));
  if (node == kNone) throw Invalid("ledger: more slots are being filled than index.nodes_max allows");
  arena_->control(slot).generation.store(entry.generation - 1, std::memory_order_relaxed);  // hand_out adds one
  hand_out(node, slot, {}, entry.format);
  out.nodes.push_back(node);
  out.slots.push_back(slot);
  out.owners.push_back(entry.owner);
}

// The block's node, or kNone with the reason counted.
NodeId HostPool::adopt_ready(SlotId slot, NodeId aside, const LedgerEntry& entry, Adopted& out) {
  NodeId parent = index_.find(entry.parent);
  // A block at depth 1 names its root, which exists by being named; its tenant says so at attach, or never does.
  if (parent == kNone && entry.depth == 1) parent = index_.root(entry.parent);
  if (parent == aside) return kNone;  // a layout proof's: nobody misses it
  const bool reachable = parent != kNone && index_.node(parent).depth + 1 == entry.depth &&
                         (entry.depth == 1 || index_.node(parent).host_slot != kNone);
  if (!reachable || index_.find(entry.key) != kNone) {
    ++out.orphaned;
    return kNone;
  }
  NodeId node = kNone;
  if (slabs_.adopt(slot, entry.format.slot_bytes())) {
    node = index_.make(parent, entry.key);
    if (node == kNone) slabs_.give(slot);
  }
  if (node == kNone) {
    ++out.no_room;
    return kNone;
  }
  arena_->control(slot).generation.store(entry.generation - 1, std::memory_order_relaxed);
  hand_out(node, slot, {}, entry.format);
  publish_one(node, slot, {{}, entry.length, 1}, entry.crc);
  return node;
}

}  // namespace kv
