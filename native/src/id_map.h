// Map from an id to a u32 that grows in small steps (see tag_table.h). Ids are ours, not a caller's, so a
// multiplicative hash is enough; it is a bijection of 32 bits, so the hash is all that is stored.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tag_table.h"
#include "types.h"

namespace kv {

class IdMap {
 public:
  std::size_t size() const noexcept { return table_.size(); }
  std::size_t memory_bytes() const noexcept { return table_.memory_bytes(); }

  // The value of id, or kNone (which is no value).
  std::uint32_t find(std::uint32_t id) const noexcept {
    const TagTable::Entry* entry = table_.find(tag(id), any);
    return entry == nullptr ? kNone : entry->value();
  }

  // Makes room for `more` further ids, so that the next `more` calls of set() cannot throw.
  void reserve(std::size_t more) { table_.prepare(more); }

  void set(std::uint32_t id, std::uint32_t value) {
    if (TagTable::Entry* entry = table_.find(tag(id), any)) return entry->set(value);
    table_.prepare(1);
    table_.insert(tag(id), value);
  }

  // True if it was there.
  bool erase(std::uint32_t id) noexcept {
    TagTable::Entry* entry = table_.find(tag(id), any);
    if (entry != nullptr) table_.erase(entry);
    return entry != nullptr;
  }

  template <class F>
  void each(F&& f) const {
    table_.each([&](std::uint32_t tag, std::uint32_t value) { f(tag * kInverse, value); });
  }

 private:
  static constexpr std::uint32_t kFactor = 0x9E3779B1u;   // odd, and near 2^32 / golden ratio
  static constexpr std::uint32_t kInverse = 0x0E8B2F51u;  // of kFactor, modulo 2^32
  static_assert(static_cast<std::uint32_t>(std::uint64_t{kFactor} * kInverse) == 1);

  static std::uint32_t tag(std::uint32_t id) noexcept { return id * kFactor; }
  static bool any(std::uint32_t) noexcept { return true; }

  TagTable table_;
};

}  // namespace kv
