// The disk pool: room for records, and how a record becomes readable and dies.
#include <algorithm>
#include <cmath>
#include <string>

#include "disk_pool.h"
#include "pool.h"

namespace kv {

// The segment that has room for so many pages, or kNone: there is none now.
std::uint32_t DiskPool::allocate(std::uint32_t pages, For what) {
  if (over_ && what == For::kSave) return kNone;
  for (;;) {
    if (filling_ == kNone && !begin_filling()) return kNone;
    const DiskSegment& segment = segments_[filling_];
    const std::uint32_t end = segment.end_page(1);
    if (segment.next_page + pages > end) {
      seal(std::exchange(filling_, kNone));
      continue;
    }
    // The last segment: what is worth keeping of the oldest must find room here, or nothing ever gets free.
    const bool last = what == For::kSave && spares() == 0 && !can_create();
    const auto share = static_cast<std::uint32_t>(std::ceil(options_.reinsert_share * segment.pages));
    const std::uint32_t kept_free = last ? std::max(share, evacuation_ ? evacuation_->pages_left : 0) : 0;
    return segment.next_page + pages + kept_free <= end ? filling_ : kNone;
  }
}

// A record where allocate() said; its page is the segment's next one.
RecordRef DiskPool::append(std::uint32_t segment, const DiskRecord& record) {
  DiskSegment& s = segments_[segment];
  s.records.push_back(record);
  s.records.back().page = s.next_page;
  s.next_page += pages_of(record);
  s.live_pages += pages_of(record);
  ++s.live;
  ++s.writing;
  ++index_.node(record.node).holders;
  index_.changed();
  return {segment, static_cast<std::uint32_t>(s.records.size() - 1)};
}

RecordHeader DiskPool::header_of(NodeId node, const Key& root, RecordRef ref) const {
  const Node& n = index_.node(node);
  const DiskSegment& segment = segments_[ref.segment];
  return {n.key, index_.node(n.parent).key, root, segment.nonce, segment.sequence, n.depth,
          record(ref).payload_crc, format_of(ref)};
}

RecordAt DiskPool::place_of(RecordRef ref) const {
  const DiskRecord& r = record(ref);
  return {fd(ref.segment), r.page, segments_[ref.segment].nonce, index_.node(r.node).key, r.payload_crc,
          formats_[r.format]};
}

// The record is dead, and its node goes if nothing else keeps it.
void DiskPool::release(RecordRef ref) {
  DiskRecord& r = record(ref);
  const NodeId node = std::exchange(r.node, kNone);
  DiskSegment& s = segments_[ref.segment];
  s.live_pages -= pages_of(r);
  if (--s.live == 0) emptied_.push_back(ref.segment);
  --index_.node(node).holders;
  index_.changed();
  index_.reap(node);
}

// A written record becomes readable, and those that waited for it.
void DiskPool::publish(NodeId node) {
  std::vector<NodeId> stack{node};
  while (!stack.empty()) {
    node = stack.back();
    stack.pop_back();
    const auto waited = held_.extract(node);
    if (!waited.empty()) resolve(waited.mapped().job, waited.mapped().at, MoveStatus::kOk);
    nodes_.set_state(node, OnDisk::kReadable);
    --writing_;
    ++readable_;
    live_bytes_ += format_of(nodes_.ref(node)).slot_bytes();
    if (stored_.size() < kRemovedMax)
      stored_.push_back(index_.node(node).key);
    else
      ++dropped_.events_lost;
    nodes_.each_child(node, [&](NodeId child) {
      if (nodes_.state(child) == OnDisk::kHeld) stack.push_back(child);
    });
  }
}

// The node's own record dies. Below it nothing may wait for it.
void DiskPool::kill(NodeId node) {
  const RecordRef ref = nodes_.ref(node);
  usage_.take(index_.root_of(node), format_of(ref).slot_bytes());
  if (forgetting_) forgotten_ = std::max(forgotten_, Mark{segments_[ref.segment].sequence, record(ref).page + 1});
  if (nodes_.readable(node)) {
    --readable_;
    live_bytes_ -= format_of(ref).slot_bytes();
    if (removed_.size() < kRemovedMax)
      removed_.push_back(index_.node(node).key);
    else
      ++dropped_.events_lost;
  } else {
    --writing_;
    const auto waited = held_.extract(node);
    if (!waited.empty()) resolve(waited.mapped().job, waited.mapped().at, MoveStatus::kDropped);
  }
  nodes_.remove(node);
  release(ref);
}

// A record dies, and those that waited for it are lost: nobody would ever read them.
void DiskPool::lose(NodeId node, std::size_t& count) {
  std::vector<NodeId> doomed{node};
  for (std::size_t i = 0; i < doomed.size(); ++i)
    nodes_.each_child(doomed[i], [&](NodeId child) {
      if (nodes_.state(child) == OnDisk::kHeld) doomed.push_back(child);
    });
  for (std::size_t i = doomed.size(); i-- > 0;) kill(doomed[i]);
  ++count;
  dropped_.lost += doomed.size() - 1;
}

// Everything at and below top dies, leaves first. False when `steps` ran out before the end.
bool DiskPool::kill_tree(NodeId top, std::size_t& count, std::size_t& steps) {
  NodeId node = nodes_.lowest(top);
  while (node != kNone) {
    if (steps == 0) return false;
    --steps;
    const NodeId next = nodes_.next_up(node, top);
    if (nodes_.state(node) != OnDisk::kNot) {
      kill(node);
      ++count;
    }
    node = next;
  }
  return true;
}

}  // namespace kv
