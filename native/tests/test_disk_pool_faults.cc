// The disk pool on a disk that rots, refuses, or has no room: what is readable stays so, and it recovers.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "disk_pool_kit.h"

using namespace kv;
using test::kBlock;
using test::key_of;
using test::Outcome;
using test::Rig;
using test::RigOptions;
using test::sorted;
using test::TempDir;

namespace {

// Flips one bit of every copy of the key's bytes in the segments' files, at that byte of the payload.
std::size_t rot(const Rig& rig, const Key& key, std::size_t byte) {
  std::size_t flipped = 0;
  for (const SegmentFile& segment : rig.directory->segments()) {
    const Fd fd(::open(test::segment_path(rig.directory->options().path, segment.number).c_str(), O_RDWR | O_CLOEXEC));
    std::vector<std::uint8_t> page(kPageBytes);
    for (std::uint32_t p = 1; p < segment.pages; ++p) {
      RecordHeader header;
      const auto at = static_cast<off_t>(std::size_t{p} * kPageBytes);
      if (::pread(fd.get(), page.data(), kPageBytes, at) != static_cast<ssize_t>(kPageBytes)) continue;
      if (!decode(page.data(), header) || !(header.key == key)) continue;
      std::uint8_t bits;
      const auto where = at + static_cast<off_t>(kPageBytes + byte);
      REQUIRE(::pread(fd.get(), &bits, 1, where) == 1);
      bits ^= 4;
      REQUIRE(::pwrite(fd.get(), &bits, 1, where) == 1);
      ++flipped;
    }
    ::fsync(fd.get());
  }
  return flipped;
}

}  // namespace

TEST_CASE("disk pool: rot is found by a read, dropped alone, and filled again by the next save") {
  TempDir dir;
  Rig rig(dir.path());
  const auto nodes = rig.save(rig.root(), 1, 5);
  CHECK(rig.flush() == 0);
  CHECK(rot(rig, key_of(3), 700) == 1);
  const Outcome outcome = rig.read(nodes);
  CHECK(outcome.corrupt == std::vector<NodeId>{nodes[2]});
  CHECK(outcome.ok.size() == 4);
  CHECK(rig.readable(nodes) == 4);
  CHECK(rig.pool->take_dropped().rot == 1);
  CHECK(rig.pool->take_removed() == std::vector<Key>{key_of(3)});
  CHECK(rig.pool->missing(nodes[2]) == std::vector<NodeId>{nodes[2]});
  CHECK(rig.pool->missing(nodes[4]).empty());  // the hole is further up
  rig.index.pin(nodes[2]);
  CHECK(rig.write({nodes[2]}).ok.size() == 1);
  rig.index.unpin(nodes[2]);
  CHECK(rig.read(nodes).ok == sorted(nodes));
}

TEST_CASE("disk pool: a flush waits for what was accepted before it, and tells what the medium refused") {
  TempDir dir;
  Rig rig(dir.path());
  CHECK(rig.flush() == 0);  // nothing to do
  rig.settle();
  const auto nodes = rig.chain(rig.root(), 1, 3);
  std::vector<SlotId> slots;
  for (NodeId id : nodes) slots.push_back(rig.ready(rig.index.node(id).key));
  rig.faults->hold(DiskOp::kWrite);
  const std::uint64_t job = rig.pool->write(nodes, slots, kBlock).job;
  const std::uint64_t flush = rig.pool->flush();
  CHECK_FALSE(rig.drive([&] { return rig.jobs[flush].last; }, 0.03));
  rig.faults->release(DiskOp::kWrite);
  CHECK(rig.wait(flush).error == 0);
  CHECK(rig.jobs[job].last);
  rig.settle();

  rig.faults->fail(DiskOp::kWrite, EIO);
  const auto more = rig.chain(nodes[2], 10, 1);
  CHECK(rig.write(more).failed == sorted(more));
  rig.faults->fail(DiskOp::kWrite, 0);
  CHECK(rig.flush() == 0);  // of what is over nothing is expected

  CHECK(rig.write(more).ok == sorted(more));
  rig.settle();
  rig.faults->fail(DiskOp::kSync, EIO);
  CHECK(rig.flush() == EIO);
  CHECK(rig.troubles == std::vector<int>{EIO});
  CHECK(rig.pool->counts().broken == 1);
  CHECK(rig.read(nodes).ok == sorted(nodes));  // still
  CHECK(rig.flush() == EIO);                   // and still not on the medium
  rig.settle();
  rig.faults->fail(DiskOp::kSync, 0);
  rig.pool->resume();
  rig.settle();
  CHECK(rig.pool->counts().broken == 0);
  CHECK(rig.pool->counts().sealed == 1);
  CHECK(rig.flush() == 0);
  CHECK(rig.read(more).ok == sorted(more));
}

TEST_CASE("disk pool: no room on the file system ends the making of files, not the rest") {
  TempDir dir;
  Rig rig(dir.path());
  rig.faults->fail(DiskOp::kAllocate, ENOSPC);
  rig.faults->fail(DiskOp::kWrite, ENOSPC);
  rig.settle();
  CHECK(rig.troubles == std::vector<int>{ENOSPC, ENOSPC});  // two were begun
  CHECK(rig.pool->counts().file_bytes == 0);
  const auto nodes = rig.chain(rig.root(), 1, 100);
  CHECK_FALSE(rig.write(nodes, kBlock, 0.02).last);
  rig.pool->resume();
  rig.settle();
  CHECK(rig.troubles.size() == 4);

  rig.faults->fail(DiskOp::kAllocate, 0);
  rig.faults->fail(DiskOp::kWrite, 0);
  rig.pool->resume();
  rig.settle();
  CHECK(rig.write(nodes).last);
  rig.settle();
  CHECK(rig.pool->counts().file_bytes == 4 * test::kSmallSegment);

  // With four segments it goes on as if that were the capacity.
  rig.faults->fail(DiskOp::kAllocate, ENOSPC);
  rig.index.unpin(nodes.back());
  for (std::uint64_t first = 1000; first < 9000; first += 1000) rig.save(rig.root(), first, 80);
  rig.settle();
  CHECK(rig.pool->counts().file_bytes == 4 * test::kSmallSegment);
  CHECK(rig.pool->take_dropped().evicted > 100);
  CHECK(rig.holds(8000));
}

TEST_CASE("disk pool: a disk that refuses everything costs nothing that is on it, and recovers") {
  TempDir dir;
  RigOptions options;
  options.segments = 4;
  Rig rig(dir.path(), options);
  for (std::uint64_t first = 1000; first < 9000; first += 1000) rig.save(rig.root(), first, 80);
  rig.settle();
  const std::size_t before = rig.pool->counts().records;
  const auto chain = rig.save(rig.root(), 8000, 80);
  REQUIRE(rig.readable(chain) == 80);
  rig.faults->fail(DiskOp::kWrite, EIO);
  rig.faults->fail(DiskOp::kSync, EIO);
  for (std::uint64_t first = 20000; first < 30000; first += 1000) {
    const auto nodes = rig.chain(rig.root(), first, 80);
    CHECK(rig.write(nodes, kBlock, 0.02).ok.empty());
    rig.index.unpin(nodes.back());
    for (NodeId node : nodes)
      if (rig.index.live(node)) rig.index.reap(node);
    rig.check();
  }
  CHECK_FALSE(rig.troubles.empty());
  rig.settle();
  CHECK(rig.pool->counts().records + 80 * 2 >= before);  // at most the evacuation that was under way
  CHECK(rig.read(chain).ok == sorted(chain));
  for (int i = 0; i < 3; ++i) {
    rig.pool->resume();
    rig.settle();
  }
  CHECK(rig.pool->counts().records + 80 * 3 >= before);
  rig.faults->fail(DiskOp::kWrite, 0);
  rig.faults->fail(DiskOp::kSync, 0);
  rig.pool->resume();
  rig.settle();
  CHECK(rig.pool->counts().broken == 0);
  rig.save(rig.root(), 50000, 80);
  CHECK(rig.holds(50000));
}

TEST_CASE("disk pool: without direct I/O, what a sync has refused is given up, and later syncs mean something again") {
  TempDir dir;
  RigOptions options;
  options.direct = false;
  Rig rig(dir.path(), options);
  const auto nodes = rig.save(rig.root(), 1, 5);
  CHECK(rig.flush() == 0);
  rig.save(nodes[4], 10, 5);
  rig.faults->fail(DiskOp::kSync, EIO);
  CHECK(rig.flush() == EIO);
  CHECK(rig.holds(14));  // readable, as long as nobody asks for more
  rig.settle();
  rig.faults->fail(DiskOp::kSync, 0);
  rig.pool->resume();
  rig.settle();
  CHECK(rig.pool->counts().records == 0);
  CHECK(rig.pool->counts().broken == 0);
  CHECK(rig.pool->take_dropped().lost == 10);
  CHECK(rig.flush() == 0);
  rig.save(rig.root(), 1, 5);
  CHECK(rig.flush() == 0);
  CHECK(rig.holds(5));
}

TEST_CASE("disk pool: a header or footer that cannot be written is written again") {
  TempDir dir;
  Rig rig(dir.path());
  rig.settle();
  const auto nodes = rig.save(rig.root(), 1, 84);  // the first segment is full
  rig.settle();
  FaultSpec torn;
  torn.torn = 1;
  rig.faults->set(torn);
  const auto more = rig.chain(nodes.back(), 100, 1);
  CHECK(rig.write(more).failed == sorted(more));  // this begins the next segment, and seals the first
  rig.settle();
  CHECK(rig.pool->counts().broken >= 1);
  CHECK_FALSE(rig.troubles.empty());
  CHECK(rig.readable(nodes) == 84);
  rig.faults->set({});
  CHECK(rig.flush() == 0);  // its records have been synced; the footer is no promise of ours
  rig.pool->resume();
  rig.settle();
  CHECK(rig.pool->counts().broken == 0);
  CHECK(rig.pool->counts().sealed == 1);
  CHECK(rig.pool->counts().opening == 2);
  CHECK(rig.read({nodes.begin(), nodes.begin() + 50}).ok.size() == 50);
}
