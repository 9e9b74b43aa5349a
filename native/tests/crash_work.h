// What is recorded before the power fails: saves, flushes, uses and drops by chance, and the book of what they promise.
#pragma once

#include <poll.h>

#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "crash_process.h"
#include "ready_slot.h"

namespace kv::test {

class Work {
 public:
  Work(Process& process, std::shared_ptr<Arena> arena, Faults& faults, const Tree& tree, Random& random,
       const Known& known)
      : process_(process), arena_(std::move(arena)), faults_(faults), tree_(tree), random_(random) {
    book_.drops = known.drops;
    for (SlotId slot = 0; slot + kSlotPages <= arena_->pages(); slot += kSlotPages) free_.push_back(slot);
    book_.saves.resize(kNames);
    for (Name name : known.saved) book_.saves[name].push_back(0);
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
  const Book& book() const { return book_; }
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
        if (random_.chance(8)) return drop(Tree::root(random_.below(2)));
        if (const NodeId id = process_.node(some()); id != kNone && random_.chance(10)) process_.pool->forget(id);
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
  Name some() { return 1 + random_.below(kSaved - 1); }

  void write() {
    for (int i = 0; jobs_.size() > 4 && i < 100; ++i) wait();
    const std::vector<Name> names = tree_.path(some());
    if (names.size() > free_.size()) return;
    std::vector<NodeId> nodes;
    Job job;
    NodeId up = process_.index.root(tree_.root_of(names.back()));
    for (Name name : names) {
      const NodeId known = process_.node(name);
      nodes.push_back(up = known != kNone ? known : process_.index.make(up, key_of(name)));
      job.slots.push_back(fill(name));
    }
    process_.index.pin(job.pin = nodes.back());
    for (Name name : names) book_.saves[name].push_back(faults_.moment() + 1);
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

  // As the store drops a namespace: first the mark, then block by block while others go on, then it is written down.
  void drop(const Key& key) {
    const NodeId root = process_.index.find(key);
    if (root == kNone) return;
    Drop drop{key, process_.pool->mark(), faults_.moment() + 1};
    std::size_t turns = random_.below(3);
    for (NodeId node : process_.pool->nodes(0, kNone, true)) {
      const bool there = process_.index.live(node) && process_.pool->present({&node, 1})[0] != 0;
      if (there && process_.index.root_of(node) == root) process_.pool->forget(node);
      if (turns == 0 || random_.chance(90)) continue;
      --turns;
      keep_book();
      wait();
    }
    if (process_.pool->forgotten() > drop.mark) {  // an evacuation has carried some of it on: up to now, then
      drop.mark = process_.pool->mark();
      drop.from = faults_.moment() + 1;
      process_.pool->forget_before({{root, drop.mark}});
      keep_book();
    }
    drop.done = faults_.moment() + 1;
    book_.drops.push_back(drop);
  }

  void flush() {
    std::set<Name> names;
    for (Name name = 1; name < kNames; ++name)
      if (process_.accepted(name)) names.insert(name);
    flushes_.emplace(process_.pool->flush(), std::move(names));
  }
  void promise(Name name, std::size_t from) {
    if (open_.emplace(name, book_.promises.size()).second) book_.promises.push_back({name, from, kForEver});
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
        book_.promises[it->second].to = before_;
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
  Book book_;
  std::size_t before_ = 0;
  DiskDropped dropped_;
};

}  // namespace kv::test
