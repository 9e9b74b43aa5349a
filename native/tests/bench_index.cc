// What the index costs, on 1 M nodes whose neighbours lie far apart (chains grown in turns, then shuffled by
// construction): walk, naive parent walk, memory per node, reserve + publish and evict per block.
//
//   bench_index [nodes]      prints one line a measurement; times are medians of many walks
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "kit.h"
#include "pool.h"

using namespace kv;
using test::key_of;
using test::Random;

namespace {

constexpr std::size_t kDepth = 8000;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double rss_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t size = 0, resident = 0;
  statm >> size >> resident;
  return static_cast<double>(resident) * 4096.0;
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

std::uint64_t name_of(std::size_t chain, std::size_t position) { return chain * 100000 + position + 1; }

struct Bench {
  explicit Bench(std::size_t n)
      : chains(n / kDepth), index(2 * n), arena(Arena::create("bench", 2 * n * kPageBytes)),
        pool(index, arena, 64 << 20), tips(chains) {
    for (std::size_t c = 0; c < chains; ++c) tips[c] = index.root(key_of(900000000 + c));
  }

  // Grows every chain by one block per round, in a new random order each time.
  void grow(std::size_t from, std::size_t to) {
    std::vector<std::size_t> order(chains);
    for (std::size_t c = 0; c < chains; ++c) order[c] = c;
    Random random(1);
    for (std::size_t position = from; position < to; ++position) {
      for (std::size_t i = chains; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
      for (std::size_t c : order) {
        const Key key = key_of(name_of(c, position));
        const Reserved r = pool.reserve(tips[c], {&key, 1}, format, {0, 1});
        const std::uint32_t crc = 0;
        pool.publish(r.nodes, r.slots, {{&crc, 1}, format.length(), 0});
        tips[c] = r.nodes[0];
      }
    }
  }

  std::size_t chains;
  SlotFormat format{1, 1, 64};
  Index index;
  std::shared_ptr<Arena> arena;
  HostPool pool;
  std::vector<NodeId> tips;
};

void walks(Bench& b, std::size_t depth) {
  std::vector<double> fast, naive, match;
  std::size_t sum = 0;
  for (std::size_t c = 0; c < b.chains; ++c) {  // every chain once: nothing is warm
    const std::uint32_t position = static_cast<std::uint32_t>(depth - 1);
    const Key key = key_of(name_of(c, position)), root = key_of(900000000 + c);
    const double start = now_s();
    if (c % 2 == 0) {
      const Walk walk = b.index.walk(root, position + 1, {&position, 1}, {&key, 1});
      fast.push_back(now_s() - start);
      const double asked = now_s();
      sum += b.pool.match(walk);
      match.push_back(now_s() - asked);
    } else {
      std::vector<NodeId> nodes(depth);
      NodeId node = b.index.find(key);
      for (std::size_t i = depth; i-- > 0; node = b.index.node(node).parent) nodes[i] = node;
      naive.push_back(now_s() - start);
      sum += nodes[0];
    }
  }
  std::printf("walk %zu of %zu shuffled nodes: %.1f us (%.1f ns a node), naive parent walk %.1f us (%.1f ns): %.1fx; "
              "match %.1f us  [%zu]\n",
              depth, b.index.size(), median(fast) * 1e6, median(fast) * 1e9 / static_cast<double>(depth),
              median(naive) * 1e6, median(naive) * 1e9 / static_cast<double>(depth), median(naive) / median(fast),
              median(match) * 1e6, sum % 2);
}

// The usual save: 100 blocks in one call, into free slots and then by evicting as many.
void saves(std::size_t n) {
  constexpr std::size_t kBatch = 100;
  Index index(2 * n);
  auto arena = Arena::create("bench", n * kPageBytes);
  HostPool pool(index, arena, 64 << 20);
  const SlotFormat format{1, 1, 64};
  const NodeId root = index.root(key_of(0));
  const std::size_t room = arena->pages() / kBatch;
  for (const char* what : {"into free slots", "evicting inline"}) {
    std::vector<std::vector<Key>> batches;
    for (std::size_t i = 0; i < room; ++i)
      batches.push_back(test::keys_of((what[0] == 'i' ? 1 : 2) * 1000000000ull + i * kBatch, kBatch));
    const std::vector<std::uint32_t> crcs(kBatch, 0);
    const double start = now_s();
    for (const auto& keys : batches) {
      const Reserved r = pool.reserve(root, keys, format, {0, 1});
      pool.publish(r.nodes, r.slots, {crcs, format.length(), 0});
    }
    std::printf("reserve + publish, %s: %.0f ns a block\n", what,
                (now_s() - start) * 1e9 / static_cast<double>(room * kBatch));
    pool.take_removed();
  }
  const std::size_t ready = pool.counts().ready;
  const double start = now_s();
  while (pool.evict(format, kKeysMax) > 0) {
  }
  std::printf("evict %zu blocks: %.0f ns a block\n", ready, (now_s() - start) * 1e9 / static_cast<double>(ready));
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t n = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000000;
  Bench b(n);
  b.grow(0, kDepth / 10);
  const double rss = rss_bytes(), arena = 64.0 * static_cast<double>(b.pool.counts().ready);
  const std::size_t nodes = b.index.size(), index = b.index.memory_bytes(), pool = b.pool.memory_bytes();
  b.grow(kDepth / 10, kDepth);
  const double more = static_cast<double>(b.index.size() - nodes);
  const double control = 64.0 * static_cast<double>(b.pool.counts().ready) - arena;  // the arena's own pages
  std::printf("memory per node, RSS slope %zu -> %zu nodes: %.1f B (index %.1f B + pool %.1f B, of these 24 B + 1 bit "
              "per slot, one slot a node)\n",
              nodes, b.index.size(), (rss_bytes() - rss - control) / more,
              static_cast<double>(b.index.memory_bytes() - index) / more,
              static_cast<double>(b.pool.memory_bytes() - pool) / more);
  walks(b, 1000);
  walks(b, kDepth);
  saves(std::min<std::size_t>(n, 500000));
}
