#include "device_pool.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kv {

DevicePool::DevicePool(Index& index, HostPool* host, std::size_t blocks, std::size_t idle_max)
    : index_(index), host_(host), idle_max_(idle_max) {
  if (blocks == 0 || blocks > kBlocksMax)
    throw Invalid("blocks: must be in [1, " + std::to_string(kBlocksMax) + "], got " + std::to_string(blocks));
  blocks_.resize(blocks);
  free_ = FreeIds(blocks);
  free_.add_range(0, blocks);
  index_.join(this);
}

DevicePool::~DevicePool() { close(); }

bool DevicePool::close_some(std::size_t most) {
  if (!closed_) {
    closed_ = true;
    by_node_ = IdMap{};
    children_ = IdMap{};
    free_.add_range(0, blocks_.size());
    mapped_ = idle_ = draining_ = 0;
  }
  const std::size_t nodes = index_.size(), first = emptied_;
  for (; emptied_ < blocks_.size() && emptied_ - first + nodes - index_.size() < most; ++emptied_) {
    const Block block = std::exchange(blocks_[emptied_], Block{});
    if (block.node == kNone) continue;
    if (block.state == State::kUsed) note(removed_, block.node);
    let_go(block.node);
  }
  if (emptied_ < blocks_.size()) return false;
  index_.leave(this);
  return true;
}

// ---- arguments -------------------------------------------------------------------------------------------

void DevicePool::require_open() const {
  if (closed_) throw Invalid("pool: this device pool is closed; make a new one for the new engine");
}

void DevicePool::require_call(std::span<const BlockId> blocks) const {
  require_open();
  if (blocks.size() > kKeysMax)
    throw Invalid("blocks: at most " + std::to_string(kKeysMax) + " in one call, got " +
                  std::to_string(blocks.size()));
}

void DevicePool::require_blocks(std::span<const BlockId> blocks, State state, const char* is_not) const {
  require_call(blocks);
  for (std::size_t i = 0; i < blocks.size(); ++i)
    if (blocks[i] >= blocks_.size() || blocks_[blocks[i]].state != state)
      throw Invalid("blocks[" + std::to_string(i) + "]: block " + std::to_string(blocks[i]) + is_not);
}

void DevicePool::require_room_for_pin(std::span<const BlockId> blocks) const {
  for (BlockId block : blocks)
    if (blocks_[block].pins > kNone - kKeysMax)
      throw Invalid("blocks: block " + std::to_string(block) + " has too many pins");
}

void DevicePool::require_once(std::span<const BlockId> blocks) const {
  std::vector<BlockId> sorted(blocks.begin(), blocks.end());
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) throw Invalid("blocks: block " + std::to_string(*twice) + " is named twice");
}

// ---- one block -------------------------------------------------------------------------------------------

bool DevicePool::candidate(BlockId block) const noexcept {
  const Block& b = blocks_[block];
  return b.state == State::kUsed && b.pins == 0 && b.node != kNone && index_.node(b.node).pins == 0 &&
         children_.find(b.node) == kNone;
}

void DevicePool::offer_if_candidate(BlockId block) {
  if (candidate(block)) policy_.offer(block, 0);
}

void DevicePool::note(std::vector<Key>& events, NodeId node) {
  if (events.size() < kRemovedMax)
    events.push_back(index_.node(node).key);
  else
    ++events_lost_;
}

void DevicePool::link(BlockId block, NodeId node) {
  index_.changed();
  const NodeId parent = index_.node(node).parent;
  const std::uint32_t siblings = children_.find(parent);
  children_.set(parent, siblings == kNone ? 1 : siblings + 1);
  by_node_.set(node, block);
  blocks_[block].node = node;
  ++index_.node(node).holders;
  note(stored_, node);
}

// The block is no longer found under its node; the node's holder stays with the caller.
void DevicePool::unlink(BlockId block) {
  index_.changed();
  const NodeId node = blocks_[block].node;
  const NodeId parent = index_.node(node).parent;
  by_node_.erase(node);
  note(removed_, node);
  const std::uint32_t left = children_.find(parent) - 1;
  if (left == 0)
    children_.erase(parent);
  else
    children_.set(parent, left);
  const BlockId up = by_node_.find(parent);
  if (up == kNone) return;
  policy_.inherit(up, block);
  offer_if_candidate(up);
}

void DevicePool::let_go(NodeId node) {
  index_.changed();
  --index_.node(node).holders;
  index_.reap(node);
}

void DevicePool::make_free(BlockId block) {
  index_.changed();
  blocks_[block] = Block{};
  free_.add(block);
}

void DevicePool::unpinned(NodeId node) {
  const BlockId block = by_node_.find(node);
  if (block != kNone) offer_if_candidate(block);
}

// ---- questions -------------------------------------------------------------------------------------------

std::size_t DevicePool::match(const Walk& walk) const noexcept {
  std::size_t n = 0;
  while (n < walk.nodes.size() && by_node_.find(walk.nodes[n]) != kNone) ++n;
  return n;
}

std::vector<BlockId> DevicePool::blocks_of(std::span<const NodeId> nodes) const {
  std::vector<BlockId> out(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) out[i] = nodes[i] == kNone ? kNone : by_node_.find(nodes[i]);
  return out;
}

void DevicePool::touch(NodeId node) {
  require_open();
  index_.require(node, "node");
  const BlockId block = by_node_.find(node);
  if (block != kNone) policy_.touch(block);
}

DeviceCounts DevicePool::counts() const noexcept {
  return {free_.count(), mapped_, idle_, draining_, events_lost_};
}

bool DevicePool::holds(NodeId node) const noexcept { return node != kNone && by_node_.find(node) != kNone; }

std::vector<Key> DevicePool::take_removed() {
  return index_.only(std::exchange(removed_, {}), [&](NodeId node) { return !holds(node); });
}

std::vector<Key> DevicePool::take_stored() {
  return index_.only(std::exchange(stored_, {}), [&](NodeId node) { return holds(node); });
}

std::size_t DevicePool::memory_bytes() const noexcept {
  return blocks_.capacity() * sizeof(Block) + free_.memory_bytes() + policy_.memory_bytes() +
         by_node_.memory_bytes() + children_.memory_bytes();
}

// ---- actions ---------------------------------------------------------------------------------------------

void DevicePool::pin_once(BlockId block) noexcept {
  index_.changed();
  if (blocks_[block].pins++ > 0) return;
  --idle_;
  ++mapped_;
}

bool DevicePool::unpin_once(BlockId block) noexcept {
  if (blocks_[block].pins == 0) return false;
  index_.changed();
  if (--blocks_[block].pins > 0) return true;
  --mapped_;
  ++idle_;
  return true;
}

void DevicePool::pin(std::span<const BlockId> blocks) {
  require_blocks(blocks, State::kUsed, " is not in use; allocate or match it first");
  require_room_for_pin(blocks);
  for (BlockId block : blocks) pin_once(block);
}

void DevicePool::unpin(std::span<const BlockId> blocks) {
  require_blocks(blocks, State::kUsed, " is not pinned");
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (unpin_once(blocks[i])) continue;
    for (std::size_t undo = 0; undo < i; ++undo) pin_once(blocks[undo]);
    throw Invalid("blocks[" + std::to_string(i) + "]: block " + std::to_string(blocks[i]) + " is not pinned");
  }
  for (BlockId block : blocks) {  // may name a block twice
    const Block& b = blocks_[block];
    if (b.pins > 0 || b.state == State::kFree) continue;
    if (b.node == kNone) {
      --idle_;
      make_free(block);
      continue;
    }
    policy_.touch(block);
    offer_if_candidate(block);
  }
}

void DevicePool::adopt(std::span<const BlockId> blocks) {
  require_call(blocks);
  for (std::size_t i = 0; i < blocks.size(); ++i)
    if (blocks[i] >= blocks_.size() || blocks_[blocks[i]].state == State::kDraining)
      throw Invalid("blocks[" + std::to_string(i) + "]: block " + std::to_string(blocks[i]) +
                    " is draining or outside the pool");
  require_once(blocks);
  require_room_for_pin(blocks);
  for (BlockId block : blocks) {
    if (blocks_[block].state == State::kUsed) {
      pin_once(block);
      continue;
    }
    index_.changed();
    free_.remove(block);
    blocks_[block] = {kNone, 1, State::kUsed};
    ++mapped_;
  }
}

// Takes the oldest idle leaf out of the index; false if there is none.
bool DevicePool::evict_one(Allocation& out) {
  const BlockId block = policy_.oldest(0, [&](BlockId id) { return candidate(id); }).id;
  if (block == kNone) return false;
  policy_.remove(block);
  const NodeId node = blocks_[block].node;
  unlink(block);
  --idle_;
  if (host_ == nullptr || index_.node(node).host_slot != kNone) {
    make_free(block);
    let_go(node);
    return true;
  }
  blocks_[block].state = State::kDraining;
  ++draining_;
  out.draining.push_back(block);
  out.draining_nodes.push_back(node);
  return true;
}

Allocation DevicePool::allocate(std::size_t wanted) {
  require_open();
  if (wanted > blocks_.size() || wanted > kKeysMax)
    throw Invalid("wanted: at most " + std::to_string(std::min(blocks_.size(), kKeysMax)) + " blocks, got " +
                  std::to_string(wanted));
  index_.changed();
  Allocation out;
  // Hopeless demands evict nothing.
  if (free_.count() + idle_ + draining_ < wanted) return out;
  while (free_.count() + out.draining.size() < wanted && evict_one(out)) {
  }
  if (free_.count() < wanted) return out;
  out.blocks.reserve(wanted);
  for (std::size_t i = 0; i < wanted; ++i) {
    const BlockId block = free_.take(cursor_);
    cursor_ = block + 1;
    blocks_[block] = {kNone, 1, State::kUsed};
    out.blocks.push_back(block);
  }
  mapped_ += wanted;
  return out;
}

Allocation DevicePool::trim(std::size_t most) {
  require_open();
  Allocation out;
  for (std::size_t i = 0; i < std::min(most, kKeysMax) && idle_ > idle_max_ && evict_one(out);) ++i;
  return out;
}

void DevicePool::drained(std::span<const BlockId> blocks) {
  require_blocks(blocks, State::kDraining, " is not draining");
  require_once(blocks);
  for (BlockId block : blocks) {
    const NodeId node = blocks_[block].node;
    make_free(block);
    --draining_;
    let_go(node);
  }
}

std::vector<std::uint8_t> DevicePool::commit(std::span<const BlockId> blocks, NodeId parent,
                                             std::span<const Key> keys) {
  require_blocks(blocks, State::kUsed, " is not in use");
  require_once(blocks);
  if (blocks.size() != keys.size())
    throw Invalid("blocks: " + std::to_string(blocks.size()) + " for " + std::to_string(keys.size()) + " keys");
  for (std::size_t i = 0; i < blocks.size(); ++i)
    if (blocks_[blocks[i]].pins == 0 || blocks_[blocks[i]].node != kNone)
      throw Invalid("blocks[" + std::to_string(i) + "]: block " + std::to_string(blocks[i]) +
                    (blocks_[blocks[i]].node != kNone ? " already holds a key's bytes" : " is not pinned"));
  const std::vector<NodeId> known = index_.resolve(parent, keys);
  index_.prepare(keys.size() - known.size());
  by_node_.reserve(keys.size());
  children_.reserve(keys.size());

  std::vector<std::uint8_t> indexed(keys.size(), 0);
  // Room for nodes may come from host evictions: they must not take the chain that is being extended.
  const NodeId guard = known.empty() ? parent : known.back();
  index_.pin(guard);
  NodeId up = parent;
  bool up_here = index_.node(parent).depth == 0 || by_node_.find(parent) != kNone;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    NodeId node = i < known.size() ? known[i] : kNone;
    const bool here = node != kNone && by_node_.find(node) != kNone;
    if (!here && up_here) {
      if (node == kNone && index_.full() && (host_ == nullptr || !host_->make_node_room())) break;
      if (node == kNone) node = index_.make(up, keys[i]);
      link(blocks[i], node);
      indexed[i] = 1;
    }
    if (node == kNone) break;
    up_here = here || indexed[i] == 1;
    up = node;
  }
  index_.unpin(guard);
  return indexed;
}

bool DevicePool::drop(NodeId node) {
  require_open();
  const BlockId block = node == kNone ? kNone : by_node_.find(node);
  if (block == kNone) return false;
  unlink(block);
  blocks_[block].node = kNone;
  if (blocks_[block].pins == 0) {
    --idle_;
    make_free(block);
  }
  let_go(node);
  return true;
}

// ---- laws ------------------------------------------------------------------------------------------------

std::uint32_t DevicePool::holders(std::uint32_t start, std::uint32_t most, const HolderOf& each) const {
  const std::size_t stop = std::min(blocks_.size(), std::size_t{start} + most);
  for (std::size_t id = start; id < stop; ++id)
    if (blocks_[id].node != kNone) each(blocks_[id].node);
  return stop == blocks_.size() ? kNone : static_cast<std::uint32_t>(stop);
}

}  // namespace kv
