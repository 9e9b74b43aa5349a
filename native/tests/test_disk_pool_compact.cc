// An account that writes within its limit makes its own room in the log: nobody else's blocks fall off its end.
#include <utility>

#include "disk_pool_kit.h"

using namespace kv;
using test::kBlock;
using test::key_of;
using test::kPerSegment;
using test::Rig;
using test::RigOptions;
using test::small;
using test::sorted;
using test::TempDir;

namespace {

constexpr Account kFlood = 1, kQuiet = 2;
constexpr std::size_t kSegments = 12;

struct Shared {
  explicit Shared(const std::string& path, RigOptions options = small(kSegments)) : rig(path, std::move(options)) {
    flood = rig.index.root(key_of(10));
    quiet = rig.index.root(key_of(20));
    rig.pool->claim(flood, kFlood);
    rig.pool->claim(quiet, kQuiet);
  }
  // A chain of the flooding account, after it has made the room.
  void pour(std::uint64_t first, std::size_t n) {
    for (int i = 0; !rig.pool->trim(kFlood, n * kBlock.slot_bytes()) && i < 1000; ++i) rig.pump();
    rig.save(flood, first, n);
    rig.settle();
  }
  // How many of the blocks [0, n) of these chains are readable, by name: ids of what is gone are given to others.
  std::size_t held(std::uint64_t first, std::uint64_t chains, std::uint64_t n) const {
    std::size_t count = 0;
    for (std::uint64_t chain = 0; chain < chains; ++chain)
      for (std::uint64_t i = 0; i < n; ++i) count += rig.holds(first + 1000 * chain + i);
    return count;
  }
  std::size_t used(Account account) const { return rig.pool->usage().used(account) / kBlock.slot_bytes(); }

  Rig rig;
  NodeId flood = kNone, quiet = kNone;
};

}  // namespace

TEST_CASE("disk pool compact: a flood within its limit turns the log ten times, and nobody else loses a block") {
  for (const bool limited : {true, false}) {
    CAPTURE(limited);
    TempDir dir;
    Shared f(dir.path());
    if (limited) f.rig.pool->set_limit(kFlood, 3 * kPerSegment * kBlock.slot_bytes());
    // Chains of both lie side by side in every segment; the quiet one's are never used again.
    std::vector<NodeId> kept;
    for (std::uint64_t i = 0; i < 12; ++i) {
      const auto chain = f.rig.save(f.quiet, 500'000 + 1000 * i, 20);
      kept.insert(kept.end(), chain.begin(), chain.end());
      f.pour(100'000 + 1000 * i, 20);
    }
    for (std::uint64_t i = 12; i < 500; ++i) f.pour(100'000 + 1000 * i, 20);
    const DiskDropped dropped = f.rig.pool->take_dropped();
    if (!limited) {  // the control
      CHECK(f.held(500'000, 12, 20) == 0);
      CHECK(dropped.compacted == 0);
      continue;
    }
    CHECK(f.held(500'000, 12, 20) == kept.size());
    CHECK(f.rig.read({kept.begin(), kept.begin() + 50}).ok == sorted({kept.begin(), kept.begin() + 50}));
    CHECK(dropped.evicted == 0);
    CHECK(dropped.over_budget == 0);
    CHECK(dropped.compacted > 20);
    CHECK(f.used(kFlood) <= 3 * kPerSegment);
    CHECK(f.used(kFlood) > 2 * kPerSegment);
    // What room costs: no more than three pages are written again for each that is gained.
    CHECK(dropped.reinserted <= 3 * 500 * 20);
    CHECK(f.rig.flush() == 0);
  }
}

TEST_CASE("disk pool compact: what moved is found after a restart, with the quiet account's every block") {
  TempDir dir;
  std::size_t kept = 0;
  {
    Shared f(dir.path());
    f.rig.pool->set_limit(kFlood, 3 * kPerSegment * kBlock.slot_bytes());
    for (std::uint64_t i = 0; i < 8; ++i, kept += 20) {
      f.rig.save(f.quiet, 500'000 + 1000 * i, 20);
      f.pour(100'000 + 1000 * i, 20);
    }
    for (std::uint64_t i = 8; i < 120; ++i) f.pour(100'000 + 1000 * i, 20);
    CHECK(f.rig.pool->take_dropped().compacted > 3);
    CHECK(f.rig.flush() == 0);
  }
  Shared f(dir.path());
  CHECK(f.used(kQuiet) == kept);
  for (std::uint64_t i = 0; i < 8; ++i) CHECK(f.rig.holds(500'000 + 1000 * i + 19));
}

TEST_CASE("disk pool compact: too much that lives for that: the oldest leave, as ever, and the log goes on") {
  TempDir dir;
  Shared f(dir.path());
  f.rig.pool->set_limit(kFlood, 2 * kPerSegment * kBlock.slot_bytes());
  for (std::uint64_t i = 0; i < 9; ++i) {
    f.rig.save(f.quiet, 500'000 + 1000 * i, kPerSegment - 4);
    f.pour(100'000 + 1000 * i, 4);
  }
  for (std::uint64_t i = 9; i < 300; ++i) f.pour(100'000 + 1000 * i, 20);
  CHECK(f.rig.pool->take_dropped().evicted > 0);
  CHECK(f.used(kQuiet) >= 4 * kPerSegment);  // but not all of it: the flood's own holes are used as well
  CHECK(f.rig.holds(100'000 + 1000 * 299 + 19));
}

TEST_CASE("disk pool compact: saves do not take the room that what moves needs") {
  TempDir dir;
  RigOptions options = small(kSegments);
  options.pool.spare = 1;
  options.pool.slice = 8;  // an evacuation takes many pumps, and saves come between them
  Shared f(dir.path(), options);
  f.rig.pool->set_limit(kFlood, 3 * kPerSegment * kBlock.slot_bytes());
  for (std::uint64_t i = 0; i < 12; ++i) {
    f.rig.save(f.quiet, 500'000 + 1000 * i, 20);
    f.pour(100'000 + 1000 * i, 20);
  }
  for (std::uint64_t i = 12; i < 300; ++i) {
    for (int turn = 0; !f.rig.pool->trim(kFlood, 20 * kBlock.slot_bytes()) && turn < 1000; ++turn) f.rig.pump();
    f.rig.save(f.flood, 100'000 + 1000 * i, 20);  // and does not wait until all is done
  }
  CHECK(f.held(500'000, 12, 20) == 240);
  CHECK(f.rig.pool->take_dropped().compacted > 20);
}
