#include "runs.h"

#include <string>

namespace kv {
namespace {

void check_pages(std::uint32_t pages_per_slot) {
  if (pages_per_slot == 0) throw Invalid("pages_per_slot: must be at least 1");
}

}  // namespace

std::vector<std::uint32_t> slot_runs(std::span<const SlotId> slots, std::uint32_t pages_per_slot) {
  check_pages(pages_per_slot);
  if (slots.size() > kRunSlotsMax) throw Invalid("slots: at most " + std::to_string(kRunSlotsMax));
  std::vector<std::uint32_t> runs;
  std::uint64_t next = 0;  // the slot that would continue the last run
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] == kNone) throw Invalid("slots[" + std::to_string(i) + "]: NONE is not a slot");
    if (i > 0 && slots[i] == next) {
      ++runs.back();
    } else {
      runs.push_back(slots[i]);
      runs.push_back(1);
    }
    next = std::uint64_t{slots[i]} + pages_per_slot;
  }
  return runs;
}

std::vector<SlotId> expand_runs(std::span<const std::uint32_t> runs, std::uint32_t pages_per_slot) {
  check_pages(pages_per_slot);
  std::size_t total = 0;  // counts are checked before anything is made: they may come from the wire
  for (std::size_t i = 0; i + 1 < runs.size(); i += 2) {
    const std::uint64_t count = runs[i + 1];
    const std::string name = "runs[" + std::to_string(i / 2) + "]";
    if (count == 0) throw Invalid(name + ": empty");
    total += count;
    if (total > kRunSlotsMax) throw Invalid(name + ": more than " + std::to_string(kRunSlotsMax) + " slots in all");
    if (runs[i] + (count - 1) * pages_per_slot >= kNone) throw Invalid(name + ": leaves the id space");
  }
  std::vector<SlotId> slots;
  slots.reserve(total);
  for (std::size_t i = 0; i + 1 < runs.size(); i += 2)
    for (std::uint32_t k = 0; k < runs[i + 1]; ++k) slots.push_back(runs[i] + k * pages_per_slot);
  return slots;
}

}  // namespace kv
