// Slots as runs: what replies and leases carry instead of one id per block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "types.h"

namespace kv {

inline constexpr std::size_t kRunSlotsMax = std::size_t{1} << 20;  // most slots that runs may stand for

// Pairs [first slot, count] of slots that follow each other at pages_per_slot, in order. Invalid on kNone.
std::vector<std::uint32_t> slot_runs(std::span<const SlotId> slots, std::uint32_t pages_per_slot);

// The slots of such pairs. Invalid when a run is empty, leaves the id space, or all are more than kRunSlotsMax.
std::vector<SlotId> expand_runs(std::span<const std::uint32_t> runs, std::uint32_t pages_per_slot);

}  // namespace kv
