// What roots had before a mark is forgotten, for all of them at once.
#include <unordered_map>

#include "disk_pool_kit.h"

using namespace kv;
using test::key_of;
using test::Rig;
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
