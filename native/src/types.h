// The words of the native core: ids, keys, states and the few constants every file shares.
//
// A *slot* is named by its offset in the arena in 4 KiB pages, so a slot id is also an address and the
// control region needs no second numbering. A *node* is one block key in the index.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace kv {

using NodeId = std::uint32_t;
using SlotId = std::uint32_t;   // arena offset / kPageBytes
using BlockId = std::uint32_t;  // index of a block in an engine's device pool

// One "nothing here" for every id: 2^32 - 1 is never a valid page, node or block.
inline constexpr std::uint32_t kNone = 0xFFFFFFFFu;

inline constexpr std::size_t kPageBytes = 4096;        // slot granularity, and the O_DIRECT unit
inline constexpr std::size_t kHugeBytes = 2u << 20;    // x86-64 / aarch64 (4 KiB granule) huge page
inline constexpr std::size_t kCellAlign = 64;          // a cell starts on a cache line (and on 512-bit lanes)
inline constexpr std::size_t kKeysMax = 8192;          // most keys in one index call: bounds the loop's pause

struct Key {
  std::array<std::uint8_t, 32> bytes{};

  friend bool operator==(const Key&, const Key&) = default;

  // Keys are BLAKE2b output: any eight bytes are already a good hash.
  std::uint64_t hash() const noexcept {
    std::uint64_t h;
    std::memcpy(&h, bytes.data(), sizeof h);
    return h;
  }
};

// What key number i adds to a chain's digest (hash.h: keys_digest).
inline std::uint64_t digest_term(const Key& key, std::uint64_t i) noexcept { return key.hash() * (2 * i + 1); }

enum class SlotState : std::uint32_t { kFree = 0, kFilling = 1, kReady = 2, kDraining = 3 };

inline constexpr std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

// Shape of one block in a slot: cells in the order [layer][head], each padded to kCellAlign, then one
// CRC32C per cell (u32 little endian), the whole rounded up to pages.
struct SlotFormat {
  std::uint32_t layers = 0;
  std::uint32_t heads = 0;
  std::uint32_t cell_bytes = 0;

  std::size_t cell_stride() const { return round_up(cell_bytes, kCellAlign); }
  std::size_t cells() const { return std::size_t{layers} * heads; }
  std::size_t table_offset() const { return cells() * cell_stride(); }
  std::size_t length() const { return table_offset() + 4 * cells(); }
  std::size_t slot_bytes() const { return round_up(length(), kPageBytes); }
  std::size_t cell_offset(std::uint32_t layer, std::uint32_t head) const {
    return (std::size_t{layer} * heads + head) * cell_stride();
  }
};

// A broken invariant: a bug of ours, never a caller's mistake.
struct Broken : std::logic_error {
  using std::logic_error::logic_error;
};

// A caller's mistake: the message names what is wrong and becomes BadRequest in Python.
struct Invalid : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace kv
