// Exact least-recently-used order of candidates, with a touch that costs one store.
//
// Each queue is a binary min-heap of (stamp, id) that is corrected lazily: touch() only writes the id's
// current stamp; when an entry with an older stamp reaches the top it is put back with the current one, and
// an entry of an id that is no candidate any more is thrown away (offer() brings it back). Stamps only
// grow, so an entry never stands behind its true place. An id has at most one live entry, noted beside its
// stamp; an entry left behind in another queue is stale, counted, and swept out before stale entries are
// half of a heap: a heap holds at most 2 * ids + 64 entries whatever is touched.
//
// When not to use it: scans longer than the pool evict everything else (S3-FIFO or LRU-2 resist them).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chunks.h"
#include "eviction.h"

namespace kv {

class Lru {
 public:
  void touch(std::uint32_t id) {
    std::uint64_t& word = word_of(id);
    word = (++clock_ << kQueueBits) | (word & kQueueMask);
  }

  void inherit(std::uint32_t parent, std::uint32_t child) {
    const std::uint64_t stamp = word_of(child) >> kQueueBits;
    std::uint64_t& word = word_of(parent);
    if (word >> kQueueBits < stamp) word = (stamp << kQueueBits) | (word & kQueueMask);
  }

  void offer(std::uint32_t id, std::size_t queue) {
    if (queue >= queues_.size()) queues_.resize(queue + 1);
    std::uint64_t& word = word_of(id);
    const std::uint64_t mark = queue + 1;
    if ((word & kQueueMask) == mark) return;
    if ((word & kQueueMask) != 0) ++queues_[(word & kQueueMask) - 1].stale;
    Queue& q = queues_[queue];
    if (q.heap.size() > 64 && q.stale * 2 > q.heap.size()) sweep(q, mark);
    word = (word & ~kQueueMask) | mark;
    push(q, word >> kQueueBits, id);
  }

  // The least recently used candidate of the queue; it stays. Amortised O(log n).
  template <class Candidate>
  Victim oldest(std::size_t queue, const Candidate& candidate) {
    if (queue >= queues_.size()) return {};
    Queue& q = queues_[queue];
    while (!q.heap.empty()) {
      const Entry top = q.heap.front();
      std::uint64_t& word = word_of(top.id);
      if ((word & kQueueMask) != queue + 1) {
        --q.stale;
        pop(q);
      } else if (!candidate(top.id)) {
        word &= ~kQueueMask;
        pop(q);
      } else if (word >> kQueueBits != top.stamp()) {
        pop(q);
        push(q, word >> kQueueBits, top.id);
      } else {
        return {top.id, top.stamp()};
      }
    }
    return {};
  }

  // Takes out the victim that oldest() just returned: it is still at the top of its queue.
  void remove(std::uint32_t id) {
    std::uint64_t& word = word_of(id);
    const std::uint64_t mark = word & kQueueMask;
    if (mark == 0 || queues_[mark - 1].heap.empty() || queues_[mark - 1].heap.front().id != id)
      throw Broken("lru: id " + std::to_string(id) + " is not the oldest of its queue");
    word &= ~kQueueMask;
    pop(queues_[mark - 1]);
  }

  // The queue that holds id's live entry, or kQueuesMax.
  std::size_t queue_of(std::uint32_t id) const {
    const std::uint64_t mark = id < words_.size() ? words_[id] & kQueueMask : 0;
    return mark == 0 ? kQueuesMax : mark - 1;
  }

  std::size_t entries(std::size_t queue) const { return queue < queues_.size() ? queues_[queue].heap.size() : 0; }

  std::size_t memory_bytes() const {
    std::size_t bytes = words_.memory_bytes();
    for (const Queue& q : queues_) bytes += q.heap.capacity() * sizeof(Entry);
    return bytes;
  }

 private:
  // The word of an id: its stamp (56 bits: 2,000 years at a million touches a second) and, below it, the
  // number + 1 of the queue with its live entry.
  static constexpr unsigned kQueueBits = 8;
  static constexpr std::uint64_t kQueueMask = (1u << kQueueBits) - 1;
  static_assert(kQueuesMax < kQueueMask);

  // 12 B, not 16: leaves can be as many as nodes.
  struct Entry {
    std::uint32_t low = 0, high = 0, id = kNone;
    std::uint64_t stamp() const { return std::uint64_t{high} << 32 | low; }
    // std's heaps keep the largest on top, so "less" is "leaves later"; ids break ties for determinism.
    friend bool operator<(const Entry& a, const Entry& b) {
      return a.stamp() != b.stamp() ? a.stamp() > b.stamp() : a.id > b.id;
    }
  };
  struct Queue {
    std::vector<Entry> heap;
    std::size_t stale = 0;
  };

  std::uint64_t& word_of(std::uint32_t id) {
    if (id >= words_.size()) words_.grow(std::size_t{id} + 1);
    return words_[id];
  }

  static void push(Queue& q, std::uint64_t stamp, std::uint32_t id) {
    q.heap.push_back({static_cast<std::uint32_t>(stamp), static_cast<std::uint32_t>(stamp >> 32), id});
    std::push_heap(q.heap.begin(), q.heap.end());
  }

  static void pop(Queue& q) {
    std::pop_heap(q.heap.begin(), q.heap.end());
    q.heap.pop_back();
  }

  // Keeps one entry per id whose word names this queue. Marks are cleared on the way to spot duplicates.
  void sweep(Queue& q, std::uint64_t mark) {
    auto kept = q.heap.begin();
    for (const Entry& e : q.heap) {
      std::uint64_t& word = words_[e.id];
      if ((word & kQueueMask) != mark) continue;
      word &= ~kQueueMask;
      *kept++ = e;
    }
    q.heap.erase(kept, q.heap.end());
    for (const Entry& e : q.heap) words_[e.id] |= mark;
    q.stale = 0;
    std::make_heap(q.heap.begin(), q.heap.end());
  }

  ChunkedArray<std::uint64_t> words_;
  std::uint64_t clock_ = 0;
  std::vector<Queue> queues_;
};
static_assert(EvictionPolicy<Lru>);

}  // namespace kv
