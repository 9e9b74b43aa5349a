// One block between a slot of the arena and an engine's paged KV memory, checked on its way (LAWS A3-A6).
//
// Nothing here allocates, blocks or throws once a route was checked: the copies run on worker threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "arena.h"
#include "types.h"

namespace kv {

inline constexpr std::size_t kCellsMax = 65536;  // most cells in a slot: bounds the table and a thread's scratch
inline constexpr std::size_t kPlanesMax = 8;     // K, V and room for quantization scales

enum class BlockStatus : std::uint8_t {
  kOk = 0,
  kStale = 1,    // not READY, another block's, unsummed, or changed under the reader: a miss
  kCorrupt = 2,  // the slot is the right one and did not change, but its bytes do not match its sums
  kDropped = 3,  // cancelled before it began
};

// Where one rank's cells lie in an engine's paged KV memory. A cell is, for each plane, `pieces` runs of
// piece_bytes at base[layer, plane] + block * block_stride + head * head_stride + piece * piece_stride.
// The cells land in rows [layer_start, +layers) and columns [head_start, +heads) of the slot.
struct PagedLayout {
  std::vector<std::uint64_t> bases;  // [layer][plane] addresses
  std::uint32_t layers = 0;
  std::uint32_t planes = 0;
  std::uint32_t blocks = 0;
  std::uint32_t heads = 0;
  std::size_t block_stride = 0;
  std::size_t head_stride = 0;
  std::size_t piece_stride = 0;
  std::size_t piece_bytes = 0;
  std::uint32_t pieces = 0;
  std::uint32_t layer_start = 0;
  std::uint32_t head_start = 0;

  // Invalid when something is zero, overlaps or overflows. Joins neighbouring pieces into one.
  void check_and_simplify();

  std::size_t cell_bytes() const { return std::size_t{planes} * pieces * piece_bytes; }
  std::size_t block_bytes() const { return std::size_t{layers} * heads * cell_bytes(); }
  std::uint8_t* cell(std::uint32_t layer, std::uint32_t plane, BlockId block, std::uint32_t head) const {
    const std::uint64_t base = bases[std::size_t{layer} * planes + plane];
    return reinterpret_cast<std::uint8_t*>(base + block * block_stride + head * head_stride);
  }
};

// What one job copies between. The arena stays mapped as long as a route holds it; the paged memory is the
// caller's to keep.
struct Route {
  std::shared_ptr<Arena> arena;
  SlotFormat format;
  PagedLayout layout;

  // Invalid unless the layout's cells are the format's and lie inside the slot.
  void check() const;
};

// A thread's working memory.
struct CopyScratch {
  // Short pieces are gathered here first, so that the sum runs over long pieces; half of a small L1.
  static constexpr std::size_t kStagingBytes = 16 << 10;
  alignas(64) std::uint8_t staging[kStagingBytes];
  std::uint32_t table[kCellsMax];
};

// What a control entry said at one moment, field by field.
struct ControlView {
  std::uint64_t generation;
  SlotState state;
  std::uint32_t length;
  std::uint32_t crc;
  std::uint32_t checked;
  std::array<std::uint8_t, 16> fingerprint;
};
ControlView read_control(const ControlEntry& entry) noexcept;

void check_format(const SlotFormat& format);
// Invalid, naming the first bad one, unless every slot of this format lies inside the arena.
void check_slots(const Arena& arena, const SlotFormat& format, std::span<const SlotId> slots);
void check_blocks(const PagedLayout& layout, std::span<const BlockId> blocks);

// A slot as one hand-out of it: the generation tells it from every earlier and later one.
struct Target {
  SlotId slot;
  std::uint64_t generation;
};

// Copies the rank's cells of a device block into a FILLING slot, padding zeroed, and writes their CRC32C
// into the slot's table. Ends with a store fence, so a message sent afterwards may publish the slot.
// kStale, with nothing written, unless the slot is FILLING in that very generation: a reservation may have
// outlived its attach, and the slot is another writer's then. Also kStale when it was handed on meanwhile.
BlockStatus store_block(const Route& route, BlockId block, const Target& target, CopyScratch& scratch) noexcept;

// Copies the rank's cells of a READY slot into a device block. kOk only if fingerprint, length, the table's
// sum, every cell's sum and, around all of it, generation and state agree; anything else leaves undefined
// bytes in the device block. The bytes summed are the bytes written: the slot is read once.
BlockStatus load_block(const Route& route, BlockId block, SlotId slot, const Key& key, CopyScratch& scratch) noexcept;

// The same checks over all cells of a slot, without a copy.
BlockStatus verify_slot(const Arena& arena, const SlotFormat& format, SlotId slot, const Key& key,
                        CopyScratch& scratch) noexcept;

// A slot and the CRC32C that its table must have.
struct Summed {
  SlotId slot;
  std::uint32_t table_crc;
};
// Whether the table and every cell of a slot that nobody writes match their sums.
bool sums_agree(const Arena& arena, const SlotFormat& format, const Summed& summed, CopyScratch& scratch) noexcept;
// The same for a slot's bytes anywhere in memory.
bool sums_agree(const std::uint8_t* bytes, const SlotFormat& format, std::uint32_t table_crc,
                CopyScratch& scratch) noexcept;

// CRC32C of the slot's table, as publish needs it. Reads 4 bytes per cell.
std::uint32_t table_crc(const Arena& arena, const SlotFormat& format, SlotId slot) noexcept;

// The generation of each slot. Invalid, naming the first bad one, unless every slot lies inside the arena.
std::vector<std::uint64_t> slot_generations(const Arena& arena, std::span<const SlotId> slots);

}  // namespace kv
