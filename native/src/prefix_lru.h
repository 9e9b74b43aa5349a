// The blocks that one replica is assumed to hold when it sends no events: the `capacity` most recently used ones.
//
// A replica's own cache is an LRU of its capacity, so this is what the exact index would say (a time limit instead
// loses a third of the hits). Chains are touched as a whole, tails leave before heads: then an LRU of blocks is an
// LRU of leaves. When not to use it: for a replica that sends events, or that shares its memory with requests that this
// router does not see.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fingerprint.h"
#include "router_rows.h"
#include "types.h"

namespace kv {

class PrefixLru {
 public:
  explicit PrefixLru(std::size_t capacity) : rows_(capacity, 0, "capacity") {}

  std::size_t size() const noexcept { return rows_.size(); }
  std::size_t capacity() const noexcept { return rows_.rows_max(); }
  std::size_t memory_bytes() const noexcept { return rows_.memory_bytes(); }
  void check() const { rows_.check("prefix lru"); }

  // Leading keys that are here. Touches nothing.
  std::size_t match(const Fingerprints& keys) const {
    check_keys(keys);
    std::size_t length = 0;
    rows_.walk(keys, [&](std::size_t, std::uint32_t id) {
      length += id != kNone;
      return id != kNone;
    });
    return length;
  }

  // The chain is used: all of it is here now, or as much of its head as there is room for. What left for it.
  std::vector<std::uint64_t> touch(const Fingerprints& keys) {
    check_keys(keys);
    std::vector<std::uint64_t> evicted;
    std::uint32_t before = kNone;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      std::uint32_t id = rows_.find(keys[i]);
      if (id == kNone) {
        if (rows_.full()) {
          if (rows_.oldest() == before) break;
          evicted.push_back(rows_.fingerprint(rows_.oldest()));
          rows_.erase(rows_.oldest());
        }
        id = rows_.insert(keys[i]);
      }
      rows_.place(id, before);
      before = id;
    }
    return evicted;
  }

  // How many of them were here.
  std::size_t drop(const Fingerprints& keys) {
    check_keys(keys);
    std::size_t dropped = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::uint32_t id = rows_.find(keys[i]);
      if (id == kNone) continue;
      rows_.erase(id);
      ++dropped;
    }
    return dropped;
  }

  void clear() { rows_ = RouterRows(rows_.rows_max(), 0, "capacity"); }

 private:
  static void check_keys(const Fingerprints& keys) {
    if (keys.size() > kRouterKeysMax)
      throw Invalid("keys: " + std::to_string(keys.size()) + " in one call, the most is " +
                    std::to_string(kRouterKeysMax));
  }

  RouterRows rows_;
};

}  // namespace kv
