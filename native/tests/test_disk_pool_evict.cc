// Who leaves the disk when it is full: oldest segments first, but not what is used, and never more than fits.
#include <utility>

#include "disk_pool_kit.h"

using namespace kv;
using test::fill;
using test::kBlock;
using test::key_of;
using test::kPerSegment;
using test::Outcome;
using test::Rig;
using test::RigOptions;
using test::small;
using test::sorted;
using test::TempDir;

namespace {

std::size_t held_bytes(const Rig& rig) { return rig.pool->counts().file_bytes; }

}  // namespace

TEST_CASE("disk pool evict: what nobody used leaves in the order in which it came") {
  TempDir dir;
  Rig rig(dir.path(), small(6));
  fill(rig, 12);
  CHECK(held_bytes(rig) == 6 * test::kSmallSegment);
  CHECK(rig.pool->counts().records == 4 * kPerSegment);  // two are spare
  for (std::uint64_t i = 0; i < 8; ++i) CHECK(rig.node(1000 * (i + 1)) == kNone);
  for (std::uint64_t i = 8; i < 12; ++i) CHECK(rig.holds(1000 * (i + 1) + kPerSegment - 1));
  const DiskDropped dropped = rig.pool->take_dropped();
  CHECK(dropped.evicted == 8 * kPerSegment);
  CHECK(dropped.reinserted == 0);
  CHECK(dropped.over_budget == 0);
  CHECK(rig.pool->take_removed().size() == 8 * kPerSegment);
}

TEST_CASE("disk pool evict: a used block stays, with all above it, and is right; what is below it leaves") {
  TempDir dir;
  Rig rig(dir.path(), small(6));
  const auto chains = fill(rig, 4);
  const std::vector<NodeId> used(chains[0].begin(), chains[0].begin() + 10);
  rig.pool->touch(std::span(used).last(1));  // a part of the chain is enough
  fill(rig, 3, 20000);
  CHECK(rig.readable(used) == 10);
  CHECK(rig.node(1000 + 10) == kNone);
  CHECK(rig.read(used).ok == sorted(used));
  DiskDropped dropped = rig.pool->take_dropped();
  CHECK(dropped.reinserted == 10);
  CHECK(dropped.reinserted_bytes == 10 * kBlock.slot_bytes());
  CHECK(dropped.over_budget == 0);
  CHECK(rig.pool->take_removed().size() == dropped.evicted);
  // Moved once, and not used since: it leaves when its turn comes again.
  fill(rig, 8, 40000);
  CHECK(rig.node(1000) == kNone);
}

TEST_CASE("disk pool evict: a save below a block is no use of it: no chain is written twice for crossing a border") {
  TempDir dir;
  Rig rig(dir.path(), small(6));
  for (std::uint64_t first = 1000; first < 40000; first += 1000) {  // each lies in two or three segments
    rig.save(rig.root(), first, 3 * kPerSegment / 2);
    rig.settle();
  }
  const DiskDropped dropped = rig.pool->take_dropped();
  CHECK(dropped.evicted > 0);
  CHECK(dropped.reinserted == 0);
  CHECK(dropped.over_budget == 0);
}

TEST_CASE("disk pool evict: beyond reinsert_share the least recently used leave, with all below them") {
  TempDir dir;
  RigOptions options = small(6);
  options.pool.reinsert_share = 0.25;  // 21 records of 3 pages
  Rig rig(dir.path(), options);
  std::vector<std::vector<NodeId>> chains;
  for (std::uint64_t i = 0; i < 8; ++i) chains.push_back(rig.save(rig.root(), 100 * (i + 1), 10));
  rig.settle();
  fill(rig, 1);
  for (const auto& chain : chains) rig.pool->touch(chain);
  fill(rig, 1, 3000);
  rig.pool->touch(chains[7]);
  const auto tail = rig.save(chains[7][9], 900, 3);  // in a newer segment
  rig.save(rig.root(), 950, 2);                      // the next one is begun: what is used now was used later
  rig.pool->touch(chains[5]);
  rig.pool->touch(chains[2]);
  DiskDropped dropped;
  for (std::uint64_t first = 20000; dropped.reinserted == 0 && first < 60000; first += 1000) {
    rig.save(rig.root(), first, 10);
    rig.settle();
    dropped = rig.pool->take_dropped();
  }
  CHECK(dropped.reinserted == 21);
  CHECK(dropped.over_budget == 59 + 3);
  CHECK(dropped.evicted >= kPerSegment);  // a chain that begins here goes on in the next segment
  CHECK(rig.readable(chains[5]) + rig.readable(chains[2]) == 20);
  CHECK(rig.readable(chains[7]) == 1);  // its head; the rest goes with all below it
  CHECK(rig.readable(tail) == 0);
  CHECK(rig.readable(chains[0]) == 0);
}

TEST_CASE("disk pool evict: pinned chains stay beyond the budget, but a segment full of them stays as it is") {
  TempDir dir;
  RigOptions options = small(6);
  options.pool.reinsert_share = 0.1;
  Rig rig(dir.path(), options);
  const auto chains = fill(rig, 4);
  rig.index.pin(chains[0][29]);  // 36 %
  rig.index.pin(chains[1][79]);  // 96 %
  for (std::uint64_t first = 20000; first < 26000; first += 1000) {
    fill(rig, 1, first);
    CHECK(rig.readable(chains[0]) == 30);  // moved whenever its turn comes
    CHECK(rig.readable(chains[1]) == 80);  // where it was
    CHECK(rig.holds(first));
  }
  CHECK(rig.pool->take_dropped().reinserted >= 30);
  rig.index.unpin(chains[1][79]);
  fill(rig, 2, 30000);
  CHECK(rig.node(2000) == kNone);
  rig.index.unpin(chains[0][29]);
}

TEST_CASE("disk pool evict: full of pinned blocks it takes nothing, and goes on when they are let go") {
  TempDir dir;
  Rig rig(dir.path(), small(4));
  std::vector<NodeId> pins;
  for (std::uint64_t i = 0; i < 5; ++i) {
    const auto nodes = rig.chain(rig.root(), 1000 * (i + 1), kPerSegment);
    pins.push_back(nodes.back());
    rig.write(nodes, kBlock, 0.1);
    rig.settle();
  }
  const std::size_t full = rig.pool->counts().records;
  CHECK(full >= 2 * kPerSegment);
  CHECK(rig.pool->take_dropped().evicted == 0);
  const auto more = rig.chain(rig.root(), 50000, 20);
  CHECK_FALSE(rig.write(more, kBlock, 0.05).last);
  for (NodeId pin : pins) rig.index.unpin(pin);
  rig.check();
  CHECK(rig.write(more).last);
  CHECK(rig.readable(more) == 20);
}

TEST_CASE("disk pool evict: a segment that is read is passed over") {
  TempDir dir;
  Rig rig(dir.path(), small(5));
  const auto chains = fill(rig, 3);
  rig.faults->hold(DiskOp::kRead);
  std::vector<SlotId> slots;
  for (int i = 0; i < 4; ++i) slots.push_back(rig.take_slot());
  const std::vector<NodeId> some(chains[0].begin(), chains[0].begin() + 4);
  const std::uint64_t job = rig.pool->read(some, slots, kBlock);
  for (std::uint64_t first = 20000; first < 23000; first += 1000) {
    rig.save(rig.root(), first, kPerSegment);
    rig.drive([] { return false; }, 0.02);
  }
  CHECK(rig.readable(chains[0]) == kPerSegment);
  CHECK(rig.node(2000) == kNone);
  rig.faults->release(DiskOp::kRead);
  CHECK(rig.wait(job).ok == sorted(some));
  fill(rig, 3, 30000);
  CHECK(rig.node(1000) == kNone);
}

TEST_CASE("disk pool evict: what died meanwhile is not brought back by its copy") {
  TempDir dir;
  Rig rig(dir.path(), small(6));
  const auto chains = fill(rig, 4);
  rig.pool->touch(std::span(chains[0]).first(20));
  rig.faults->hold(DiskOp::kRead);  // copies wait
  rig.save(rig.root(), 20000, 20);
  CHECK(rig.drive([&] { return rig.pool->counts().evacuating == 1 && rig.faults->held() > 0; }));
  CHECK(rig.pool->forget(chains[0][10]));
  rig.check();
  CHECK(rig.pool->drop(chains[0][5]));
  rig.check();
  const auto again = rig.chain(chains[0][9], 1010, 1);  // the same block, saved anew while the old one is copied
  CHECK(rig.write(again).ok == sorted(again));
  rig.index.unpin(again[0]);
  rig.faults->release(DiskOp::kRead);
  rig.settle();
  CHECK(rig.pool->counts().evacuating == 0);
  CHECK(rig.holds(1009));
  CHECK_FALSE(rig.readable(chains[0][5]));
  CHECK(rig.holds(1010));
  CHECK(rig.node(1011) == kNone);
  std::vector<NodeId> left;
  for (std::uint64_t name = 1000; name <= 1010; ++name)
    if (rig.holds(name)) left.push_back(rig.node(name));
  CHECK(left.size() == 10);
  CHECK(rig.read(left).ok == sorted(left));
}

TEST_CASE("disk pool evict: more records than records_max is too many, whatever room there is") {
  TempDir dir;
  RigOptions options = small(12);
  options.pool.records_max = 3 * kPerSegment;
  Rig rig(dir.path(), options);
  fill(rig, 8);
  CHECK(rig.pool->counts().records <= 3 * kPerSegment);
  CHECK(rig.pool->counts().records >= 2 * kPerSegment);
  CHECK(rig.holds(8000));
  CHECK(rig.pool->counts().file_bytes <= 8 * test::kSmallSegment);
}

TEST_CASE("disk pool evict: a segment in which nothing lives is used again at once") {
  TempDir dir;
  Rig rig(dir.path(), small(6));
  const auto chains = fill(rig, 4);
  const std::size_t free = rig.pool->counts().free;
  rig.pool->forget(chains[1][0]);
  rig.pool->forget(chains[2][0]);
  rig.settle();
  CHECK(rig.pool->counts().free == free + 2);
  CHECK(rig.pool->take_dropped().evicted == 0);
}

TEST_CASE("disk pool evict: what waits for its parent is moved, and goes on waiting") {
  TempDir dir;
  Rig rig(dir.path(), small(6));
  rig.settle();
  rig.save(rig.root(), 1000, kPerSegment - 1);
  std::uint32_t first = 0;
  while (rig.pool->nodes(first, 1).empty()) ++first;
  rig.faults->hold(DiskOp::kWrite, rig.directory->segments()[first].fd.get());
  const auto nodes = rig.chain(rig.root(), 5000, 1 + kPerSegment);  // the parent ends the first segment
  std::vector<SlotId> slots;
  for (NodeId id : nodes) slots.push_back(rig.ready(rig.index.node(id).key));
  const auto write = [&](std::size_t from, std::size_t n) {
    const auto begun = rig.pool->write(std::span(nodes).subspan(from, n), std::span(slots).subspan(from, n), kBlock);
    REQUIRE(begun.accepted == n);
    return begun.job;
  };
  const std::uint64_t parent = write(0, 1), children = write(1, kPerSegment);
  rig.index.unpin(nodes.back());
  const std::vector<NodeId> used(nodes.begin() + 1, nodes.begin() + 11);
  rig.pool->touch(std::span(used).last(1));
  std::size_t reinserted = 0;
  for (std::uint64_t name = 20000; reinserted == 0 && name < 30000; name += 1000) {
    rig.save(rig.root(), name, kPerSegment);
    rig.drive([] { return false; }, 0.02);
    reinserted = rig.pool->take_dropped().reinserted;
  }
  CHECK(reinserted == used.size());
  CHECK(rig.faults->held() > 0);
  CHECK(rig.readable(nodes) == 0);
  rig.faults->release(DiskOp::kWrite);
  CHECK(rig.wait(parent).ok == std::vector<NodeId>{nodes[0]});
  const Outcome outcome = rig.wait(children);
  CHECK(outcome.ok == sorted(used));
  CHECK(outcome.failed.size() == kPerSegment - used.size());
  CHECK(rig.read(used).ok == sorted(used));
}

TEST_CASE("disk pool evict: in slices of any size it comes to the same end") {
  std::vector<std::size_t> records, reinserted, over;
  for (const std::size_t slice : {std::size_t{1}, std::size_t{7}, std::size_t{8192}}) {
    TempDir dir;
    RigOptions options = small(6);
    options.pool.slice = slice;
    options.check = slice > 1;
    Rig rig(dir.path(), options);
    const auto chains = fill(rig, 4);
    const auto pinned = rig.chain(chains[0][20], 5000, 100);  // 100 of them are not on the disk
    rig.pool->touch(std::span(chains[1]).first(40));          // more than the budget
    rig.pool->touch(std::span(chains[2]).first(3));
    fill(rig, 3, 20000);
    records.push_back(rig.pool->counts().records);
    const DiskDropped dropped = rig.pool->take_dropped();
    reinserted.push_back(dropped.reinserted);
    over.push_back(dropped.over_budget);
    CHECK(rig.readable(chains[0]) == 21);
    CHECK(rig.readable(chains[1]) == 21);
    CHECK(rig.readable(chains[2]) == 3);
    rig.check();
    rig.index.unpin(pinned.back());
  }
  CHECK(records == std::vector<std::size_t>(3, records[0]));
  CHECK(reinserted == std::vector<std::size_t>(3, 45));
  CHECK(over == std::vector<std::size_t>(3, 19));
}
