#include "disk_nodes.h"

#include <algorithm>
#include <string>

namespace kv {

void DiskNodes::place(NodeId id, RecordRef ref, OnDisk state) {
  const bool was_present = present(id);
  DiskNode& node = nodes_[id];
  node.record = ref.record;
  node.segment = static_cast<std::uint16_t>(ref.segment);
  node.state = state;
  if (state == OnDisk::kReadable) node.hole = false;
  if (!was_present) list(id);
}

void DiskNodes::set_state(NodeId id, OnDisk state) noexcept {
  nodes_[id].state = state;
  if (state == OnDisk::kReadable) nodes_[id].hole = false;
}

void DiskNodes::remove(NodeId id) noexcept {
  DiskNode& node = nodes_[id];
  node.record = kNone;
  node.segment = 0;
  node.state = OnDisk::kNot;
  node.hole = true;
  if (node.first_child == kNone) unlist(id);
}

void DiskNodes::list(NodeId id) noexcept {
  const NodeId up = index_.node(id).parent;
  DiskNode& node = nodes_[id];
  node.next = nodes_[up].first_child;
  if (node.next != kNone) nodes_[node.next].prev = id;
  nodes_[up].first_child = id;
}

void DiskNodes::unlist(NodeId id) noexcept {
  for (;;) {
    const NodeId up = index_.node(id).parent;
    const DiskNode node = nodes_[id];
    nodes_[id] = DiskNode{};
    if (up == kNone) return;
    if (node.next != kNone) nodes_[node.next].prev = node.prev;
    (node.prev != kNone ? nodes_[node.prev].next : nodes_[up].first_child) = node.next;
    if (present(up)) return;
    id = up;
  }
}

std::size_t DiskNodes::raise(NodeId id, std::uint32_t stamp) noexcept {
  std::size_t changed = 0;
  for (; index_.node(id).depth > 0 && nodes_[id].stamp < stamp; id = index_.node(id).parent, ++changed)
    nodes_[id].stamp = stamp;
  return changed;
}

void DiskNodes::lift_parent(NodeId id, std::uint32_t stamp) noexcept {
  const NodeId up = index_.node(id).parent;
  if (index_.node(up).depth > 0) nodes_[up].stamp = std::max({nodes_[up].stamp, nodes_[id].stamp, stamp});
}

NodeId DiskNodes::deepest_present(NodeId id) const noexcept {
  while (id != kNone && !present(id)) {
    const NodeId jump = index_.node(id).jump;  // present nodes have present parents, so the border is found in strides
    id = jump != kNone && !present(jump) ? jump : index_.node(id).parent;
  }
  return id;
}

NodeId DiskNodes::lowest(NodeId top) const noexcept {
  while (nodes_[top].first_child != kNone) top = nodes_[top].first_child;
  return top;
}

NodeId DiskNodes::next_up(NodeId id, NodeId top) const noexcept {
  while (id != top) {
    if (nodes_[id].next != kNone) return lowest(nodes_[id].next);
    id = index_.node(id).parent;
    if (nodes_[id].state != OnDisk::kNot) return id;  // a hole goes by itself, with the last one below it
  }
  return kNone;
}

void DiskNodes::check(NodeId id) const {
  const auto broken = [&](const char* law) {
    throw Broken("disk: node " + std::to_string(id) + ": " + law);
  };
  const DiskNode& node = nodes_[id];
  if (!present(id)) {
    const bool clean = node.record == kNone && node.segment == 0 && !node.hole && node.next == kNone &&
                       node.prev == kNone && node.stamp == 0;
    if (!clean) broken("nothing of it is on the disk, but its entry is not empty");
    return;
  }
  if (!index_.live(id)) broken("on the disk, but not in the index");
  if ((node.state == OnDisk::kNot) != (node.record == kNone)) broken("its state contradicts its record");
  each_child(id, [&](NodeId child) {
    if (!present(child) || !index_.live(child)) broken("lists a child of which nothing is on the disk");
    if (index_.node(child).parent != id) broken("lists another node's child");
    const NodeId prev = nodes_[child].prev, next = nodes_[child].next;
    if (prev == kNone ? node.first_child != child : nodes_[prev].next != child) broken("its list of children is torn");
    if (next != kNone && nodes_[next].prev != child) broken("its list of children is torn");
  });
  if (index_.node(id).depth == 0) {
    if (node.state != OnDisk::kNot || node.hole || node.stamp != 0) broken("a root has neither record nor stamp");
    return;
  }
  const NodeId up = index_.node(id).parent;
  if (node.prev == kNone && nodes_[up].first_child != id) broken("its parent does not list it");
  if (index_.node(up).depth == 0) return;
  if (nodes_[up].stamp < node.stamp) broken("used after the block above it");
  if (node.state == OnDisk::kReadable && !readable(up) && !nodes_[up].hole)
    broken("readable, but the block above it is neither, nor a hole");
  if (node.state == OnDisk::kHeld && nodes_[up].state != OnDisk::kWriting && nodes_[up].state != OnDisk::kHeld)
    broken("waits for a block that is not on its way");
}

}  // namespace kv
