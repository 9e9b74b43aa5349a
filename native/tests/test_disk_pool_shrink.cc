// A directory that is opened with less capacity than it has files for: everything is found again, then it shrinks by
// giving up what it would give up anyway.
#include <cerrno>
#include <filesystem>
#include <utility>

#include "disk_pool_kit.h"

using namespace kv;
using test::fill;
using test::kBlock;
using test::key_of;
using test::kPerSegment;
using test::kSmallSegment;
using test::Rig;
using test::RigOptions;
using test::small;
using test::sorted;
using test::TempDir;

namespace {

constexpr std::uint64_t kHead = 1;         // the name of the first of four blocks that all chains begin with
constexpr std::size_t kHeadBlocks = 4, kChains = 10, kChain = 80;  // a segment for each chain
constexpr std::size_t kReadable = kHeadBlocks + kChains * kChain;

std::uint64_t chain_name(std::size_t i) { return 1000 * (i + 1); }

// A pool of many segments, with room to spare.
void make(const std::string& path) {
  Rig rig(path, small(16));
  const auto head = rig.save(rig.root(), kHead, kHeadBlocks);
  for (std::size_t i = 0; i < kChains; ++i) rig.save(head.back(), chain_name(i), kChain);
  CHECK(rig.flush() == 0);
  rig.pool->close(10);
}

std::size_t whole_chains(const Rig& rig) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < kChains; ++i) count += rig.holds(chain_name(i) + kChain - 1);
  return count;
}

std::size_t file_bytes(const Rig& rig) { return rig.pool->counts().file_bytes; }

// Nothing of what is FREE when the pool is opened.
void remove_empty_files(const std::string& path) {
  DiskDirectory::Options tool;
  tool.path = path;
  tool.create = false;
  const auto directory = DiskDirectory::open(tool);
  DiskSurvey survey(directory);
  survey.read(1);
  for (std::uint32_t i = 0; i < survey.segments().size(); ++i)
    if (survey.segments()[i].records.empty()) directory->discard(i);
}

}  // namespace

TEST_CASE("disk pool shrink: shared heads and the youngest chains survive, and no byte is over in the end") {
  for (const std::size_t segments : {12u, 6u, 4u, 3u}) {
    for (const bool spares : {true, false}) {
      CAPTURE(segments);
      CAPTURE(spares);
      TempDir dir;
      make(dir.path());
      if (!spares) remove_empty_files(dir.path());
      Rig rig(dir.path(), small(segments));
      CHECK(rig.adopted.readable == kReadable);
      const std::size_t before = file_bytes(rig);
      rig.settle();
      CHECK(file_bytes(rig) <= segments * kSmallSegment);
      CHECK((file_bytes(rig) < before) == (before > segments * kSmallSegment));
      CHECK(rig.holds(kHead + kHeadBlocks - 1));
      const std::size_t whole = whole_chains(rig);
      // One is filled, one or two are spare, and a chain that begins in one that leaves loses some of its head.
      CHECK(whole >= (segments > kChains ? kChains : (segments - 2) / 2));
      for (std::size_t i = kChains - whole + (spares ? 0 : 1); i < kChains; ++i)
        CHECK(rig.holds(chain_name(i) + (i + 1 == kChains && !spares ? 0 : kChain - 1)));
      std::vector<NodeId> left;
      for (std::size_t i = 0; i < kHeadBlocks; ++i) left.push_back(rig.node(kHead + i));
      CHECK(rig.read(left).ok == sorted(left));
      const auto more = rig.save(left.back(), 50000, 30);
      CHECK(rig.readable(more) == 30);
      CHECK(file_bytes(rig) <= segments * kSmallSegment);
    }
  }
}

TEST_CASE("disk pool shrink: a shared head as large as a segment survives as well") {
  TempDir dir;
  {
    Rig rig(dir.path(), small(16));
    const auto head = rig.save(rig.root(), kHead, kPerSegment);
    for (std::size_t i = 0; i < kChains; ++i) rig.save(head.back(), chain_name(i), kPerSegment);
    rig.pool->close(10);
  }
  Rig rig(dir.path(), small(6));
  rig.settle();
  CHECK(file_bytes(rig) <= 6 * kSmallSegment);
  CHECK(rig.holds(kHead + kPerSegment - 1));
  CHECK(rig.holds(chain_name(kChains - 1) + kPerSegment - 1));
}

TEST_CASE("disk pool shrink: what is pinned or used by then stays") {
  TempDir dir;
  make(dir.path());
  Rig rig(dir.path(), small(6));
  rig.index.pin(rig.node(chain_name(0) + 19));
  const NodeId used = rig.node(chain_name(2) + 9);
  rig.pool->touch(std::vector<NodeId>{used});
  rig.settle();
  CHECK(file_bytes(rig) <= 6 * kSmallSegment);
  CHECK(rig.holds(chain_name(0) + 19));
  CHECK(rig.holds(chain_name(2) + 9));
  CHECK_FALSE(rig.holds(chain_name(2) + 10));
  CHECK_FALSE(rig.holds(chain_name(1)));
  rig.index.unpin(rig.node(chain_name(0) + 19));
}

TEST_CASE("disk pool shrink: pinned as a whole it stays over, and goes on when it is let go") {
  TempDir dir;
  make(dir.path());
  Rig rig(dir.path(), small(4));
  for (std::size_t i = 0; i < kChains; ++i) rig.index.pin(rig.node(chain_name(i) + kChain - 1));
  rig.settle();
  CHECK(file_bytes(rig) > 4 * kSmallSegment);
  CHECK(rig.pool->counts().records == kReadable);
  for (std::size_t i = 0; i < kChains; ++i) rig.index.unpin(rig.node(chain_name(i) + kChain - 1));
  rig.settle();
  CHECK(file_bytes(rig) <= 4 * kSmallSegment);
  CHECK(rig.holds(kHead));
}

TEST_CASE("disk pool shrink: writes wait until the rest fits, and then go on") {
  TempDir dir;
  make(dir.path());
  Rig rig(dir.path(), small(5));
  rig.faults->hold(DiskOp::kRead);  // nothing can be moved
  const auto nodes = rig.chain(rig.node(kHead + kHeadBlocks - 1), 50000, 10);
  CHECK_FALSE(rig.write(nodes, kBlock, 0.05).last);
  CHECK(rig.pool->counts().writing == 0);
  CHECK(file_bytes(rig) > 5 * kSmallSegment);
  CHECK(rig.holds(chain_name(kChains - 1)));  // reads are served: what is there is there
  rig.faults->release(DiskOp::kRead);
  CHECK(rig.write(nodes).last);
  CHECK(rig.readable(nodes) == 10);
  CHECK(file_bytes(rig) <= 5 * kSmallSegment);
  rig.index.unpin(nodes.back());
}

TEST_CASE("disk pool shrink: an end in the middle loses nothing more, whatever capacity comes next") {
  for (const std::size_t next : {16, 5}) {
    CAPTURE(next);
    TempDir dir;
    make(dir.path());
    std::size_t records = 0, bytes = 0;
    {
      RigOptions options = small(5);
      options.pool.slice = 10;
      Rig rig(dir.path(), options);
      const std::size_t before = file_bytes(rig);
      CHECK(rig.drive([&] { return file_bytes(rig) + 2 * kSmallSegment <= before; }));
      records = rig.pool->counts().records;
      bytes = file_bytes(rig);
      CHECK(bytes > 5 * kSmallSegment);
    }
    Rig rig(dir.path(), small(next));
    CHECK(rig.adopted.readable >= records);  // of a segment that was given up only in part
    rig.settle();
    CHECK(file_bytes(rig) <= next * kSmallSegment);
    CHECK(rig.holds(kHead + kHeadBlocks - 1));
    if (next == 16) CHECK(rig.pool->counts().records == rig.adopted.readable);
  }
}

TEST_CASE("disk pool shrink: also while segments get another size") {
  for (const std::size_t bytes : {2 * kSmallSegment, 4 * kSmallSegment}) {
    TempDir dir;
    make(dir.path());
    RigOptions options = small(12 * kSmallSegment / bytes - (bytes > 2 * kSmallSegment ? 0 : 1));
    options.segment_bytes = bytes;
    Rig rig(dir.path(), options);
    CHECK(rig.adopted.readable == kReadable);
    rig.settle();
    CHECK(file_bytes(rig) <= options.segments * bytes);
    CHECK(rig.holds(kHead + kHeadBlocks - 1));
    rig.save(rig.node(kHead), 50000, 100);
    CHECK(rig.holds(50099));
  }
}

TEST_CASE("disk pool shrink: room for fewer than three segments is refused, and nothing is touched") {
  TempDir dir;
  make(dir.path());
  CHECK_THROWS_AS(Rig(dir.path(), small(2)), Invalid);
  CHECK(Rig(dir.path(), small(16)).adopted.readable == kReadable);
}

TEST_CASE("disk pool shrink: a removed segment counts for marks until its name is gone on the medium") {
  TempDir dir;
  make(dir.path());
  Rig rig(dir.path(), small(5));
  rig.faults->hold(DiskOp::kSync, rig.directory->fd());
  CHECK(rig.drive([&] { return file_bytes(rig) <= 5 * kSmallSegment; }));
  const std::uint64_t oldest = rig.pool->oldest_sequence();
  rig.faults->release(DiskOp::kSync);
  rig.settle();
  CHECK(rig.pool->oldest_sequence() > oldest);
}
