// What was dropped stays dropped: a record lies in its segment until that is recycled, and a restart would find it.
#include <algorithm>

#include "disk_pool.h"

namespace kv {

DiskPool::Mark DiskPool::mark() const {
  Mark last;
  for (const DiskSegment& s : segments_)
    if (!s.records.empty() && s.sequence >= last.sequence) last = {s.sequence, s.next_page};
  return last;
}

std::uint64_t DiskPool::oldest_sequence() const {
  std::uint64_t oldest = sequence_ + 1;
  for (const DiskSegment& s : segments_) {
    if (!s.records.empty()) oldest = std::min(oldest, s.sequence);
    if (s.old_sequence != 0) oldest = std::min(oldest, s.old_sequence);
  }
  return oldest;
}

std::size_t DiskPool::forget_before(const std::unordered_map<NodeId, Mark>& roots) {
  require_open();
  Mark last;
  for (const auto& [root, mark] : roots) {
    index_.require(root, "root");
    last = std::max(last, mark);
  }
  const std::size_t before = readable_;
  for (const DiskSegment& s : segments_) {
    if (s.sequence > last.sequence) continue;
    std::vector<NodeId> gone;  // what is forgotten takes all below it along, wherever that lies
    for (const DiskRecord& r : s.records) {
      if (r.node == kNone || r.copy) continue;
      const auto dropped = roots.find(index_.root_of(r.node));
      if (dropped != roots.end() && Mark{s.sequence, r.page} < dropped->second) gone.push_back(r.node);
    }
    for (NodeId node : gone)
      if (index_.live(node)) forget(node);
  }
  return before - readable_;
}

}  // namespace kv
