// Taking up what an earlier process has left: segments first, then their records, parents before children.
#include <algorithm>
#include <numeric>
#include <utility>

#include "disk_pool.h"

namespace kv {

DiskAdopted DiskPool::adopt(const DiskSurvey& survey) {
  if (closed_) throw Invalid("disk pool: closed");
  if (!segments_.empty()) throw Invalid("adopt: once, before anything else");
  if (survey.directory() != directory_) throw Invalid("survey: of another directory");
  if (survey.segments().size() != directory_->segments().size()) throw Invalid("survey: not read");
  DiskAdopted out;
  segments_.resize(survey.segments().size());
  take_up_segments(survey, out);
  take_up_records(survey, out);
  adopted_ = true;
  for (std::uint32_t s = 0; s < segments_.size(); ++s) {
    DiskSegment& segment = segments_[s];
    out.segments += segment.live > 0;
    if (segment.state == SegmentState::kSealed && segment.live == 0) emptied_.push_back(s);
    if (segment.state != SegmentState::kSealing) continue;
    // What could not be read may be readable another time: a footer would say that it never was.
    segment.footless = segment.error != 0 || segment.end_page(0) < segment.next_page;
    out.unsealed += segment.live > 0;
    segment.dirty = segment.adopted = true;  // found in the file; on the medium is what a sync says
    advance(s);
  }
  count_room();
  again();
  return out;
}

// ---- segments --------------------------------------------------------------------------------------------

void DiskPool::take_up_segments(const DiskSurvey& survey, DiskAdopted& out) {
  std::vector<std::uint32_t> order(segments_.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::pair(file(a).header.sequence, a) < std::pair(file(b).header.sequence, b);
  });
  for (std::uint32_t s : order) {
    const FoundSegment& found = survey.segments()[s];
    DiskSegment& segment = segments_[s];
    in_[static_cast<std::size_t>(SegmentState::kGone)].insert(s);
    out.rotten += found.rotten;
    sequence_ = std::max(sequence_, file(s).header.sequence);
    if (found.state == FoundSegment::State::kUnfinished) {
      if (file(s).fd) directory_->discard(s);
      continue;
    }
    const bool empty = found.records.empty() && found.error == 0;
    if (found.state == FoundSegment::State::kEmpty || empty) {
      move(s, SegmentState::kFree);
      continue;
    }
    const bool seal = found.state == FoundSegment::State::kUnsealed;
    move(s, found.records.empty() ? SegmentState::kBroken : seal ? SegmentState::kSealing : SegmentState::kSealed);
    clock_ += 2;
    segment.age = clock_;
    segment.error = found.error;
    segment.pages = file(s).pages;
    segment.sequence = file(s).header.sequence;
    segment.nonce = file(s).header.nonce;
    segment.next_page = found.end_page;
    segment.records.resize(found.records.size());
  }
}

// ---- records ---------------------------------------------------------------------------------------------

// Sorted by depth, so that a parent has been taken up before its children are looked at; among those of one
// depth the newest segment comes first, so that of two records of a block the newer one is there already.
void DiskPool::take_up_records(const DiskSurvey& survey, DiskAdopted& out) {
  const auto& found = survey.segments();
  std::vector<std::size_t> starts(kDepthMax + 2, 0);
  std::vector<std::uint32_t> order;
  std::size_t count = 0;
  for (std::uint32_t s = 0; s < segments_.size(); ++s) {
    if (segments_[s].records.empty()) continue;
    order.push_back(s);
    count += segments_[s].records.size();
    for (const FooterEntry& entry : found[s].records) ++starts[std::min(entry.depth, kDepthMax) + 1];
  }
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return segments_[a].age > segments_[b].age; });
  std::vector<RecordRef> sorted(count);
  for (std::uint32_t s : order)
    for (auto i = static_cast<std::uint32_t>(segments_[s].records.size()); i-- > 0;)  // the newest first
      sorted[starts[std::min(found[s].records[i].depth, kDepthMax)]++] = {s, i};

  index_.prepare(count);
  std::vector<NodeId> taken;
  taken.reserve(count);
  for (const RecordRef& ref : sorted) {
    const NodeId node = take_up(ref, found[ref.segment].records[ref.record], out);
    if (node != kNone) taken.push_back(node);
  }
  // See "Who stays": whoever was written after what is above it has used that.
  for (std::size_t i = taken.size(); i-- > 0;)
    nodes_.lift_parent(taken[i], segments_[nodes_[taken[i]].segment].age);
  out.readable = taken.size();
}

// The record's node, or kNone with the reason counted.
NodeId DiskPool::take_up(RecordRef ref, const FooterEntry& entry, DiskAdopted& out) {
  DiskSegment& segment = segments_[ref.segment];
  const NodeId parent = parent_of(entry, out);
  if (parent == kNone) return kNone;
  NodeId node = index_.find(entry.key);
  if (node != kNone && (index_.node(node).parent != parent || index_.node(node).depth != entry.depth)) {
    ++out.orphaned;
    return kNone;
  }
  if (node != kNone && nodes_.readable(node)) {
    ++out.older;
    return kNone;
  }
  const std::uint32_t format = formats_.number(entry.format);
  if (node == kNone && format != kNone) node = index_.make(parent, entry.key);
  if (node == kNone || format == kNone) {
    ++out.no_room;
    return kNone;
  }
  nodes_.grow();
  segment.records[ref.record] = {node, entry.page, entry.payload_crc, static_cast<std::uint16_t>(format), false};
  ++segment.live;
  segment.live_pages += pages_of(segment.records[ref.record]);
  ++index_.node(node).holders;
  index_.changed();
  nodes_.place(node, ref, OnDisk::kReadable);
  ++readable_;
  live_bytes_ += entry.format.slot_bytes();
  usage_.add(index_.root_of(node), entry.format.slot_bytes());
  return node;
}

// A readable node here, or a root; else kNone, with the reason counted.
NodeId DiskPool::parent_of(const FooterEntry& entry, DiskAdopted& out) {
  NodeId parent = index_.find(entry.parent);
  // A block at depth 1 names its root, which exists by being named; its tenant says so at attach, or never does.
  if (parent == kNone && entry.depth == 1) {
    if (index_.roots_full()) {
      ++out.no_room;
      return kNone;
    }
    parent = index_.root(entry.parent);
  }
  const bool reachable = parent != kNone && index_.node(parent).depth + 1 == entry.depth &&
                         (entry.depth == 1 || nodes_.readable(parent));
  if (reachable) return parent;
  ++out.orphaned;
  return kNone;
}

}  // namespace kv
