// Open-addressing map from an id to a u32: 8 B an entry, linear probing, deletion by backward shift (so no
// tombstones and no decay). Ids are ours, not a caller's, so a multiplicative hash is enough.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "types.h"

namespace kv {

class IdMap {
 public:
  std::size_t size() const noexcept { return size_; }
  std::size_t memory_bytes() const noexcept { return slots_.capacity() * sizeof(Slot); }

  // The value of id, or kNone.
  std::uint32_t find(std::uint32_t id) const noexcept {
    if (slots_.empty()) return kNone;
    for (std::size_t i = home(id);; i = (i + 1) & mask_) {
      if (slots_[i].id == id) return slots_[i].value;
      if (slots_[i].id == kNone) return kNone;
    }
  }

  // Makes room for `more` further ids, so that the next `more` calls of set() cannot throw.
  void reserve(std::size_t more) {
    std::size_t wanted = slots_.empty() ? 16 : slots_.size();
    while ((size_ + more) * 4 > wanted * 3) wanted *= 2;
    if (wanted != slots_.size()) rehash(wanted);
  }

  void set(std::uint32_t id, std::uint32_t value) {
    reserve(1);
    std::size_t i = home(id);
    while (slots_[i].id != kNone && slots_[i].id != id) i = (i + 1) & mask_;
    if (slots_[i].id == kNone) ++size_;
    slots_[i] = {id, value};
  }

  // True if it was there.
  bool erase(std::uint32_t id) noexcept {
    if (slots_.empty()) return false;
    std::size_t i = home(id);
    while (slots_[i].id != id) {
      if (slots_[i].id == kNone) return false;
      i = (i + 1) & mask_;
    }
    for (std::size_t j = (i + 1) & mask_; slots_[j].id != kNone; j = (j + 1) & mask_) {
      // An entry may move back to the hole only if the hole is not before its home.
      if (((j - home(slots_[j].id)) & mask_) >= ((j - i) & mask_)) {
        slots_[i] = slots_[j];
        i = j;
      }
    }
    slots_[i].id = kNone;
    --size_;
    return true;
  }

  template <class F>
  void each(F&& f) const {
    for (const Slot& s : slots_)
      if (s.id != kNone) f(s.id, s.value);
  }

 private:
  struct Slot {
    std::uint32_t id = kNone;
    std::uint32_t value = 0;
  };

  std::size_t home(std::uint32_t id) const noexcept {
    return static_cast<std::size_t>((id * 0x9E3779B97F4A7C15ull) >> 32) & mask_;
  }

  void rehash(std::size_t wanted) {
    std::vector<Slot> old(wanted);
    std::swap(old, slots_);
    mask_ = wanted - 1;
    for (const Slot& s : old) {
      if (s.id == kNone) continue;
      std::size_t i = home(s.id);
      while (slots_[i].id != kNone) i = (i + 1) & mask_;
      slots_[i] = s;
    }
  }

  std::vector<Slot> slots_;
  std::size_t mask_ = 0;
  std::size_t size_ = 0;
};

}  // namespace kv
