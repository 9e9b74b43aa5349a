// A disk that rots or refuses while a segment is evacuated.
#include <cerrno>
#include <chrono>
#include <thread>

#include "disk_pool_kit.h"

using namespace kv;
using test::fill;
using test::kBlock;
using test::key_of;
using test::kPerSegment;
using test::Rig;
using test::RigOptions;
using test::small;
using test::TempDir;

TEST_CASE("disk pool evict: rot in what should stay is a hole, and a disk that refuses keeps the segment") {
  for (const bool refuses : {false, true}) {
    CAPTURE(refuses);
    TempDir dir;
    Rig rig(dir.path(), small(6));
    const auto chains = fill(rig, 4);
    rig.pool->touch(std::span(chains[0]).first(20));
    const DiskCounts before = rig.pool->counts();
    CHECK(before.sealed >= 3);
    FaultSpec spec;
    (refuses ? spec.read_eio : spec.flip_read) = 1;
    rig.faults->set(spec);
    rig.save(rig.root(), 20000, kPerSegment);
    rig.save(rig.root(), 21000, 10);
    rig.settle();
    rig.faults->set({});
    const DiskDropped dropped = rig.pool->take_dropped();
    if (!refuses) {
      CHECK(dropped.rot > 0);
      CHECK(dropped.rot + dropped.reinserted == 20);
      CHECK(rig.readable(chains[0]) == dropped.reinserted);
      continue;
    }
    CHECK(dropped.reinserted == 0);
    CHECK_FALSE(rig.troubles.empty());
    CHECK(rig.readable(chains[0]) == 20);
    CHECK(rig.read({chains[0].begin(), chains[0].begin() + 20}).ok.size() == 20);
    rig.pool->resume();
    rig.settle();
    CHECK(rig.pool->take_dropped().reinserted == 20);
    CHECK(rig.readable(chains[0]) == 20);
  }
}

TEST_CASE("disk pool evict: what cannot be moved twice is lost, so that its segment does not stay for ever") {
  TempDir dir;
  Rig rig(dir.path(), small(6));
  const auto chains = fill(rig, 4);
  rig.pool->touch(std::span(chains[0]).first(20));
  FaultSpec spec;
  spec.read_eio = 1;
  rig.faults->set(spec);
  rig.save(rig.root(), 20000, kPerSegment);
  rig.save(rig.root(), 21000, 10);
  rig.settle();
  CHECK(rig.readable(chains[0]) == 20);
  rig.pool->resume();
  rig.settle();
  CHECK(rig.readable(chains[0]) == 0);
  CHECK(rig.pool->take_dropped().lost == 20);
  CHECK(rig.pool->counts().evacuating == 0);
}

TEST_CASE("disk pool evict: a sync that fails leaves the old records in their place") {
  TempDir dir;
  Rig rig(dir.path(), small(6));
  const auto chains = fill(rig, 4);
  rig.pool->touch(std::span(chains[0]).first(20));
  rig.faults->hold(DiskOp::kRead);
  rig.save(rig.root(), 20000, kPerSegment);
  rig.save(rig.root(), 21000, 10);
  CHECK(rig.flush() == 0);
  CHECK(rig.drive([&] { return rig.pool->counts().evacuating == 1 && rig.faults->held() > 0; }));
  rig.faults->fail(DiskOp::kSync, EIO);
  rig.faults->release(DiskOp::kRead);
  rig.settle();
  CHECK(rig.pool->counts().broken >= 1);
  CHECK(rig.pool->counts().evacuating == 0);
  CHECK(rig.readable(chains[0]) == 20);
  CHECK(rig.pool->take_dropped().reinserted == 0);
  rig.faults->fail(DiskOp::kSync, 0);
  rig.pool->resume();
  rig.settle();
  CHECK(rig.pool->counts().broken == 0);
  CHECK(rig.pool->take_dropped().reinserted == 20);
  CHECK(rig.readable(chains[0]) == 20);
  CHECK(rig.read({chains[0].begin(), chains[0].begin() + 20}).ok.size() == 20);
}

TEST_CASE("disk pool evict: a disk that refuses meanwhile costs nothing more") {
  TempDir dir;
  RigOptions options = small(6);
  options.pool.slice = 1;
  options.check = false;
  Rig rig(dir.path(), options);
  fill(rig, 4);
  const auto more = rig.chain(rig.root(), 20000, 1);
  const std::vector<SlotId> slots{rig.ready(key_of(20000))};
  rig.faults->hold(DiskOp::kSync);
  REQUIRE(rig.pool->write(more, slots, kBlock).accepted == 1);
  rig.pool->flush();
  while (rig.pool->counts().evacuating == 0) rig.pump();
  rig.faults->fail(DiskOp::kSync, EIO);
  rig.faults->release(DiskOp::kSync);
  for (int i = 0; rig.troubles.empty() && i < 40; ++i) {  // a block dies in each
    rig.pump();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  REQUIRE_FALSE(rig.troubles.empty());
  REQUIRE(rig.pool->counts().evacuating == 1);
  const std::size_t before = rig.pool->counts().records;
  CHECK(before > 3 * kPerSegment);
  for (int i = 0; i < 200; ++i) rig.pump();
  CHECK(rig.pool->counts().records == before);
  CHECK(rig.pool->counts().evacuating == 1);
  rig.faults->fail(DiskOp::kSync, 0);
  rig.pool->resume();
  rig.settle();
  rig.pool->check();
  CHECK(rig.pool->counts().evacuating == 0);
  CHECK(rig.node(1000) == kNone);
  CHECK(rig.holds(2000));
  rig.index.unpin(more.back());
}
