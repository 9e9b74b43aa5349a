#include "pool.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kv {

bool slot_may_move(SlotState from, SlotState to) noexcept {
  using enum SlotState;
  switch (from) {
    case kFree: return to == kFilling;
    case kFilling: return to == kReady || to == kFree;
    case kReady: return to == kFree || to == kDraining;
    case kDraining: return to == kFree;
  }
  return false;
}

HostPool::HostPool(Index& index, std::shared_ptr<Arena> arena, std::size_t slab_bytes, std::shared_ptr<Ledger> ledger)
    : index_(index), arena_(std::move(arena)), ledger_(std::move(ledger)),
      slabs_(arena_->capacity_bytes(), slab_bytes) {
  if (ledger_ && ledger_->pages() != arena_->pages()) throw Invalid("ledger: made for an arena of another size");
  if (!arena_->writable_control())
    throw Invalid("arena: attached by a client; a pool needs the arena that create() made");
  records_.resize(slabs_.slabs());
  index_.claim_host();
  index_.join(this);
  for (NodeId id = 0; id < index_.ids(); ++id)
    if (index_.node(id).pins > 0) pinned(id);
}

// Control entries and ledger stay as they are: a kept arena outlives its pool.
HostPool::~HostPool() {
  std::vector<NodeId> held;
  for (std::uint32_t slab = 0; slab < slabs_.slabs(); ++slab) {
    if (slabs_.class_of(slab) == kClassesMax) continue;
    for (const Record& r : records_[slab])
      if (r.state != SlotState::kFree) held.push_back(r.node);
  }
  for (NodeId id = 0; id < index_.ids(); ++id) {
    index_.node(id).host_slot = kNone;
    index_.node(id).host_refs = 0;
  }
  for (NodeId id : held) --index_.node(id).holders;
  for (NodeId id : held)
    if (index_.live(id)) index_.reap(id);
  index_.leave(this);
  index_.release_host();
}

// ---- one slot --------------------------------------------------------------------------------------------

void HostPool::move(SlotId slot, SlotState from, SlotState to) {
  Record& r = record(slot);
  if (r.state != from || !slot_may_move(from, to))
    throw Broken("pool: slot " + std::to_string(slot) + " in state " +
                 std::to_string(static_cast<int>(r.state)) + " cannot move " +
                 std::to_string(static_cast<int>(from)) + " -> " + std::to_string(static_cast<int>(to)));
  ControlEntry& control = arena_->control(slot);
  // Before anyone may write: a reader that is still copying finds another generation afterwards.
  if (from == SlotState::kFree) control.generation.fetch_add(1, std::memory_order_acq_rel);
  control.state.store(static_cast<std::uint32_t>(to), std::memory_order_release);
  if (ledger_ && from != SlotState::kFree && to != SlotState::kReady) ledger_->free(slot);
  r.state = to;
  index_.changed();
  --by_state_[static_cast<std::size_t>(from)];
  ++by_state_[static_cast<std::size_t>(to)];
  const std::size_t bytes = slabs_.slot_bytes(slabs_.class_of(slabs_.locate(slot).slab));
  if (from == SlotState::kFree) {
    used_bytes_ += bytes;
    usage_.add(r.root, bytes);
  }
  if (to == SlotState::kFree) {
    used_bytes_ -= bytes;
    usage_.take(r.root, bytes);
  }
}

SlotId HostPool::hand_out(NodeId node, SlotId slot, const Filler& filler, const SlotFormat& format) {
  const std::uint32_t slab = slabs_.locate(slot).slab;
  if (records_[slab].size() != slabs_.slots_in(slab)) records_[slab].assign(slabs_.slots_in(slab), Record{});
  Record& r = record(slot);
  r.node = node;
  r.root = index_.root_of(node);
  r.since_s = filler.now_s;
  r.older = fills_.find(node);
  fills_.set(node, slot);
  move(slot, SlotState::kFree, SlotState::kFilling);
  if (ledger_)
    ledger_->filling(slot, arena_->control(slot).generation.load(std::memory_order_relaxed), filler.owner, format);
  ++index_.node(node).holders;
  policy_.touch(node);
  ref(node);
  return slot;
}

// The slot becomes FREE, and its node goes if nothing else keeps it.
void HostPool::take_back(NodeId node, SlotId slot, SlotState from) {
  move(slot, from, SlotState::kFree);
  record(slot) = Record{};
  slabs_.give(slot);
  --index_.node(node).holders;
  unref(node);
  index_.reap(node);
}

void HostPool::forget_fill(NodeId node, SlotId slot) {
  const SlotId newest = fills_.find(node);
  const SlotId older = record(slot).older;
  if (newest == slot) {
    if (older == kNone)
      fills_.erase(node);
    else
      fills_.set(node, older);
    return;
  }
  for (SlotId s = newest; s != kNone; s = record(s).older) {
    if (record(s).older != slot) continue;
    record(s).older = older;
    return;
  }
  throw Broken("pool: FILLING slot " + std::to_string(slot) + " is not among its node's");
}

// ---- who may leave ---------------------------------------------------------------------------------------

std::size_t HostPool::queue_of(SlotId slot) const {
  const std::size_t lane = usage_.lanes() == 1 ? 0 : usage_.lane(record(slot).root);
  return lane * kClassesMax + slabs_.class_of(slabs_.locate(slot).slab);
}

bool HostPool::candidate(NodeId node, std::size_t queue) const {
  const Node& n = index_.node(node);
  return n.host_refs == 1 && n.host_slot != kNone && queue_of(n.host_slot) == queue;
}

void HostPool::offer_if_candidate(NodeId node) {
  const Node& n = index_.node(node);
  if (n.host_refs == 1 && n.host_slot != kNone) policy_.offer(node, queue_of(n.host_slot));
}

// Whoever may leave stands in the queue where it is looked for now.
void HostPool::settle_lanes() {
  if (!std::exchange(lanes_moved_, false)) return;
  for (const auto& slab : records_)
    for (const Record& r : slab)
      if (r.state == SlotState::kReady) offer_if_candidate(r.node);
}

void HostPool::claim(NodeId root, Account account) {
  index_.require(root, "root");
  if (index_.node(root).depth != 0) throw Invalid("root: node " + std::to_string(root) + " is none");
  lanes_moved_ |= usage_.claim(root, account);
}

void HostPool::set_limit(Account account, std::size_t bytes) {
  lanes_moved_ |= usage_.set_limit(account, bytes);
}

void HostPool::ref(NodeId node) {
  while (node != kNone && index_.node(node).host_refs++ == 0) node = index_.node(node).parent;
}

void HostPool::unref(NodeId node) {
  for (;;) {
    Node& n = index_.node(node);
    if (n.host_refs == 0) throw Broken("pool: node " + std::to_string(node) + " has no reference to give back");
    if (--n.host_refs > 0) return offer_if_candidate(node);
    if (n.parent == kNone) return;
    policy_.inherit(n.parent, node);
    node = n.parent;
  }
}

void HostPool::pinned(NodeId node) {
  policy_.touch(node);
  ref(node);
}

void HostPool::unpinned(NodeId node) {
  unref(node);
  const auto waiting = drains_.extract(node);
  if (waiting.empty()) return;
  for (SlotId slot : waiting.mapped()) {
    const std::uint32_t readers = draining_.find(slot) - 1;
    if (readers > 0) {
      draining_.set(slot, readers);
      continue;
    }
    draining_.erase(slot);
    take_back(record(slot).node, slot, SlotState::kDraining);
  }
}

Victim HostPool::oldest(std::size_t queue) {
  return policy_.oldest(queue, [&](NodeId id) { return candidate(id, queue); });
}

// The queue whose next victim is the oldest of all that are meant, or kQueuesMax. Bounds are cheap, some 5 ns a
// queue; only the queue with the lowest is looked at, and that corrects its bound.
std::size_t HostPool::oldest_queue(Among among) {
  const bool any_lane = among.lane == kLanesMax, any_class = among.size_class == kClassesMax;
  const std::size_t lane_stop = any_lane ? usage_.lanes() : among.lane + 1;
  const std::size_t class_stop = any_class ? slabs_.classes() : among.size_class + 1;
  for (;;) {
    std::size_t found = kQueuesMax;
    std::uint64_t least = kNever, second = kNever;
    for (std::size_t lane = any_lane ? 0 : among.lane; lane < lane_stop; ++lane)
      for (std::size_t c = any_class ? 0 : among.size_class; c < class_stop; ++c) {
        const std::uint64_t bound = policy_.bound(lane * kClassesMax + c);
        if (bound < least) {
          second = least;
          least = bound;
          found = lane * kClassesMax + c;
        } else if (bound < second) {
          second = bound;
        }
      }
    if (found == kQueuesMax) return kQueuesMax;
    const Victim victim = oldest(found);
    if (victim.id != kNone && victim.age <= second) return found;
  }
}

void HostPool::removed(NodeId node) {
  if (removed_.size() < kRemovedMax)
    removed_.push_back(index_.node(node).key);
  else
    ++dropped_.events_lost;
}

void HostPool::evict_victim(NodeId node) {
  policy_.remove(node);
  const SlotId slot = index_.node(node).host_slot;
  index_.node(node).host_slot = kNone;
  removed(node);
  ++dropped_.evicted;
  take_back(node, slot, SlotState::kReady);
}

// A slot of the class, evicting as needed, or kNone. Victims go in the order of their last use across all
// classes, so the memory follows the use: a class that is used no longer gives its slabs away one by one,
// and a new layout is never starved. An eviction in another class helps only once it empties a slab, hence
// the bound; beyond it the class lives off its own leaves.
SlotId HostPool::take_slot(std::size_t size_class, Evictions& evictions) {
  for (;;) {
    const SlotId slot = slabs_.take(size_class);
    if (slot != kNone) return slot;
    std::size_t from = oldest_queue({});
    const bool foreign = from != kQueuesMax && from % kClassesMax != size_class;
    if (foreign && ++evictions.foreign > kForeignEvictionsMax) from = oldest_queue({kLanesMax, size_class});
    if (from == kQueuesMax) return kNone;
    evict_victim(oldest(from).id);
  }
}

// Whether the root's account may have so many bytes more, once its own oldest blocks have made room for them. What a
// lowered limit leaves too much leaves here, some thousands in one call.
bool HostPool::make_own_room(NodeId root, std::size_t bytes, Evictions& evictions) {
  if (!usage_.could_fit(root, bytes)) return false;  // never: nothing shall leave for it
  while (!usage_.fits(root, bytes)) {
    const std::size_t from = oldest_queue({usage_.lane(root), kClassesMax});
    if (from == kQueuesMax || ++evictions.own > kForeignEvictionsMax) return false;
    evict_victim(oldest(from).id);
  }
  return true;
}

bool HostPool::make_node_room() {
  for (std::size_t i = 0; index_.full() && i < kNodeEvictionsMax; ++i) {
    const std::size_t from = oldest_queue({});
    if (from == kQueuesMax) return false;
    evict_victim(oldest(from).id);
  }
  return !index_.full();
}

std::size_t HostPool::evict(const SlotFormat& format, std::size_t slots) {
  const std::size_t size_class = slabs_.find_class(format.slot_bytes());
  slots = std::min(slots, kKeysMax);
  for (std::size_t done = 0; done < slots; ++done) {
    const std::size_t from = size_class == kClassesMax ? kQueuesMax : oldest_queue({kLanesMax, size_class});
    if (from == kQueuesMax) return done;
    evict_victim(oldest(from).id);
  }
  return slots;
}

bool HostPool::drop(NodeId node) {
  if (!forget(node)) return false;
  ++dropped_.rot;
  return true;
}

bool HostPool::forget(NodeId node) {
  if (!index_.live(node) || index_.node(node).host_slot == kNone) return false;
  const std::vector<NodeId> readers = index_.pinned_below(node);
  const SlotId slot = index_.node(node).host_slot;
  index_.node(node).host_slot = kNone;
  removed(node);
  if (readers.empty()) {
    take_back(node, slot, SlotState::kReady);
    return true;
  }
  move(slot, SlotState::kReady, SlotState::kDraining);
  draining_.set(slot, static_cast<std::uint32_t>(readers.size()));
  for (NodeId reader : readers) drains_[reader].push_back(slot);
  return true;
}

// ---- questions -------------------------------------------------------------------------------------------

std::size_t HostPool::match(const Walk& walk) const noexcept {
  return walk.ready;
}

std::vector<SlotId> HostPool::slots(std::span<const NodeId> nodes) const {
  std::vector<SlotId> out(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i)
    out[i] = nodes[i] < index_.ids() ? index_.node(nodes[i]).host_slot : kNone;
  return out;
}

void HostPool::touch(NodeId node) {
  index_.require(node, "node");
  policy_.touch(node);
  if (ledger_ && index_.node(node).host_slot != kNone) ledger_->touch(index_.node(node).host_slot);
}

std::vector<NodeId> HostPool::missing(NodeId node) const {
  index_.require(node, "node");
  std::vector<NodeId> chain;
  for (; index_.node(node).depth != 0 && index_.node(node).host_slot == kNone; node = index_.node(node).parent)
    chain.push_back(node);
  return {chain.rbegin(), chain.rend()};
}

std::vector<NodeId> HostPool::ready_nodes(std::size_t start, std::size_t most) const {
  std::vector<NodeId> nodes;
  for (std::size_t slab = start; slab < records_.size() && slab - start < most; ++slab)
    for (const Record& record : records_[slab])
      if (record.state == SlotState::kReady) nodes.push_back(record.node);
  return nodes;
}

// Positions are pages: those of a slab's slots, then those of the next slab.
std::uint32_t HostPool::holders(std::uint32_t start, std::uint32_t most, const HolderOf& each) const {
  const std::size_t slab_pages = slabs_.slab_bytes() / kPageBytes;
  for (std::size_t slab = start / slab_pages; slab < slabs_.slabs(); ++slab) {
    const std::size_t size_class = slabs_.class_of(static_cast<std::uint32_t>(slab));
    const std::size_t slots = size_class == kClassesMax ? 0 : records_[slab].size();
    const std::size_t pages = size_class == kClassesMax ? 1 : slabs_.slot_bytes(size_class) / kPageBytes;
    for (std::size_t i = start % slab_pages / pages; i < slots; ++i, --most) {
      if (most == 0) return static_cast<std::uint32_t>(slab * slab_pages + i * pages);
      if (records_[slab][i].state != SlotState::kFree) each(records_[slab][i].node);
    }
    start = 0;
  }
  return kNone;
}

std::vector<Key> HostPool::take_removed() {
  return index_.only(std::exchange(removed_, {}),
                     [&](NodeId node) { return node == kNone || index_.node(node).host_slot == kNone; });
}

HostDropped HostPool::take_dropped() { return std::exchange(dropped_, {}); }

HostCounts HostPool::counts() const noexcept {
  return {slabs_.free_slots(), by_state_[1], by_state_[2], by_state_[3], slabs_.free_slabs(), used_bytes_};
}

std::size_t HostPool::memory_bytes() const noexcept {
  std::size_t bytes = policy_.memory_bytes() + fills_.memory_bytes() + draining_.memory_bytes();
  for (const auto& slab : records_) bytes += slab.capacity() * sizeof(Record);
  return bytes;
}

}  // namespace kv
