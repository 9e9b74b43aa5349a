// The life of segments: made, opened, filled, sealed, used again. Every step is a job of the mover whose notice
// begins the next one; nothing waits here.
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "disk_pool.h"

namespace kv {

namespace {

constexpr std::size_t kPositionsMax = 65535;  // a node names its segment in 16 bits

// In every record and trailer of one life of a segment. Whoever fills blocks must not be able to guess it.
std::uint64_t random_nonce() {
  std::uint64_t nonce = 0;
  while (nonce == 0)
    if (::getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) nonce = 0;
  return nonce;
}

}  // namespace

void DiskPool::move(std::uint32_t segment, SegmentState to) {
  DiskSegment& s = segments_[segment];
  if (!segment_may_move(s.state, to))
    throw Broken("disk: segment " + std::to_string(segment) + " cannot move " + std::string(name_of(s.state)) + " -> " +
                 std::string(name_of(to)));
  in_[static_cast<std::size_t>(s.state)].erase(segment);
  in_[static_cast<std::size_t>(to)].insert(segment);
  s.state = to;
  s.step = SegmentStep::kStart;
  if (to != SegmentState::kFree && to != SegmentState::kGone) return;
  if (s.live > 0 || !s.idle()) throw Broken("disk: segment " + std::to_string(segment) + " is given up while in use");
  DiskSegment empty;
  empty.state = to;
  empty.pages = file(segment).pages;
  empty.old_sequence = s.old_sequence != 0 ? s.old_sequence : s.sequence;
  empty.asked = empty.done = empty.wanted = s.asked;  // somebody may still have to see that a number was reached
  s = std::move(empty);
  if (to == SegmentState::kFree && s.pages != segment_pages_ && directory_->options().segment_bytes != 0)
    misfits_.push_back(segment);
}

// ---- what there should be --------------------------------------------------------------------------------

void DiskPool::count_room() noexcept {
  const DiskDirectory::Options& sizes = directory_->options();
  const std::size_t used = directory_->bytes();
  const bool none = sizes.segment_bytes == 0 || used > sizes.capacity_bytes || segments_.size() >= kPositionsMax;
  room_ = none ? 0 : (sizes.capacity_bytes - used) / sizes.segment_bytes;
  over_ = directory_->over_capacity();
  file_bytes_max_ = std::min(file_bytes_max_, std::max(used, sizes.capacity_bytes));
}

bool DiskPool::can_create() const noexcept { return room_ > 0 && !stopped_ && !creation_stopped_; }

std::size_t DiskPool::spares() const noexcept {
  using enum SegmentState;
  std::size_t count = 0;
  for (const SegmentState state : {kCreating, kFree, kOpening}) count += in_[static_cast<std::size_t>(state)].size();
  return count;
}

// So many that at least one segment keeps what was written, and one is filled.
std::size_t DiskPool::spare_target() const noexcept {
  using enum SegmentState;
  std::size_t count = segments_.size() + (can_create() ? room_ : 0);
  for (const SegmentState state : {kGone, kBroken}) count -= in_[static_cast<std::size_t>(state)].size();
  if (over_) count = std::min(count, directory_->options().capacity_bytes / directory_->options().segment_bytes);
  return std::clamp<std::size_t>(count < 3 ? 1 : (count - 1) / 2, 1, options_.spare);
}

// True when something is left to do that no notice will tell of.
bool DiskPool::maintain() {
  recycle();
  if (!stopped_) {
    open_ahead();
    while (can_create() && spares() < spare_target()) create();
    if (wants_evacuation()) begin_evacuation();
  }
  const bool more = evacuation_ && step_evacuation();
  open_ahead();  // what has just become FREE
  return more;
}

// Whether all that was taken up is on the medium: see (4) in disk_pool.h.
bool DiskPool::proven() const noexcept {
  const auto adopted = [&](std::uint32_t segment) { return segments_[segment].adopted; };
  return std::ranges::none_of(in_[static_cast<std::size_t>(SegmentState::kSealing)], adopted) &&
         std::ranges::none_of(in_[static_cast<std::size_t>(SegmentState::kBroken)], adopted);
}

void DiskPool::recycle() {
  if (!proven()) return;
  for (std::uint32_t segment : std::exchange(emptied_, {})) {
    const DiskSegment& s = segments_[segment];
    if (s.state == SegmentState::kSealed && s.live == 0 && s.idle()) move(segment, SegmentState::kFree);
  }
  if (stopped_) return;
  if (!creation_stopped_)
    for (std::uint32_t segment : std::exchange(misfits_, {}))
      if (segments_[segment].state == SegmentState::kFree) remove(segment);
  const auto& free = in_[static_cast<std::size_t>(SegmentState::kFree)];
  while (over_ && !free.empty() && spares() > spare_target()) remove(*free.begin());
  sync_names();
}

void DiskPool::remove(std::uint32_t segment) {
  directory_->discard(segment);
  move(segment, SegmentState::kGone);
  unlinked_.push_back(segment);
  const bool before = over_;
  count_room();
  if (before && !over_) again();  // whoever has waited may write
}

void DiskPool::sync_names() {
  if (unlinked_.empty() || !unlinking_.empty()) return;
  unlinking_ = std::exchange(unlinked_, {});
  Work work;
  work.kind = Work::Kind::kNames;
  works_.emplace(mover_->sync(directory_->fd()), work);
}

// After a refusal the next one is asked for when something is removed again.
void DiskPool::took_names(const Notice& notice) {
  const bool ok = notice.statuses.at(0) == MoveStatus::kOk;
  for (std::uint32_t segment : std::exchange(unlinking_, {})) {
    if (ok)
      segments_[segment].old_sequence = 0;
    else
      unlinked_.push_back(segment);
  }
}

void DiskPool::create() {
  std::uint32_t segment = kNone;
  try {
    segment = directory_->add();
  } catch (const std::system_error& error) {
    creation_stopped_ = true;
    return fail(error.code().value(), DiskEvent::Kind::kNotMade);
  }
  segments_.resize(directory_->segments().size());
  in_[static_cast<std::size_t>(SegmentState::kGone)].insert(segment);
  move(segment, SegmentState::kCreating);
  segments_[segment].pages = file(segment).pages;
  segments_[segment].step = SegmentStep::kPages;
  count_room();
  step(segment, mover_->create(fd(segment), segments_[segment].pages, header_of(segment)));
}

// All spare ones are ready before the one that is being filled is full: a sync takes as long as filling a segment, when
// saves come as fast as the disk takes them.
void DiskPool::open_ahead() {
  const auto& opening = in_[static_cast<std::size_t>(SegmentState::kOpening)];
  const auto& free = in_[static_cast<std::size_t>(SegmentState::kFree)];
  const std::size_t ahead = over_ ? spare_target() : options_.spare;
  for (auto it = free.begin(); it != free.end() && !stopped_ && !closed_ && opening.size() < ahead;) {
    const std::uint32_t segment = *it++;
    if (segments_[segment].pages < segment_pages_) continue;
    move(segment, SegmentState::kOpening);
    DiskSegment& s = segments_[segment];
    s.sequence = ++sequence_;
    s.nonce = random_nonce();
    s.next_page = kHeaderPages;
    s.step = SegmentStep::kPages;
    std::vector<std::uint8_t> page(kPageBytes);
    encode(header_of(segment), page.data());
    step(segment, mover_->pages(fd(segment), 0, std::move(page)));
  }
}

// False: none is ready. In the order of their sequences: of two records of a block, the later one has the higher.
bool DiskPool::begin_filling() {
  const auto& opening = in_[static_cast<std::size_t>(SegmentState::kOpening)];
  const auto first = std::min_element(opening.begin(), opening.end(), [&](std::uint32_t a, std::uint32_t b) {
    return segments_[a].sequence < segments_[b].sequence;
  });
  if (first == opening.end() || segments_[*first].step != SegmentStep::kReady) return false;
  filling_ = *first;
  move(filling_, SegmentState::kFilling);
  clock_ += 2;
  segments_[filling_].age = clock_;
  again();  // for the next one
  return true;
}

void DiskPool::seal(std::uint32_t segment) {
  move(segment, SegmentState::kSealing);
  advance(segment);
}

// ---- steps -----------------------------------------------------------------------------------------------

// The next step of an OPENING or SEALING segment, if what it waits for has come.
void DiskPool::advance(std::uint32_t segment) {
  DiskSegment& s = segments_[segment];
  if (closed_ || (s.state != SegmentState::kOpening && s.state != SegmentState::kSealing)) return;
  const bool synced = s.done >= s.awaited;
  if (s.step == SegmentStep::kStart && s.writing == 0) return await_sync(segment, SegmentStep::kRecordsSync);
  if (s.step == SegmentStep::kRecordsSync && synced) {
    s.adopted = false;
    return s.footless ? sealed(segment) : write_footer(segment);
  }
  if (s.step != SegmentStep::kPagesSync || !synced) return;
  if (s.state == SegmentState::kOpening) {
    s.step = SegmentStep::kReady;
    s.old_sequence = 0;
    return;
  }
  sealed(segment);
}

void DiskPool::sealed(std::uint32_t segment) {
  move(segment, SegmentState::kSealed);
  if (segments_[segment].live == 0) emptied_.push_back(segment);
}

void DiskPool::await_sync(std::uint32_t segment, SegmentStep step) {
  DiskSegment& s = segments_[segment];
  s.step = step;
  s.awaited = s.want_sync();
  sync_if_wanted(segment);
  if (s.done >= s.awaited) advance(segment);
}

void DiskPool::write_footer(std::uint32_t segment) {
  DiskSegment& s = segments_[segment];
  std::vector<FooterEntry> entries;
  for (const DiskRecord& r : s.records) {
    if (r.node == kNone) continue;
    const Node& n = index_.node(r.node);
    entries.push_back({n.key, index_.node(n.parent).key, n.depth, r.page, r.payload_crc, formats_[r.format]});
  }
  Footer end = footer(entries, header_of(segment));
  s.step = SegmentStep::kPages;
  step(segment, mover_->pages(fd(segment), end.page, std::move(end.bytes)));
}

void DiskPool::step(std::uint32_t segment, MoveId move) {
  Work work;
  work.kind = Work::Kind::kStep;
  work.segment = segment;
  works_.emplace(move, work);
}

// Its file, header or footer was written, or could not be.
void DiskPool::took_step(std::uint32_t segment, const Notice& notice) {
  DiskSegment& s = segments_[segment];
  const bool ok = notice.statuses.at(0) == MoveStatus::kOk;
  const int error = ok ? 0 : notice.error != 0 ? notice.error : ECANCELED;
  if (closed_) return;
  if (s.state == SegmentState::kCreating) {
    if (ok && s.step == SegmentStep::kPages) {  // then its name, in the directory
      s.step = SegmentStep::kPagesSync;
      return step(segment, mover_->sync(directory_->fd()));
    }
    if (ok) return move(segment, SegmentState::kFree);
    directory_->discard(segment);
    move(segment, SegmentState::kGone);
    count_room();
    creation_stopped_ = true;
    return fail(error, DiskEvent::Kind::kNotMade);
  }
  if (s.state == SegmentState::kBroken) return;  // by a sync that failed meanwhile
  if (!ok) return broken(segment, error);
  s.dirty = true;
  await_sync(segment, SegmentStep::kPagesSync);
}

// ---- syncs -----------------------------------------------------------------------------------------------

void DiskPool::sync_if_wanted(std::uint32_t segment) {
  DiskSegment& s = segments_[segment];
  if (closed_ || s.wanted <= s.asked || s.done < s.asked) return;
  ++s.asked;
  s.dirty = false;
  Work work;
  work.kind = Work::Kind::kSync;
  work.segment = segment;
  works_.emplace(mover_->sync(fd(segment)), work);
}

void DiskPool::took_sync(std::uint32_t segment, const Notice& notice) {
  DiskSegment& s = segments_[segment];
  const bool ok = notice.statuses.at(0) == MoveStatus::kOk;
  if (closed_) return;
  if (!ok) {
    s.dirty = s.unproven = true;
    broken(segment, notice.error != 0 ? notice.error : ECANCELED);
  }
  s.done = s.asked;
  if (!ok) s.wanted = s.asked;
  sync_if_wanted(segment);
  if (ok) advance(segment);
}

// ---- a disk that fails -----------------------------------------------------------------------------------

void DiskPool::fail(int error, DiskEvent::Kind kind) {
  DiskEvent event;
  event.kind = kind;
  event.error = error;
  events_.push_back(std::move(event));
}

// What is readable stays so; whoever waits for one of its syncs is told that there will be none.
void DiskPool::broken(std::uint32_t segment, int error) {
  DiskSegment& s = segments_[segment];
  s.error = error;
  if (s.state != SegmentState::kBroken) move(segment, SegmentState::kBroken);
  if (filling_ == segment) filling_ = kNone;
  stopped_ = true;
  for (Flush& flush : flushes_)
    if (std::erase_if(flush.syncs, [&](const auto& sync) { return sync.first == segment && sync.second > s.done; }) > 0)
      flush.error = error;
  if (evacuation_ && !s.synced()) {
    std::erase_if(evacuation_->syncs, [&](const auto& sync) { return sync.first == segment; });
    for (Move& move : evacuation_->moves) {
      if (!move.ok || move.to.segment != segment) continue;
      move.ok = false;
      evacuation_->keep = true;
    }
  }
  fail(error);
}

void DiskPool::resume() {
  require_open();
  stopped_ = creation_stopped_ = false;
  const auto& sealed = in_[static_cast<std::size_t>(SegmentState::kSealed)];
  for (std::uint32_t segment : sealed) segments_[segment].passed_over = false;
  const std::set<std::uint32_t> tried = in_[static_cast<std::size_t>(SegmentState::kBroken)];
  for (std::uint32_t segment : tried) {
    DiskSegment& s = segments_[segment];
    // Without direct I/O the kernel may have forgotten what it could not write: a later sync proves nothing.
    if (s.unproven && !directory_->options().direct)
      for (std::size_t i = 0; i < s.records.size(); ++i)
        if (s.records[i].node != kNone && !s.records[i].copy) lose(s.records[i].node, dropped_.lost);
    s.unproven = false;
    if (s.live == 0 && s.idle())
      move(segment, SegmentState::kFree);
    else
      seal(segment);
  }
  again();
}

}  // namespace kv
