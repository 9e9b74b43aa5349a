// Rows named by fingerprints, in the order of their use: what the router's three tables are made of.
//
// A row is its fingerprint and a few words of payload, all of one size; ids are dense, so memory is what is used,
// whatever the cap is. The hash table holds ids only (tag_table.h: 9.8..11.4 B a row, no pause to grow). 0 marks a free
// row, so fingerprint 0 is taken for 1.
//
// Neighbours. Blocks of a chain are stored together, so their rows mostly lie side by side: in rising order in
// fresh memory, in falling order where evicted tails made room. walk() therefore looks at the row beside the last one
// first, which is a stream that the processor prefetches by itself (3..5 ns a block), and asks the table where that
// ends; where it ends again and again, for many keys at once, so that their cache misses overlap.
//
// Order. place() puts the first row of a batch to the front and every further one right behind its predecessor:
// one pass through a chain leaves its head more recently used than its tail, so a tail leaves first. That holds within a
// batch. A block that was stored by a later event than its parent is more recent, until the whole chain is touched.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "fingerprint.h"
#include "tag_table.h"
#include "types.h"
#include "zeroed.h"

namespace kv {

inline constexpr std::size_t kRouterRowsMax = std::size_t{1} << 31;

class RouterRows {
 public:
  // `field` names the cap in errors. Nothing is touched yet.
  RouterRows(std::size_t rows_max, std::size_t payload_words, const char* field)
      : rows_max_(checked(rows_max, field)), stride_(1 + payload_words), words_(rows_max * stride_), links_(rows_max) {
    if (rows_max < kHugeRows) return;
    words_.prefer_huge();
    links_.prefer_huge();
  }

  std::size_t size() const noexcept { return size_; }
  std::size_t rows_max() const noexcept { return rows_max_; }
  bool full() const noexcept { return size_ == rows_max_; }
  std::uint32_t ids() const noexcept { return ids_; }  // all ids in use are below
  bool live(std::uint32_t id) const noexcept { return words_[id * stride_] != 0; }
  std::uint64_t fingerprint(std::uint32_t id) const noexcept { return words_[id * stride_]; }
  std::uint64_t* payload(std::uint32_t id) noexcept { return &words_[id * stride_ + 1]; }
  const std::uint64_t* payload(std::uint32_t id) const noexcept { return &words_[id * stride_ + 1]; }
  std::uint32_t oldest() const noexcept { return oldest_; }
  std::size_t memory_bytes() const noexcept {
    return ids_ * (stride_ * sizeof(std::uint64_t) + sizeof(Link)) + table_.memory_bytes();
  }

  std::uint32_t find(std::uint64_t named) const noexcept {
    const std::uint64_t fp = name(named);
    const auto* entry = table_.find(tag(fp), [&](std::uint32_t id) { return fingerprint(id) == fp; });
    return entry == nullptr ? kNone : entry->value();
  }

  // A new row with a payload of zeros at the front; the caller knows that it is not there and that there is room.
  // May throw std::bad_alloc, changing nothing.
  std::uint32_t insert(std::uint64_t named) {
    table_.prepare(1);
    const std::uint64_t fp = name(named);
    const std::uint32_t id = free_ == kNone ? ids_++ : free_;
    if (id == free_) free_ = links_[id].older;
    words_[id * stride_] = fp;
    table_.insert(tag(fp), id);
    ++size_;
    link(id, kNone);
    return id;
  }

  // To the front (kNone), or right behind another row.
  void place(std::uint32_t id, std::uint32_t behind) noexcept {
    if (id == behind || (behind == kNone ? newest_ == id : links_[id].newer == behind)) return;
    unlink(id);
    link(id, behind);
  }

  void erase(std::uint32_t id) noexcept {
    const std::uint64_t fp = fingerprint(id);
    table_.erase(table_.find(tag(fp), [&](std::uint32_t other) { return other == id; }));
    unlink(id);
    std::fill_n(&words_[id * stride_], stride_, 0);
    links_[id] = {kNone, free_};
    free_ = id;
    --size_;
  }

  // each(i, id) for every key in order, id kNone where it is not known, until it returns false.
  template <class Each>
  void walk(const Fingerprints& keys, Each&& each) const {
    for (std::size_t i = 0; i < keys.size();) {
      const std::size_t start = i;
      std::uint32_t last = find(keys[i]);
      if (!each(i++, last)) return;
      for (const std::uint32_t step : {1u, ~0u}) {  // upwards, then downwards; wraps to a large number at the bottom
        for (; last != kNone && i < keys.size() && last + step < ids_; ++i) {
          if (fingerprint(last + step) != name(keys[i])) break;
          last += step;
          if (!each(i, last)) return;
        }
      }
      if (i - start < kRun && i < keys.size() && !walk_scattered(keys, i, each)) return;
    }
  }

  // Hints for calls that change rows as they go.
  [[gnu::always_inline]] void prefetch(const Fingerprints& keys, std::size_t i) const noexcept {
    if (i < keys.size()) table_.prefetch(tag(name(keys[i])));
  }

  template <class F>
  void each_live(F&& f) const {
    for (std::uint32_t id = 0; id < ids_; ++id)
      if (live(id)) f(id);
  }

  // Broken, naming `what`, unless every live row is found once, the order visits each of them, and the rest are free.
  void check(const std::string& what) const {
    std::size_t alive = 0, ordered = 0, free = 0;
    each_live([&](std::uint32_t id) {
      ++alive;
      if (find(fingerprint(id)) != id) throw Broken(what + ": row " + std::to_string(id) + " is not found");
    });
    for (std::uint32_t id = newest_, newer = kNone; id != kNone; newer = id, id = links_[id].older)
      if (!live(id) || links_[id].newer != newer || ++ordered > size_)
        throw Broken(what + ": the order breaks at row " + std::to_string(id));
    for (std::uint32_t id = free_; id != kNone; id = links_[id].older)
      if (live(id) || ++free > ids_) throw Broken(what + ": the free rows are no list");
    if (alive != size_ || ordered != size_ || table_.size() != size_ || free + size_ != ids_ || size_ > rows_max_)
      throw Broken(what + ": rows, order, table and free rows do not add up");
  }

 private:
  static constexpr std::size_t kAhead = 16;  // keys: about as many as a core has cache misses under way
  static constexpr std::size_t kHugeRows = std::size_t{1} << 18;  // fewer are not worth pages of 2 MiB
  static constexpr std::size_t kRun = 4;     // neighbours that make looking beside pay

  struct Link {
    std::uint32_t newer = 0, older = 0;
  };

  static std::size_t checked(std::size_t rows_max, const char* field) {
    if (rows_max == 0 || rows_max > kRouterRowsMax)
      throw Invalid(std::string(field) + ": must be in [1, " + std::to_string(kRouterRowsMax) + "], got " +
                    std::to_string(rows_max));
    return rows_max;
  }

  static std::uint64_t name(std::uint64_t fp) noexcept { return fp + (fp == 0); }
  // Hashes of engines need not be mixed well.
  static std::uint32_t tag(std::uint64_t fp) noexcept {
    return static_cast<std::uint32_t>(fold(fp, 0x9E3779B97F4A7C15ull));
  }

  // The same from key i on by the table alone, until kRun rows in a row were neighbours; i is where to go on. Three steps
  // that each wait for memory, kAhead keys apart, so that many keys wait at the same time. False: each() has enough.
  template <class Each>
  bool walk_scattered(const Fingerprints& keys, std::size_t& i, Each&& each) const {
    const std::size_t first = i;
    std::array<std::uint32_t, 2 * kAhead> tags, found;  // rings
    std::uint32_t last = kNone;
    for (std::size_t ahead = first, run = 0; i < keys.size() && run < kRun; ++ahead) {
      if (ahead < keys.size()) {
        std::uint32_t& tag_of = tags[ahead % tags.size()];
        tag_of = tag(name(keys[ahead]));
        table_.prefetch(tag_of);
      }
      if (ahead < first + kAhead) continue;
      if (const std::size_t at = ahead - kAhead; at < keys.size()) {
        // Rows of equal tags are rare; should this be the wrong one, the next step asks again.
        const auto* entry = table_.find(tags[at % tags.size()], [](std::uint32_t) { return true; });
        const std::uint32_t id = found[at % found.size()] = entry == nullptr ? kNone : entry->value();
        if (id != kNone) __builtin_prefetch(&words_[id * stride_]);
      }
      if (ahead < first + 2 * kAhead) continue;
      std::uint32_t id = found[i % found.size()];
      if (id != kNone && fingerprint(id) != name(keys[i])) id = find(keys[i]);
      if (!each(i++, id)) return false;
      run = id != kNone && last != kNone && (id == last + 1 || id + 1 == last) ? run + 1 : 0;
      last = id;
    }
    return true;
  }

  void link(std::uint32_t id, std::uint32_t behind) noexcept {
    const std::uint32_t older = behind == kNone ? newest_ : links_[behind].older;
    links_[id] = {behind, older};
    (behind == kNone ? newest_ : links_[behind].older) = id;
    (older == kNone ? oldest_ : links_[older].newer) = id;
  }
  void unlink(std::uint32_t id) noexcept {
    const Link at = links_[id];
    (at.newer == kNone ? newest_ : links_[at.newer].older) = at.older;
    (at.older == kNone ? oldest_ : links_[at.older].newer) = at.newer;
  }

  std::size_t rows_max_;
  std::size_t stride_;
  Zeroed<std::uint64_t> words_;
  Zeroed<Link> links_;  // apart: a walk does not read them
  TagTable table_;
  std::size_t size_ = 0;
  std::uint32_t ids_ = 0;
  std::uint32_t free_ = kNone, newest_ = kNone, oldest_ = kNone;
};

}  // namespace kv
