// The disk pool beside an oracle that knows only names: random lives on a disk that fails, closed or cut off and
// opened again with a new index, every law after every step. What must hold:
//
//   * bytes are those of the key, or the read says corrupt, or failed;
//   * what a flush has acknowledged is found again, unless it was evicted, forgotten or rotten before the end;
//   * what is found again is right, its chain is whole, and nothing else is found;
//   * the files are never larger than the capacity;
//   * every job ends, once.
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "disk_pool_kit.h"

using namespace kv;
using test::format_of_pages;
using test::key_of;
using test::Outcome;
using test::Random;
using test::Rig;
using test::RigOptions;
using test::TempDir;

namespace {

using Name = std::uint32_t;  // names[0] and names[1] are roots; the parent of another is smaller
constexpr Name kNames = 70;
constexpr SlotId kSlotPages = 32;
const SlotFormat kFormats[] = {format_of_pages(29), format_of_pages(17)};

struct Totals {
  std::size_t evicted = 0, reinserted = 0, over_budget = 0, rot = 0, lost = 0, read = 0, corrupt = 0, failed = 0;
  std::size_t flushed = 0, reopened = 0, found = 0, troubles = 0, over_limit = 0, compacted = 0;
};

struct Life {
  Life(std::uint64_t seed, bool rotting, const std::string& kind) : random(seed), rots(rotting) {
    options.segments = 4 + random.below(3);
    options.slot_pages = kSlotPages;
    options.kind = kind;
    options.pool.reinsert_share = 0.25 * random.below(3);
    options.pool.spare = 1 + random.below(2);
    options.pool.slice = 1 + random.below(random.chance(50) ? 3 : 200);
    options.pool.records_max = random.chance(30) ? 20 : kNone;
    parent = {0, 1};
    for (Name name = 2; name < kNames; ++name)
      parent.push_back(random.chance(70) && name > 2 ? name - 1 : random.below(name));
    rig = std::make_unique<Rig>(dir.path(), options);
  }

  // ---- names -------------------------------------------------------------------------------------------------
  std::vector<Name> path(Name name) const {
    std::vector<Name> out;
    for (; name > 1; name = parent[name]) out.insert(out.begin(), name);
    return out;
  }
  Name root_of(Name name) const {
    while (name > 1) name = parent[name];
    return name;
  }
  const SlotFormat& format_of(Name name) const { return kFormats[root_of(name)]; }
  NodeId node(Name name) const { return rig->node(name); }
  bool readable(Name name) const { return rig->holds(name); }
  bool accepted(Name name) const { return node(name) != kNone && rig->pool->missing(node(name)).empty(); }
  Name some() { return 2 + random.below(kNames - 2); }

  // ---- what it does ------------------------------------------------------------------------------------------
  void write() {
    const Name last = some();
    const std::vector<Name> names = path(last);
    if (names.size() > rig->free_slots()) return;
    std::vector<NodeId> nodes;
    NodeId up = rig->root(root_of(last));
    for (Name name : names) {
      const NodeId known = node(name);
      nodes.push_back(up = known != kNone ? known : rig->index.make(up, key_of(name)));
    }
    rig->index.pin(nodes.back());
    Pending pending{{}, {}, {}, nodes.back()};
    for (Name name : names) pending.slots.push_back(rig->ready(key_of(name), format_of(name)));
    const DiskPool::Begun begun = rig->pool->write(nodes, pending.slots, format_of(last));
    REQUIRE(begun.accepted <= nodes.size());
    if (begun.job == 0) return end(pending);
    pendings.emplace(begun.job, std::move(pending));
  }
  void read() {
    Pending pending;
    std::vector<NodeId> nodes;
    const Name last = some();
    for (Name name : path(last))
      if (readable(name) && rig->free_slots() > 0) {
        nodes.push_back(node(name));
        pending.names.push_back(name);
        pending.nodes.push_back(node(name));
        pending.slots.push_back(rig->take_slot());
      }
    if (nodes.empty()) return;
    const std::uint64_t job = rig->pool->read(nodes, pending.slots, format_of(last));
    if (random.chance(10)) rig->pool->cancel(job);
    pendings.emplace(job, std::move(pending));
  }
  void flush() {
    std::set<Name> now;
    for (Name name = 2; name < kNames; ++name)
      if (accepted(name)) now.insert(name);
    flushes.emplace(rig->pool->flush(), std::move(now));
  }
  void touch() {
    std::vector<NodeId> nodes;
    for (Name name : path(some()))
      if (node(name) != kNone) nodes.push_back(node(name));
    rig->pool->touch(nodes);
  }
  void pin() {
    if (!pins.empty() && random.chance(55)) {
      const std::size_t at = random.below(pins.size());
      rig->index.unpin(pins[at]);
      pins.erase(pins.begin() + static_cast<std::ptrdiff_t>(at));
    } else if (const NodeId id = node(some()); id != kNone && pins.size() < 4) {
      rig->index.pin(id);
      pins.push_back(id);
    }
  }
  void forget() {
    const Name name = some();
    const NodeId id = node(name);
    if (random.chance(50)) {
      rig->pool->forget(id);
      CHECK_FALSE(readable(name));
    } else {
      CHECK(rig->pool->drop(id) == (id != kNone && readable(name)));
    }
  }
  // One of two accounts that share the disk gets a smaller limit, and gives up what is too much.
  void limit() {
    const Name owner = random.below(2);
    rig->pool->claim(rig->root(owner), owner + 1);
    const std::size_t block = kFormats[owner].slot_bytes();
    rig->pool->set_limit(owner + 1, random.chance(20) ? kUnlimited : block * (1 + random.below(6)));
    const std::size_t more = block * (1 + random.below(3));
    bool fits = false;
    for (int slice = 0; slice < 50 && !fits; ++slice)
      fits = rig->pool->trim(owner + 1, more, random.chance(50) ? node(some()) : kNone);
    const std::size_t limit = rig->pool->usage().limit(owner + 1);
    CHECK(fits == (more <= limit && rig->pool->usage().used(owner + 1) <= limit - more));
  }
  void fail() {
    FaultSpec spec;
    spec.seed = random.next();
    switch (random.below(8)) {
      case 0: spec.write_eio = 0.2; break;
      case 1: spec.read_eio = 0.2; break;
      case 2: spec.sync_eio = 0.2; break;
      case 3: spec.write_enospc = 0.2; break;
      case 4: spec.torn = 0.2; break;
      case 5: spec.flip_read = 0.1; break;
      case 6: spec.flip_write = rots ? 0.1 : 0; break;
      default: spec.shortened = 0.3, spec.slow = 0.3, spec.slow_ms = 2;
    }
    if (random.chance(50)) spec = {};
    rig->faults->set(spec);
    if (random.chance(60)) rig->pool->resume();
  }
  void pump() {
    rig->pump();
    totals.troubles += rig->troubles.size();
    rig->troubles.clear();
    for (auto it = pendings.begin(); it != pendings.end();) {
      const auto job = rig->jobs.find(it->first);
      if (job == rig->jobs.end() || !job->second.last) {
        ++it;
        continue;
      }
      verify(it->second, job->second);
      end(it->second);
      it = pendings.erase(it);
    }
    for (auto it = flushes.begin(); it != flushes.end();) {
      const auto job = rig->jobs.find(it->first);
      if (job == rig->jobs.end() || !job->second.last) {
        ++it;
        continue;
      }
      if (job->second.error == 0) {
        for (Name name : it->second)
          if (closed || readable(name)) safe.insert(name);
        ++totals.flushed;
      }
      it = flushes.erase(it);
    }
  }
  void wait() {
    pollfd ready{rig->pool->eventfd(), POLLIN, 0};
    ::poll(&ready, 1, 20);
    pump();
    drop_lost();
  }

  void step() {
    for (int i = 0; pendings.size() > 5 && i < 100; ++i) wait();  // not faster than the disk, or little ever happens
    const std::uint32_t dice = random.below(100);
    if (dice < 34) {
      write();
    } else if (dice < 44) {
      read();
    } else if (dice < 54) {
      touch();
    } else if (dice < 60) {
      pin();
    } else if (dice < 61) {
      forget();
    } else if (dice < 65) {
      limit();
    } else if (dice < 68) {
      flush();
    } else if (dice < 71) {
      fail();
    } else if (dice < 72) {
      reopen();
    } else {
      wait();
    }
    rig->check();
    drop_lost();
  }
  // What is not readable any more was evicted, forgotten, lost or rotten.
  void drop_lost() {
    std::erase_if(safe, [&](Name name) { return !readable(name); });
    for (auto& [job, names] : flushes) std::erase_if(names, [&](Name name) { return !accepted(name); });
  }

  // ---- the end of a process, and the next one ------------------------------------------------------------------
  void reopen() {
    if (random.chance(50)) {
      // What was on its way may fail now, and the pool does not say what of it is readable: no promise.
      for (auto& [job, names] : flushes) std::erase_if(names, [&](Name name) { return !readable(name); });
      rig->pool->close(random.chance(50) ? 1.0 : 0.0);
      closed = true;
      pump();
      closed = false;
      CHECK(pendings.empty());
      CHECK(flushes.empty());
    }
    count();
    rig.reset();
    pendings.clear();
    flushes.clear();
    pins.clear();
    ++totals.reopened;

    std::size_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(dir.path()))
      if (entry.path().extension() == ".kvs") bytes += entry.file_size();
    CHECK(bytes <= options.segments * options.segment_bytes);

    rig = std::make_unique<Rig>(dir.path(), options);
    std::set<Name> found;
    for (Name name = 2; name < kNames; ++name)
      if (readable(name)) found.insert(name);
    CHECK(rig->pool->counts().records == found.size());  // nothing that nobody wrote
    totals.found += found.size();
    for (Name name : found)
      for (Name above : path(name)) CHECK(found.contains(above));
    if (!rots)
      for (Name name : safe) {
        const std::vector<Name> chain = path(name);
        const bool whole = std::all_of(chain.begin(), chain.end(), [&](Name above) { return safe.contains(above); });
        CAPTURE(name);
        if (whole) CHECK(found.contains(name));
      }
    for (Name name : found) {
      if (!readable(name)) continue;  // room is being made again
      const Outcome outcome = rig->read({node(name)}, format_of(name));
      CHECK(outcome.failed.empty());
      if (!rots) CHECK(outcome.corrupt.empty());
    }
    safe.clear();
  }
  void finish() {
    rig->faults->set({});
    rig->pool->resume();
    const auto over = [&] {
      pump();
      drop_lost();
      return pendings.empty() && flushes.empty();
    };
    const auto stop = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!over() && std::chrono::steady_clock::now() < stop) wait();
    CHECK(over());
    reopen();
    count();
  }

 private:
  struct Pending {
    std::vector<Name> names;    // of a read
    std::vector<NodeId> nodes;  // of a read
    std::vector<SlotId> slots;
    NodeId pin = kNone;         // of a write
  };

  void verify(const Pending& pending, const Outcome& outcome) {
    for (std::size_t i = 0; i < pending.names.size(); ++i) {
      if (std::find(outcome.ok.begin(), outcome.ok.end(), pending.nodes[i]) == outcome.ok.end()) continue;
      const test::Payload& payload = test::payload_kept(key_of(pending.names[i]), format_of(pending.names[i]));
      REQUIRE(std::memcmp(rig->arena->slot(pending.slots[i]), payload.bytes.data(), payload.bytes.size()) == 0);
    }
    if (pending.pin != kNone) return;
    totals.read += outcome.ok.size();
    totals.corrupt += outcome.corrupt.size();
    totals.failed += outcome.failed.size();
  }
  void end(const Pending& pending) {
    for (SlotId slot : pending.slots) rig->give_slot(slot);
    if (pending.pin != kNone) rig->index.unpin(pending.pin);
  }
  void count() {
    const DiskDropped dropped = rig->pool->take_dropped();
    totals.evicted += dropped.evicted;
    totals.reinserted += dropped.reinserted;
    totals.over_budget += dropped.over_budget;
    totals.rot += dropped.rot;
    totals.lost += dropped.lost;
    totals.over_limit += dropped.over_limit;
    totals.compacted += dropped.compacted;
  }

 public:
  Random random;
  const bool rots;
  RigOptions options;
  TempDir dir;
  std::vector<Name> parent;
  std::unique_ptr<Rig> rig;
  std::map<std::uint64_t, Pending> pendings;
  std::map<std::uint64_t, std::set<Name>> flushes;
  std::vector<NodeId> pins;
  std::set<Name> safe;  // acknowledged by a flush, and readable ever since
  bool closed = false;
  Totals totals;
};

Totals live(bool rots, std::uint64_t first, std::uint64_t seeds, int steps) {
  Totals sum;
  for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
    CAPTURE(seed);
    Life life(seed, rots, seed % 2 == 0 ? "auto" : "threads");
    for (int step = 0; step < steps; ++step) {
      CAPTURE(step);
      life.step();
    }
    life.finish();
    const Totals& t = life.totals;
    sum.evicted += t.evicted, sum.reinserted += t.reinserted, sum.over_budget += t.over_budget, sum.rot += t.rot;
    sum.lost += t.lost, sum.read += t.read, sum.corrupt += t.corrupt, sum.failed += t.failed;
    sum.flushed += t.flushed, sum.reopened += t.reopened, sum.found += t.found, sum.troubles += t.troubles;
    sum.over_limit += t.over_limit, sum.compacted += t.compacted;
  }
  MESSAGE("evicted " << sum.evicted << ", reinserted " << sum.reinserted << ", over budget " << sum.over_budget
                     << ", rot " << sum.rot << ", lost " << sum.lost << ", read " << sum.read << ", corrupt "
                     << sum.corrupt << ", failed " << sum.failed << ", flushed " << sum.flushed << ", reopened "
                     << sum.reopened << ", found " << sum.found << ", troubles " << sum.troubles
                     << ", over limit " << sum.over_limit << ", compacted " << sum.compacted);
  return sum;
}

}  // namespace

TEST_CASE("disk pool model: on a disk that fails, nothing acknowledged is lost and nothing wrong is read") {
  const Totals totals = live(false, 1, 4, 250);
  CHECK(totals.evicted + totals.over_budget > 5);  // the lives were lively
  CHECK(totals.reinserted > 0);
  CHECK(totals.read > 20);
  CHECK(totals.flushed > 10);
  CHECK(totals.reopened >= 4);
  CHECK(totals.found > 30);
  CHECK(totals.over_limit > 5);
  CHECK(totals.compacted > 0);
}

TEST_CASE("disk pool model: on a disk that rots, nothing wrong is read") {
  const Totals totals = live(true, 1000, 2, 250);
  CHECK(totals.read + totals.corrupt > 10);
  CHECK(totals.found > 10);
}
