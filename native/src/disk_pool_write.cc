// The disk pool: blocks on their way to the disk and back, and flushes that wait for them.
#include <algorithm>
#include <string>
#include <utility>

#include "copy.h"
#include "disk_pool.h"
#include "engine.h"

namespace kv {

namespace {

std::string at(const char* what, std::size_t i) { return std::string(what) + "[" + std::to_string(i) + "]: "; }

}  // namespace

// ---- what a caller must have right -----------------------------------------------------------------------

void DiskPool::require_blocks(std::span<const NodeId> nodes, std::span<const SlotId> slots,
                              const SlotFormat& format) const {
  require_open();
  if (nodes.size() != slots.size())
    throw Invalid("slots: " + std::to_string(slots.size()) + " for " + std::to_string(nodes.size()) + " nodes");
  if (nodes.empty() || nodes.size() > kKeysMax)
    throw Invalid("nodes: must be in [1, " + std::to_string(kKeysMax) + "], got " + std::to_string(nodes.size()));
  check_format(format);
  check_slots(*arena_, format, slots);
}

void DiskPool::require_chain(std::span<const NodeId> nodes) const {
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    index_.require(nodes[i], "nodes");
    const NodeId parent = index_.node(nodes[i]).parent;
    if (parent == kNone) throw Invalid(at("nodes", i) + "a root has no bytes");
    if (i > 0 && parent != nodes[i - 1]) throw Invalid(at("nodes", i) + "not the child of the one before");
    if (i == 0 && index_.node(parent).depth > 0 && nodes_.state(parent) == OnDisk::kNot)
      throw Invalid("nodes[0]: the block above it is neither on the disk nor on its way there");
  }
}

// The slots of those nodes that would be written hold what may be written.
void DiskPool::require_saved(std::span<const NodeId> nodes, std::span<const SlotId> slots,
                             const SlotFormat& format) const {
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (nodes_.state(nodes[i]) != OnDisk::kNot) continue;
    const ControlView control = read_control(arena_->control(slots[i]));
    if (control.state != SlotState::kReady) throw Invalid(at("slots", i) + "not READY");
    if (control.checked == 0) throw Invalid(at("slots", i) + "its cells were not summed");
    if (control.length != format.length()) throw Invalid(at("slots", i) + "of another format");
    const Key& key = index_.node(nodes[i]).key;
    if (!std::equal(control.fingerprint.begin(), control.fingerprint.end(), key.bytes.begin()))
      throw Invalid(at("slots", i) + "holds another block");
  }
}

// ---- write -----------------------------------------------------------------------------------------------

DiskPool::Begun DiskPool::write(std::span<const NodeId> nodes, std::span<const SlotId> slots,
                                const SlotFormat& format) {
  require_blocks(nodes, slots, format);
  require_chain(nodes);
  require_saved(nodes, slots, format);
  const std::uint32_t pages = record_pages(format);
  if (!fits(pages))
    throw Invalid("format: a block of " + std::to_string(format.slot_bytes()) + " bytes does not fit a segment of " +
                  std::to_string(std::size_t{segment_pages_} * kPageBytes));
  const std::uint32_t number = formats_.number(format);
  if (number == kNone) throw Invalid("format: more than " + std::to_string(DiskFormats::kMax) + " on one disk");
  nodes_.grow();

  const NodeId top = index_.root_of(nodes[0]);
  const Key& root = index_.node(top).key;
  Begun out;
  Job job;
  job.format = format;
  std::vector<WriteOrder> orders;
  for (; out.accepted < nodes.size(); ++out.accepted) {
    const NodeId node = nodes[out.accepted];
    const SlotId slot = slots[out.accepted];
    if (nodes_.state(node) != OnDisk::kNot) continue;
    if (crowded() || (write_bytes_ > 0 && write_bytes_ + format.slot_bytes() > options_.write_bytes_max)) break;
    const std::uint32_t segment = allocate(pages, For::kSave);
    if (segment == kNone) break;
    DiskRecord record{node, 0, arena_->control(slot).crc, static_cast<std::uint16_t>(number), false};
    const RecordRef ref = append(segment, record);
    nodes_.place(node, ref, OnDisk::kWriting);
    usage_.add(top, format.slot_bytes());
    ++writing_;
    write_bytes_ += format.slot_bytes();
    orders.push_back({fd(segment), this->record(ref).page, header_of(node, root, ref), slot});
    job.nodes.push_back(node);
    job.refs.push_back(ref);
  }
  if (orders.empty()) return out;
  job.move = mover_->write(std::move(orders));
  out.job = begin(std::move(job));
  return out;
}

std::uint64_t DiskPool::begin(Job job) {
  const std::uint64_t id = next_job_++;
  job.open = job.nodes.size();
  Work work;
  work.job = id;
  works_.emplace(job.move, work);
  jobs_.emplace(id, std::move(job));
  return id;
}

void DiskPool::written(std::uint64_t id, std::uint32_t at, MoveStatus status) {
  const Job& job = jobs_.at(id);
  const RecordRef ref = job.refs[at];
  DiskSegment& segment = segments_[ref.segment];
  --segment.writing;
  write_bytes_ -= job.format.slot_bytes();
  segment.dirty = true;  // also what has failed may have left something
  const NodeId node = record(ref).node;
  if (node == kNone) {
    resolve(id, at, MoveStatus::kDropped);  // forgotten meanwhile
  } else if (status == MoveStatus::kOk) {
    settle(node, id, at);
  } else {
    lose(node, dropped_.lost);
    resolve(id, at, status);
  }
  if (segment.writing == 0) advance(ref.segment);
}

// Its bytes are on the disk: readable if the block above is, and if that is on its way, when it is.
void DiskPool::settle(NodeId node, std::uint64_t id, std::uint32_t at) {
  const NodeId parent = index_.node(node).parent;
  if (index_.node(parent).depth == 0 || nodes_.readable(parent)) {
    publish(node);
    resolve(id, at, MoveStatus::kOk);
  } else if (nodes_.state(parent) != OnDisk::kNot) {
    nodes_.set_state(node, OnDisk::kHeld);
    held_[node] = {id, at};
  } else {
    lose(node, dropped_.lost);
    resolve(id, at, MoveStatus::kDropped);
  }
}

// ---- read ------------------------------------------------------------------------------------------------

std::uint64_t DiskPool::read(std::span<const NodeId> nodes, std::span<const SlotId> slots, const SlotFormat& format) {
  require_blocks(nodes, slots, format);
  if (crowded()) throw Full("disk pool: too many jobs are out; pump() first");
  Job job;
  job.kind = DiskEvent::Kind::kRead;
  job.format = format;
  std::vector<ReadOrder> orders;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (!nodes_.readable(nodes[i])) throw Invalid(at("nodes", i) + "not readable on the disk");
    const RecordRef ref = nodes_.ref(nodes[i]);
    const SlotFormat& written = format_of(ref);
    if (written.layers != format.layers || written.heads != format.heads || written.cell_bytes != format.cell_bytes)
      throw Invalid(at("nodes", i) + "written in another format");
    orders.push_back({place_of(ref), slots[i]});
    job.nodes.push_back(nodes[i]);
    job.refs.push_back(ref);
  }
  job.move = mover_->read(std::move(orders));
  for (const RecordRef& ref : job.refs) ++segments_[ref.segment].readers;
  return begin(std::move(job));
}

void DiskPool::read_ended(std::uint64_t id, std::uint32_t at, MoveStatus status) {
  const Job& job = jobs_.at(id);
  const RecordRef ref = job.refs[at];
  DiskSegment& segment = segments_[ref.segment];
  --segment.readers;
  if (segment.live == 0) emptied_.push_back(ref.segment);
  // Not if it has died meanwhile, or is read from another place by now.
  const NodeId node = record(ref).node;
  if (status == MoveStatus::kCorrupt && node != kNone) lose(node, dropped_.rot);
  resolve(id, at, status);
}

void DiskPool::cancel(std::uint64_t job) {
  const auto it = jobs_.find(job);
  if (it != jobs_.end() && it->second.kind == DiskEvent::Kind::kRead) mover_->cancel(it->second.move);
}

// ---- flush -----------------------------------------------------------------------------------------------

std::uint64_t DiskPool::flush() {
  require_open();
  Flush flush;
  flush.job = next_job_++;
  for (const auto& [id, job] : jobs_) flush.writes += job.kind == DiskEvent::Kind::kWritten;
  flushes_.push_back(std::move(flush));
  again();
  return flushes_.back().job;
}

// Everything it is about has been written: what of it no sync has covered yet?
void DiskPool::ask_syncs(Flush& flush) {
  flush.asked = true;
  using enum SegmentState;
  for (const SegmentState state : {kFilling, kSealing, kBroken})
    for (std::uint32_t s : in_[static_cast<std::size_t>(state)]) {
      DiskSegment& segment = segments_[s];
      if (segment.synced() || segment.live == 0) continue;
      if (state == kBroken) {
        flush.error = segment.error;
        continue;
      }
      flush.syncs.emplace_back(s, segment.want_sync());
      sync_if_wanted(s);
    }
}

void DiskPool::step_flushes() {
  for (std::size_t i = 0; i < flushes_.size(); ++i)
    if (!flushes_[i].asked && flushes_[i].writes == 0) ask_syncs(flushes_[i]);
  const auto over = [&](const Flush& flush) {
    return flush.asked && std::all_of(flush.syncs.begin(), flush.syncs.end(), [&](const auto& sync) {
             return segments_[sync.first].done >= sync.second;
           });
  };
  for (const Flush& flush : flushes_) {
    if (!over(flush)) continue;
    DiskEvent event;
    event.kind = DiskEvent::Kind::kFlushed;
    event.job = flush.job;
    event.last = true;
    event.error = flush.error;
    events_.push_back(std::move(event));
  }
  std::erase_if(flushes_, over);
}

// ---- what nobody wants -----------------------------------------------------------------------------------

bool DiskPool::forget(NodeId node) {
  require_open();
  if (!nodes_.present(node)) return false;
  std::size_t count = 0, steps = kNone;
  forgetting_ = true;
  kill_tree(node, count, steps);
  forgetting_ = false;
  if (evacuation_ && !evacuation_->moves.empty()) forgotten_ = std::max(forgotten_, mark());
  if (!changed_.empty() || !emptied_.empty()) again();
  return true;
}

bool DiskPool::drop(NodeId node) {
  require_open();
  if (!nodes_.readable(node)) return false;
  lose(node, dropped_.rot);
  if (!changed_.empty() || !emptied_.empty()) again();
  return true;
}

void DiskPool::touch(std::span<const NodeId> nodes) {
  require_open();
  for (std::size_t i = nodes.size(); i-- > 0;)
    if (nodes_.present(nodes[i])) nodes_.raise(nodes[i], clock_ + 1);
}

}  // namespace kv
