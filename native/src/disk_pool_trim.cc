// Room within one account's share of the disk, and how it becomes room in the log.
//
// What trim() takes leaves holes, and a log has no use for a hole: whoever writes within its limit would turn it as
// fast as one without, and whatever others have not used since they wrote it would fall off its end. So where a
// segment consists of such holes by kCompactShare or more, it is *compacted* before any segment is evacuated in the
// usual way: everything that lives in it is written again, used or not, and nobody loses anything. A page that is
// gained so costs at most (1 - kCompactShare) / kCompactShare = 3 pages that are written again.
//
// It follows that an account within its limit pushes nobody out as long as all that lives takes at most
// 1 - kCompactShare of the segments that are neither spare nor being filled: then one of them has that many holes.
// (After a restart the holes are records again until their account is trimmed again.)
#include <string>

#include "disk_pool.h"

namespace kv {

namespace {

constexpr double kCompactShare = 0.25;

}  // namespace

void DiskPool::claim(NodeId root, Account account) {
  require_open();
  index_.require(root, "root");
  if (index_.node(root).depth != 0) throw Invalid("root: node " + std::to_string(root) + " is none");
  usage_.claim(root, account);
}

// The oldest segment with records behind this sequence, or kNone.
std::uint32_t DiskPool::next_written(std::uint64_t after) const noexcept {
  std::uint32_t found = kNone;
  for (std::uint32_t s = 0; s < segments_.size(); ++s)
    if (!segments_[s].records.empty() && segments_[s].sequence > after &&
        (found == kNone || segments_[s].sequence < segments_[found].sequence))
      found = s;
  return found;
}

// The segment with the most holes, if they are enough and what lives in it has a place to go; else kNone.
std::uint32_t DiskPool::compactable() const noexcept {
  if (over_ || readable_ + writing_ > options_.records_max) return kNone;
  std::uint32_t found = kNone;
  for (std::uint32_t segment : in_[static_cast<std::size_t>(SegmentState::kSealed)]) {
    const DiskSegment& s = segments_[segment];
    if (s.passed_over || !s.idle() || s.live == 0 || s.trimmed_pages < kCompactShare * s.pages) continue;
    if (found == kNone || s.trimmed_pages > segments_[found].trimmed_pages) found = segment;
  }
  if (found == kNone || spares() > 0) return found;
  const std::uint32_t needed = segments_[found].live_pages + footer_pages(segments_[found].live);
  const bool fits = filling_ != kNone && segments_[filling_].next_page + needed <= segments_[filling_].end_page(1);
  return fits ? found : kNone;
}

// A round goes through the segments from the oldest on, and through each from its end: there a chain's leaves are. What
// has become a leaf in an older segment is for the next round.
bool DiskPool::trim(Account account, std::size_t bytes, NodeId keep) {
  require_open();
  if (bytes > usage_.limit(account)) return false;
  const auto fits = [&] { return usage_.used(account) <= usage_.limit(account) - bytes; };
  const NodeId above = keep == kNone ? kNone : nodes_.deepest_present(keep);
  Trimming& t = trimming_[account];
  for (std::size_t steps = options_.slice; steps > 0 && !fits();) {
    const std::uint32_t s = next_written(t.after);
    if (s == kNone) {
      const bool over = !t.found && t.used_too;
      t = {0, 0, false, !t.found && !t.used_too};
      if (over) break;
      --steps;
      continue;
    }
    const DiskSegment& segment = segments_[s];
    for (; t.seen < segment.records.size() && steps > 0 && !fits(); ++t.seen) {
      --steps;
      const DiskRecord& r = segment.records[segment.records.size() - 1 - t.seen];
      if (r.node == kNone || r.copy || r.node == above || nodes_[r.node].first_child != kNone) continue;
      if (!nodes_.readable(r.node) || index_.node(r.node).pins > 0 || usage_.account(index_.root_of(r.node)) != account) continue;
      if (nodes_[r.node].stamp > segment.age && !t.used_too) continue;
      segments_[s].trimmed_pages += pages_of(r);
      kill(r.node);
      ++dropped_.over_limit;
      t.found = true;
    }
    if (t.seen < segment.records.size()) continue;
    t.after = segment.sequence;
    t.seen = 0;
  }
  if (!changed_.empty() || !emptied_.empty()) again();
  return fits();
}

}  // namespace kv
