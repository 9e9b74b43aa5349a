#include "survey.h"

#include <algorithm>
#include <string>
#include <utility>

#include "copy.h"
#include "index.h"
#include "pieces.h"

namespace kv {

namespace {

constexpr std::size_t kPieceBytes = 32u << 20;  // a thread's turn: ~4 ms of reading

bool fits(const Arena& arena, const SlotFormat& format, SlotId slot) {
  try {
    check_format(format);
    check_slots(arena, format, {&slot, 1});
  } catch (const Invalid&) {
    return false;
  }
  return true;
}

}  // namespace

Survey::Survey(std::shared_ptr<Ledger> ledger, std::shared_ptr<Arena> arena)
    : ledger_(std::move(ledger)), arena_(std::move(arena)) {
  if (ledger_->pages() != arena_->pages()) throw Invalid("ledger: made for an arena of another size");
  for (SlotId slot : ledger_->used()) {
    const LedgerEntry& entry = ledger_->entry(slot);
    const Verdict verdict = judge(slot);
    found_.push_back({slot, entry.depth, entry.sequence, verdict});
    if (verdict != Verdict::kClaimed) continue;
    claimed_bytes_ += entry.length;
    last_sequence_ = std::max(last_sequence_, entry.sequence);
  }
}

Verdict Survey::judge(SlotId slot) const {
  const LedgerEntry& entry = ledger_->entry(slot);
  switch (ledger_->state(slot)) {
    case SlotState::kFree: return Verdict::kFree;
    case SlotState::kFilling:
      // Who writes there and how far is not known then, so no byte of the arena may be handed on.
      if (!fits(*arena_, entry.format, slot))
        throw Invalid("ledger: slot " + std::to_string(slot) + " is being filled with an impossible format");
      return Verdict::kFilling;
    case SlotState::kReady: break;
    default: return Verdict::kTorn;
  }
  const bool whole = ledger_sum(entry) == entry.sum && entry.depth > 0 && entry.depth <= kDepthMax &&
                     fits(*arena_, entry.format, slot) && entry.length == entry.format.length();
  return whole ? Verdict::kClaimed : Verdict::kTorn;
}

void Survey::verify(int threads) {
  std::vector<Found*> claimed;
  for (Found& found : found_)
    if (found.verdict == Verdict::kClaimed) claimed.push_back(&found);
  std::vector<std::size_t> starts{0};  // of pieces of about equal bytes
  for (std::size_t i = 0, bytes = 0; i < claimed.size(); ++i) {
    bytes += ledger_->entry(claimed[i]->slot).length;
    if (bytes < kPieceBytes && i + 1 < claimed.size()) continue;
    starts.push_back(i + 1);
    bytes = 0;
  }
  for_pieces(threads, starts.size() - 1, [&](std::size_t piece) {
    const auto scratch = std::make_unique_for_overwrite<CopyScratch>();
    for (std::size_t i = starts[piece]; i < starts[piece + 1]; ++i) {
      const LedgerEntry& entry = ledger_->entry(claimed[i]->slot);
      const bool agree = sums_agree(*arena_, entry.format, {claimed[i]->slot, entry.crc}, *scratch);
      claimed[i]->verdict = agree ? Verdict::kReady : Verdict::kRotten;
      verified_bytes_.fetch_add(entry.length, std::memory_order_relaxed);
    }
  });
}

}  // namespace kv
