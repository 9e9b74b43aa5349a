// A process is killed, and what it had not synced stays in the page cache; another one goes on with that; then the power
// fails. What the first one's flush has acknowledged is there at any moment of it.
#include <cerrno>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "crash_log.h"
#include "disk_pool_kit.h"

using namespace kv;
using test::CrashLog;
using test::fill;
using test::ImageDirectory;
using test::key_of;
using test::kPerSegment;
using test::Random;
using test::Rig;
using test::RigOptions;
using test::small;
using test::TempDir;

namespace {

constexpr int kDirectoryName = -2;  // instead of a descriptor, as the others have their segment's number
constexpr std::size_t kSegments = 6;
constexpr std::size_t kMoments = 80;  // of the second process, from its first on
constexpr std::size_t kForEver = ~std::size_t{0};

// Processes on one directory, and one log of what they write.
struct Log {
  // What was logged since the last call was a process's with these files.
  void name(const Rig& rig) {
    std::map<int, int> names{{rig.directory->fd(), kDirectoryName}};
    for (const SegmentFile& file : rig.directory->segments()) {
      if (!file.fd) continue;
      names[file.fd.get()] = static_cast<int>(file.number);
      numbers[file.number] = static_cast<int>(file.number);
    }
    const std::vector<LoggedWrite> all = faults->log();
    for (std::size_t i = entries.size(); i < all.size(); ++i) {
      entries.push_back(all[i]);
      entries.back().fd = names.at(all[i].fd);
    }
  }
  std::shared_ptr<Faults> faults = std::make_shared<Faults>();
  std::vector<LoggedWrite> entries;
  std::map<std::uint32_t, int> numbers;
};

// Flushed chains, of which the first segment's records are all copied elsewhere; no sync of the copies.
void first_process(const std::string& path, Log& log) {
  RigOptions options = small(kSegments);
  options.pool.reinsert_share = 1;
  options.faults = log.faults;
  Rig rig(path, options);
  const auto chains = fill(rig, 4);
  CHECK(rig.flush() == 0);
  rig.pool->touch(chains[0]);
  rig.faults->hold(DiskOp::kRead);
  rig.save(rig.root(), 20000, 10);
  REQUIRE(rig.drive([&] { return rig.pool->counts().evacuating == 1 && rig.faults->held() > 0; }));
  rig.faults->fail(DiskOp::kSync, EIO);  // none of them gets there
  rig.faults->release(DiskOp::kRead);
  CHECK_FALSE(rig.drive([] { return false; }, 0.05));
  rig.faults->fail(DiskOp::kSync, 0);
  CHECK(rig.readable(chains[0]) == kPerSegment);
  log.name(rig);
}

// Until when each of those blocks had to survive.
std::map<std::uint64_t, std::size_t> second_process(const std::string& path, Log& log, std::uint64_t seed) {
  RigOptions options = small(kSegments);
  options.faults = log.faults;
  FaultSpec spec;
  spec.seed = seed;
  spec.slow = 0.5;
  spec.slow_ms = 5;
  log.faults->set(spec);
  Rig rig(path, options);
  std::map<std::uint64_t, std::size_t> until;
  for (std::uint64_t first = 1000; first <= 4000; first += 1000)
    for (std::uint64_t name = first; name < first + kPerSegment; ++name)
      if (rig.holds(name)) until[name] = kForEver;
  CHECK(until.size() == 4 * kPerSegment);
  std::size_t before = 0;
  const auto keep_book = [&] {
    for (auto& [name, end] : until)
      if (end == kForEver && !rig.holds(name)) end = before;
    before = log.faults->moment();
    return false;
  };
  before = log.faults->moment();
  rig.drive(keep_book, 0.05);
  const auto more = rig.chain(rig.root(), 50000, 2 * kPerSegment);
  for (std::size_t i = 0; i < more.size(); i += 12) {
    rig.write({more.begin() + static_cast<std::ptrdiff_t>(i), more.begin() + static_cast<std::ptrdiff_t>(i + 12)});
    keep_book();
  }
  log.faults->set({});
  rig.index.unpin(more.back());
  log.name(rig);
  return until;
}

}  // namespace

TEST_CASE("disk crash: killed, opened again, and then the power fails: nothing flushed is lost") {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    CAPTURE(seed);
    TempDir one, two;
    Log log;
    log.faults->record();
    first_process(one.path(), log);
    const std::size_t killed = log.faults->moment();
    const auto until = second_process(one.path(), log, seed);
    std::filesystem::copy(one.path("kvstore.disk"), two.path("kvstore.disk"));
    const CrashLog crashes({}, log.numbers, kDirectoryName, log.entries);
    ImageDirectory there(two.path());
    Random random(seed);
    std::size_t lost = 0, promised = 0;
    for (std::size_t moment = killed; moment < std::min(killed + kMoments, crashes.moments()); ++moment) {
      there.hold(crashes.image(moment, random));
      RigOptions options = small(kSegments);
      options.check = false;
      options.faults = std::make_shared<Faults>();
      for (const DiskOp op : {DiskOp::kWrite, DiskOp::kSync, DiskOp::kAllocate}) options.faults->fail(op, EROFS);
      const Rig rig(two.path(), options);
      for (const auto& [name, end] : until) {
        if (end < moment) continue;
        ++promised;
        lost += !rig.holds(name);
      }
    }
    CHECK(promised > 1000);
    CHECK(lost == 0);
  }
}
