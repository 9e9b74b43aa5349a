// Test kit of the byte half: paged memory in several shapes, and a daemon's hand on control entries.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "copy.h"
#include "crc.h"

namespace kv::testing {

enum class Shape {
  kHeadMajor,   // [block][head][token][dim]: one run per plane
  kTokenMajor,  // [block][token][head][dim]: a short piece per token
  kPacked,      // one plane, [head][block][cell]: heads outermost, an odd cell size
};

// One rank's paged memory, filled with random bytes.
struct Paged {
  PagedLayout layout;
  std::vector<std::vector<std::uint8_t>> memory;  // one allocation per (layer, plane)
  std::size_t plane_bytes = 0;                    // of one cell

  Paged(Shape shape, std::uint32_t layers, std::uint32_t heads, std::uint32_t blocks, std::uint32_t tokens = 16,
        std::size_t row = 128) {
    layout.layers = layers;
    layout.heads = heads;
    layout.blocks = blocks;
    layout.planes = shape == Shape::kPacked ? 1 : 2;
    plane_bytes = tokens * row;
    if (shape == Shape::kPacked) plane_bytes += 7;
    layout.pieces = 1;
    layout.piece_bytes = layout.piece_stride = plane_bytes;
    layout.head_stride = plane_bytes;
    layout.block_stride = plane_bytes * heads;
    if (shape == Shape::kTokenMajor) {
      layout.pieces = tokens;
      layout.piece_bytes = layout.head_stride = row;
      layout.piece_stride = row * heads;
    }
    if (shape == Shape::kPacked) {
      layout.block_stride = plane_bytes;
      layout.head_stride = plane_bytes * blocks;
    }
    std::mt19937_64 random(layers * 1000 + heads);
    for (std::uint32_t i = 0; i < layers * layout.planes; ++i) {
      auto& bytes = memory.emplace_back(plane_bytes * heads * blocks);
      for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random() >> 56);
      layout.bases.push_back(reinterpret_cast<std::uint64_t>(bytes.data()));
    }
    layout.check_and_simplify();
  }

  std::size_t cell_bytes() const { return plane_bytes * layout.planes; }

  // The cell by its definition, byte by byte: the oracle of every copy.
  std::vector<std::uint8_t> cell(std::uint32_t layer, std::uint32_t head, BlockId block) const {
    std::vector<std::uint8_t> bytes;
    for (std::uint32_t plane = 0; plane < layout.planes; ++plane) {
      const std::uint8_t* base = memory[layer * layout.planes + plane].data();
      for (std::uint32_t piece = 0; piece < layout.pieces; ++piece)
        for (std::size_t i = 0; i < layout.piece_bytes; ++i)
          bytes.push_back(base[block * layout.block_stride + head * layout.head_stride +
                               piece * layout.piece_stride + i]);
    }
    return bytes;
  }

  // All of a rank's bytes of a block, in canonical order.
  std::vector<std::uint8_t> block(BlockId id) const {
    std::vector<std::uint8_t> bytes;
    for (std::uint32_t layer = 0; layer < layout.layers; ++layer)
      for (std::uint32_t head = 0; head < layout.heads; ++head) {
        const auto one = cell(layer, head, id);
        bytes.insert(bytes.end(), one.begin(), one.end());
      }
    return bytes;
  }

  void fill(std::uint8_t byte) {
    for (auto& bytes : memory) std::memset(bytes.data(), byte, bytes.size());
  }
};

inline Key key_of(std::uint64_t n) {
  Key key;
  std::mt19937_64 random(n);
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint64_t word = random();
    std::memcpy(key.bytes.data() + 8 * i, &word, 8);
  }
  return key;
}

// What the pool does to a control entry, reduced to the bytes' side of it. Fields are stored as atomics
// because the tests read them from other threads on purpose.
inline void hand_out(const Arena& arena, SlotId slot) {
  ControlEntry& entry = arena.control(slot);
  entry.generation.fetch_add(1, std::memory_order_acq_rel);
  entry.state.store(static_cast<std::uint32_t>(SlotState::kFilling), std::memory_order_release);
}

// The slot as it is handed out now.
inline Target target_of(const Arena& arena, SlotId slot) { return {slot, arena.control(slot).generation.load()}; }

inline void publish(const Arena& arena, const SlotFormat& format, SlotId slot, const Key& key) {
  ControlEntry& entry = arena.control(slot);
  __atomic_store_n(&entry.length, static_cast<std::uint32_t>(format.length()), __ATOMIC_RELAXED);
  __atomic_store_n(&entry.crc, table_crc(arena, format, slot), __ATOMIC_RELAXED);
  __atomic_store_n(&entry.checked, 1u, __ATOMIC_RELAXED);
  for (std::size_t i = 0; i < 16; ++i) __atomic_store_n(&entry.fingerprint[i], key.bytes[i], __ATOMIC_RELAXED);
  entry.state.store(static_cast<std::uint32_t>(SlotState::kReady), std::memory_order_release);
}

}  // namespace kv::testing
