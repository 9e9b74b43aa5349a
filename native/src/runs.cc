#include "runs.h"

#include <algorithm>
#include <string>

namespace kv {
namespace {

void check_pages(std::uint32_t pages_per_slot) {
  if (pages_per_slot == 0) throw Invalid("pages_per_slot: must be at least 1");
}

// One past the last first page that a slot may have.
std::uint64_t first_outside(const SlotsExpected& expected) {
  return expected.pages < expected.pages_per_slot ? 0 : expected.pages - expected.pages_per_slot + 1;
}

[[noreturn]] void refuse(std::size_t at, const char* why) {
  throw Invalid("slots: number " + std::to_string(at) + " " + why);
}

}  // namespace

// Sums of 32 bits throughout: a slot is the number of a page, so none that exists is near their end.
bool runs_are_shorter(std::span<const SlotId> slots, std::uint32_t pages_per_slot) {
  check_pages(pages_per_slot);
  if (slots.size() > kPackedSlotsMax) throw Invalid("slots: at most " + std::to_string(kPackedSlotsMax));
  // One pass without branches, so that scattered slots cost no more than a copy.
  std::uint32_t breaks = 0, none = slots.empty() ? 0 : slots[0] == kNone;
  for (std::size_t i = 1; i < slots.size(); ++i) {
    none += slots[i] == kNone;
    breaks += slots[i] != slots[i - 1] + pages_per_slot;
  }
  if (none != 0) throw Invalid("slots: NONE is not a slot");
  return !slots.empty() && 2 * (std::size_t{breaks} + 1) < slots.size();
}

std::vector<std::uint32_t> pack_slots(std::span<const SlotId> slots, std::uint32_t pages_per_slot) {
  if (!runs_are_shorter(slots, pages_per_slot)) return {slots.begin(), slots.end()};
  std::vector<std::uint32_t> runs;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (i > 0 && slots[i] == slots[i - 1] + pages_per_slot) {
      ++runs.back();
    } else {
      runs.push_back(slots[i]);
      runs.push_back(1);
    }
  }
  return runs;
}

std::vector<SlotId> unpack_slots(std::span<const std::uint32_t> packed, const SlotsExpected& expected) {
  check_pages(expected.pages_per_slot);
  if (expected.count > kPackedSlotsMax) throw Invalid("slots: at most " + std::to_string(kPackedSlotsMax));
  const std::uint64_t outside = first_outside(expected);
  if (packed.size() == expected.count) {
    SlotId highest = 0;  // without a branch per slot: this runs for every hit
    for (SlotId slot : packed) highest = std::max(highest, slot);
    if (!packed.empty() && highest >= outside)
      refuse(static_cast<std::size_t>(std::find(packed.begin(), packed.end(), highest) - packed.begin()),
             "is outside the arena");
    return {packed.begin(), packed.end()};
  }
  if (packed.size() > expected.count || packed.size() % 2 != 0)
    throw Invalid("slots: " + std::to_string(packed.size()) + " numbers for " + std::to_string(expected.count) +
                  " slots");
  std::vector<SlotId> slots;
  slots.reserve(expected.count);
  for (std::size_t i = 0; i < packed.size(); i += 2) {
    const std::uint64_t first = packed[i], count = packed[i + 1];
    if (count == 0 || count > expected.count - slots.size()) refuse(i + 1, "is not a count that fits");
    if (first + (count - 1) * expected.pages_per_slot >= outside) refuse(i, "begins a run that leaves the arena");
    for (std::uint64_t k = 0; k < count; ++k)
      slots.push_back(static_cast<SlotId>(first + k * expected.pages_per_slot));
  }
  if (slots.size() != expected.count)
    throw Invalid("slots: " + std::to_string(slots.size()) + " named, expected " + std::to_string(expected.count));
  return slots;
}

}  // namespace kv
