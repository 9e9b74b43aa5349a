// The laws of a device pool, in slices (see check.h).
#include <algorithm>
#include <string>

#include "check.h"
#include "device_pool.h"

namespace kv {

namespace {

[[noreturn]] void broken(std::size_t block, const char* law) {
  throw Broken("device pool: block " + std::to_string(block) + ": " + law);
}

}  // namespace

void DevicePool::check() const { DeviceChecker(*this).step(kCheckAll); }

DeviceChecker::DeviceChecker(const DevicePool& pool)
    : pool_(pool), version_(pool.index_.version()), ids_(pool.index_.ids()), children_(ids_) {}

bool DeviceChecker::settled() const noexcept { return pool_.index_.version() == version_; }

bool DeviceChecker::step(std::size_t most) {
  const std::size_t blocks = pool_.blocks_.size();
  for (std::size_t left = std::max<std::size_t>(most, 1); left > 0; --left, ++at_) {
    if (at_ < blocks) {
      block(static_cast<BlockId>(at_));
      continue;
    }
    if (!settled() || at_ - blocks == ids_) {
      sums();
      return true;
    }
    const NodeId id = static_cast<NodeId>(at_ - blocks);
    const std::uint32_t counted = pool_.children_.find(id);
    if ((counted == kNone ? 0 : counted) != children_[id])
      throw Broken("device pool: node " + std::to_string(id) + ": wrong child count");
  }
  return false;
}

void DeviceChecker::block(BlockId id) {
  using State = DevicePool::State;
  const DevicePool::Block& b = pool_.blocks_[id];
  const Index& index = pool_.index_;
  if (pool_.free_.has(id) != (b.state == State::kFree)) broken(id, "free and used at once");
  if (b.state == State::kFree && (b.pins > 0 || b.node != kNone)) broken(id, "FREE but pinned or indexed");
  mapped_ += b.state == State::kUsed && b.pins > 0;
  idle_ += b.state == State::kUsed && b.pins == 0;
  draining_ += b.state == State::kDraining;
  if (b.state == State::kUsed && b.pins == 0 && b.node == kNone) broken(id, "neither pinned nor indexed");
  if (b.state == State::kDraining && (b.pins > 0 || b.node == kNone)) broken(id, "DRAINING without a node");
  if (b.node == kNone) return;
  if (!index.live(b.node)) broken(id, "its node does not exist");
  if (b.state != State::kUsed) return;
  ++linked_;
  if (pool_.by_node_.find(b.node) != id) broken(id, "its node names another block");
  if (pool_.candidate(id) && pool_.policy_.queue_of(id) != 0) broken(id, "may leave but is in no queue");
  const NodeId parent = index.node(b.node).parent;
  if (pool_.children_.find(parent) == kNone) broken(id, "its parent counts no children here");
  if (settled()) parents_ += children_[parent]++ == 0;
}

void DeviceChecker::sums() const {
  const DeviceCounts c = pool_.counts();
  if (c.free + c.mapped + c.idle + c.draining != pool_.blocks_.size())
    throw Broken("device pool: free + mapped + idle + draining != blocks");
  if (!settled()) return;
  if (linked_ != pool_.by_node_.size()) throw Broken("device pool: nodes with blocks are miscounted");
  if (parents_ != pool_.children_.size()) throw Broken("device pool: parents are miscounted");
  if (mapped_ != c.mapped || idle_ != c.idle || draining_ != c.draining)
    throw Broken("device pool: counts by state are off");
}

}  // namespace kv
