// Where many blocks lie, in as few bytes as it takes: what replies carry.
//
// Either one number per slot, or, when that is shorter, a pair [first slot, count] per run of neighbours. The
// reader knows how many slots there are, and so which form it is: pairs are used only if they are fewer than
// half the slots, so `4 * count` bytes are always single slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "types.h"

namespace kv {

inline constexpr std::size_t kPackedSlotsMax = std::size_t{1} << 20;  // most slots that one message may name

// Whether pairs are shorter than a number per slot. Neighbours are slots that follow each other at
// pages_per_slot. Invalid on kNone.
bool runs_are_shorter(std::span<const SlotId> slots, std::uint32_t pages_per_slot);

// The slots in whichever form is shorter. Invalid on kNone.
std::vector<std::uint32_t> pack_slots(std::span<const SlotId> slots, std::uint32_t pages_per_slot);

// What the slots of a reader must be like.
struct SlotsExpected {
  std::size_t count = 0;
  std::uint32_t pages_per_slot = 1;
  std::uint64_t pages = 0;  // of the arena: every slot must lie inside
};

// The slots that `packed` names. Invalid unless they are exactly what is expected: it may come from the wire.
std::vector<SlotId> unpack_slots(std::span<const std::uint32_t> packed, const SlotsExpected& expected);

}  // namespace kv
