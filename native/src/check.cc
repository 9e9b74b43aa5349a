#include "check.h"

#include <algorithm>
#include <string>

#include "index.h"
#include "pool.h"

namespace kv {

namespace {

[[noreturn]] void broken(const char* what, std::uint32_t id, const char* law) {
  throw Broken(std::string(what) + " " + std::to_string(id) + ": " + law);
}

}  // namespace

void Index::check() const { Checker(*this).step(kCheckAll); }
void HostPool::check() const { Checker(index_, this).step(kCheckAll); }

Checker::Checker(const Index& index, const HostPool* host)
    : index_(index), host_(host), version_(index.version()), ids_(index.ids()), children_(ids_), held_(ids_),
      refs_(host == nullptr ? 0 : ids_) {
  if (host != nullptr) host->slabs_.check();
}

bool Checker::settled() const noexcept { return index_.version() == version_; }

bool Checker::step(std::size_t most) {
  const std::size_t slice = std::max<std::size_t>(most, 1);
  for (std::size_t left = slice; left > 0 && phase_ != Phase::kDone;) {
    const std::uint32_t before = at_;
    const Phase phase = phase_;
    if (phase == Phase::kSlots) slots(left);
    if (phase == Phase::kHolders) holders(left);
    if (phase == Phase::kNodes) nodes(left);
    if (phase == Phase::kCounts) counts(left);
    left -= std::min<std::size_t>(left, at_ > before ? at_ - before : 1);
  }
  return phase_ == Phase::kDone;
}

// ---- slots of the arena ----------------------------------------------------------------------------------

void Checker::slots(std::size_t most) {
  if (host_ == nullptr || slab_ == host_->slabs_.slabs()) {
    phase_ = Phase::kHolders;
    slab_ = at_ = 0;
    return;
  }
  const Slabs& slabs = host_->slabs_;
  const bool owned = slabs.class_of(slab_) != kClassesMax;
  const std::size_t in_slab = owned ? slabs.slots_in(slab_) : 0;
  if (owned && host_->records_[slab_].size() != in_slab) broken("pool: slab", slab_, "has records for another class");
  for (std::size_t done = 0; done < most && at_ < in_slab; ++done, ++at_) slot(slab_, at_);
  if (at_ < in_slab) return;
  ++slab_;
  at_ = 0;
}

void Checker::slot(std::uint32_t slab, std::uint32_t index) {
  const HostPool& pool = *host_;
  const HostPool::Record& r = pool.records_[slab][index];
  const SlotId id = pool.slabs_.slot_at({slab, index});
  ++by_state_[static_cast<std::size_t>(r.state)];
  if (pool.slabs_.taken({slab, index}) != (r.state != SlotState::kFree))
    broken("pool: slot", id, "free and used at once");
  if (r.state == SlotState::kFree) {
    if (r.node != kNone) broken("pool: slot", id, "FREE but names a node");
    return;
  }
  const std::size_t bytes = pool.slabs_.slot_bytes(pool.slabs_.class_of(slab));
  used_bytes_ += bytes;
  if (sum_ == nullptr || r.root != sum_root_) {  // neighbours mostly have one root
    sum_ = &bytes_[r.root];
    sum_root_ = r.root;
  }
  *sum_ += bytes;
  if (!index_.live(r.node)) broken("pool: slot", id, "its node does not exist");
  if (r.node < ids_) ++refs_[r.node], ++held_[r.node];
  const ControlEntry& control = pool.arena_->control(id);
  if (control.state.load(std::memory_order_acquire) != static_cast<std::uint32_t>(r.state))
    broken("pool: slot", id, "its control entry says another state");
  if (control.generation.load(std::memory_order_acquire) == 0)
    broken("pool: slot", id, "handed out in generation 0");
  if ((r.state == SlotState::kReady) != (index_.node(r.node).host_slot == id))
    broken("pool: slot", id, "READY for a node that does not name it, or the reverse");
  if (r.state == SlotState::kReady) ready(id, r.node);
  if (r.state == SlotState::kFilling) filling(id, r.node);
  if ((r.state == SlotState::kDraining) != (pool.draining_.find(id) != kNone))
    broken("pool: slot", id, "DRAINING but waits for no reader, or the reverse");
}

void Checker::ready(SlotId slot, NodeId node) const {
  const Slabs& slabs = host_->slabs_;
  const ControlEntry& control = host_->arena_->control(slot);
  if (std::memcmp(control.fingerprint, index_.node(node).key.bytes.data(), sizeof control.fingerprint) != 0)
    broken("pool: slot", slot, "its control entry has another key's fingerprint");
  if (control.length == 0 || control.length > slabs.slot_bytes(slabs.class_of(slabs.locate(slot).slab)))
    broken("pool: slot", slot, "its control entry has an impossible length");
}

// It stands in its node's list, newest first, and so do only FILLING slots of that node.
void Checker::filling(SlotId slot, NodeId node) {
  bool listed = false;
  const SlotId newest = host_->fills_.find(node);
  newest_fills_ += newest == slot;
  for (SlotId s = newest; s != kNone; s = host_->record(s).older) {
    if (host_->record(s).node != node || host_->record(s).state != SlotState::kFilling)
      broken("pool: slot", s, "listed as FILLING for another node");
    listed = listed || s == slot;
  }
  if (!listed) broken("pool: slot", slot, "FILLING but not listed under its node");
}

// ---- holders and nodes -----------------------------------------------------------------------------------

void Checker::holders(std::size_t most) {
  if (!settled() || slab_ == index_.places_.size()) {
    phase_ = Phase::kNodes;
    at_ = 0;
    return;
  }
  const auto count = [&](NodeId id) {
    if (!index_.live(id)) broken("index: node", id, "does not exist, but a place holds its bytes");
    ++held_[id];
  };
  const Place* place = index_.places_[slab_];
  at_ = place == host_ ? kNone  // its slots have been counted
                       : place->holders(at_, static_cast<std::uint32_t>(std::min<std::size_t>(most, kNone - 1)), count);
  if (at_ != kNone) return;
  ++slab_;
  at_ = 0;
}

void Checker::nodes(std::size_t most) {
  for (std::size_t done = 0; done < most && at_ < index_.ids(); ++done, ++at_) node(at_);
  if (at_ < index_.ids()) return;
  phase_ = Phase::kCounts;
  at_ = 0;
}

void Checker::node(NodeId id) {
  const Node& n = index_.node(id);
  if (index_.free_.has(id) != (n.depth == kNone)) broken("index: node", id, "free and live at once, or neither");
  if (n.depth == kNone) {
    if (n.host_slot != kNone) broken("pool: node", id, "holds a slot but is free");
    return;
  }
  tree(id, n);
  if (host_ != nullptr) bytes(id, n);
  ++live_;
  roots_ += n.depth == 0;
  if (n.pins == 0 && host_ != nullptr && host_->drains_.contains(id))
    broken("pool: node", id, "DRAINING slots wait for it, but nobody reads below it");
  pins_ += n.pins;
  pinned_ += n.pins > 0;
  if (!settled()) return;
  if (n.parent != kNone) ++children_[n.parent];
  if (host_ == nullptr) return;
  refs_[id] += n.pins > 0;
  if (n.parent != kNone && n.host_refs > 0) ++refs_[n.parent];
}

void Checker::tree(NodeId id, const Node& n) const {
  if ((index_.pinned_.find(id) != kNone) != (n.pins > 0))
    broken("index: node", id, "the set of pinned nodes disagrees");
  if (index_.find(n.key) != id) broken("index: node", id, "its key finds another node");
  if (n.depth == 0) return;
  if (n.children == 0 && n.holders == 0 && n.pins == 0) broken("index: node", id, "removable but not reaped");
  if (!index_.live(n.parent)) broken("index: node", id, "its parent does not exist");
  const Node& up = index_.node(n.parent);
  if (n.depth != up.depth + 1) broken("index: node", id, "depth is not its parent's + 1");
  if (up.children == 0) broken("index: node", id, "its parent counts no children");
  if (n.jump != (up.depth % kJumpStride == 0 ? n.parent : up.jump)) broken("index: node", id, "wrong jump");
}

void Checker::bytes(NodeId id, const Node& n) const {
  const bool kept = n.host_slot != kNone || n.pins > 0;
  if (kept && n.host_refs == 0) broken("pool: node", id, "has bytes or pins but no host_refs");
  if (n.host_refs > 0 && n.parent != kNone && index_.node(n.parent).host_refs == 0)
    broken("pool: node", id, "its parent has no host_refs: it would not leave leaf-first");
  if (n.host_slot == kNone) return;
  const Slabs::Spot spot = host_->slabs_.locate(n.host_slot);
  if (spot.slab == kNone || host_->records_[spot.slab][spot.index].node != id)
    broken("pool: node", id, "names a slot not its own");
  const Node& up = index_.node(n.parent);
  const NodeId root = host_->records_[spot.slab][spot.index].root;
  const NodeId expected = up.depth == 0 ? n.parent : up.host_slot != kNone ? host_->record(up.host_slot).root : root;
  if (root != expected) broken("pool: node", id, "paid for by another root than the block above it");
  if (n.host_refs == 1 && host_->policy_.queue_of(id) != host_->queue_of(n.host_slot))
    broken("pool: node", id, "may leave but is not in the queue of its lane and class");
}

// ---- counts ----------------------------------------------------------------------------------------------

void Checker::counts(std::size_t most) {
  for (std::size_t done = 0; settled() && done < most && at_ < ids_; ++done, ++at_) {
    const Node& n = index_.node(at_);
    if (n.depth == kNone) continue;
    if (n.children != children_[at_]) broken("index: node", at_, "wrong child count");
    if (n.holders != held_[at_]) broken("index: node", at_, "holders differ from what the pools hold");
    if (host_ != nullptr && n.host_refs != refs_[at_]) broken("pool: node", at_, "wrong host_refs");
  }
  if (settled() && at_ < ids_) return;
  sums();
  phase_ = Phase::kDone;
}

void Checker::sums() const {
  if (index_.table_.size() != index_.live_) throw Broken("index: entries in the table != nodes");
  if (index_.size() > index_.nodes_max()) throw Broken("index: more than nodes_max nodes");
  if (settled() && (live_ != index_.live_ || roots_ != index_.roots_)) throw Broken("index: node counts are off");
  if (settled() && (pins_ != index_.pins_ || pinned_ != index_.pinned_.size()))
    throw Broken("index: the sum of pins is off");
  if (host_ == nullptr) return;
  const HostCounts c = host_->counts();
  if (c.free + c.filling + c.ready + c.draining != host_->capacity_slots())
    throw Broken("pool: free + filling + ready + draining != capacity");
  if (host_->draining_.size() != c.draining) throw Broken("pool: DRAINING slots are not all waiting for readers");
  if (!settled()) return;
  if (by_state_[0] != c.free || by_state_[1] != c.filling || by_state_[2] != c.ready || by_state_[3] != c.draining)
    throw Broken("pool: slot counts by state are off");
  if (used_bytes_ != host_->used_bytes_) throw Broken("pool: used_bytes is off");
  host_->usage_.check(bytes_);
  if (newest_fills_ != host_->fills_.size()) throw Broken("pool: a node without FILLING slots is listed as filled");
}

}  // namespace kv
