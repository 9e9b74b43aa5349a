// Does everything that a flush has acknowledged survive any crash? And does nothing come back that must not? A
// program of its own, because it takes minutes:
//
//   crash_images [--images N] [--seed S]     prints one JSON object; exits 1 if a promise was broken
//
// A process works on a directory, and everything that it writes is recorded. Then the record is cut at many moments
// (crash_log.h), each time the files are made that may be left, and a new process opens them. The last image is
// where the next process goes on. The recorded process has threads, so a seed gives similar runs, not the same.
//
//   flushed_lost  a flush had acknowledged it, it was not dropped or evicted since, and it is not found
//   corrupt       found, and other bytes than those of its key, or none, are read
//   phantom       found, although (1) no save of it had begun, or none since a drop of it that was acknowledged;
//                 (2) no record of it may lie on the medium: every life of a segment that had one was over, or it lies
//                 before what was dropped; (3) under another parent or root than it was saved with; and every record
//                 that is counted beyond the blocks that have a name
//
// An oracle that finds nothing proves nothing. So each run is looked at four times more, in ways that must count (see
// look_blindly()): what they count is printed as `blind_…`, and none may be 0.
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
#include "crash_process.h"
#include "crash_traces.h"
#include "crash_work.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr std::size_t kImagesPerRun = 80;
constexpr std::size_t kToldMax = 20;  // lines about what is wrong

// What one image showed, or all.
struct Seen {
  std::size_t acknowledged = 0, read = 0, found = 0, unsealed = 0;
  std::size_t flushed_lost = 0, corrupt = 0, phantom = 0, capacity_exceeded = 0;
  std::size_t overwritten = 0;  // of the phantoms: no record of theirs may lie on the medium

  std::size_t wrong() const { return flushed_lost + corrupt + phantom + capacity_exceeded; }
  Seen& operator+=(const Seen& more) {
    acknowledged += more.acknowledged, read += more.read, found += more.found, unsealed += more.unsealed;
    flushed_lost += more.flushed_lost, corrupt += more.corrupt, phantom += more.phantom;
    overwritten += more.overwritten;
    capacity_exceeded += more.capacity_exceeded;
    return *this;
  }
};

// What was seen by looks that must see something.
struct Blind {
  std::size_t unsaved = 0, undropped = 0, rewound = 0, lost = 0, damaged = 0;
  bool nothing() const { return unsaved == 0 || undropped == 0 || rewound == 0 || lost == 0 || damaged == 0; }
};

struct Totals {
  std::size_t images = 0, runs = 0, drops = 0, evicted = 0, reinserted = 0;
  Seen seen;
  Blind blind;
};

// Opens an image; nothing of it is changed but files that were never finished. Counts what is not as promised.
class Examiner {
 public:
  Examiner(const Tree& tree, std::shared_ptr<Arena> arena, const Book& book, const Traces& traces)
      : tree_(tree), arena_(std::move(arena)), book_(book), traces_(traces) {}

  // `drops`: what is written down about drops.
  Seen examine(const ImageDirectory& place, std::size_t moment, const std::vector<Drop>& drops) const {
    const auto faults = std::make_shared<Faults>();
    for (const DiskOp op : {DiskOp::kWrite, DiskOp::kSync, DiskOp::kAllocate}) faults->fail(op, EROFS);
    Process process(place.path(), arena_, faults, {}, drops);
    const std::set<Name> found = process.readable();
    Seen seen;
    seen.found = found.size();
    seen.unsealed = process.adopted.unsealed;
    seen.capacity_exceeded = place.bytes() > kCapacity;
    seen.phantom = process.pool->counts().records - found.size();
    for (Name name : found) {
      const Drop last = book_.last_drop(tree_.root_of(name), moment);
      seen.overwritten += !traces_.may_lie(key_of(name), moment);
      seen.phantom += !saved(name, moment) || !traces_.may_lie(key_of(name), moment, last.mark) ||
                      !in_place(process, name);
    }
    for (const Promise& p : book_.promises) {
      if (p.from > moment || p.to < moment) continue;
      ++seen.acknowledged;
      seen.flushed_lost += !found.contains(p.name);
    }
    read(process, found, seen);
    return seen;
  }
  // Whether a save of it had begun by then, since it was dropped.
  bool saved(Name name, std::size_t moment) const {
    const Drop last = book_.last_drop(tree_.root_of(name), moment);
    const std::vector<std::size_t>& saves = book_.saves[name];
    return std::any_of(saves.begin(), saves.end(), [&](auto save) { return last.from <= save && save <= moment; });
  }

 private:
  bool in_place(const Process& process, Name name) const {
    const NodeId node = process.node(name);
    return process.index.node(process.index.node(node).parent).key == tree_.parent_of(name) &&
           process.index.node(process.index.root_of(node)).key == tree_.root_of(name);
  }

  void read(Process& process, const std::set<Name>& found, Seen& seen) const {
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
      seen.corrupt += !ok.contains(nodes[i++]) || !same;
      ++seen.read;
    }
  }

  const Tree& tree_;
  std::shared_ptr<Arena> arena_;
  const Book& book_;
  const Traces& traces_;
};

// A process at work, and what may be left of it.
class Run {
 public:
  Run(const ImageDirectory& here, const Files& before, const Tree& tree, std::shared_ptr<Arena> arena, Random& random,
      const Known& known, Totals& totals) {
    const auto faults = std::make_shared<Faults>();
    faults->record();
    DiskOptions options;
    options.spare = 1 + random.below(2);
    options.slice = 1 + random.below(50);
    options.reinsert_share = 0.25 * (1 + random.below(2));
    Process process(here.path(), arena, faults, options, known.drops);
    Work work(process, arena, *faults, tree, random, known);
    work.go_on(60 + random.below(180));
    book_ = work.book();
    totals.evicted += work.dropped().evicted;
    totals.reinserted += work.dropped().reinserted;
    totals.drops += book_.drops.size() - known.drops.size();
    std::map<std::uint32_t, int> fds;
    for (const SegmentFile& segment : process.directory->segments())
      if (segment.fd) fds[segment.number] = segment.fd.get();
    if (random.chance(30)) process.pool->close(random.chance(50) ? 1 : 0);
    log_.emplace(before, fds, process.directory->fd(), faults->log());
    traces_.emplace(*log_);
    examiner_.emplace(tree, std::move(arena), book_, *traces_);
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // What must be counted: a look at a moment's image as if it were another's, or nothing was known of drops, or with
  // bytes that rotted.
  void look_blindly(ImageDirectory& there, Random& random, Blind& blind) const {
    const std::size_t end = log_->moments();
    const Files last = log_->image(end, random);
    there.hold(last);
    blind.unsaved += examiner_->examine(there, 0, {}).phantom;
    blind.undropped += examiner_->examine(there, end, {}).phantom;
    there.hold(log_->image(0, random));
    const Seen early = examiner_->examine(there, end, book_.dropped(0));
    blind.rewound += early.overwritten;
    blind.lost += early.flushed_lost;
    there.hold(rotten(last));
    const Seen damaged = examiner_->examine(there, end, book_.dropped(end));
    blind.damaged += damaged.corrupt + damaged.flushed_lost;
  }
  // Cut anywhere. What is known there.
  Known look(ImageDirectory& there, Random& random, Totals& totals) const {
    const std::size_t moment = random.below(log_->moments() + 1);
    there.hold(log_->image(moment, random));
    Known known{book_.dropped(moment), {}};
    const Seen seen = examiner_->examine(there, moment, known.drops);
    ++totals.images;
    totals.seen += seen;
    if (seen.wrong() != 0 && totals.seen.wrong() <= kToldMax)
      std::fprintf(stderr, "run %zu, cut at %zu: lost %zu, corrupt %zu, phantom %zu\n", totals.runs, moment,
                   seen.flushed_lost, seen.corrupt, seen.phantom);
    for (Name name = 1; name < kNames; ++name)
      if (examiner_->saved(name, moment)) known.saved.insert(name);
    for (Drop& drop : known.drops) drop.from = drop.done = 0;
    return known;
  }

 private:
  static Files rotten(Files files) {
    for (auto& [number, bytes] : files)
      for (std::size_t at = kPageBytes + 2000; at < bytes.size(); at += kPageBytes) bytes[at] ^= 0xFF;
    return files;
  }

  Book book_;
  std::optional<CrashLog> log_;
  std::optional<Traces> traces_;
  std::optional<Examiner> examiner_;
};

// `here`: where a process goes on, with what is known of earlier ones; `there`: where the next one will.
void run(ImageDirectory& here, ImageDirectory& there, std::shared_ptr<Arena> arena, Random& random, std::size_t images,
         Known& known, Totals& totals) {
  Random shape(totals.runs / 10);  // the same blocks for ten runs
  const Tree tree(shape);
  if (totals.runs % 10 == 0) {
    here.hold({});
    known = {};
  }
  ++totals.runs;
  const Files before = here.files();
  const Run run(here, before, tree, std::move(arena), random, known, totals);
  run.look_blindly(there, random, totals.blind);
  for (std::size_t i = 0; i < images; ++i) known = run.look(there, random, totals);
}

std::size_t argument(int argc, char** argv, const std::string& name, std::size_t otherwise) {
  for (int i = 1; i + 1 < argc; ++i)
    if (argv[i] == name) return std::strtoull(argv[i + 1], nullptr, 10);
  return otherwise;
}

int report(const Totals& t, std::size_t seed, double seconds) {
  const Seen& s = t.seen;
  const Blind& b = t.blind;
  const std::pair<const char*, std::size_t> numbers[] = {
      {"images", t.images}, {"runs", t.runs}, {"seed", seed}, {"found", s.found}, {"read", s.read},
      {"acknowledged", s.acknowledged}, {"drops", t.drops}, {"evicted", t.evicted}, {"unsealed", s.unsealed},
      {"reinserted", t.reinserted}, {"flushed_lost", s.flushed_lost}, {"corrupt", s.corrupt}, {"phantom", s.phantom},
      {"capacity_exceeded", s.capacity_exceeded}, {"blind_unsaved", b.unsaved}, {"blind_undropped", b.undropped},
      {"blind_rewound", b.rewound}, {"blind_lost", b.lost}, {"blind_damaged", b.damaged}};
  std::printf("{");
  for (const auto& [name, number] : numbers) std::printf("\"%s\": %zu, ", name, number);
  std::printf("\"seconds\": %.1f}\n", seconds);
  if (b.nothing()) std::fprintf(stderr, "what must be counted was not (blind_…): nothing was proven\n");
  return s.wrong() == 0 && !b.nothing() ? 0 : 1;
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
  Totals totals;
  Known known;
  while (totals.images < images) {
    run(here, there, arena, random, std::min(kImagesPerRun, images - totals.images), known, totals);
    std::swap(here, there);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
  return report(totals, seed, seconds.count());
}
