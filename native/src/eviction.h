// What a pool asks of an eviction policy. The pool decides *what may leave* (leaves with bytes and without
// readers: a "candidate"); the policy only decides *which candidate leaves first*. Ids are the pool's own
// (nodes or blocks), a queue is a set of candidates that compete for the same room (a size class, or one tenant's
// part of it).
//
// To add a policy: write one leaf file like lru.h (state per id in a ChunkedArray, a link to the paper, and
// when not to use it), static_assert this concept, run test_lru.cc's model on it, name it in pool.h's Policy.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "types.h"

namespace kv {

inline constexpr std::size_t kQueuesMax = 16'384;

inline constexpr std::uint64_t kNever = ~std::uint64_t{0};

// The next victim of a queue. id == kNone: the queue has no candidate. Lower age leaves first, also when
// victims of different queues are compared.
struct Victim {
  std::uint32_t id = kNone;
  std::uint64_t age = 0;
};

template <class P>
concept EvictionPolicy = requires(P policy, std::uint32_t id, std::size_t queue,
                                  const std::function<bool(std::uint32_t)>& candidate) {
  policy.touch(id);        // id was used now, and with it its whole chain
  policy.inherit(id, id);  // (parent, child): the child leaves, its uses were uses of the parent
  policy.offer(id, queue); // id is a candidate; every transition to candidate is announced, none away from it
  { policy.oldest(queue, candidate) } -> std::same_as<Victim>;  // peek
  { policy.bound(queue) } -> std::same_as<std::uint64_t>;  // no candidate of the queue is older; kNever: it has none
  policy.remove(id);       // of the victim just returned by oldest(): it leaves
  { policy.queue_of(id) } -> std::same_as<std::size_t>;  // where it will be considered; kQueuesMax: nowhere
  { policy.memory_bytes() } -> std::same_as<std::size_t>;
};

}  // namespace kv
