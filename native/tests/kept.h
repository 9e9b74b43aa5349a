// What the tests of kept arenas share: blocks with right sums.
#pragma once

#include <cstring>

#include "arena.h"
#include "copy.h"
#include "crc.h"
#include "kit.h"

namespace kv::test {

// Fills a slot with bytes of its key, sums in the table; returns the sum of the table.
inline std::uint32_t write_block(Arena& arena, SlotId slot, const SlotFormat& format, const Key& key) {
  std::uint8_t* bytes = arena.slot(slot);
  for (std::size_t cell = 0; cell < format.cells(); ++cell) {
    std::uint8_t* at = bytes + cell * format.cell_stride();
    for (std::size_t i = 0; i < format.cell_bytes; ++i)
      at[i] = static_cast<std::uint8_t>(key.bytes[i % key.bytes.size()] + cell + i / key.bytes.size());
    const std::uint32_t crc = crc32c(at, format.cell_bytes);
    std::memcpy(bytes + format.table_offset() + 4 * cell, &crc, 4);
  }
  return table_crc(arena, format, slot);
}

}  // namespace kv::test
