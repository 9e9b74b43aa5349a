// A process on a disk that will lose power, and what it was asked to do: for crash_images.cc.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "disk_faulty.h"
#include "disk_kit.h"
#include "disk_pool.h"

namespace kv::test {

using Name = std::uint32_t;  // of a block; 0 stands for both roots, the parent of another is smaller
inline constexpr Name kSaved = 64;      // names below it are saved, again and again
inline constexpr Name kNames = 72;      // the others never are
inline constexpr std::size_t kSegments = 5;
inline constexpr std::size_t kCapacity = kSegments * kSegmentBytesMin;
inline constexpr SlotId kSlotPages = 24;
inline constexpr std::size_t kForEver = ~std::size_t{0};
inline const SlotFormat kFormat{2, 3, 14000};  // 21 pages

// Chains under two roots.
struct Tree {
  explicit Tree(Random& random) : parent{0}, origin{0} {
    for (Name name = 1; name < kNames; ++name) {
      const bool first = name == 1 || random.chance(8);
      parent.push_back(first ? 0 : random.chance(75) ? name - 1 : random.below(name));
      origin.push_back(parent[name] == 0 ? random.below(2) : origin[parent[name]]);
    }
    for (Name name = 0; name < kNames; ++name) payloads.push_back(payload_of(key_of(name), kFormat));
  }
  std::vector<Name> path(Name name) const {
    std::vector<Name> out;
    for (; name != 0; name = parent[name]) out.insert(out.begin(), name);
    return out;
  }
  static Key root(std::uint32_t origin) { return key_of(1000 + origin); }
  Key root_of(Name name) const { return root(origin[name]); }
  Key parent_of(Name name) const { return parent[name] == 0 ? root_of(name) : key_of(parent[name]); }

  std::vector<Name> parent;
  std::vector<std::uint32_t> origin;  // which root
  std::vector<Payload> payloads;
};

// From when to when a block had to survive, in moments of the record.
struct Promise {
  Name name;
  std::size_t from, to;
};

// All that a root had was dropped, and (as the store does it) where in the log that was is written down.
struct Drop {
  Key root;
  DiskPool::Mark mark;
  std::size_t from = 0;         // moment: saves from then on are not meant
  std::size_t done = kForEver;  // moment: from then on it is written down, and acknowledged
};

// What a restart knows of earlier records.
struct Known {
  std::vector<Drop> drops;  // written down
  std::set<Name> saved;     // since the last of them; not all of it need be there
};

// What happened while it was recorded.
struct Book {
  std::vector<Promise> promises;
  std::vector<std::vector<std::size_t>> saves;  // by name, the moments from which on it may be found
  std::vector<Drop> drops;                      // oldest first; earlier records and their saves are at moment 0

  // The drops that a restart at that moment knows of.
  std::vector<Drop> dropped(std::size_t moment) const {
    std::vector<Drop> out;
    for (const Drop& drop : drops)
      if (drop.done <= moment) out.push_back(drop);
    return out;
  }
  // The last one of a root.
  Drop last_drop(const Key& root, std::size_t moment) const {
    Drop last;
    for (const Drop& drop : dropped(moment))
      if (drop.root == root) last = drop;
    return last;
  }
};

// A pool on a directory, in a process that will be cut off.
class Process {
 public:
  Process(const std::string& path, std::shared_ptr<Arena> arena, std::shared_ptr<Faults> faults, DiskOptions options,
          const std::vector<Drop>& drops)
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
    for (const Drop& drop : drops)
      if (const NodeId root = index.find(drop.root); root != kNone) pool->forget_before({{root, drop.mark}});
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

}  // namespace kv::test
