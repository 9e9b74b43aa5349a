// The laws of the host pool, recomputed from scratch. O(nodes + slots), for tests and idle moments.
#include <algorithm>
#include <string>

#include "pool.h"

namespace kv {

namespace {

[[noreturn]] void broken(const char* what, std::uint32_t id, const char* law) {
  throw Broken("pool: " + std::string(what) + " " + std::to_string(id) + ": " + law);
}

}  // namespace

void HostPool::count_holders(std::span<std::uint32_t> counts) const {
  for (std::uint32_t slab = 0; slab < slabs_.slabs(); ++slab) {
    if (slabs_.class_of(slab) == kClassesMax) continue;
    for (const Record& r : records_[slab])
      if (r.state != SlotState::kFree) ++counts[r.node];
  }
}

void HostPool::check() const {
  slabs_.check();
  std::size_t counted[4] = {}, used_bytes = 0, in_fills = 0;
  for (std::uint32_t slab = 0; slab < slabs_.slabs(); ++slab) {
    const std::size_t size_class = slabs_.class_of(slab);
    if (size_class == kClassesMax) continue;
    if (records_[slab].size() != slabs_.slots_in(slab)) broken("slab", slab, "has records for another class");
    for (std::uint32_t i = 0; i < records_[slab].size(); ++i) {
      const Record& r = records_[slab][i];
      ++counted[static_cast<std::size_t>(r.state)];
      if (slabs_.taken({slab, i}) != (r.state != SlotState::kFree))
        broken("slot", slabs_.slot_at({slab, i}), "free and used at once");
      if (r.state != SlotState::kFree) used_bytes += slabs_.slot_bytes(size_class);
      check_slot(slabs_.slot_at({slab, i}), r);
    }
  }
  const HostCounts c = counts();
  if (counted[0] != c.free || counted[1] != c.filling || counted[2] != c.ready || counted[3] != c.draining)
    throw Broken("pool: slot counts by state are off");
  if (c.free + c.filling + c.ready + c.draining != capacity_slots())
    throw Broken("pool: free + filling + ready + draining != capacity");
  if (used_bytes != used_bytes_) throw Broken("pool: used_bytes is off");
  if (draining_.size() != c.draining) throw Broken("pool: DRAINING slots are not all waiting for readers");
  fills_.each([&](NodeId node, SlotId slot) {
    for (; slot != kNone; slot = record(slot).older, ++in_fills)
      if (record(slot).node != node || record(slot).state != SlotState::kFilling)
        broken("slot", slot, "listed as FILLING for another node");
  });
  if (in_fills != c.filling) throw Broken("pool: FILLING slots are not all listed under their nodes");

  std::vector<std::uint32_t> refs(index_.ids(), 0);
  count_holders(refs);
  check_refs(std::move(refs));
}

void HostPool::check_slot(SlotId slot, const Record& r) const {
  if (r.state == SlotState::kFree) {
    if (r.node != kNone) broken("slot", slot, "FREE but names a node");
    return;
  }
  if (!index_.live(r.node)) broken("slot", slot, "its node does not exist");
  const ControlEntry& control = arena_->control(slot);
  if (control.state.load(std::memory_order_acquire) != static_cast<std::uint32_t>(r.state))
    broken("slot", slot, "its control entry says another state");
  if (control.generation.load(std::memory_order_acquire) == 0) broken("slot", slot, "handed out in generation 0");
  if ((r.state == SlotState::kReady) != (index_.node(r.node).host_slot == slot))
    broken("slot", slot, "READY for a node that does not name it, or the reverse");
  if (r.state != SlotState::kReady) return;
  const Key& key = index_.node(r.node).key;
  if (std::memcmp(control.fingerprint, key.bytes.data(), sizeof control.fingerprint) != 0)
    broken("slot", slot, "its control entry has another key's fingerprint");
  if (control.length == 0 || control.length > slabs_.slot_bytes(slabs_.class_of(slabs_.locate(slot).slab)))
    broken("slot", slot, "its control entry has an impossible length");
}

// refs comes in as the own slots of each node.
void HostPool::check_refs(std::vector<std::uint32_t> refs) const {
  std::vector<NodeId> nodes;
  for (NodeId id = 0; id < index_.ids(); ++id) {
    const Node& n = index_.node(id);
    if (n.host_slot != kNone) {
      const Slabs::Spot p = slabs_.locate(n.host_slot);
      if (p.slab == kNone || records_[p.slab][p.index].node != id) broken("node", id, "names a slot not its own");
    }
    if (!index_.live(id)) continue;
    refs[id] += n.pins > 0;
    nodes.push_back(id);
  }
  std::sort(nodes.begin(), nodes.end(),
            [&](NodeId a, NodeId b) { return index_.node(a).depth > index_.node(b).depth; });
  for (NodeId id : nodes) {  // children before parents
    const Node& n = index_.node(id);
    if (n.host_refs != refs[id]) broken("node", id, "wrong host_refs");
    if (n.parent != kNone && refs[id] > 0) ++refs[n.parent];
    if (n.host_refs != 1 || n.host_slot == kNone) continue;
    if (policy_.queue_of(id) != slabs_.class_of(slabs_.locate(n.host_slot).slab))
      broken("node", id, "may leave but is in no queue of its class");
  }
}

}  // namespace kv
