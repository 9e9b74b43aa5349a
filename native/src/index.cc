#include "index.h"

#include <algorithm>
#include <random>

namespace kv {

namespace {

constexpr std::size_t kLanes = 48;      // sub-walks in flight: more than a core's outstanding cache misses
constexpr std::size_t kIdStep = 1024;   // ids come into use in steps, so a small index is quick to check

__extension__ using Wide = unsigned __int128;

std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  const Wide product = Wide{a} * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::string at(std::size_t i, std::uint32_t position) {
  return "positions[" + std::to_string(i) + "] = " + std::to_string(position) + ": ";
}

}  // namespace

Index::Index(std::size_t nodes_max) : nodes_max_(nodes_max) {
  if (nodes_max == 0 || nodes_max > kNodesMax)
    throw Invalid("nodes_max: must be in [1, 2^31], got " + std::to_string(nodes_max));
  free_ = FreeIds(round_up(nodes_max + kRootsMax, kIdStep));
  std::random_device random;
  for (auto& word : seed_) word = std::uint64_t{random()} << 32 | random();
}

void Index::require(NodeId id, const char* what) const {
  if (!live(id))
    throw Invalid(std::string(what) + ": there is no node " + std::to_string(id) +
                  "; it was reaped, look the key up again");
}

// ---- hash table ------------------------------------------------------------------------------------------

std::uint32_t Index::tag(const Key& key) const noexcept {
  std::uint64_t w[4];
  std::memcpy(w, key.bytes.data(), sizeof w);
  const std::uint64_t mixed = fold(w[0] ^ seed_[0], w[1] ^ seed_[1]) + fold(w[2] ^ seed_[2], w[3] ^ seed_[3]);
  return static_cast<std::uint32_t>(mixed >> 32);
}

NodeId Index::find(const Key& key) const noexcept { return find(key, tag(key)); }

NodeId Index::find(const Key& key, std::uint32_t tag) const noexcept {
  const TagTable::Entry* entry = table_.find(tag, [&](NodeId id) { return nodes_[id].key == key; });
  return entry == nullptr ? kNone : entry->value();
}

// As find() for each key, with the misses of several keys under way at once.
std::vector<NodeId> Index::find_all(std::span<const Key> keys) const {
  constexpr std::size_t kTableAhead = 16, kNodeAhead = 8;
  std::vector<std::uint32_t> tags(keys.size());
  std::vector<NodeId> ids(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) tags[i] = tag(keys[i]);
  for (std::size_t i = 0; i < keys.size() + kTableAhead; ++i) {
    if (i < keys.size()) table_.prefetch(tags[i]);
    if (i >= kNodeAhead && i - kNodeAhead < keys.size()) {
      const TagTable::Entry* entry = table_.find(tags[i - kNodeAhead], [](NodeId) { return true; });
      if (entry != nullptr) __builtin_prefetch(&nodes_[entry->value()]);
    }
    if (i >= kTableAhead) ids[i - kTableAhead] = find(keys[i - kTableAhead], tags[i - kTableAhead]);
  }
  return ids;
}

void Index::erase(const Key& key, NodeId id) {
  TagTable::Entry* entry = table_.find(tag(key), [&](NodeId other) { return other == id; });
  if (entry == nullptr) throw Broken("index: node " + std::to_string(id) + ": its key is not in the table");
  table_.erase(entry);
}

// ---- nodes -----------------------------------------------------------------------------------------------

void Index::prepare(std::size_t n) {
  reserve(std::min(n, nodes_max_ - size()));
}

void Index::reserve(std::size_t n) {
  table_.prepare(n);
  while (free_.count() < n) {
    nodes_.grow(ids_ + kIdStep);
    free_.add_range(ids_, ids_ + kIdStep);
    ids_ += kIdStep;
  }
}

NodeId Index::take_id() noexcept {
  cursor_ = free_.take(cursor_);
  return cursor_;
}

NodeId Index::make(NodeId parent, const Key& key) {
  if (full()) return kNone;
  prepare(1);
  const NodeId id = take_id();
  Node& up = nodes_[parent];
  Node& node = nodes_[id];
  node = Node{};
  node.key = key;
  node.parent = parent;
  node.depth = up.depth + 1;
  node.jump = up.depth % kJumpStride == 0 ? parent : up.jump;
  ++up.children;
  ++live_;
  ++version_;
  table_.insert(tag(key), id);
  return id;
}

NodeId Index::root(const Key& key) {
  const NodeId known = find(key);
  if (known != kNone) {
    if (nodes_[known].depth != 0)
      throw Invalid("root: this key is known as a block at depth " + std::to_string(nodes_[known].depth));
    return known;
  }
  if (roots_ == kRootsMax)
    throw Invalid("root: more than " + std::to_string(kRootsMax) + " roots (tenants x namespaces)");
  reserve(1);
  const NodeId id = take_id();
  nodes_[id] = Node{};
  nodes_[id].key = key;
  nodes_[id].depth = 0;
  ++live_;
  ++roots_;
  ++version_;
  table_.insert(tag(key), id);
  return id;
}

void Index::reap(NodeId id) {
  for (;;) {
    Node& node = nodes_[id];
    if (node.depth == 0 || node.children > 0 || node.holders > 0 || node.pins > 0) return;
    if (node.host_refs > 0 || node.host_slot != kNone) 
      throw Broken("index: node " + std::to_string(id) + ": reaped while the host pool refers to it");
    const NodeId parent = node.parent;
    erase(node.key, id);
    ++version_;
    node = Node{};
    free_.add(id);
    --live_;
    --nodes_[parent].children;
    id = parent;
  }
}

std::vector<NodeId> Index::resolve(NodeId parent, std::span<const Key> keys) const {
  require(parent, "parent");
  if (keys.size() > kKeysMax)
    throw Invalid("keys: at most " + std::to_string(kKeysMax) + " in one call, got " +
                  std::to_string(keys.size()));
  if (nodes_[parent].depth + keys.size() > kDepthMax)
    throw Invalid("keys: the chain would be longer than " + std::to_string(kDepthMax) + " blocks");
  std::vector<NodeId> ids = find_all(keys);
  std::size_t known = 0;
  for (NodeId up = parent; known < ids.size() && ids[known] != kNone; up = ids[known++])
    if (nodes_[ids[known]].parent != up)
      throw Invalid("keys[" + std::to_string(known) + "]: this key is known after another parent");
  // Unknown keys are compared among themselves: a repeated key would need two nodes.
  std::vector<std::uint32_t> seen(std::max<std::size_t>(16, 2 * (ids.size() - known)), kNone);
  for (std::size_t i = known; i < ids.size(); ++i) {
    if (ids[i] != kNone)
      throw Invalid("keys[" + std::to_string(i) + "]: this key is known after another parent");
    std::size_t j = (std::uint64_t{tag(keys[i])} * seen.size()) >> 32;
    for (; seen[j] != kNone; j = j + 1 == seen.size() ? 0 : j + 1)
      if (keys[seen[j]] == keys[i])
        throw Invalid("keys[" + std::to_string(i) + "]: repeats keys[" + std::to_string(seen[j]) + "]");
    seen[j] = static_cast<std::uint32_t>(i);
  }
  ids.resize(known);
  return ids;
}

// ---- walk ------------------------------------------------------------------------------------------------

// Fills the walk from `deepest` up and returns the root's node. The jumps, one dependent miss per 64 nodes, open
// a stretch each; open stretches are independent of one another, so kLanes of them are walked in step with the
// next jump, and all their misses overlap.
NodeId Index::climb(NodeId deepest, Walk& walk) const {
  struct Stretch {
    NodeId node;
    std::uint32_t position;  // of the node in the chain
  };
  Stretch lanes[kLanes];
  std::size_t open = 0;
  NodeId jumper = deepest;
  walk.nodes.resize(walk.depth);
  walk.slots.resize(walk.depth);
  walk.ready = walk.depth;
  for (std::uint32_t depth = walk.depth; depth > 0 || open > 0;) {
    if (depth > 0 && open < kLanes) {
      lanes[open++] = {jumper, depth - 1};
      depth = (depth - 1) / kJumpStride * kJumpStride;
      jumper = nodes_[jumper].jump;
      __builtin_prefetch(&nodes_[jumper]);
    }
    for (std::size_t lane = 0; lane < open;) {
      const Stretch s = lanes[lane];
      const Node& here = nodes_[s.node];
      walk.nodes[s.position] = s.node;
      walk.slots[s.position] = here.host_slot;
      walk.digest += digest_term(here.key, s.position);
      if (here.host_slot == kNone) walk.ready = std::min(walk.ready, s.position);
      if (s.position % kJumpStride == 0) {
        lanes[lane] = lanes[--open];
        continue;
      }
      lanes[lane++] = {here.parent, s.position - 1};
      __builtin_prefetch(&nodes_[here.parent]);
    }
  }
  return jumper;
}

std::uint64_t Index::digest(const Walk& walk, std::size_t length) const {
  if (length > walk.depth)
    throw Invalid("length: " + std::to_string(length) + " keys asked, the walk has " + std::to_string(walk.depth));
  if (length == walk.depth) return walk.digest;
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < length; ++i) {
    require(walk.nodes[i], "walk");
    sum += digest_term(nodes_[walk.nodes[i]].key, i);
  }
  return sum;
}

Walk Index::walk(const Key& root, std::uint32_t n, std::span<const std::uint32_t> positions,
                 std::span<const Key> keys) const {
  if (positions.size() != keys.size())
    throw Invalid("positions: " + std::to_string(positions.size()) + " for " + std::to_string(keys.size()) +
                  " keys");
  if (keys.size() > kKeysMax)
    throw Invalid("keys: at most " + std::to_string(kKeysMax) + " in one call, got " +
                  std::to_string(keys.size()));
  if (n > kDepthMax) throw Invalid("n: at most " + std::to_string(kDepthMax) + " blocks, got " + std::to_string(n));
  for (std::size_t i = 0; i < positions.size(); ++i)
    if (positions[i] >= n || (i > 0 && positions[i] <= positions[i - 1]))
      throw Invalid(at(i, positions[i]) + "must ascend and be below n = " + std::to_string(n));

  Walk result;
  result.root = find(root);
  if (result.root != kNone && nodes_[result.root].depth != 0)
    throw Invalid("root: this key is known as a block at depth " + std::to_string(nodes_[result.root].depth));
  result.deepest = result.root;
  const std::size_t deepest = last_known(positions, keys, result);
  if (result.depth > 0) climb(result.deepest, result);
  // Ancestors are closed: every key before the deepest known one must be its ancestor. The climb has just
  // touched their nodes, so comparing keys is cheaper than finding them.
  for (std::size_t i = 0; result.depth > 0 && i < deepest; ++i)
    if (!(nodes_[result.nodes[positions[i]]].key == keys[i])) {
      if (const NodeId other = find(keys[i]); under(other, result.root)) check_depth(other, i, positions[i]);
      throw Invalid(at(i, positions[i]) + "this key is not on the chain of the deepest known key");
    }
  const std::size_t next = result.depth > 0 ? deepest + 1 : 0;
  result.gap_stop = next < positions.size() ? positions[next] : n;
  return result;
}

// What is known of a chain is its beginning (ancestors are closed), so a few rounds of several keys each find
// where that ends. The last keys come first: a conversation that grows ends there. A key that stands under another
// root is as unknown as one that nobody has: whoever asks learns nothing of what others keep.
std::size_t Index::last_known(std::span<const std::uint32_t> positions, std::span<const Key> keys,
                              Walk& walk) const {
  constexpr std::size_t kTail = 8, kWays = 16;
  std::size_t known = 0, unknown = keys.size();  // keys[known - 1] is known, keys[unknown] is not
  std::size_t start = unknown - std::min(unknown, kTail), step = 1;
  while (known < unknown) {
    std::vector<Key> some;
    for (std::size_t i = start; i < unknown; i += step) some.push_back(keys[i]);
    const std::vector<NodeId> ids = find_all(some);
    std::size_t found = ids.size();
    while (found > 0 && !under(ids[found - 1], walk.root)) --found;
    if (found < ids.size()) unknown = start + found * step;
    if (found > 0) {
      known = start + (found - 1) * step + 1;
      check_depth(ids[found - 1], known - 1, positions[known - 1]);
      walk.deepest = ids[found - 1];
      walk.depth = positions[known - 1] + 1;
    }
    step = (unknown - known + kWays - 1) / kWays;
    start = known + step - 1;
  }
  return known == 0 ? 0 : known - 1;
}

void Index::check_depth(NodeId id, std::size_t i, std::uint32_t position) const {
  if (id != kNone && nodes_[id].depth != position + 1)
    throw Invalid(at(i, position) + "this key is known at depth " + std::to_string(nodes_[id].depth) + ", not " +
                  std::to_string(position + 1));
}

// ---- pins ------------------------------------------------------------------------------------------------

void Index::pin(NodeId id) {
  require(id, "node");
  pinned_.set(id, 0);
  ++version_;
  ++pins_;
  if (++nodes_[id].pins == 1)
    for (Place* place : places_) place->pinned(id);
}

void Index::unpin(NodeId id) {
  require(id, "node");
  if (nodes_[id].pins == 0) throw Invalid("node: " + std::to_string(id) + " is not pinned");
  ++version_;
  --pins_;
  if (--nodes_[id].pins > 0) return;
  pinned_.erase(id);
  ++nodes_[id].holders;  // stays until every place has heard of it, whatever they let go
  for (Place* place : places_) place->unpinned(id);
  --nodes_[id].holders;
  reap(id);
}

bool Index::below(NodeId id, NodeId ancestor) const noexcept {
  const std::uint32_t depth = nodes_[ancestor].depth;
  while (nodes_[id].depth > depth) {
    const NodeId jump = nodes_[id].jump;
    id = nodes_[jump].depth >= depth ? jump : nodes_[id].parent;
  }
  return id == ancestor;
}

std::vector<NodeId> Index::pinned_below(NodeId id) const {
  std::vector<NodeId> found;
  pinned_.each([&](NodeId pinned, std::uint32_t) {
    if (below(pinned, id)) found.push_back(pinned);
  });
  return found;
}

void Index::join(Place* place) {
  ++version_;
  places_.push_back(place);
}

void Index::leave(Place* place) {
  ++version_;
  std::erase(places_, place);
}

void Index::claim_host() {
  if (host_claimed_)
    throw Invalid("index: it already has a host pool; every trust group has its own index and arena");
  host_claimed_ = true;
}

std::size_t Index::memory_bytes() const noexcept {
  return nodes_.memory_bytes() + table_.memory_bytes() + free_.memory_bytes() +
         pinned_.memory_bytes();
}

}  // namespace kv
