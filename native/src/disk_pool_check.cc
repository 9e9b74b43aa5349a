// The laws of the disk pool, recomputed from scratch.
#include <algorithm>
#include <string>
#include <utility>

#include "disk_pool.h"

namespace kv {

namespace {

[[noreturn]] void unlawful(const char* what, std::size_t id, const char* law) {
  throw Broken(std::string("disk: ") + what + " " + std::to_string(id) + ": " + law);
}

}  // namespace

void DiskPool::check() const {
  if (closed_) return;  // nothing is left to hold
  std::size_t members = 0;
  for (const auto& in : in_) members += in.size();
  if (members != segments_.size()) throw Broken("disk: the states of segments do not add up");
  for (std::uint32_t segment = 0; segment < segments_.size(); ++segment) check_segment(segment);
  if (filling_ != kNone && segments_[filling_].state != SegmentState::kFilling)
    unlawful("segment", filling_, "is filled in another state");
  if (in_[static_cast<std::size_t>(SegmentState::kFilling)].size() != (filling_ != kNone ? 1 : 0))
    throw Broken("disk: not exactly one segment is filled");

  std::size_t readable = 0, bytes = 0, writing = 0, held = 0;
  std::unordered_map<NodeId, std::size_t> by_root;
  for (NodeId id = 0; id < std::min(nodes_.size(), index_.ids()); ++id) {
    nodes_.check(id);
    const OnDisk state = nodes_.state(id);
    if (state == OnDisk::kNot) continue;
    const RecordRef ref = nodes_.ref(id);
    if (ref.segment >= segments_.size() || ref.record >= segments_[ref.segment].records.size() ||
        record(ref).node != id || record(ref).copy)
      unlawful("node", id, "its record is not its own");
    readable += state == OnDisk::kReadable;
    bytes += state == OnDisk::kReadable ? format_of(ref).slot_bytes() : 0;
    writing += state != OnDisk::kReadable;
    by_root[index_.root_of(id)] += format_of(ref).slot_bytes();
    held += state == OnDisk::kHeld;
    if ((state == OnDisk::kHeld) != held_.contains(id)) unlawful("node", id, "waits, or is said to, and not both");
  }
  if (readable != readable_ || bytes != live_bytes_ || writing != writing_ || held != held_.size())
    throw Broken("disk: the sums over records are off");
  usage_.check(by_root);

  std::size_t open = 0, under_way = 0;
  for (const auto& [id, job] : jobs_) open += job.open;
  for (const DiskSegment& segment : segments_) under_way += segment.writing + segment.readers;
  if (evacuation_) under_way -= 2 * evacuation_->open;  // an order reads in one segment and writes in another
  if (open != under_way + held) throw Broken("disk: jobs and segments count other orders");
  if (directory_->options().capacity_bytes > 0 && directory_->bytes() > file_bytes_max_)
    throw Broken("disk: the files are larger than the capacity, and than they were");
}

void DiskPool::check_segment(std::uint32_t segment) const {
  const DiskSegment& s = segments_[segment];
  if (!in_[static_cast<std::size_t>(s.state)].contains(segment)) unlawful("segment", segment, "in another state's set");
  using enum SegmentState;
  const bool holds = s.state == kFilling || s.state == kSealing || s.state == kSealed || s.state == kEvacuating ||
                     s.state == kBroken;
  if (!holds && (!s.records.empty() || !s.idle())) unlawful("segment", segment, "has records, and no state for them");
  if (s.writing > 0 && (s.state == kSealed || s.state == kEvacuating))
    unlawful("segment", segment, "is written to after it was sealed");
  if ((s.state == kEvacuating) != (evacuation_ && evacuation_->segment == segment))
    unlawful("segment", segment, "is EVACUATING and nobody does it, or the reverse");
  if (s.state == kSealed && !s.synced()) unlawful("segment", segment, "SEALED, but not synced");
  if (s.records.empty()) return;

  std::vector<std::pair<std::uint32_t, std::uint32_t>> taken;  // pages
  std::size_t live = 0;
  std::uint32_t live_pages = 0;
  for (std::uint32_t i = 0; i < s.records.size(); ++i) {
    const DiskRecord& r = s.records[i];
    if (r.node == kNone) continue;
    ++live;
    live_pages += pages_of(r);
    check_record({segment, i});
    taken.emplace_back(r.page, r.page + pages_of(r));
  }
  if (live != s.live || live_pages != s.live_pages) unlawful("segment", segment, "counts other live records");
  if (s.live_pages + s.trimmed_pages > s.next_page) unlawful("segment", segment, "has more holes than room");
  std::sort(taken.begin(), taken.end());
  for (std::size_t i = 0; i < taken.size(); ++i) {
    if (taken[i].first < kHeaderPages || taken[i].second > s.next_page)
      unlawful("segment", segment, "a record lies outside");
    if (i > 0 && taken[i].first < taken[i - 1].second) unlawful("segment", segment, "two records overlap");
  }
  if (s.state == kFilling && s.next_page > s.end_page(0)) unlawful("segment", segment, "has no room for its footer");
}

void DiskPool::check_record(RecordRef ref) const {
  const DiskRecord& r = record(ref);
  if (!index_.live(r.node)) unlawful("segment", ref.segment, "holds a record of a node that does not exist");
  if (!r.copy && (nodes_.state(r.node) == OnDisk::kNot || nodes_.ref(r.node) != ref))
    unlawful("segment", ref.segment, "holds a record that its node does not name");
  if (!r.copy) return;
  const auto names = [&](const Move& move) { return move.to == ref; };
  if (!evacuation_ || std::none_of(evacuation_->moves.begin(), evacuation_->moves.end(), names))
    unlawful("segment", ref.segment, "holds a copy that nobody makes");
}

}  // namespace kv
