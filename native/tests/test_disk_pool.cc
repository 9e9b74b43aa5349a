// The disk pool on real files: the life of a segment, writes and reads.
#include <cerrno>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include "disk_pool_kit.h"
#include "engine.h"

using namespace kv;
using test::kBlock;
using test::key_of;
using test::Outcome;
using test::Rig;
using test::RigOptions;
using test::sorted;
using test::TempDir;

namespace {

const std::vector<std::string> kKinds = {"auto", "threads"};

void wait_until(const std::function<bool()>& done) {
  const auto stop = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!done() && std::chrono::steady_clock::now() < stop) std::this_thread::yield();
  REQUIRE(done());
}

FaultSpec slow_ms(double ms) {
  FaultSpec spec;
  spec.stall = 1;
  spec.stall_ms = ms;
  return spec;
}

}  // namespace

TEST_CASE("disk pool: which of the transitions of a segment exist") {
  using enum SegmentState;
  const std::set<std::pair<SegmentState, SegmentState>> moves = {
      {kGone, kCreating},   {kGone, kFree},      {kGone, kSealing},      {kGone, kSealed},
      {kGone, kBroken},     {kCreating, kFree},  {kCreating, kGone},     {kFree, kOpening},
      {kFree, kGone},       {kOpening, kFilling}, {kOpening, kSealing},  {kOpening, kBroken},  {kFilling, kSealing},
      {kFilling, kBroken},  {kSealing, kSealed}, {kSealing, kBroken},    {kSealed, kEvacuating},
      {kSealed, kFree},     {kEvacuating, kFree}, {kEvacuating, kSealed}, {kBroken, kFree},
      {kBroken, kSealing}};
  for (std::size_t from = 0; from < kSegmentStates; ++from)
    for (std::size_t to = 0; to < kSegmentStates; ++to) {
      const auto move = std::pair(static_cast<SegmentState>(from), static_cast<SegmentState>(to));
      CAPTURE(name_of(move.first));
      CAPTURE(name_of(move.second));
      CHECK(segment_may_move(move.first, move.second) == moves.contains(move));
    }
}

TEST_CASE("disk pool: makes segments ahead, opens them, and never more than the capacity") {
  for (const std::string& kind : kKinds) {
    TempDir dir;
    RigOptions options;
    options.kind = kind;
    Rig rig(dir.path(), options);
    CHECK(rig.pool->counts().file_bytes == 0);
    rig.settle();
    DiskCounts counts = rig.pool->counts();
    CHECK(counts.free == 0);
    CHECK(counts.opening == 2);
    CHECK(counts.creating + counts.filling + counts.sealing + counts.sealed + counts.broken == 0);
    CHECK(counts.file_bytes == 2 * test::kSmallSegment);
    CHECK(counts.capacity_bytes == 6 * test::kSmallSegment);

    const auto nodes = rig.save(rig.root(), 100, 200);  // two segments and a half
    rig.settle();
    counts = rig.pool->counts();
    CHECK(counts.filling == 1);
    CHECK(counts.sealed == 2);
    CHECK(counts.opening == 2);
    CHECK(counts.free == 0);
    CHECK(counts.records == 200);
    CHECK(counts.live_bytes == 200 * kBlock.slot_bytes());
    CHECK(counts.writing == 0);
    CHECK(counts.file_bytes == 5 * test::kSmallSegment);
    CHECK(rig.read(nodes).ok == sorted(nodes));
    CHECK(rig.troubles.empty());
  }
}

TEST_CASE("disk pool: too little room, or options out of range, are refused") {
  TempDir dir;
  RigOptions options;
  options.segments = 2;
  const char* why = "capacity_bytes: 2097152 is room for 2 segments of 1048576 bytes; at least 3 are needed";
  CHECK_THROWS_WITH_AS(Rig(dir.path(), options), why, Invalid);
  options.segments = 3;
  options.pool.reinsert_share = 1.5;
  CHECK_THROWS_AS(Rig(dir.path(), options), Invalid);
  options.pool.reinsert_share = 0.25;
  options.pool.spare = 0;
  CHECK_THROWS_AS(Rig(dir.path(), options), Invalid);
}

TEST_CASE("disk pool: what a chain lacks is written, the rest is not written twice") {
  for (const std::string& kind : kKinds) {
    TempDir dir;
    RigOptions options;
    options.kind = kind;
    Rig rig(dir.path(), options);
    rig.settle();
    const std::vector<NodeId> nodes = rig.chain(rig.root(), 1, 6);
    CHECK(rig.pool->missing(nodes[5]) == nodes);
    const std::vector<NodeId> head(nodes.begin(), nodes.begin() + 4);
    const Outcome first = rig.write(head);
    CHECK(first.ok == sorted(head));
    CHECK(rig.pool->missing(nodes[5]) == std::vector<NodeId>{nodes[4], nodes[5]});
    CHECK(rig.readable(nodes) == 4);

    const Outcome rest = rig.write(nodes);
    CHECK(rest.ok == std::vector<NodeId>{nodes[4], nodes[5]});
    std::vector<SlotId> slots;
    for (NodeId id : nodes) slots.push_back(rig.ready(rig.index.node(id).key));
    const DiskPool::Begun none = rig.pool->write(nodes, slots, kBlock);
    CHECK(none.job == 0);
    CHECK(none.accepted == 6);

    const std::vector<std::uint32_t> positions = {0, 5};
    const std::vector<Key> keys = {key_of(1), key_of(6)};
    const Walk walk = rig.index.walk(key_of(0), 6, positions, keys);
    CHECK(walk.ready == 0);
    CHECK(rig.pool->match(walk) == 6);
    CHECK(rig.pool->take_stored().size() == 6);
    CHECK(rig.pool->take_stored().empty());
    rig.index.unpin(nodes.back());
    rig.check();
    CHECK(rig.index.live(nodes[0]));  // the disk holds them
  }
}

TEST_CASE("disk pool: calls that cannot be right change nothing") {
  TempDir dir;
  Rig rig(dir.path());
  rig.settle();
  const auto nodes = rig.chain(rig.root(), 1, 3);
  std::vector<SlotId> slots;
  for (NodeId id : nodes) slots.push_back(rig.ready(rig.index.node(id).key));
  const auto refuses = [&](std::span<const NodeId> some, std::span<const SlotId> where, const SlotFormat& format) {
    CHECK_THROWS_AS(rig.pool->write(some, where, format), Invalid);
    rig.check();
    CHECK(rig.pool->counts().writing == 0);
  };
  const std::span all(nodes);
  const std::span places(slots);
  refuses(all.subspan(1), places.subspan(1), kBlock);  // its parent is not here
  refuses(all, places.first(2), kBlock);
  refuses(all.first(0), places.first(0), kBlock);
  refuses(std::vector<NodeId>{nodes[0], nodes[2]}, places.first(2), kBlock);
  refuses(std::vector<NodeId>{rig.root()}, places.first(1), kBlock);
  refuses(std::vector<NodeId>{4711}, places.first(1), kBlock);
  refuses(all, std::vector<SlotId>{slots[0], slots[2], slots[1]}, kBlock);  // other blocks
  refuses(all, std::vector<SlotId>{slots[0], slots[1], 1u << 20}, kBlock);
  refuses(all, places, {1, 1, 64});                                         // another format
  refuses(all, places, {0, 1, 64});
  rig.arena->control(slots[1]).checked = 0;
  refuses(all, places, kBlock);
  rig.arena->control(slots[1]).checked = 1;
  rig.arena->control(slots[1]).state = static_cast<std::uint32_t>(SlotState::kFilling);
  refuses(all, places, kBlock);
  rig.arena->control(slots[1]).state = static_cast<std::uint32_t>(SlotState::kReady);

  CHECK_THROWS_AS(rig.pool->read(all, places, kBlock), Invalid);
  CHECK_THROWS_AS(rig.pool->write(all, places, test::format_of_pages(300)), Invalid);
  CHECK(rig.wait(rig.pool->write(all, places, kBlock).job).ok == sorted(nodes));
  CHECK_THROWS_AS(rig.pool->read(all, places, {1, 1, 64}), Invalid);
  CHECK_THROWS_AS(rig.pool->missing(4711), Invalid);
  CHECK_FALSE(rig.pool->forget(4711));
  CHECK_FALSE(rig.pool->drop(rig.root()));
  rig.pool->cancel(4711);
}

TEST_CASE("disk pool: a record is readable only when its parent is") {
  for (const bool parent_fails : {false, true}) {
    CAPTURE(parent_fails);
    TempDir dir;
    Rig rig(dir.path());
    rig.settle();
    const auto nodes = rig.chain(rig.root(), 1, 3);
    std::vector<SlotId> slots;
    for (NodeId id : nodes) slots.push_back(rig.ready(rig.index.node(id).key));
    const auto write = [&](std::size_t i) {
      const DiskPool::Begun begun =
          rig.pool->write(std::span(nodes).subspan(i, 1), std::span(slots).subspan(i, 1), kBlock);
      REQUIRE(begun.accepted == 1);
      rig.check();
      return begun.job;
    };
    FaultSpec slow = slow_ms(50);
    slow.write_eio = parent_fails;
    rig.faults->set(slow);
    const std::uint64_t parent = write(0);
    wait_until([&] { return rig.faults->held() == 1; });
    rig.faults->set({});
    const std::uint64_t child = write(1), grandchild = write(2);
    rig.drive([&] { return rig.jobs[parent].last; });
    rig.wait(child);
    rig.wait(grandchild);
    CHECK(rig.readable(nodes) == (parent_fails ? 0 : 3));
    CHECK(rig.jobs[parent].error == (parent_fails ? EIO : 0));
    for (std::uint64_t job : {child, grandchild}) {
      CHECK(rig.jobs[job].ok.size() == (parent_fails ? 0 : 1));
      CHECK(rig.jobs[job].failed.size() == (parent_fails ? 1 : 0));
    }
    CHECK(rig.pool->take_dropped().lost == (parent_fails ? 3 : 0));
    CHECK(rig.pool->counts().writing == 0);
    // It is tried again by whoever still wants it.
    CHECK(rig.write(nodes).ok.size() == (parent_fails ? 3 : 0));
    CHECK(rig.read(nodes).ok == sorted(nodes));
  }
}

TEST_CASE("disk pool: at most write_bytes_max is accepted, and the rest when it is on the disk") {
  TempDir dir;
  RigOptions options;
  options.pool.write_bytes_max = 4 * kBlock.slot_bytes();
  Rig rig(dir.path(), options);
  rig.settle();
  const auto nodes = rig.chain(rig.root(), 1, 10);
  std::vector<SlotId> slots;
  for (NodeId id : nodes) slots.push_back(rig.ready(rig.index.node(id).key));
  rig.faults->hold(DiskOp::kWrite);
  const DiskPool::Begun begun = rig.pool->write(nodes, slots, kBlock);
  CHECK(begun.accepted == 4);
  CHECK(rig.pool->counts().writing == 4);
  CHECK(rig.pool->write(nodes, slots, kBlock).accepted == 4);
  rig.check();
  rig.faults->release(DiskOp::kWrite);
  CHECK(rig.wait(begun.job).ok.size() == 4);
  CHECK(rig.write(nodes).last);
  CHECK(rig.readable(nodes) == 10);
}

TEST_CASE("disk pool: forget takes all below with it, also what is on its way; drop takes one") {
  TempDir dir;
  Rig rig(dir.path());
  const auto trunk = rig.save(rig.root(), 1, 4);
  rig.save(trunk[1], 100, 3);
  rig.save(trunk[3], 200, 3);
  CHECK(rig.pool->counts().records == 10);
  CHECK(rig.pool->drop(trunk[2]));
  CHECK_FALSE(rig.pool->drop(trunk[2]));
  rig.check();
  CHECK(rig.pool->counts().records == 9);
  CHECK(rig.pool->forget(trunk[2]));  // a hole, with four readable blocks below
  rig.check();
  CHECK(rig.pool->counts().records == 5);
  CHECK(rig.node(3) == kNone);
  CHECK(rig.node(200) == kNone);

  const auto more = rig.chain(trunk[1], 300, 4);
  std::vector<SlotId> slots;
  for (NodeId id : more) slots.push_back(rig.ready(rig.index.node(id).key));
  rig.faults->hold(DiskOp::kWrite);
  const std::uint64_t job = rig.pool->write(more, slots, kBlock).job;
  rig.check();
  CHECK(rig.pool->forget(trunk[0]));
  rig.check();
  CHECK(rig.pool->counts().records == 0);
  CHECK(rig.pool->counts().writing == 0);
  rig.index.unpin(more.back());
  rig.check();
  CHECK(rig.index.size() == 0);
  rig.faults->release(DiskOp::kWrite);
  const Outcome outcome = rig.wait(job);
  CHECK(outcome.failed.size() == 4);
  CHECK(outcome.error == 0);
  CHECK_FALSE(rig.pool->forget(rig.root()));
  CHECK(rig.pool->take_removed().size() == 10);
}

TEST_CASE("disk pool: a read that is cancelled ends, and what is not on the disk yet fails") {
  TempDir dir;
  Rig rig(dir.path());
  const auto nodes = rig.save(rig.root(), 1, 60);
  rig.faults->hold(DiskOp::kRead);
  std::vector<SlotId> slots;
  for (std::size_t i = 0; i < nodes.size(); ++i) slots.push_back(rig.take_slot());
  const std::uint64_t job = rig.pool->read(nodes, slots, kBlock);
  wait_until([&] { return rig.faults->held() > 0; });
  rig.pool->cancel(job);
  rig.faults->release(DiskOp::kRead);
  const Outcome outcome = rig.wait(job);
  CHECK(outcome.ok.size() + outcome.failed.size() == nodes.size());
  CHECK(outcome.corrupt.empty());
  CHECK(outcome.error == 0);
  CHECK(rig.readable(nodes) == nodes.size());
}

TEST_CASE("disk pool: an end in time seals, an end at once does not; either leaves nothing behind") {
  for (const double timeout_s : {5.0, 0.0}) {
    CAPTURE(timeout_s);
    TempDir dir;
    {
      Rig rig(dir.path());
      const auto nodes = rig.chain(rig.root(), 1, 20);
      CHECK(rig.write(nodes).last);
      CHECK(rig.flush() == 0);
      const auto more = rig.chain(nodes.back(), 100, 20);
      std::vector<SlotId> slots;
      for (NodeId id : more) slots.push_back(rig.ready(rig.index.node(id).key));
      const std::uint64_t job = rig.pool->write(more, slots, kBlock).job;
      const std::uint64_t flush = rig.pool->flush();
      rig.pool->close(timeout_s);
      rig.check();
      CHECK(rig.pool->counts().records == 0);
      CHECK(rig.readable(nodes) == 0);
      rig.index.unpin(nodes.back());
      rig.index.unpin(more.back());
      CHECK(rig.index.size() == 0);
      rig.pump();
      CHECK(rig.jobs[job].last);
      CHECK(rig.jobs[flush].last);
      if (timeout_s > 0) CHECK(rig.jobs[job].ok == sorted(more));
      if (timeout_s > 0) CHECK(rig.jobs[flush].error == 0);
      CHECK_THROWS_AS(rig.pool->write(nodes, slots, kBlock), Invalid);
      CHECK_THROWS_AS(rig.pool->flush(), Invalid);
      rig.pool->close(1);
    }
    {
      DiskDirectory::Options tool;
      tool.path = dir.path();
      tool.create = false;
      DiskSurvey survey(DiskDirectory::open(tool));
      survey.read(1);
      CHECK((survey.bytes_in_all() == 0) == (timeout_s > 0));  // also of segments that were open and empty
    }
    Rig rig(dir.path());
    CHECK(rig.adopted.unsealed == (timeout_s > 0 ? 0 : 1));
    CHECK(rig.adopted.readable >= 20);
    if (timeout_s > 0) CHECK(rig.adopted.readable == 40);
    CHECK(rig.holds(20));
  }
}

TEST_CASE("disk pool: what it tells of keys that come and go") {
  TempDir dir;
  Rig rig(dir.path());
  const auto nodes = rig.save(rig.root(), 1, 3);
  CHECK(rig.pool->take_stored().size() == 3);
  rig.save(nodes[2], 10, 2);
  rig.pool->forget(rig.node(10));
  CHECK(rig.pool->take_stored().empty());   // they have left
  CHECK(rig.pool->take_removed().size() == 2);
  rig.pool->forget(nodes[2]);
  rig.save(nodes[1], 3, 1);
  CHECK(rig.pool->take_removed().empty());  // it is back
  CHECK(rig.pool->nodes().size() == 3);
  CHECK(rig.pool->nodes(0, 1).size() + rig.pool->nodes(1).size() == 3);
  CHECK(rig.pool->memory_bytes() > 0);
}
