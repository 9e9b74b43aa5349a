// A disk pool on real files, with an index and an arena of its own, every law checked after each step.
#pragma once

#include <doctest/doctest.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "disk_faulty.h"
#include "disk_kit.h"
#include "disk_pool.h"
#include "ready_slot.h"

namespace kv {

struct DiskPoolProbe {
  static bool idle(const DiskPool& pool) { return pool.works_.empty(); }
  static std::size_t& readable(DiskPool& pool) { return pool.readable_; }
  static DiskSegment& filling(DiskPool& pool) { return pool.segments_[pool.filling_]; }
};

}  // namespace kv

namespace kv::test {

inline constexpr std::size_t kSmallSegment = kSegmentBytesMin;  // 256 pages
inline const SlotFormat kBlock{2, 3, 1000};                     // a record of 3 pages
inline constexpr std::size_t kPerSegment = 84;  // of a small one: 1 + 84 * 3 + 3 = 256 pages: header, records, footer

struct RigOptions {
  std::size_t segments = 6;  // of room
  std::size_t segment_bytes = kSmallSegment;
  std::size_t nodes_max = 10000;
  SlotId slot_pages = 8;
  std::string kind = "auto";
  DiskOptions pool{};
  bool check = true;   // laws after every pump
  bool direct = true;  // where the file system can
  std::shared_ptr<Faults> faults{};  // what shall go wrong from the start on
};

// payload_of() as a test needs it again and again; one format a key.
inline const Payload& payload_kept(const Key& key, const SlotFormat& format) {
  static std::map<std::array<std::uint8_t, 32>, Payload> kept;
  const auto known = kept.find(key.bytes);
  if (known != kept.end() && known->second.bytes.size() == format.slot_bytes()) return known->second;
  return kept[key.bytes] = payload_of(key, format);
}

inline std::vector<NodeId> sorted(std::vector<NodeId> nodes) {
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

// What became of a job.
struct Outcome {
  std::vector<NodeId> ok, corrupt, failed;
  bool last = false;
  int error = 0;
};

class Rig {
 public:
  explicit Rig(const std::string& path, RigOptions options = {})
      : options_(std::move(options)), index(options_.nodes_max), arena(Arena::create("test", 4 * kHugeBytes)),
        faults(options_.faults ? options_.faults : std::make_shared<Faults>()) {
    for (SlotId slot = 0; slot + options_.slot_pages <= arena->pages(); slot += options_.slot_pages)
      free_.push_back(slot);
    DiskDirectory::Options where;
    where.path = path;
    where.capacity_bytes = options_.segments * options_.segment_bytes;
    where.segment_bytes = options_.segment_bytes;
    where.direct = options_.direct && direct_works(std::filesystem::temp_directory_path().string());
    directory = DiskDirectory::open(where);
    auto disk = faulty_disk(open_disk(options_.kind, 32, 4), faults);
    auto mover = std::make_unique<Mover>(std::move(disk), arena, Mover::Limits{});
    pool = std::make_unique<DiskPool>(index, arena, directory, std::move(mover), options_.pool);
    if (directory->segments().empty()) return;
    DiskSurvey survey(directory);
    survey.read(1);
    adopted = pool->adopt(survey);
    check();
  }
  ~Rig() {
    for (const DiskOp op : {DiskOp::kRead, DiskOp::kWrite, DiskOp::kSync, DiskOp::kAllocate}) faults->release(op);
    pool.reset();
  }

  void check() {
    if (!options_.check) return;
    pool->check();
    index.check();
  }

  // ---- nodes -------------------------------------------------------------------------------------------------
  NodeId root(std::uint64_t name = 0) { return index.root(key_of(name)); }
  NodeId node(std::uint64_t name) const { return index.find(key_of(name)); }
  // The nodes of a chain of names after parent, made as needed and held by a pin of the last one.
  std::vector<NodeId> chain(NodeId parent, std::uint64_t first, std::size_t n) {
    std::vector<NodeId> out;
    for (std::size_t i = 0; i < n; ++i) {
      const Key key = key_of(first + i);
      const NodeId known = index.find(key);
      out.push_back(known != kNone ? known : index.make(i == 0 ? parent : out.back(), key));
    }
    index.pin(out.back());
    return out;
  }
  bool readable(NodeId node) const { return pool->readable(std::vector<NodeId>{node})[0] != 0; }
  bool holds(std::uint64_t name) const { return node(name) != kNone && readable(node(name)); }  // readable, by name
  std::size_t readable(const std::vector<NodeId>& nodes) const {
    const auto flags = pool->readable(nodes);
    return static_cast<std::size_t>(std::count(flags.begin(), flags.end(), 1));
  }

  // ---- slots -------------------------------------------------------------------------------------------------
  // A READY slot with the block of this key, as a host pool leaves it.
  SlotId ready(const Key& key, const SlotFormat& format = kBlock) {
    const SlotId slot = take_slot();
    make_ready(*arena, slot, key, format, payload_kept(key, format));
    return slot;
  }
  SlotId take_slot() {
    REQUIRE(!free_.empty());
    const SlotId slot = free_.back();
    free_.pop_back();
    std::memset(arena->slot(slot), 0xEE, options_.slot_pages * kPageBytes);
    return slot;
  }
  void give_slot(SlotId slot) { free_.push_back(slot); }
  std::size_t free_slots() const { return free_.size(); }

  // ---- what the pool does --------------------------------------------------------------------------------------
  // Once; whoever calls it looks at `jobs` and `troubles`.
  void pump() {
    for (DiskEvent& event : pool->pump()) {
      if (event.kind == DiskEvent::Kind::kFailed || event.kind == DiskEvent::Kind::kNotMade) {
        troubles.push_back(event.error);
        continue;
      }
      Outcome& outcome = jobs[event.job];
      CHECK(!outcome.last);
      outcome.ok.insert(outcome.ok.end(), event.ok.begin(), event.ok.end());
      outcome.corrupt.insert(outcome.corrupt.end(), event.corrupt.begin(), event.corrupt.end());
      outcome.failed.insert(outcome.failed.end(), event.failed.begin(), event.failed.end());
      outcome.last = event.last;
      if (event.error != 0) outcome.error = event.error;
    }
    check();
  }
  // Pumps until that holds; false after so many seconds without an event.
  bool drive(const std::function<bool()>& done, double patience_s = 10) {
    for (;;) {
      pump();
      if (done()) return true;
      pollfd ready{pool->eventfd(), POLLIN, 0};
      if (::poll(&ready, 1, static_cast<int>(patience_s * 1000)) == 0) return false;
    }
  }
  // Its nodes ascending: several events tell of a job, each of what has just ended.
  Outcome wait(std::uint64_t job) {
    REQUIRE(drive([&] { return jobs[job].last; }));
    Outcome out = jobs[job];
    for (auto* nodes : {&out.ok, &out.corrupt, &out.failed}) *nodes = sorted(std::move(*nodes));
    return out;
  }
  // Until nothing is under way.
  void settle() {
    CHECK(drive([this] {
      pollfd ready{pool->eventfd(), POLLIN, 0};
      return ::poll(&ready, 1, 0) == 0 && DiskPoolProbe::idle(*pool);
    }));
  }

  // Writes what is missing of a chain and waits. Stops (not `last`) where the pool takes no more and nothing happens.
  Outcome write(const std::vector<NodeId>& nodes, const SlotFormat& format = kBlock, double patience_s = 10) {
    Outcome all;
    std::size_t begun = 0;
    while (begun < nodes.size()) {
      const std::size_t part = std::min<std::size_t>(nodes.size() - begun, 64);
      std::vector<SlotId> slots;
      for (std::size_t i = 0; i < part; ++i) slots.push_back(ready(index.node(nodes[begun + i]).key, format));
      const DiskPool::Begun some = pool->write(std::span(nodes).subspan(begun, part), slots, format);
      if (some.job != 0) {
        const Outcome outcome = wait(some.job);
        all.ok.insert(all.ok.end(), outcome.ok.begin(), outcome.ok.end());
        all.failed.insert(all.failed.end(), outcome.failed.begin(), outcome.failed.end());
        if (outcome.error != 0) all.error = outcome.error;
      }
      for (SlotId slot : slots) give_slot(slot);
      begun += some.accepted;
      if (!all.failed.empty()) break;
      if (some.accepted == part || some.job != 0) continue;  // with the job's end there is room again
      pollfd ready{pool->eventfd(), POLLIN, 0};
      if (::poll(&ready, 1, static_cast<int>(patience_s * 1000)) == 0) break;
      pump();
    }
    all.last = begun == nodes.size();
    return all;
  }
  // A chain after parent, saved and let go of.
  std::vector<NodeId> save(NodeId parent, std::uint64_t first, std::size_t n, const SlotFormat& format = kBlock) {
    const std::vector<NodeId> nodes = chain(parent, first, n);
    const Outcome outcome = write(nodes, format);
    CHECK(outcome.last);
    CHECK(outcome.failed.empty());
    index.unpin(nodes.back());
    check();
    return nodes;
  }
  // Reads blocks and compares those that are ok with what was written.
  Outcome read(const std::vector<NodeId>& nodes, const SlotFormat& format = kBlock) {
    std::vector<SlotId> slots;
    std::map<NodeId, std::pair<Key, SlotId>> where;
    for (NodeId id : nodes) {
      slots.push_back(take_slot());
      where[id] = {index.node(id).key, slots.back()};
    }
    const Outcome outcome = wait(pool->read(nodes, slots, format));
    for (NodeId id : outcome.ok) {
      const auto& [key, slot] = where.at(id);
      const Payload& payload = payload_kept(key, format);
      CHECK(std::memcmp(arena->slot(slot), payload.bytes.data(), payload.bytes.size()) == 0);
    }
    for (SlotId slot : slots) give_slot(slot);
    return outcome;
  }
  int flush() { return wait(pool->flush()).error; }

 private:
  RigOptions options_;
  std::vector<SlotId> free_;

 public:
  Index index;
  std::shared_ptr<Arena> arena;
  std::shared_ptr<Faults> faults;
  std::shared_ptr<DiskDirectory> directory;
  std::unique_ptr<DiskPool> pool;
  DiskAdopted adopted;
  std::map<std::uint64_t, Outcome> jobs;
  std::vector<int> troubles;
};

inline RigOptions small(std::size_t segments) {
  RigOptions options;
  options.segments = segments;
  return options;
}

// One chain of its own per segment, the first block of the i-th named first + 1000 * i.
inline std::vector<std::vector<NodeId>> fill(Rig& rig, std::size_t segments, std::uint64_t first = 1000) {
  std::vector<std::vector<NodeId>> chains;
  for (std::size_t i = 0; i < segments; ++i) {
    chains.push_back(rig.save(rig.root(), first + 1000 * i, kPerSegment));
    rig.settle();
  }
  return chains;
}

}  // namespace kv::test
