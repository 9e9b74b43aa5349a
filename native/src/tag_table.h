// Open-addressing multimap from a 32-bit tag to a u32: 8 B an entry, linear probing, deletion by backward
// shift (so no tombstones and no decay), and growth in small steps, so that no insertion pays for all
// earlier ones.
//
// The home of an entry is tag * homes / 2^32: monotonic in the tag. A table grows into a new array a quarter
// larger, from its first slot to its last; what has moved is then exactly "all tags below a bound", so a
// find costs one comparison more and looks in one array only. Every insertion moves kMovesPerInsert slots
// (in batches of kBatch), and the pages they leave behind go back to the kernel as the move goes on.
//
// Arithmetic, with N homes before the growth. It begins at 13/16 N entries and ends N / kMovesPerInsert =
// 1/16 N insertions later: the old array is never fuller than 14/16, the new one begins at 0.70. An entry
// costs 8 / 0.8125 = 9.8 B at best and 8 / 0.70 = 11.4 B at worst, the growth included (+ kReleaseSlots * 8 B
// = 256 KiB whatever N is). Nothing wraps: an array has 2 N slots for N homes, and the upper ones are never
// touched but by an overflow (address space, not memory).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "types.h"
#include "zeroed.h"

namespace kv {

class TagTable {
 public:
  struct Entry {
    std::uint32_t tag = 0;
    std::uint32_t flipped = 0;  // ~value: zeroed memory is an empty table, kNone is no value

    bool empty() const noexcept { return flipped == 0; }
    std::uint32_t value() const noexcept { return ~flipped; }
    void set(std::uint32_t value) noexcept { flipped = ~value; }
  };

  static constexpr std::size_t kHomesMin = kPageBytes / sizeof(Entry) / 2;  // one page
  static constexpr std::size_t kMovesPerInsert = 16;
  static constexpr std::size_t kBatch = 128;          // slots moved at a time
  static constexpr std::size_t kReleaseSlots = 1u << 15;

  std::size_t size() const noexcept { return size_; }
  // What is resident: of the new array as much as has moved into it, of the old one what is not given back.
  std::size_t memory_bytes() const noexcept {
    if (!moving()) return table_.homes * sizeof(Entry);
    const std::size_t reached = std::uint64_t{table_.homes} * frontier_ / old_.homes;
    return (reached + old_.homes - std::min(released_, old_.homes)) * sizeof(Entry);
  }
  bool moving() const noexcept { return bound_ != kAllTags; }
  // Slots that growing has looked at since the start: what bounds a call's pause.
  std::uint64_t moved_slots() const noexcept { return moved_slots_; }

  // Makes the next n calls of insert() unable to fail. May throw std::bad_alloc, changing nothing that can be
  // seen. O(1), or O(n) when n is large against the table: a growth still under way has at least as many
  // free homes as the table had / 7, so it is finished here only if 7 n exceeds the table.
  void prepare(std::size_t n) {
    if ((size_ + n) * 16 <= table_.homes * 13) return;
    const std::size_t wanted = std::max({table_.homes + table_.homes / 4, (size_ + n) * 16 / 13 + 1, kHomesMin});
    Part larger{Zeroed<Entry>(2 * wanted), wanted};
    while (moving()) move(kBatch);
    old_ = std::exchange(table_, std::move(larger));
    frontier_ = released_ = debt_ = 0;
    bound_ = size_ == 0 ? kAllTags : 0;
    if (!moving()) old_ = Part{};
  }

  // The caller has prepared room, and knows that the pair is not there.
  void insert(std::uint32_t tag, std::uint32_t value) noexcept {
    put(part(tag), {tag, ~value});
    ++size_;
    if (!moving()) return;
    debt_ += kMovesPerInsert;
    if (debt_ >= kBatch) move(std::exchange(debt_, 0));
  }

  // The entry with that tag whose value satisfies `is`, or null. Good until the next insert() or erase().
  template <class Is>
  Entry* find(std::uint32_t tag, Is&& is) noexcept {
    if (size_ == 0) return nullptr;
    Part& p = part(tag);
    for (std::size_t i = p.home(tag); !p.slots[i].empty(); ++i)
      if (p.slots[i].tag == tag && is(p.slots[i].value())) return &p.slots[i];
    return nullptr;
  }
  template <class Is>
  const Entry* find(std::uint32_t tag, Is&& is) const noexcept {
    return const_cast<TagTable*>(this)->find(tag, std::forward<Is>(is));
  }

  // Of an entry that find() just returned.
  void erase(Entry* entry) noexcept {
    Part& p = part(entry->tag);
    std::size_t i = static_cast<std::size_t>(entry - &p.slots[0]);
    for (std::size_t j = i + 1; !p.slots[j].empty(); ++j) {
      if (p.home(p.slots[j].tag) > i) continue;  // may not stand before its home
      p.slots[i] = p.slots[j];
      i = j;
    }
    p.slots[i] = Entry{};
    --size_;
  }

  // Always inline: GCC takes a function that only prefetches for one without effect, and drops the call.
  [[gnu::always_inline]] void prefetch(std::uint32_t tag) const noexcept {
    if (size_ != 0) __builtin_prefetch(&part(tag).slots[part(tag).home(tag)]);
  }

  template <class F>
  void each(F&& f) const {
    each_in(table_, 0, f);
    if (moving()) each_in(old_, frontier_, f);
  }

 private:
  struct Part {
    Zeroed<Entry> slots;
    std::size_t homes = 0;
    std::size_t home(std::uint32_t tag) const noexcept { return (std::uint64_t{tag} * homes) >> 32; }
  };

  Part& part(std::uint32_t tag) noexcept { return tag < bound_ ? table_ : old_; }
  const Part& part(std::uint32_t tag) const noexcept { return tag < bound_ ? table_ : old_; }

  static void put(Part& p, Entry entry) noexcept {
    std::size_t i = p.home(entry.tag);
    while (!p.slots[i].empty()) ++i;
    p.slots[i] = entry;
  }

  // Moves the slots [frontier, frontier + slots) and what remains of the last run of full slots. It ends at an
  // empty slot: no entry beyond it has its home before it, so one bound on tags tells the arrays apart.
  void move(std::size_t slots) noexcept {
    const std::size_t stop = std::min(frontier_ + slots, old_.homes);
    std::size_t i = frontier_;
    for (; i < stop || !old_.slots[i].empty(); ++i)
      if (!old_.slots[i].empty()) put(table_, old_.slots[i]);
    moved_slots_ += i - frontier_;
    frontier_ = i;
    if (i >= old_.homes) {
      bound_ = kAllTags;
      old_ = Part{};
      return;
    }
    bound_ = ((std::uint64_t{i} << 32) + old_.homes - 1) / old_.homes;  // the smallest tag at home in i or later
    if (i - released_ < kReleaseSlots) return;
    old_.slots.release(released_, i);
    released_ = i;
  }

  template <class F>
  static void each_in(const Part& p, std::size_t from, F& f) {
    for (std::size_t i = from; i < p.homes || (i < p.slots.size() && !p.slots[i].empty()); ++i)
      if (!p.slots[i].empty()) f(p.slots[i].tag, p.slots[i].value());
  }

  static constexpr std::uint64_t kAllTags = std::uint64_t{1} << 32;

  Part table_;              // the array that grows into; all of it when nothing moves
  Part old_;                // while a growth is under way: the tags from bound_ up
  std::uint64_t bound_ = kAllTags;
  std::size_t size_ = 0;
  std::size_t frontier_ = 0;  // slots of old_ before it have moved,
  std::size_t released_ = 0;  // and the pages of those before this one are given back
  std::size_t debt_ = 0;      // slots that insertions owe
  std::uint64_t moved_slots_ = 0;
};

}  // namespace kv
