// The filling of slots: reserve, then exactly one of publish and abort per slot.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "pool.h"

namespace kv {

// A running reserve() stands on the deepest node it has reached: neither the node nor any bytes above it leave.
void HostPool::stand_on(NodeId node) {
  ref(node);
  ++index_.node(node).holders;
}

void HostPool::step_off(NodeId node) {
  --index_.node(node).holders;
  unref(node);
  index_.reap(node);
}

bool HostPool::being_filled(NodeId node, const Filler& filler) const {
  const SlotId newest = fills_.find(node);
  return newest != kNone && filler.now_s - record(newest).since_s < filler.stall_s;
}

Reserved HostPool::reserve(NodeId parent, std::span<const Key> keys, const SlotFormat& format, Filler filler) {
  if (!std::isfinite(filler.now_s) || !(filler.stall_s >= 0))
    throw Invalid("now_s, stall_s: must be finite and not negative");
  const std::vector<NodeId> known = index_.resolve(parent, keys);
  const std::size_t size_class = slabs_.class_for(format.slot_bytes());
  index_.prepare(keys.size());  // also those known now may have to make room
  fills_.reserve(keys.size());

  Reserved out;
  out.nodes.reserve(keys.size());
  out.slots.reserve(keys.size());
  Evictions evictions;
  const NodeId root = index_.root_of(parent);
  // The chain was used just now, so what it has further down leaves last. But it may leave: a hole near the head
  // is worth more than the tail behind it, which nobody can reach.
  policy_.touch(known.empty() ? parent : known.back());
  NodeId up = parent;
  stand_on(up);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    NodeId node = i < known.size() && index_.is(known[i], up, keys[i]) ? known[i] : kNone;
    if (node != kNone) stand_on(node);  // before room is made: hollow, it might go with the last leaf below it
    SlotId slot = kNone;
    if (node != kNone && index_.node(node).host_slot != kNone) {
      ++out.filled;
    } else if (node != kNone && being_filled(node, filler)) {
      ++out.elsewhere;
    } else {
      out.over_limit = !make_own_room(root, format.slot_bytes(), evictions);
      if (!out.over_limit) slot = take_slot(size_class, evictions);
      const bool room = slot != kNone && (node != kNone || make_node_room());
      if (!room) {
        if (slot != kNone) slabs_.give(slot);
        if (node != kNone) step_off(node);
        break;
      }
      if (node == kNone) stand_on(node = index_.make(up, keys[i]));
      hand_out(node, slot, filler, format);
    }
    step_off(up);
    up = node;
    out.nodes.push_back(node);
    out.slots.push_back(slot);
  }
  step_off(up);
  out.dropped = keys.size() - out.nodes.size();
  (out.over_limit ? dropped_.over_limit : dropped_.no_room) += out.dropped;
  return out;
}

// Invalid unless every slot is FILLING for its node and named once.
void HostPool::require_filling(std::span<const NodeId> nodes, std::span<const SlotId> slots) const {
  if (nodes.size() != slots.size())
    throw Invalid("slots: " + std::to_string(slots.size()) + " for " + std::to_string(nodes.size()) + " nodes");
  if (slots.size() > kKeysMax)
    throw Invalid("slots: at most " + std::to_string(kKeysMax) + " in one call, got " +
                  std::to_string(slots.size()));
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const Slabs::Spot spot = slabs_.locate(slots[i]);
    const bool taken = spot.slab != kNone && slabs_.taken(spot);
    if (!taken || record(slots[i]).state != SlotState::kFilling || record(slots[i]).node != nodes[i])
      throw Invalid("slots[" + std::to_string(i) + "]: slot " + std::to_string(slots[i]) +
                    " is not being filled for node " + std::to_string(nodes[i]));
  }
  std::vector<SlotId> sorted(slots.begin(), slots.end());
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) throw Invalid("slots: slot " + std::to_string(*twice) + " is named twice");
}

std::vector<std::uint8_t> HostPool::publish(std::span<const NodeId> nodes, std::span<const SlotId> slots,
                                            const Content& content) {
  require_filling(nodes, slots);
  if (content.crcs.size() != slots.size())
    throw Invalid("crcs: " + std::to_string(content.crcs.size()) + " for " + std::to_string(slots.size()) +
                  " slots");
  if (content.checked > 1) throw Invalid("checked: must be 0 (none) or 1 (crc)");
  for (SlotId slot : slots) {
    const std::size_t room = slabs_.slot_bytes(slabs_.class_of(slabs_.locate(slot).slab));
    if (content.length == 0 || content.length > room)
      throw Invalid("length: must be in [1, " + std::to_string(room) + "], got " + std::to_string(content.length));
  }
  // Parents publish first, in whatever order the caller names them.
  std::vector<std::uint32_t> order(slots.size());
  std::iota(order.begin(), order.end(), 0u);
  const auto by_depth = [&](std::uint32_t a, std::uint32_t b) {
    return index_.node(nodes[a]).depth < index_.node(nodes[b]).depth;
  };
  if (!std::is_sorted(order.begin(), order.end(), by_depth))
    std::stable_sort(order.begin(), order.end(), by_depth);

  std::vector<std::uint8_t> ready(slots.size(), 0);
  for (std::uint32_t i : order) ready[i] = publish_one(nodes[i], slots[i], content, content.crcs[i]);
  return ready;
}

// READY if nobody was first and the parent's bytes are there or on a lower tier; else FREE.
bool HostPool::publish_one(NodeId node, SlotId slot, const Content& content, std::uint32_t crc) {
  Node& n = index_.node(node);
  const Node& up = index_.node(n.parent);
  const bool lost = n.host_slot != kNone;
  const bool orphaned = !lost && up.depth > 0 && up.host_slot == kNone && !(lower_ && lower_->reads(n.parent));
  forget_fill(node, slot);
  if (lost || orphaned) {
    dropped_.lost += lost;
    dropped_.orphaned += orphaned;
    take_back(node, slot, SlotState::kFilling);
    return false;
  }
  record(slot).older = kNone;
  ControlEntry& control = arena_->control(slot);
  control.length = static_cast<std::uint32_t>(content.length);
  control.crc = crc;
  control.checked = content.checked;
  std::memcpy(control.fingerprint, n.key.bytes.data(), sizeof control.fingerprint);
  move(slot, SlotState::kFilling, SlotState::kReady);
  if (ledger_ && content.checked != 0)
    ledger_->ready(slot, {n.key, up.key, n.depth, control.length, crc});
  else if (ledger_)
    ledger_->free(slot);  // nobody may read it (see Reading in copy.cc): not worth keeping
  n.host_slot = slot;
  policy_.touch(node);
  offer_if_candidate(node);
  return true;
}

void HostPool::abort(std::span<const NodeId> nodes, std::span<const SlotId> slots) {
  require_filling(nodes, slots);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    forget_fill(nodes[i], slots[i]);
    take_back(nodes[i], slots[i], SlotState::kFilling);
  }
}

}  // namespace kv
