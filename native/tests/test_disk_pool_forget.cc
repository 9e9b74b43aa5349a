// What roots had before a mark is forgotten, for all of them at once.
#include <unordered_map>

#include "disk_pool_kit.h"

using namespace kv;
using test::fill;
using test::key_of;
using test::kPerSegment;
using test::Rig;
using test::small;
using test::TempDir;

TEST_CASE("disk pool: what was dropped before its root's mark is forgotten, and nothing else") {
  TempDir dir;
  DiskPool::Mark early, late;
  {
    Rig rig(dir.path());
    for (const std::uint64_t root : {10, 20, 30, 40}) rig.save(rig.index.root(key_of(root)), 1000 * root, 30);
    early = rig.pool->mark();
    for (const std::uint64_t root : {10, 20, 30}) rig.save(rig.node(1000 * root + 9), 1000 * root + 500, 30);
    rig.save(rig.index.root(key_of(20)), 25000, 30);
    late = rig.pool->mark();
    rig.save(rig.index.root(key_of(10)), 15000, 30);
    CHECK(rig.flush() == 0);
    CHECK(early < late);
  }
  Rig rig(dir.path());
  CHECK(rig.adopted.readable == 9 * 30);
  std::unordered_map<NodeId, DiskPool::Mark> roots;
  roots[rig.node(10)] = late;
  roots[rig.node(20)] = early;  // with all below, also what is younger
  roots[rig.node(40)] = {early.sequence, kHeaderPages};
  CHECK(rig.pool->forget_before(roots) == 4 * 30);
  rig.check();
  CHECK(rig.node(10000) == kNone);
  CHECK(rig.node(10500) == kNone);
  CHECK(rig.holds(15029));
  CHECK(rig.node(20000) == kNone);
  CHECK(rig.node(20500) == kNone);
  CHECK(rig.holds(25029));
  CHECK(rig.holds(30529));
  CHECK(rig.pool->forget_before({}) == 0);
  CHECK_THROWS_AS(rig.pool->forget_before({{NodeId{9999}, late}}), Invalid);
}

TEST_CASE("disk pool: what an evacuation carries past its root's mark is forgotten with it") {
  TempDir dir;
  DiskPool::Mark asked, dropped;
  std::vector<NodeId> kept;
  {
    Rig rig(dir.path(), small(6));
    const auto chain = rig.save(rig.index.root(key_of(77)), 1000, kPerSegment);
    rig.settle();
    fill(rig, 3, 10000);
    rig.pool->touch(std::span(chain).first(10));  // what is used is carried on when its segment is emptied
    asked = rig.pool->mark();
    SUBCASE("moved already") { fill(rig, 3, 20000); }
    SUBCASE("being moved") {
      rig.faults->hold(DiskOp::kRead);
      rig.save(rig.root(), 20000, 20);
      CHECK(rig.drive([&] { return rig.pool->counts().evacuating == 1 && rig.faults->held() > 0; }));
    }
    CHECK(rig.pool->forget(chain[0]));
    dropped = std::max(asked, rig.pool->forgotten());
    CHECK(asked < dropped);
    rig.faults->release(DiskOp::kRead);
    rig.settle();
    CHECK(rig.flush() == 0);
  }
  Rig rig(dir.path(), small(6));
  const NodeId root = rig.index.find(key_of(77));
  std::size_t back = 0;
  for (std::uint64_t name = 1000; name < 1020; ++name) back += rig.holds(name);
  CHECK(back > 0);  // so there is something to forget
  rig.pool->forget_before({{root, asked}});
  std::size_t left = 0;
  for (std::uint64_t name = 1000; name < 1020; ++name) left += rig.holds(name);
  CHECK(left > 0);  // the mark that was taken first is not enough
  rig.pool->forget_before({{root, dropped}});
  for (std::uint64_t name = 1000; name < 1020; ++name) CHECK_FALSE(rig.holds(name));
  rig.check();
}
