#include "disk_pool.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <string>
#include <system_error>

namespace kv {

namespace {

constexpr std::size_t kSegmentsLeast = 3;
using Clock = std::chrono::steady_clock;

void watch(int epoll, int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0)
    throw std::system_error(errno, std::generic_category(), "disk pool: epoll_ctl");
}

void check_options(const DiskOptions& options, const DiskDirectory& directory) {
  if (!(options.reinsert_share >= 0 && options.reinsert_share <= 1))
    throw Invalid("reinsert_share: must be in [0, 1]");
  if (options.spare < 1) throw Invalid("spare: at least 1");
  if (options.slice < 1) throw Invalid("slice: at least 1");
  const DiskDirectory::Options& sizes = directory.options();
  const std::size_t room =
      sizes.capacity_bytes == 0 ? directory.segments().size() : sizes.capacity_bytes / sizes.segment_bytes;
  if (room < kSegmentsLeast)
    throw Invalid("capacity_bytes: " + std::to_string(sizes.capacity_bytes) + " is room for " + std::to_string(room) +
                  " segments of " + std::to_string(sizes.segment_bytes) + " bytes; at least " +
                  std::to_string(kSegmentsLeast) + " are needed");
}

}  // namespace

DiskPool::DiskPool(Index& index, std::shared_ptr<Arena> arena, std::shared_ptr<DiskDirectory> directory,
                   std::unique_ptr<Mover> mover, DiskOptions options)
    : index_(index), arena_(std::move(arena)), directory_(std::move(directory)), mover_(std::move(mover)),
      options_(options), again_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      nodes_(index) {
  check_options(options_, *directory_);
  segment_pages_ = static_cast<std::uint32_t>(directory_->options().segment_bytes / kPageBytes);
  if (segment_pages_ == 0)  // as it is, nothing new is made
    for (const SegmentFile& segment : directory_->segments())
      segment_pages_ = segment_pages_ == 0 ? segment.pages : std::min(segment_pages_, segment.pages);
  if (!again_ || !epoll_) throw std::system_error(errno, std::generic_category(), "disk pool: eventfd");
  watch(epoll_.get(), again_.get());
  watch(epoll_.get(), mover_->eventfd());
  count_room();
  adopted_ = directory_->segments().empty();
  if (adopted_) again();
  index_.join(this);
}

DiskPool::~DiskPool() { close(0); }

void DiskPool::require_open() const {
  if (closed_) throw Invalid("disk pool: closed");
  if (!adopted_) throw Invalid("disk pool: the directory has segments; adopt() them first");
}

SegmentHeader DiskPool::header_of(std::uint32_t segment) const {
  const DiskSegment& s = segments_[segment];
  return {directory_->id(), file(segment).number, s.pages, s.sequence, s.nonce};
}

// ---- what ended ------------------------------------------------------------------------------------------

void DiskPool::again() noexcept {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(again_.get(), &one, sizeof one));  // full: it is readable already
}

std::vector<DiskEvent> DiskPool::pump() {
  if (!closed_) {
    require_open();
    std::uint64_t count;
    static_cast<void>(!::read(again_.get(), &count, sizeof count));
    for (const Notice& notice : mover_->notices()) took(notice);
    if (maintain()) again();
    report_jobs();
    step_flushes();
  }
  return std::exchange(events_, {});
}

void DiskPool::took(const Notice& notice) {
  const auto it = works_.find(notice.job);
  if (it == works_.end()) throw Broken("disk: a notice of a job that was never begun");
  const Work work = it->second;
  if (notice.last) works_.erase(it);
  switch (work.kind) {
    case Work::Kind::kJob: return took_job(work.job, notice);
    case Work::Kind::kMoves: return took_moves(work.first, notice);
    case Work::Kind::kStep: return took_step(work.segment, notice);
    case Work::Kind::kSync: return took_sync(work.segment, notice);
    case Work::Kind::kNames: return took_names(notice);
  }
}

void DiskPool::took_job(std::uint64_t id, const Notice& notice) {
  if (notice.statuses.empty()) return;  // all of it has been told
  Job& job = jobs_.at(id);
  job.seconds = notice.seconds;
  if (notice.error != 0) job.error = notice.error;
  for (std::size_t i = 0; i < notice.statuses.size(); ++i) {
    const auto at = static_cast<std::uint32_t>(notice.first + i);
    if (job.kind == DiskEvent::Kind::kWritten)
      written(id, at, notice.statuses[i]);
    else
      read_ended(id, at, notice.statuses[i]);
  }
}

void DiskPool::resolve(std::uint64_t id, std::uint32_t at, MoveStatus status) {
  Job& job = jobs_.at(id);
  --job.open;
  (status == MoveStatus::kOk ? job.ok : status == MoveStatus::kCorrupt ? job.corrupt : job.failed).push_back(at);
  if (job.listed) return;
  job.listed = true;
  changed_.push_back(id);
}

void DiskPool::report_jobs() {
  for (std::uint64_t id : std::exchange(changed_, {})) {
    Job& job = jobs_.at(id);
    DiskEvent event;
    event.kind = job.kind;
    event.job = id;
    const auto name = [&](std::vector<std::uint32_t>& at, std::vector<NodeId>& out) {
      std::sort(at.begin(), at.end());
      for (std::uint32_t i : at) out.push_back(job.nodes[i]);
      at.clear();
    };
    name(job.ok, event.ok);
    name(job.corrupt, event.corrupt);
    name(job.failed, event.failed);
    event.last = job.open == 0;
    event.error = event.failed.empty() ? 0 : job.error;
    event.bytes = event.ok.size() * job.format.slot_bytes();
    event.seconds = job.seconds;
    events_.push_back(std::move(event));
    job.listed = false;
    if (job.open > 0) continue;
    for (Flush& flush : flushes_)
      if (job.kind == DiskEvent::Kind::kWritten && id < flush.job) {
        --flush.writes;
        if (job.error != 0) flush.error = job.error;
      }
    jobs_.erase(id);
  }
}

// ---- the end ---------------------------------------------------------------------------------------------

void DiskPool::close(double timeout_s) {
  if (closed_) return;
  if (!(timeout_s >= 0)) throw Invalid("timeout_s: must be a number of seconds >= 0");
  const auto deadline = Clock::now() + std::chrono::duration<double>(std::min(timeout_s, 1e6));
  stopped_ = true;  // nothing new is opened, made or evacuated
  while (timeout_s > 0) {
    for (const Notice& notice : mover_->notices()) took(notice);
    if (writing_ == 0) seal_everything();
    report_jobs();
    step_flushes();
    const std::chrono::duration<double> left = deadline - Clock::now();
    if ((writing_ == 0 && in_[static_cast<std::size_t>(SegmentState::kSealing)].empty()) || left.count() <= 0) break;
    pollfd ready{mover_->eventfd(), POLLIN, 0};
    ::poll(&ready, 1, static_cast<int>(std::ceil(left.count() * 1e3)));
  }
  closed_ = true;
  mover_->close();
  for (const Notice& notice : mover_->notices()) took(notice);
  release_everything();
  report_jobs();
  for (const Flush& flush : std::exchange(flushes_, {})) {
    DiskEvent event;
    event.kind = DiskEvent::Kind::kFlushed;
    event.job = flush.job;
    event.last = true;
    event.error = ECANCELED;
    events_.push_back(std::move(event));
  }
  index_.leave(this);
}

void DiskPool::seal_everything() {
  if (filling_ != kNone) seal(std::exchange(filling_, kNone));
  const std::set<std::uint32_t> opening = in_[static_cast<std::size_t>(SegmentState::kOpening)];
  for (std::uint32_t segment : opening)
    if (segments_[segment].step == SegmentStep::kReady) seal(segment);
}

void DiskPool::release_everything() {
  for (const auto& [node, waiting] : std::exchange(held_, {})) resolve(waiting.job, waiting.at, MoveStatus::kDropped);
  evacuation_.reset();
  nodes_.clear();
  std::vector<NodeId> nodes;
  for (DiskSegment& segment : segments_)
    for (const DiskRecord& r : std::exchange(segment.records, {}))
      if (r.node != kNone) nodes.push_back(r.node);
  for (DiskSegment& segment : segments_) segment.live = 0;
  for (NodeId node : nodes) --index_.node(node).holders;
  for (NodeId node : nodes)
    if (index_.live(node)) index_.reap(node);
  index_.changed();
  readable_ = live_bytes_ = writing_ = 0;
  stored_.clear();
  removed_.clear();
}

// ---- questions -------------------------------------------------------------------------------------------

std::size_t DiskPool::match(const Walk& walk) const noexcept {
  std::size_t length = walk.ready;
  while (length < walk.depth && (walk.slots[length] != kNone || nodes_.readable(walk.nodes[length]))) ++length;
  return length;
}

std::vector<std::uint8_t> DiskPool::readable(std::span<const NodeId> nodes) const {
  std::vector<std::uint8_t> out(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) out[i] = nodes_.readable(nodes[i]);
  return out;
}

std::vector<NodeId> DiskPool::missing(NodeId node) const {
  index_.require(node, "node");
  std::vector<NodeId> chain;
  for (; index_.node(node).depth != 0 && nodes_.state(node) == OnDisk::kNot; node = index_.node(node).parent)
    chain.push_back(node);
  return {chain.rbegin(), chain.rend()};
}

std::vector<std::uint8_t> DiskPool::present(std::span<const NodeId> nodes) const {
  std::vector<std::uint8_t> out(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) out[i] = nodes_.present(nodes[i]);
  return out;
}

std::vector<NodeId> DiskPool::nodes(std::size_t start, std::size_t most, bool coming) const {
  std::vector<NodeId> out;
  for (std::size_t s = start; s < segments_.size() && s - start < most; ++s)
    for (const DiskRecord& r : segments_[s].records)
      if (r.node != kNone && !r.copy && (coming || nodes_.readable(r.node))) out.push_back(r.node);
  return out;
}

DiskCounts DiskPool::counts() const noexcept {
  const auto in = [&](SegmentState state) { return in_[static_cast<std::size_t>(state)].size(); };
  using enum SegmentState;
  return {in(kCreating), in(kFree),   in(kOpening), in(kFilling), in(kSealing), in(kSealed),
          in(kEvacuating), in(kBroken), readable_,  live_bytes_,  writing_,     directory_->options().capacity_bytes,
          directory_->bytes()};
}

std::size_t DiskPool::memory_bytes() const noexcept {
  std::size_t bytes = nodes_.memory_bytes() + segments_.capacity() * sizeof(DiskSegment);
  for (const DiskSegment& segment : segments_) bytes += segment.records.capacity() * sizeof(DiskRecord);
  return bytes;
}

// Positions count records, segment after segment.
std::uint32_t DiskPool::holders(std::uint32_t start, std::uint32_t most, const HolderOf& each) const {
  std::uint32_t before = 0;
  for (const DiskSegment& segment : segments_) {
    const auto count = static_cast<std::uint32_t>(segment.records.size());
    for (std::uint32_t i = start > before ? start - before : 0; i < count; ++i, --most) {
      if (most == 0) return before + i;
      if (segment.records[i].node != kNone) each(segment.records[i].node);
    }
    before += count;
  }
  return kNone;
}

std::vector<Key> DiskPool::take_stored() {
  return index_.only(std::exchange(stored_, {}), [&](NodeId node) { return node != kNone && nodes_.readable(node); });
}

std::vector<Key> DiskPool::take_removed() {
  return index_.only(std::exchange(removed_, {}), [&](NodeId node) { return node == kNone || !nodes_.readable(node); });
}

DiskDropped DiskPool::take_dropped() { return std::exchange(dropped_, {}); }

}  // namespace kv
