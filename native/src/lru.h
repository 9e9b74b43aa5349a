// Exact least-recently-used order of candidates, with a touch that costs one store.
//
// Each queue is a binary min-heap of (stamp, id) that is corrected lazily: touch() only writes the id's
// current stamp; when an entry with an older stamp reaches the top it is put back with the current one, and
// an entry of an id that is no candidate any more is thrown away (offer() brings it back). Stamps only
// grow, so an entry never stands behind its true place. An id has at most one live entry, noted beside its
// stamp; an entry left behind in another queue is stale, counted, and swept out before stale entries are
// half of a heap: a heap holds at most 2 * ids + 64 entries whatever is touched. (The sweep is one pass, but no
// request can cause it: a node's queue follows from its root, whatever pool asks.)
//
// When not to use it: scans longer than the pool evict everything else (S3-FIFO or LRU-2 resist them).
#pragma once

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
    q.heap.push(entry_of(word >> kQueueBits, id));
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
        q.heap.pop();
      } else if (!candidate(top.id)) {
        word &= ~kQueueMask;
        q.heap.pop();
      } else if (word >> kQueueBits != top.stamp()) {
        q.heap.replace_front(entry_of(word >> kQueueBits, top.id));
      } else {
        return {top.id, top.stamp()};
      }
    }
    return {};
  }

  // A lower bound of the age of whatever oldest() would return; kNever when there is nothing. O(1).
  std::uint64_t bound(std::size_t queue) const {
    return queue >= queues_.size() || queues_[queue].heap.empty() ? kNever : queues_[queue].heap.front().stamp();
  }

  // Takes out the victim that oldest() just returned: it is still at the top of its queue.
  void remove(std::uint32_t id) {
    std::uint64_t& word = word_of(id);
    const std::uint64_t mark = word & kQueueMask;
    if (mark == 0 || queues_[mark - 1].heap.empty() || queues_[mark - 1].heap.front().id != id)
      throw Broken("lru: id " + std::to_string(id) + " is not the oldest of its queue");
    word &= ~kQueueMask;
    queues_[mark - 1].heap.pop();
  }

  // The queue that holds id's live entry, or kQueuesMax.
  std::size_t queue_of(std::uint32_t id) const {
    const std::uint64_t mark = id < words_.size() ? words_[id] & kQueueMask : 0;
    return mark == 0 ? kQueuesMax : mark - 1;
  }

  std::size_t entries(std::size_t queue) const { return queue < queues_.size() ? queues_[queue].heap.size() : 0; }

  std::size_t memory_bytes() const {
    std::size_t bytes = words_.memory_bytes();
    for (const Queue& q : queues_) bytes += q.heap.memory_bytes();
    return bytes;
  }

 private:
  // The word of an id: its stamp (48 bits: nine years at a million touches a second) and, below it, the
  // number + 1 of the queue with its live entry.
  static constexpr unsigned kQueueBits = 16;
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
  // A binary heap in chunks: it grows without copying, whatever it holds.
  class Heap {
   public:
    bool empty() const { return size_ == 0; }
    std::size_t size() const { return size_; }
    std::size_t memory_bytes() const { return entries_.memory_bytes(); }
    const Entry& front() const { return entries_[0]; }

    void push(const Entry& entry) {
      if (size_ == entries_.size()) entries_.grow(size_ + 1);
      std::size_t i = size_++;
      for (; i > 0 && entries_[(i - 1) / 2] < entry; i = (i - 1) / 2) entries_[i] = entries_[(i - 1) / 2];
      entries_[i] = entry;
    }

    void pop() {
      const Entry last = entries_[--size_];
      if (size_ > 0) sink(0, last);
    }
    void replace_front(const Entry& entry) { sink(0, entry); }

    // Keeps the entries that satisfy `keep`. O(n).
    template <class Keep>
    void filter(Keep&& keep) {
      std::size_t kept = 0;
      for (std::size_t i = 0; i < size_; ++i)
        if (keep(entries_[i])) entries_[kept++] = entries_[i];
      size_ = kept;
      for (std::size_t i = size_ / 2; i-- > 0;) sink(i, entries_[i]);
    }

    template <class F>
    void each(F&& f) const {
      for (std::size_t i = 0; i < size_; ++i) f(entries_[i]);
    }

   private:
    void sink(std::size_t i, const Entry entry) {
      for (std::size_t child = 2 * i + 1; child < size_; child = 2 * i + 1) {
        if (child + 1 < size_ && entries_[child] < entries_[child + 1]) ++child;
        if (!(entry < entries_[child])) break;
        entries_[i] = entries_[child];
        i = child;
      }
      entries_[i] = entry;
    }

    ChunkedArray<Entry, 4096> entries_;
    std::size_t size_ = 0;
  };
  struct Queue {
    Heap heap;
    std::size_t stale = 0;
  };

  std::uint64_t& word_of(std::uint32_t id) {
    if (id >= words_.size()) words_.grow(std::size_t{id} + 1);
    return words_[id];
  }

  static Entry entry_of(std::uint64_t stamp, std::uint32_t id) {
    return {static_cast<std::uint32_t>(stamp), static_cast<std::uint32_t>(stamp >> 32), id};
  }

  // Keeps one entry per id whose word names this queue. Marks are cleared on the way to spot duplicates, and
  // the entries that were kept set them again.
  void sweep(Queue& q, std::uint64_t mark) {
    q.heap.filter([&](const Entry& e) {
      std::uint64_t& word = words_[e.id];
      if ((word & kQueueMask) != mark) return false;
      word &= ~kQueueMask;
      return true;
    });
    q.heap.each([&](const Entry& e) { words_[e.id] |= mark; });
    q.stale = 0;
  }

  ChunkedArray<std::uint64_t> words_;
  std::uint64_t clock_ = 0;
  std::vector<Queue> queues_;
};
static_assert(EvictionPolicy<Lru>);

}  // namespace kv
