// Does everything that a flush has acknowledged survive any crash? A program of its own, because it takes minutes:
//
//   crash_images [--images N] [--seed S]     prints one JSON object; exits 1 if a promise was broken
//
// A process works on a directory, and everything that it writes is recorded. Then the record is cut at many moments
// (crash_log.h), each time the files are made that may be left, and a new process opens them. The last image is
// where the next process goes on. The recorded process has threads, so a seed gives similar runs, not the same.
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "crash_log.h"
#include "disk_kit.h"
#include "disk_pool.h"
#include "ready_slot.h"

using namespace kv;
using namespace kv::test;

namespace {

using Name = std::uint32_t;  // names[0] is the root; the parent of another is smaller
constexpr Name kNames = 64;
constexpr std::size_t kSegments = 5;
constexpr std::size_t kCapacity = kSegments * kSegmentBytesMin;
constexpr SlotId kSlotPages = 24;
constexpr std::size_t kImagesPerRun = 120;
constexpr std::size_t kToldMax = 20;  // lines about what is wrong
const SlotFormat kFormat{2, 3, 14000};  // 21 pages

struct Tree {
  explicit Tree(Random& random) : parent{0} {
    for (Name name = 1; name < kNames; ++name)
      parent.push_back(random.chance(75) ? name - 1 : random.below(name));
    for (Name name = 0; name < kNames; ++name) payloads.push_back(payload_of(key_of(name), kFormat));
  }
  std::vector<Name> path(Name name) const {
    std::vector<Name> out;
    for (; name != 0; name = parent[name]) out.insert(out.begin(), name);
    return out;
  }
  std::vector<Name> parent;
  std::vector<Payload> payloads;
};

struct Totals {
  std::size_t images = 0, runs = 0, acknowledged = 0, read = 0, found = 0, unsealed = 0;
  std::size_t evicted = 0, reinserted = 0;
  std::size_t flushed_lost = 0, corrupt = 0, phantom = 0, capacity_exceeded = 0;
};

// From when to when a block had to survive, in moments of the record.
struct Promise {
  Name name;
  std::size_t from, to;
};
constexpr std::size_t kForEver = ~std::size_t{0};

// A pool on a directory, in a process that will be cut off.
class Process {
 public:
  Process(const std::string& path, std::shared_ptr<Arena> arena, std::shared_ptr<Faults> faults, DiskOptions options)
      : index(1000), arena_(std::move(arena)) {
    DiskDirectory::Options where;
    where.path = path;
    where.capacity_bytes = kCapacity;
    where.segment_bytes = kSegmentBytesMin;
    where.direct = false;
    directory = DiskDirectory::open(where);
    auto disk = faulty_disk(open_disk("threads", 16, 3), std::move(faults));
    auto mover = std::make_unique<Mover>(std::move(disk), arena_, Mover::Limits{});
    pool = std::make_unique<DiskPool>(index, arena_, directory, std::move(mover), options);
    if (directory->segments().empty()) return;
    DiskSurvey survey(directory);
    survey.read(1);
    adopted = pool->adopt(survey);
  }

  NodeId node(Name name) const { return index.find(key_of(name)); }
  bool readable(Name name) const {
    const NodeId id = node(name);
    return id != kNone && pool->readable({&id, 1})[0] != 0;
  }
  std::set<Name> readable() const {
    std::set<Name> out;
    for (Name name = 1; name < kNames; ++name)
      if (readable(name)) out.insert(name);
    return out;
  }
  // Readable, or on its way.
  bool accepted(Name name) const {
    const NodeId id = node(name);
    return id != kNone && pool->missing(id).empty();
  }

  Index index;
  std::shared_ptr<DiskDirectory> directory;
  std::unique_ptr<DiskPool> pool;
  DiskAdopted adopted;

 private:
  std::shared_ptr<Arena> arena_;
};

// ---- what is recorded --------------------------------------------------------------------------------------

class Work {
 public:
  Work(Process& process, std::shared_ptr<Arena> arena, Faults& faults, const Tree& tree, Random& random)
      : process_(process), arena_(std::move(arena)), faults_(faults), tree_(tree), random_(random) {
    for (SlotId slot = 0; slot + kSlotPages <= arena_->pages(); slot += kSlotPages) free_.push_back(slot);
    for (Name name : process_.readable()) promise(name, 0);
  }

  void go_on(std::size_t steps) {
    for (std::size_t i = 0; i < steps; ++i) {
      before_ = faults_.moment();
      step();
      keep_book();
    }
    // Whatever is under way may end or not.
    for (std::size_t i = 0, patience = random_.below(40); i < patience && !jobs_.empty(); ++i) wait();
  }
  const std::vector<Promise>& promises() const { return promises_; }
  const DiskDropped& dropped() const { return dropped_; }

 private:
  struct Job {
    std::vector<SlotId> slots;
    NodeId pin = kNone;
  };

  void step() {
    switch (random_.below(12)) {
      case 4:
      case 8: {
        std::vector<NodeId> nodes;
        for (Name name : tree_.path(some()))
          if (process_.node(name) != kNone) nodes.push_back(process_.node(name));
        return process_.pool->touch(nodes);
      }
      case 5:
        if (random_.chance(15) && process_.node(1) != kNone) process_.pool->forget(process_.node(some()));
        return;
      case 6: return flushes_.empty() ? flush() : void();
      case 7: {
        FaultSpec spec;  // so that what was begun first does not always end first
        spec.seed = random_.next();
        spec.slow = random_.chance(50) ? 0.4 : 0;
        spec.slow_ms = 3;
        return faults_.set(spec);
      }
      case 9:
      case 10:
      case 11: return wait();
      default: return write();
    }
  }
  Name some() { return 1 + random_.below(kNames - 1); }

  void write() {
    for (int i = 0; jobs_.size() > 4 && i < 100; ++i) wait();
    const std::vector<Name> names = tree_.path(some());
    if (names.size() > free_.size()) return;
    std::vector<NodeId> nodes;
    Job job;
    NodeId up = process_.index.root(key_of(0));
    for (Name name : names) {
      const NodeId known = process_.node(name);
      nodes.push_back(up = known != kNone ? known : process_.index.make(up, key_of(name)));
      job.slots.push_back(fill(name));
    }
    process_.index.pin(job.pin = nodes.back());
    const DiskPool::Begun begun = process_.pool->write(nodes, job.slots, kFormat);
    begun.job == 0 ? end(job) : void(jobs_.emplace(begun.job, std::move(job)));
  }
  SlotId fill(Name name) {
    const SlotId slot = free_.back();
    free_.pop_back();
    make_ready(*arena_, slot, key_of(name), kFormat, tree_.payloads[name]);
    return slot;
  }
  void end(const Job& job) {
    free_.insert(free_.end(), job.slots.begin(), job.slots.end());
    process_.index.unpin(job.pin);
  }

  void flush() {
    std::set<Name> names;
    for (Name name = 1; name < kNames; ++name)
      if (process_.accepted(name)) names.insert(name);
    flushes_.emplace(process_.pool->flush(), std::move(names));
  }
  void promise(Name name, std::size_t from) {
    if (open_.emplace(name, promises_.size()).second) promises_.push_back({name, from, kForEver});
  }

  void wait() {
    pollfd ready{process_.pool->eventfd(), POLLIN, 0};
    ::poll(&ready, 1, 4);
    before_ = faults_.moment();
    const std::vector<DiskEvent> events = process_.pool->pump();
    keep_book();
    for (const DiskEvent& event : events) {
      if (!event.last) continue;
      if (event.kind == DiskEvent::Kind::kFlushed) {
        const std::set<Name> names = flushes_.extract(event.job).mapped();
        for (Name name : names)
          if (event.error == 0 && process_.readable(name)) promise(name, faults_.moment());
      } else if (event.kind == DiskEvent::Kind::kWritten) {
        end(jobs_.extract(event.job).mapped());
      }
    }
    const DiskDropped dropped = process_.pool->take_dropped();
    dropped_.evicted += dropped.evicted + dropped.over_budget;
    dropped_.reinserted += dropped.reinserted;
  }

  // Whatever is no longer readable was given up after `before_`.
  void keep_book() {
    for (auto it = open_.begin(); it != open_.end();) {
      if (process_.readable(it->first)) {
        ++it;
      } else {
        promises_[it->second].to = before_;
        it = open_.erase(it);
      }
    }
    for (auto& [job, names] : flushes_) std::erase_if(names, [&](Name name) { return !process_.accepted(name); });
  }

  Process& process_;
  std::shared_ptr<Arena> arena_;
  Faults& faults_;
  const Tree& tree_;
  Random& random_;
  std::vector<SlotId> free_;
  std::map<std::uint64_t, Job> jobs_;
  std::map<std::uint64_t, std::set<Name>> flushes_;  // what was accepted before it, and has not gone since
  std::map<Name, std::size_t> open_;                 // promises that hold, by their position
  std::vector<Promise> promises_;
  std::size_t before_ = 0;
  DiskDropped dropped_;
};

// ---- what is found again -------------------------------------------------------------------------------------

// Opens an image; nothing of it is changed but files that were never finished. Counts what is not as promised.
class Examiner {
 public:
  Examiner(const Tree& tree, std::shared_ptr<Arena> arena) : tree_(tree), arena_(std::move(arena)) {}

  void examine(const ImageDirectory& place, const std::vector<Promise>& promises, std::size_t moment, Totals& totals) {
    const auto faults = std::make_shared<Faults>();
    for (const DiskOp op : {DiskOp::kWrite, DiskOp::kSync, DiskOp::kAllocate}) faults->fail(op, EROFS);
    Process process(place.path(), arena_, faults, {});
    const std::set<Name> found = process.readable();
    ++totals.images;
    totals.found += found.size();
    totals.unsealed += process.adopted.unsealed;
    totals.capacity_exceeded += place.bytes() > kCapacity;
    if (process.pool->counts().records != found.size()) ++totals.phantom;
    for (const Promise& p : promises) {
      if (p.from > moment || p.to < moment) continue;
      ++totals.acknowledged;
      if (found.contains(p.name)) continue;
      if (++totals.flushed_lost > kToldMax) continue;
      std::fprintf(stderr, "run %zu: block %u, promised from %zu to %zu, is lost at %zu\n", totals.runs, p.name, p.from,
                   p.to, moment);
    }
    const std::size_t wrong = totals.corrupt;
    read(process, found, totals);
    if (wrong == totals.corrupt || wrong > kToldMax) return;
    std::fprintf(stderr, "run %zu: corrupt at %zu\n", totals.runs, moment);
  }

 private:
  void read(Process& process, const std::set<Name>& found, Totals& totals) {
    if (found.empty()) return;
    std::vector<NodeId> nodes;
    std::vector<SlotId> slots;
    for (Name name : found) {
      nodes.push_back(process.node(name));
      slots.push_back(static_cast<SlotId>(slots.size()) * kSlotPages);
    }
    const std::uint64_t job = process.pool->read(nodes, slots, kFormat);
    std::set<NodeId> ok;
    for (bool last = false; !last;) {
      pollfd ready{process.pool->eventfd(), POLLIN, 0};
      if (::poll(&ready, 1, 60000) == 0) throw std::runtime_error("a read does not end");
      for (const DiskEvent& event : process.pool->pump()) {
        if (event.job != job) continue;
        ok.insert(event.ok.begin(), event.ok.end());
        last = event.last;
      }
    }
    std::size_t i = 0;
    for (Name name : found) {
      const Bytes& bytes = tree_.payloads[name].bytes;
      const bool same = std::memcmp(arena_->slot(slots[i]), bytes.data(), bytes.size()) == 0;
      totals.corrupt += !ok.contains(nodes[i++]) || !same;
      ++totals.read;
    }
  }

  const Tree& tree_;
  std::shared_ptr<Arena> arena_;
};

// One process, and what may be left of it. Returns where the next one goes on.
void run(ImageDirectory& here, ImageDirectory& there, std::shared_ptr<Arena> arena, Random& random, std::size_t images,
         Totals& totals) {
  Random shape(totals.runs / 10);  // the same blocks for ten runs
  const Tree tree(shape);
  if (totals.runs % 10 == 0) here.hold({});
  ++totals.runs;
  const Files before = here.files();
  const auto faults = std::make_shared<Faults>();
  faults->record();
  std::optional<CrashLog> log;
  std::vector<Promise> promises;
  {
    DiskOptions options;
    options.spare = 1 + random.below(2);
    options.slice = 1 + random.below(50);
    options.reinsert_share = 0.25 * (1 + random.below(2));
    Process process(here.path(), arena, faults, options);
    Work work(process, arena, *faults, tree, random);
    work.go_on(40 + random.below(120));
    promises = work.promises();
    totals.evicted += work.dropped().evicted;
    totals.reinserted += work.dropped().reinserted;
    std::map<std::uint32_t, int> fds;
    for (const SegmentFile& segment : process.directory->segments())
      if (segment.fd) fds[segment.number] = segment.fd.get();
    if (random.chance(30)) process.pool->close(random.chance(50) ? 1 : 0);
    log.emplace(before, fds, process.directory->fd(), faults->log());
  }
  Examiner examiner(tree, arena);
  for (std::size_t i = 0; i < images; ++i) {
    const std::size_t moment = random.below(log->moments() + 1);
    there.hold(log->image(moment, random));
    examiner.examine(there, promises, moment, totals);
  }
}

std::size_t argument(int argc, char** argv, const std::string& name, std::size_t otherwise) {
  for (int i = 1; i + 1 < argc; ++i)
    if (argv[i] == name) return std::strtoull(argv[i + 1], nullptr, 10);
  return otherwise;
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t images = argument(argc, argv, "--images", 10000), seed = argument(argc, argv, "--seed", 1);
  const auto begun = std::chrono::steady_clock::now();
  Random random(seed);
  const std::shared_ptr<Arena> arena = Arena::create("crash", std::size_t{8} << 20);
  TempDir one, two;
  ImageDirectory here(one.path()), there(two.path());
  {
    DiskDirectory::Options where;
    where.path = one.path();
    where.capacity_bytes = kCapacity;
    where.segment_bytes = kSegmentBytesMin;
    DiskDirectory::open(where);
  }
  for (const auto& entry : std::filesystem::directory_iterator(one.path()))
    std::filesystem::copy(entry.path(), two.path());
  Totals t;
  while (t.images < images) {
    run(here, there, arena, random, std::min(kImagesPerRun, images - t.images), t);
    std::swap(here, there);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
  const std::pair<const char*, std::size_t> numbers[] = {
      {"images", t.images},   {"runs", t.runs},       {"seed", seed},
      {"found", t.found},     {"read", t.read},       {"acknowledged", t.acknowledged},
      {"evicted", t.evicted}, {"unsealed", t.unsealed}, {"reinserted", t.reinserted},
      {"flushed_lost", t.flushed_lost}, {"corrupt", t.corrupt}, {"phantom", t.phantom},
      {"capacity_exceeded", t.capacity_exceeded}};
  std::printf("{");
  for (const auto& [name, number] : numbers) std::printf("\"%s\": %zu, ", name, number);
  std::printf("\"seconds\": %.1f}\n", seconds.count());
  return t.flushed_lost + t.corrupt + t.phantom + t.capacity_exceeded == 0 ? 0 : 1;
}
