// What was found after a kill may lie in the page cache only: nothing else is given up for it before a sync.
#include <cerrno>
#include <filesystem>
#include <memory>
#include <utility>

#include "disk_pool_kit.h"

using namespace kv;
using test::fill;
using test::kPerSegment;
using test::kSmallSegment;
using test::Rig;
using test::RigOptions;
using test::small;
using test::TempDir;

namespace {

// The first segment's records have all been copied to others; whether those copies were synced nobody knows.
void kill_after_copies(const std::string& path) {
  RigOptions options = small(6);
  options.pool.reinsert_share = 1;
  Rig rig(path, options);
  const auto chains = fill(rig, 4);
  CHECK(rig.flush() == 0);
  rig.pool->touch(chains[0]);
  rig.faults->hold(DiskOp::kRead);  // copies wait
  rig.save(rig.root(), 20000, 10);
  REQUIRE(rig.drive([&] { return rig.pool->counts().evacuating == 1 && rig.faults->held() > 0; }));
  rig.faults->hold(DiskOp::kSync);
  rig.faults->release(DiskOp::kRead);
  CHECK_FALSE(rig.drive([] { return false; }, 0.1));
  REQUIRE(rig.pool->counts().evacuating == 1);
  rig.faults->release(DiskOp::kSync);  // too late for this one to hear of it
}

std::uint32_t oldest_position(const DiskDirectory& directory) {
  std::uint32_t oldest = kNone;
  const auto& all = directory.segments();
  for (std::uint32_t i = 0; i < all.size(); ++i)
    if (all[i].header.sequence != 0 && (oldest == kNone || all[i].header.sequence < all[oldest].header.sequence))
      oldest = i;
  return oldest;
}

// The files that have the copies.
std::vector<int> files_of_copies(const Rig& rig) {
  std::vector<int> fds;
  for (std::uint32_t s = 0; s < rig.pool->segments(); ++s) {
    const auto nodes = rig.pool->nodes(s, 1);
    const auto is_copy = [&](NodeId node) {
      for (std::uint64_t name = 1000; name < 1000 + kPerSegment; ++name)
        if (rig.node(name) == node) return true;
      return false;
    };
    if (std::any_of(nodes.begin(), nodes.end(), is_copy)) fds.push_back(rig.directory->segments()[s].fd.get());
  }
  return fds;
}

// Moments of the log.
std::size_t first_write(const Faults& faults, int fd) {
  for (const LoggedWrite& entry : faults.log())
    if (entry.op == DiskOp::kWrite && entry.fd == fd) return entry.begun;
  return LoggedWrite::kNotEnded;
}

std::size_t first_sync(const Faults& faults, int fd) {
  for (const LoggedWrite& entry : faults.log())
    if (entry.op == DiskOp::kSync && entry.fd == fd && entry.error == 0) return entry.ended;
  return LoggedWrite::kNotEnded;
}

}  // namespace

TEST_CASE("disk pool adopt: a segment whose records are newer elsewhere is kept until those are synced") {
  for (const bool refuses : {false, true}) {
    CAPTURE(refuses);
    TempDir dir;
    kill_after_copies(dir.path());
    RigOptions options = small(6);
    options.faults = std::make_shared<Faults>();
    options.faults->record();
    refuses ? options.faults->fail(DiskOp::kSync, EIO) : options.faults->hold(DiskOp::kSync);
    Rig rig(dir.path(), options);
    CHECK(rig.adopted.older == kPerSegment);
    const int old = rig.directory->segments()[oldest_position(*rig.directory)].fd.get();
    const std::vector<int> copies = files_of_copies(rig);
    REQUIRE_FALSE(copies.empty());
    CHECK_FALSE(rig.drive([] { return false; }, 0.1));
    CHECK(first_write(*rig.faults, old) == LoggedWrite::kNotEnded);
    if (refuses) {
      CHECK(rig.pool->counts().broken > 0);
      rig.pool->resume();
      CHECK_FALSE(rig.drive([] { return false; }, 0.1));
      CHECK(first_write(*rig.faults, old) == LoggedWrite::kNotEnded);
      rig.faults->fail(DiskOp::kSync, 0);
      rig.pool->resume();
    } else {
      rig.faults->release(DiskOp::kSync);
    }
    rig.settle();
    fill(rig, 3, 30000);
    CHECK(first_write(*rig.faults, old) != LoggedWrite::kNotEnded);
    for (int fd : copies) CHECK(first_sync(*rig.faults, fd) < first_write(*rig.faults, old));
  }
}

TEST_CASE("disk pool adopt: a segment that could not be read whole is synced, too, and gets no footer") {
  TempDir dir;
  {
    Rig rig(dir.path());
    rig.save(rig.root(), 1, 40);
    CHECK(rig.flush() == 0);
  }
  DiskDirectory::Options where;
  where.path = dir.path();
  where.capacity_bytes = 6 * kSmallSegment;
  where.segment_bytes = kSmallSegment;
  const auto directory = DiskDirectory::open(where);
  std::uint32_t position = 0;
  DiskSurvey survey(directory);
  survey.read(1);
  while (survey.segments()[position].records.empty()) ++position;
  const std::uint32_t number = directory->segments()[position].number;
  const int fd = directory->segments()[position].fd.get();
  std::filesystem::resize_file(test::segment_path(dir.path(), number), kSmallSegment / 4);
  survey.read(1);
  REQUIRE(survey.segments()[position].error == EIO);
  const std::size_t found = survey.segments()[position].records.size();
  REQUIRE(found > 0);

  const auto faults = std::make_shared<Faults>();
  faults->record();
  Index index(1000);
  const auto arena = Arena::create("test", kHugeBytes);
  auto mover = std::make_unique<Mover>(faulty_disk(open_disk("threads", 16, 2), faults), arena, Mover::Limits{});
  DiskPool pool(index, arena, directory, std::move(mover), {});
  CHECK(pool.adopt(survey).readable == found);
  for (int i = 0; i < 1000 && pool.counts().sealed == 0; ++i) {
    pollfd ready{pool.eventfd(), POLLIN, 0};
    ::poll(&ready, 1, 10);
    pool.pump();
    pool.check();
  }
  CHECK(pool.counts().sealed == 1);
  CHECK(pool.nodes().size() == found);
  CHECK(first_sync(*faults, fd) != LoggedWrite::kNotEnded);
  CHECK(first_write(*faults, fd) == LoggedWrite::kNotEnded);
}
