#include "copy.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "crc.h"

namespace kv {
namespace {

// From here on a piece is copied and summed in place: below, starting and ending a sum for each costs more
// than the detour through the L1 cache.
constexpr std::size_t kDirectBytes = 2048;

constexpr std::size_t kAddressMax = std::size_t{1} << 57;  // five-level page tables

std::string at(std::size_t i) { return "[" + std::to_string(i) + "]"; }

// Widens `extent` by `count` repetitions `stride` apart; Invalid if they overlap or leave the address space.
void widen(std::size_t& extent, std::size_t count, std::size_t stride, const char* name) {
  if (count == 1) return;
  if (stride < extent) throw Invalid(std::string(name) + ": too small, neighbours would overlap");
  std::size_t span = 0;
  if (__builtin_mul_overflow(stride, count - 1, &span) || __builtin_add_overflow(span, extent, &extent) ||
      extent > kAddressMax)
    throw Invalid(std::string(name) + ": the layout leaves the address space");
}

// The reader's half of the slot protocol (LAWS A4): what holds before the bytes are read is asked again after.
class Reading {
 public:
  Reading(const ControlEntry& entry, const SlotFormat& format, const Key& key) noexcept
      : entry_(entry), before_(read_control(entry)) {
    matches_ = before_.state == SlotState::kReady && before_.checked != 0 && before_.length == format.length() &&
               std::memcmp(before_.fingerprint.data(), key.bytes.data(), before_.fingerprint.size()) == 0;
  }

  bool matches() const noexcept { return matches_; }
  std::uint32_t table_crc() const noexcept { return before_.crc; }

  BlockStatus end(bool sums_agree) const noexcept {
    load_fence();
    constexpr auto kReady = static_cast<std::uint32_t>(SlotState::kReady);
    const bool unchanged = entry_.generation.load(std::memory_order_relaxed) == before_.generation &&
                           entry_.state.load(std::memory_order_relaxed) == kReady;
    if (!unchanged) return BlockStatus::kStale;
    return sums_agree ? BlockStatus::kOk : BlockStatus::kCorrupt;
  }

 private:
  const ControlEntry& entry_;
  ControlView before_;
  bool matches_ = false;
};

bool is_filling(const ControlEntry& entry) noexcept {
  return entry.state.load(std::memory_order_acquire) == static_cast<std::uint32_t>(SlotState::kFilling);
}

// Pieces that fit the staging buffer at once.
std::uint32_t pieces_staged(const PagedLayout& layout) {
  return static_cast<std::uint32_t>(CopyScratch::kStagingBytes / layout.piece_bytes);
}

// Tells the memory system where the next run of a store begins: it lies elsewhere, and short runs would each
// start with a full memory latency (a sixth of the speed with 2 KiB runs).
void expect_next(const PagedLayout& layout, std::uint32_t layer, std::uint32_t head, std::uint32_t plane,
                 BlockId block) noexcept {
  constexpr std::size_t kLine = 64, kExpectBytes = 1024;
  if (++plane == layout.planes) plane = 0, ++head;
  if (head == layout.heads) head = 0, ++layer;
  if (layer == layout.layers) return;
  const std::uint8_t* next = layout.cell(layer, plane, block, head);
  for (std::size_t i = 0; i < std::min(kExpectBytes, layout.piece_bytes); i += kLine) __builtin_prefetch(next + i);
}

std::uint32_t store_cell(const PagedLayout& layout, std::uint32_t layer, std::uint32_t head, BlockId block,
                         std::uint8_t* target, CopyScratch& scratch) noexcept {
  std::uint32_t crc = 0;
  for (std::uint32_t plane = 0; plane < layout.planes; ++plane) {
    const std::uint8_t* source = layout.cell(layer, plane, block, head);
    expect_next(layout, layer, head, plane, block);
    if (layout.piece_bytes >= kDirectBytes) {
      for (std::uint32_t i = 0; i < layout.pieces; ++i, target += layout.piece_bytes)
        crc = copy_crc(target, source + i * layout.piece_stride, layout.piece_bytes, crc, Stores::kStream);
      continue;
    }
    const std::uint32_t most = pieces_staged(layout);
    for (std::uint32_t done = 0; done < layout.pieces;) {
      const std::uint32_t count = std::min(most, layout.pieces - done);
      for (std::uint32_t i = 0; i < count; ++i)
        std::memcpy(scratch.staging + i * layout.piece_bytes, source + (done + i) * layout.piece_stride,
                    layout.piece_bytes);
      crc = copy_crc(target, scratch.staging, count * layout.piece_bytes, crc, Stores::kStream);
      target += count * layout.piece_bytes;
      done += count;
    }
  }
  return crc;
}

// Streams although the engine reads the bytes soon: copy plus first read costs 0.75-0.9 of ordinary stores for
// jobs of 1 MiB and more (a core's L2), 1.07 for 256 KiB.
std::uint32_t load_cell(const PagedLayout& layout, std::uint32_t layer, std::uint32_t head, BlockId block,
                        const std::uint8_t* source, CopyScratch& scratch) noexcept {
  std::uint32_t crc = 0;
  for (std::uint32_t plane = 0; plane < layout.planes; ++plane) {
    std::uint8_t* target = layout.cell(layer, plane, block, head);
    if (layout.piece_bytes >= kDirectBytes) {
      for (std::uint32_t i = 0; i < layout.pieces; ++i, source += layout.piece_bytes)
        crc = copy_crc(target + i * layout.piece_stride, source, layout.piece_bytes, crc, Stores::kStream);
      continue;
    }
    const std::uint32_t most = pieces_staged(layout);
    for (std::uint32_t done = 0; done < layout.pieces;) {
      const std::uint32_t count = std::min(most, layout.pieces - done);
      crc = copy_crc(scratch.staging, source, count * layout.piece_bytes, crc, Stores::kCached);
      for (std::uint32_t i = 0; i < count; ++i)
        copy_bytes(target + (done + i) * layout.piece_stride, scratch.staging + i * layout.piece_bytes,
                   layout.piece_bytes, Stores::kStream);
      source += count * layout.piece_bytes;
      done += count;
    }
  }
  return crc;
}

// Every layer and head of the rank against the table; stops at the first cell that disagrees.
bool load_cells(const Route& route, BlockId block, const std::uint8_t* bytes, CopyScratch& scratch) noexcept {
  const auto& [arena, format, layout] = route;
  for (std::uint32_t layer = 0; layer < layout.layers; ++layer) {
    for (std::uint32_t head = 0; head < layout.heads; ++head) {
      const std::uint32_t row = layout.layer_start + layer;
      const std::uint32_t column = layout.head_start + head;
      const std::uint32_t crc = load_cell(layout, layer, head, block, bytes + format.cell_offset(row, column), scratch);
      if (crc != scratch.table[std::size_t{row} * format.heads + column]) return false;
    }
  }
  return true;
}

// A private copy of the table, so that what was checked is what the cells are compared with.
bool take_table(const SlotFormat& format, const std::uint8_t* bytes, std::uint32_t crc, CopyScratch& scratch) noexcept {
  return copy_crc(scratch.table, bytes + format.table_offset(), 4 * format.cells(), 0, Stores::kCached) == crc;
}

}  // namespace

ControlView read_control(const ControlEntry& entry) noexcept {
  ControlView view{};
  view.generation = entry.generation.load(std::memory_order_acquire);
  view.state = static_cast<SlotState>(entry.state.load(std::memory_order_acquire));
  view.length = __atomic_load_n(&entry.length, __ATOMIC_RELAXED);
  view.crc = __atomic_load_n(&entry.crc, __ATOMIC_RELAXED);
  view.checked = __atomic_load_n(&entry.checked, __ATOMIC_RELAXED);
  for (std::size_t i = 0; i < view.fingerprint.size(); ++i)
    view.fingerprint[i] = __atomic_load_n(&entry.fingerprint[i], __ATOMIC_RELAXED);
  return view;
}

void PagedLayout::check_and_simplify() {
  if (layers == 0 || planes == 0) throw Invalid("bases: expected shape (layers, planes), both at least 1");
  if (planes > kPlanesMax) throw Invalid("bases: at most " + std::to_string(kPlanesMax) + " planes");
  if (bases.size() != std::size_t{layers} * planes) throw Invalid("bases: expected layers * planes addresses");
  if (blocks == 0 || blocks == kNone) throw Invalid("blocks: must be in [1, 2**32 - 1)");
  if (heads == 0 || heads > kCellsMax) throw Invalid("heads: must be in [1, " + std::to_string(kCellsMax) + "]");
  if (pieces == 0) throw Invalid("pieces: must be at least 1");
  if (piece_bytes == 0 || piece_bytes > kAddressMax) throw Invalid("piece_bytes: must be at least 1");

  struct Dimension {
    std::size_t count, stride;
    const char* name;
  };
  // Engines nest these in any order (heads inside tokens or around blocks): judge them from the inside out.
  Dimension dimensions[] = {{pieces, piece_stride, "piece_stride"}, {heads, head_stride, "head_stride"},
                            {blocks, block_stride, "block_stride"}};
  std::sort(std::begin(dimensions), std::end(dimensions),
            [](const Dimension& a, const Dimension& b) { return a.stride < b.stride; });
  std::size_t extent = piece_bytes;
  for (const Dimension& dimension : dimensions) widen(extent, dimension.count, dimension.stride, dimension.name);
  for (std::size_t i = 0; i < bases.size(); ++i)
    if (bases[i] == 0 || bases[i] > kAddressMax - extent)
      throw Invalid("bases" + at(i) + ": not an address that the layout fits behind");

  if (pieces > 1 && piece_stride == piece_bytes) {
    piece_bytes *= pieces;
    pieces = 1;
  }
}

void check_format(const SlotFormat& format) {
  if (format.layers == 0) throw Invalid("layers: must be at least 1");
  if (format.heads == 0) throw Invalid("heads: must be at least 1");
  if (format.cell_bytes == 0) throw Invalid("cell_bytes: must be at least 1");
  if (format.cells() > kCellsMax)
    throw Invalid("layers * heads: at most " + std::to_string(kCellsMax) + " cells in a slot");
  // cells <= 2^16 and a cell < 2^32 + 64, so none of this overflows 64 bits; the control entry has 32.
  if (format.slot_bytes() > std::numeric_limits<std::uint32_t>::max())
    throw Invalid("cell_bytes: a slot must be smaller than 4 GiB");
}

void Route::check() const {
  check_format(format);
  if (layout.cell_bytes() != format.cell_bytes)
    throw Invalid("layout: planes * pieces * piece_bytes = " + std::to_string(layout.cell_bytes()) +
                  ", but the format's cell_bytes is " + std::to_string(format.cell_bytes));
  if (std::uint64_t{layout.layer_start} + layout.layers > format.layers)
    throw Invalid("layout: layer_start + layers exceeds the format's " + std::to_string(format.layers) + " layers");
  if (std::uint64_t{layout.head_start} + layout.heads > format.heads)
    throw Invalid("layout: head_start + heads exceeds the format's " + std::to_string(format.heads) + " heads");
}

void check_slots(const Arena& arena, const SlotFormat& format, std::span<const SlotId> slots) {
  const std::size_t pages = format.slot_bytes() / kPageBytes;
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (slots[i] + pages > arena.pages())
      throw Invalid("slots" + at(i) + ": " + std::to_string(slots[i]) + " does not lie inside the arena of " +
                    std::to_string(arena.pages()) + " pages");
}

void check_blocks(const PagedLayout& layout, std::span<const BlockId> blocks) {
  for (std::size_t i = 0; i < blocks.size(); ++i)
    if (blocks[i] >= layout.blocks)
      throw Invalid("blocks" + at(i) + ": " + std::to_string(blocks[i]) + " is not below the layout's " +
                    std::to_string(layout.blocks) + " blocks");
}

BlockStatus store_block(const Route& route, BlockId block, const Target& to, CopyScratch& scratch) noexcept {
  const auto& [arena, format, layout] = route;
  const ControlEntry& entry = arena->control(to.slot);
  const auto ours = [&] {
    return entry.generation.load(std::memory_order_acquire) == to.generation && is_filling(entry);
  };
  if (!ours()) return BlockStatus::kStale;  // READY has readers, another generation another writer: never write it
  // Streamed stores may overtake plain ones of the same thread: had it handed the slot out itself, a reader could
  // see new bytes under the old generation.
  store_fence();
  std::uint8_t* bytes = arena->slot(to.slot);
  const std::size_t padding = format.cell_stride() - format.cell_bytes;
  for (std::uint32_t layer = 0; layer < layout.layers; ++layer) {
    for (std::uint32_t head = 0; head < layout.heads; ++head) {
      const std::uint32_t row = layout.layer_start + layer;
      const std::uint32_t column = layout.head_start + head;
      std::uint8_t* target = bytes + format.cell_offset(row, column);
      const std::uint32_t crc = store_cell(layout, layer, head, block, target, scratch);
      if (padding > 0) std::memset(target + format.cell_bytes, 0, padding);
      const std::size_t cell = std::size_t{row} * format.heads + column;
      std::memcpy(bytes + format.table_offset() + 4 * cell, &crc, 4);
    }
  }
  store_fence();
  return ours() ? BlockStatus::kOk : BlockStatus::kStale;
}

BlockStatus load_block(const Route& route, BlockId block, SlotId slot, const Key& key, CopyScratch& scratch) noexcept {
  const Reading reading(route.arena->control(slot), route.format, key);
  if (!reading.matches()) return BlockStatus::kStale;
  const std::uint8_t* bytes = route.arena->slot(slot);
  const bool agree = take_table(route.format, bytes, reading.table_crc(), scratch) &&
                     load_cells(route, block, bytes, scratch);
  store_fence();
  return reading.end(agree);
}

BlockStatus verify_slot(const Arena& arena, const SlotFormat& format, SlotId slot, const Key& key,
                        CopyScratch& scratch) noexcept {
  const Reading reading(arena.control(slot), format, key);
  if (!reading.matches()) return BlockStatus::kStale;
  return reading.end(sums_agree(arena, format, {slot, reading.table_crc()}, scratch));
}

bool sums_agree(const Arena& arena, const SlotFormat& format, const Summed& summed, CopyScratch& scratch) noexcept {
  return sums_agree(arena.slot(summed.slot), format, summed.table_crc, scratch);
}

bool sums_agree(const std::uint8_t* bytes, const SlotFormat& format, std::uint32_t table_crc,
                CopyScratch& scratch) noexcept {
  bool agree = take_table(format, bytes, table_crc, scratch);
  for (std::size_t cell = 0; agree && cell < format.cells(); ++cell)
    agree = crc32c(bytes + cell * format.cell_stride(), format.cell_bytes) == scratch.table[cell];
  return agree;
}

std::uint32_t table_crc(const Arena& arena, const SlotFormat& format, SlotId slot) noexcept {
  return crc32c(arena.slot(slot) + format.table_offset(), 4 * format.cells());
}

std::vector<std::uint64_t> slot_generations(const Arena& arena, std::span<const SlotId> slots) {
  std::vector<std::uint64_t> generations(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] >= arena.pages()) throw Invalid("slots" + at(i) + ": " + std::to_string(slots[i]) + " is no slot");
    generations[i] = arena.control(slots[i]).generation.load(std::memory_order_acquire);
  }
  return generations;
}

}  // namespace kv
