// Who leaves the disk: one segment at a time gives up what nobody uses, and hands on the rest.
//
//   mark     what lies on the chain of a pinned node (a pin is no use: who writes a block pins it, too)
//   choose   records not used since they were written die, with all below them; the others are candidates
//   trim     candidates beyond the budget die as well, least recently used first
//   copy     those that are left are ordered to be written again
//   wait     until the mover has written them
//   sync     until they are on the medium
//   end      nodes go on with the new records; when nobody reads the old ones, the segment is FREE
//
// Up to and including copy, a pump() does a slice of it.
#include <algorithm>
#include <cerrno>
#include <string>
#include <tuple>
#include <utility>

#include "disk_pool.h"

namespace kv {

namespace {

constexpr std::size_t kMovesPerJob = 64;
// More of a segment is never moved, pinned or not: an evacuation that frees next to nothing would be followed by
// the next one, and so on for ever.
constexpr double kMovedShareMax = 0.5;

}  // namespace

bool DiskPool::wants_evacuation() const noexcept {
  if (evacuation_ || stopped_ || !proven()) return false;
  return over_ || (spares() < spare_target() && !can_create()) || readable_ + writing_ > options_.records_max;
}

// The oldest one that nobody reads. But where segments have to leave and nothing could be written again (after a start
// with less capacity or another size of segments, every one full) the youngest: what is used would be lost with all
// below it, and below the youngest there is nothing. Otherwise what was flushed last stays, whatever becomes of the old.
std::uint32_t DiskPool::victim() const noexcept {
  const auto& sealed = in_[static_cast<std::size_t>(SegmentState::kSealed)];
  const bool leaving = over_ || std::ranges::any_of(sealed, [&](auto s) { return segments_[s].pages != segment_pages_; });
  const bool full = leaving && filling_ == kNone && spares() == 0 && !can_create();
  std::uint32_t found = kNone;
  for (std::uint32_t segment : sealed) {
    const DiskSegment& s = segments_[segment];
    if (s.passed_over || !s.idle()) continue;
    if (found == kNone || (s.age < segments_[found].age) != full) found = segment;
  }
  return found;
}

// While the files are larger than the capacity: the age of the youngest segment that will have to leave. What was used
// only by what is in those has no use any more.
std::uint32_t DiskPool::leaving_age() const {
  const DiskDirectory::Options& sizes = directory_->options();
  const auto kept_free = static_cast<std::ptrdiff_t>(spare_target() + (filling_ == kNone)) -
                         static_cast<std::ptrdiff_t>(spares());
  auto excess = static_cast<std::ptrdiff_t>(directory_->bytes() - sizes.capacity_bytes) +
                kept_free * static_cast<std::ptrdiff_t>(sizes.segment_bytes);
  std::vector<std::pair<std::uint32_t, std::size_t>> sealed;  // age, bytes
  for (std::uint32_t segment : in_[static_cast<std::size_t>(SegmentState::kSealed)])
    sealed.emplace_back(segments_[segment].age, file(segment).bytes());
  std::sort(sealed.begin(), sealed.end());
  std::uint32_t last = 0;
  for (const auto& [age, bytes] : sealed) {
    if (excess <= 0) break;
    last = age;
    excess -= static_cast<std::ptrdiff_t>(bytes);
  }
  return last;
}

void DiskPool::begin_evacuation() {
  if (std::exchange(pins_ended_, false))
    for (std::uint32_t segment : in_[static_cast<std::size_t>(SegmentState::kSealed)])
      if (segments_[segment].failures == 0) segments_[segment].passed_over = false;
  const std::uint32_t compacted = compactable();
  const std::uint32_t segment = compacted != kNone ? compacted : victim();
  stuck_ = segment == kNone;
  if (stuck_) return;
  Evacuation evacuation;
  evacuation.segment = segment;
  evacuation.compacts = compacted != kNone;
  if (evacuation.compacts) evacuation.pages_left = segments_[segment].live_pages + footer_pages(segments_[segment].live);
  evacuation.used_since = std::max(segments_[segment].age, over_ ? leaving_age() : 0);
  evacuation.marks = Zeroed<std::uint64_t>((index_.ids() + 63) / 64);
  index_.each_pinned([&](NodeId node) { evacuation.pinned.push_back(node); });
  evacuation_ = std::move(evacuation);
  move(segment, SegmentState::kEvacuating);
}

// True when this slice is over and the next one has something to do.
bool DiskPool::step_evacuation() {
  using enum Evacuation::Phase;
  Evacuation& e = *evacuation_;
  std::size_t steps = options_.slice;
  if (stopped_ && e.phase < kCopy) return false;  // what was chosen would die for nothing; resume() goes on
  if (e.phase == kMark) mark_pinned(steps);
  if (e.phase == kChoose) choose(steps);
  if (e.phase == kTrim) trim(steps);
  if (e.phase == kCopy) copy(steps);
  if (e.phase == kWait && e.open == 0) sync_moves();
  const auto reached = [&](const auto& sync) { return segments_[sync.first].done >= sync.second; };
  if (e.phase == kSync && std::all_of(e.syncs.begin(), e.syncs.end(), reached)) switch_over();
  if (e.phase == kEnd) {
    end_evacuation();
    return !evacuation_ && wants_evacuation();
  }
  return steps == 0;
}

// ---- who stays -------------------------------------------------------------------------------------------

bool DiskPool::marked(NodeId node) const noexcept {
  const Zeroed<std::uint64_t>& marks = evacuation_->marks;
  return node / 64 < marks.size() && (marks[node / 64] >> (node % 64) & 1) != 0;
}

// Marks everything present at and above a pinned node; how many steps that took.
std::size_t DiskPool::mark_chain(NodeId pinned) noexcept {
  Zeroed<std::uint64_t>& marks = evacuation_->marks;
  std::size_t steps = 1;
  for (NodeId node = nodes_.deepest_present(pinned); node != kNone && !marked(node); node = index_.node(node).parent) {
    // A node that is younger than the evacuation lies in a younger segment, but not all above it does.
    if (node / 64 < marks.size()) marks[node / 64] |= std::uint64_t{1} << (node % 64);
    ++steps;
  }
  return steps;
}

void DiskPool::mark_pinned(std::size_t& steps) {
  Evacuation& e = *evacuation_;
  while (!e.pinned.empty()) {
    if (steps == 0) return;
    const NodeId node = e.pinned.back();
    e.pinned.pop_back();
    if (index_.live(node) && index_.node(node).pins > 0) steps -= std::min(steps, mark_chain(node));
  }
  e.phase = Evacuation::Phase::kChoose;
}

void DiskPool::pinned(NodeId node) {
  if (evacuation_) mark_chain(node);
}

// What kept a segment from being evacuated may have ended.
void DiskPool::unpinned(NodeId) {
  pins_ended_ = true;
  if (std::exchange(stuck_, false)) again();
}

void DiskPool::choose(std::size_t& steps) {
  Evacuation& e = *evacuation_;
  const DiskSegment& segment = segments_[e.segment];
  for (; e.at < segment.records.size(); ++e.at) {
    if (steps == 0) return;
    const NodeId node = segment.records[e.at].node;
    const bool stays = node != kNone && (e.compacts || nodes_[node].stamp > e.used_since || marked(node));
    if (stays) e.chosen.push_back(e.at);
    if (stays || node == kNone)
      --steps;
    else if (!kill_tree(node, dropped_.evicted, steps))
      return;
  }
  e.at = 0;
  split_by_budget();
  e.phase = Evacuation::Phase::kTrim;
}

// Pinned ones first, then the most recently used. What is above a block comes before it, so what stays has its parents.
// With too many pinned ones the segment stays as it is, and so do the others.
void DiskPool::split_by_budget() {
  Evacuation& e = *evacuation_;
  const DiskSegment& segment = segments_[e.segment];
  std::erase_if(e.chosen, [&](std::uint32_t i) { return segment.records[i].node == kNone; });
  if (e.compacts) return;
  const auto rank = [&](std::uint32_t i) {
    const NodeId node = segment.records[i].node;
    return std::tuple(!marked(node), ~nodes_[node].stamp, index_.node(node).depth);
  };
  std::sort(e.chosen.begin(), e.chosen.end(), [&](std::uint32_t a, std::uint32_t b) { return rank(a) < rank(b); });
  const auto whole = static_cast<double>(std::size_t{segment.pages} * kPageBytes);
  // Where segments have to leave, what others need of them all moves: once, for later it is no older than those.
  const double share = over_ ? 1 : options_.reinsert_share;
  double bytes = 0;
  std::size_t stay = 0;
  for (; stay < e.chosen.size(); ++stay) {
    const DiskRecord& r = segment.records[e.chosen[stay]];
    bytes += static_cast<double>(formats_[r.format].slot_bytes() + kPageBytes);
    if (!marked(r.node) && bytes > share * whole) break;
    if (marked(r.node) && bytes > std::max(options_.reinsert_share, kMovedShareMax) * whole) {
      e.keep = true;
      e.chosen.clear();
      return;
    }
  }
  const auto middle = e.chosen.begin() + static_cast<std::ptrdiff_t>(stay);
  e.over.assign(middle, e.chosen.end());
  e.chosen.erase(middle, e.chosen.end());
  // As they lie: neighbours travel together, and stay neighbours.
  std::sort(e.chosen.begin(), e.chosen.end(),
            [&](std::uint32_t a, std::uint32_t b) { return segment.records[a].page < segment.records[b].page; });
}

void DiskPool::trim(std::size_t& steps) {
  Evacuation& e = *evacuation_;
  while (!e.over.empty()) {
    if (steps == 0) return;
    const std::uint32_t at = e.over.back();
    const NodeId node = segments_[e.segment].records[at].node;
    const bool stays = node != kNone && marked(node);  // pinned since the choice
    if (stays) e.chosen.push_back(at);
    if (stays || node == kNone)
      --steps;
    else if (!kill_tree(node, dropped_.over_budget, steps))
      return;
    e.over.pop_back();
  }
  e.phase = Evacuation::Phase::kCopy;
}

// ---- what stays is written again -------------------------------------------------------------------------

void DiskPool::copy(std::size_t& steps) {
  Evacuation& e = *evacuation_;
  bool more = true;
  while (more && e.at < e.chosen.size() && steps > 0) {
    if (stopped_ || crowded()) {
      if (stopped_) {
        e.keep = true;
        e.at = static_cast<std::uint32_t>(e.chosen.size());
      }
      break;
    }
    std::vector<RelocateOrder> orders;
    const std::size_t first = e.moves.size();
    while (more && e.at < e.chosen.size() && orders.size() < kMovesPerJob && steps > 0)
      more = copy_one(e.chosen[e.at], orders, steps);
    if (orders.empty()) continue;
    Work work;
    work.kind = Work::Kind::kMoves;
    work.first = first;
    works_.emplace(mover_->relocate(std::move(orders)), work);
  }
  if (e.at < e.chosen.size()) return;
  e.pages_left = 0;
  e.phase = Evacuation::Phase::kWait;
}

// False: there is no room now, but there will be.
bool DiskPool::copy_one(std::uint32_t from, std::vector<RelocateOrder>& orders, std::size_t& steps) {
  Evacuation& e = *evacuation_;
  const RecordRef old{e.segment, from};
  const NodeId node = record(old).node;
  if (node == kNone) {
    --steps;
    ++e.at;
    return true;
  }
  const RecordAt source = place_of(old);
  const std::uint32_t pages = record_pages(source.format);
  const std::uint32_t segment = fits(pages) ? allocate(pages, For::kMove) : kNone;
  if (segment == kNone) {
    if (spares() > 0 && fits(pages)) return false;
    const bool stays = (e.compacts || marked(node)) && fits(pages);  // where it is, and the segment as well
    e.keep |= stays;
    if (stays) --steps;
    if (stays || kill_tree(node, dropped_.over_budget, steps)) ++e.at;
    return true;
  }
  --steps;
  e.pages_left -= std::min(e.pages_left, pages);
  DiskRecord copy = record(old);
  copy.copy = true;
  const RecordRef to = append(segment, copy);
  ++segments_[e.segment].readers;
  ++e.open;
  e.moves.push_back({from, to, false});
  const Key& root = index_.node(index_.root_of(node)).key;
  orders.push_back({source, fd(segment), record(to).page, header_of(node, root, to)});
  ++e.at;
  return true;
}

void DiskPool::took_moves(std::size_t first, const Notice& notice) {
  for (std::size_t i = 0; i < notice.statuses.size(); ++i)
    moved(evacuation_->moves[first + notice.first + i], notice.statuses[i], notice.error);
}

void DiskPool::moved(Move& move, MoveStatus status, int error) {
  Evacuation& e = *evacuation_;
  DiskSegment& from = segments_[e.segment];
  const std::uint32_t target = move.to.segment;
  DiskSegment& to = segments_[target];
  --e.open;
  --from.readers;
  --to.writing;
  to.dirty = true;
  move.ok = status == MoveStatus::kOk;
  const NodeId node = from.records[move.from].node;
  if (!move.ok) release(std::exchange(move.to, {}));
  if (node != kNone && status == MoveStatus::kCorrupt) lose(node, dropped_.rot);
  if (node != kNone && (status == MoveStatus::kError || status == MoveStatus::kDropped)) {
    // The disk may have refused to read or to write. Once more, after resume(); then it is lost.
    if (status == MoveStatus::kError && from.failures > 0) {
      lose(node, dropped_.lost);
    } else {
      e.keep = true;
      e.failed |= status == MoveStatus::kError;
      if (!stopped_) fail(error != 0 ? error : ECANCELED);
      stopped_ = true;
    }
  }
  if (to.writing == 0) advance(target);
}

void DiskPool::sync_moves() {
  Evacuation& e = *evacuation_;
  e.phase = Evacuation::Phase::kSync;
  for (Move& move : e.moves) {
    const std::uint32_t s = move.to.segment;
    if (!move.ok) continue;
    if (segments_[s].state == SegmentState::kBroken && !segments_[s].synced()) {
      move.ok = false;
      e.keep = true;
    } else if (e.syncs.empty() || e.syncs.back().first != s) {
      e.syncs.emplace_back(s, segments_[s].want_sync());
      sync_if_wanted(s);
    }
  }
}

void DiskPool::switch_over() {
  Evacuation& e = *evacuation_;
  e.phase = Evacuation::Phase::kEnd;
  for (const Move& move : e.moves) {
    if (move.to.segment == kNone) continue;  // it was not written
    const RecordRef old{e.segment, move.from};
    const NodeId node = record(old).node;
    DiskRecord& copy = record(move.to);
    if (!move.ok || node == kNone) {  // it died meanwhile
      release(move.to);
      continue;
    }
    copy.copy = false;
    nodes_.place(node, move.to, nodes_.state(node));  // one that waits for its parent goes on waiting
    ++dropped_.reinserted;
    dropped_.reinserted_bytes += formats_[copy.format].slot_bytes();
    release(old);
  }
  e.moves.clear();
}

void DiskPool::end_evacuation() {
  Evacuation& e = *evacuation_;
  DiskSegment& segment = segments_[e.segment];
  if (e.keep) {
    segment.passed_over = true;
    segment.failures += e.failed;
    move(e.segment, SegmentState::kSealed);
    if (segment.live == 0) emptied_.push_back(e.segment);
    evacuation_.reset();
  } else if (segment.idle()) {
    dropped_.compacted += e.compacts;
    move(e.segment, SegmentState::kFree);
    evacuation_.reset();
  }
}

}  // namespace kv
