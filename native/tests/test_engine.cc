#include <chrono>
#include <doctest/doctest.h>

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "engine.h"
#include "paged.h"

using namespace kv;
using namespace kv::testing;

namespace {

constexpr double kLong = 60;  // seconds: a deadline that only a bug reaches

bool readable(int fd, int timeout_ms = 0) {
  pollfd entry{fd, POLLIN, 0};
  return poll(&entry, 1, timeout_ms) == 1;
}

// Paged memory on both sides of an arena with room for all its blocks, in slots one after another.
struct Rig {
  std::uint32_t blocks;
  Paged source, target;
  std::shared_ptr<Arena> arena;
  SlotFormat format;
  std::vector<BlockId> ids;
  std::vector<SlotId> slots;
  std::vector<Key> keys;

  explicit Rig(std::uint32_t n, std::uint32_t layers = 4)
      : blocks(n), source(Shape::kTokenMajor, layers, 2, n), target(Shape::kHeadMajor, layers, 2, n),
        format{layers, 2, static_cast<std::uint32_t>(source.cell_bytes())}, ids(n) {
    const std::size_t pages = format.slot_bytes() / kPageBytes;
    arena = Arena::create("t", round_up(n * format.slot_bytes(), kHugeBytes));
    std::iota(ids.begin(), ids.end(), 0u);
    for (std::uint32_t i = 0; i < n; ++i) {
      slots.push_back(static_cast<SlotId>(i * pages));
      keys.push_back(key_of(i));
    }
    target.fill(0);
  }

  Route store_route() const { return {arena, format, source.layout}; }
  Route load_route() const { return {arena, format, target.layout}; }

  std::vector<std::uint64_t> generations() const { return slot_generations(*arena, slots); }

  void hand_out_all() {
    for (const SlotId slot : slots) hand_out(*arena, slot);
  }
  void fill_all() {
    hand_out_all();
    const auto scratch = std::make_unique<CopyScratch>();
    for (std::uint32_t i = 0; i < blocks; ++i) {
      REQUIRE(store_block(store_route(), ids[i], target_of(*arena, slots[i]), *scratch) == BlockStatus::kOk);
      publish(*arena, format, slots[i], keys[i]);
    }
  }
  JobId load(Copier& copier) const { return copier.load(load_route(), ids, slots, keys); }
};

std::size_t count(const Completion& completion, BlockStatus status) {
  return static_cast<std::size_t>(std::count(completion.statuses.begin(), completion.statuses.end(), status));
}

Completion wait_for(Copier& copier, JobId job) {
  auto completion = copier.wait(job, kLong);
  REQUIRE(completion.has_value());
  CHECK(completion->job == job);
  return std::move(*completion);
}

}  // namespace

TEST_CASE("copier: what was stored is loaded, in one job shared by several threads") {
  Rig rig(100);
  rig.hand_out_all();
  Copier copier(3);
  const Completion stored = wait_for(copier, copier.store(rig.store_route(), rig.ids, rig.slots, rig.generations()));
  CHECK(count(stored, BlockStatus::kOk) == 100);
  CHECK(stored.bytes == 100 * rig.source.layout.block_bytes());
  CHECK(stored.seconds > 0);
  for (std::uint32_t i = 0; i < 100; ++i) publish(*rig.arena, rig.format, rig.slots[i], rig.keys[i]);

  const JobId job = rig.load(copier);
  std::size_t last = 0;
  while (last < 100) {  // progress never falls, and what it counts is there
    const std::size_t now = copier.progress(job);
    REQUIRE(now >= last);
    if (now > last) REQUIRE(rig.target.block(rig.ids[now - 1]) == rig.source.block(rig.ids[now - 1]));
    last = now;
  }
  const Completion loaded = wait_for(copier, job);
  CHECK(count(loaded, BlockStatus::kOk) == 100);
  for (std::uint32_t i = 0; i < 100; ++i) REQUIRE(rig.target.block(i) == rig.source.block(i));
}

TEST_CASE("copier: statuses stand in the order of the call, progress stops at the first bad block") {
  Rig rig(40);
  rig.fill_all();
  rig.arena->slot(rig.slots[20])[5] ^= 1;
  rig.keys[30] = key_of(999);
  Copier copier(2);
  const JobId job = rig.load(copier);
  REQUIRE(readable(copier.eventfd(), 60'000));
  CHECK(copier.progress(job) == 20);
  const Completion done = wait_for(copier, job);
  for (std::size_t i = 0; i < 40; ++i) {
    const BlockStatus expected =
        i == 20 ? BlockStatus::kCorrupt : i == 30 ? BlockStatus::kStale : BlockStatus::kOk;
    CHECK(done.statuses[i] == expected);
  }
  CHECK(done.bytes == 38 * rig.target.layout.block_bytes());
}

TEST_CASE("copier: nothing is written when any id or length is bad") {
  Rig rig(4);
  rig.fill_all();
  Copier copier(1);
  const auto refused = [&](std::vector<BlockId> ids, std::vector<SlotId> slots, std::vector<Key> keys) {
    CHECK_THROWS_AS(copier.load(rig.load_route(), std::move(ids), std::move(slots), std::move(keys)), Invalid);
  };
  auto ids = rig.ids;
  ids[3] = 4;
  refused(ids, rig.slots, rig.keys);
  auto slots = rig.slots;
  slots[3] = static_cast<SlotId>(rig.arena->pages());
  refused(rig.ids, slots, rig.keys);
  slots[3] = kNone;
  refused(rig.ids, slots, rig.keys);
  slots.pop_back();
  refused(rig.ids, slots, rig.keys);
  refused(rig.ids, rig.slots, {rig.keys[0]});
  Route route = rig.load_route();
  route.format.heads = 1;
  CHECK_THROWS_AS(copier.load(route, rig.ids, rig.slots, rig.keys), Invalid);
  route.arena = nullptr;
  CHECK_THROWS_AS(copier.load(route, rig.ids, rig.slots, rig.keys), Invalid);
  CHECK(copier.quiesce(kLong));
  CHECK(copier.completions().empty());
  CHECK(rig.target.block(0) == std::vector<std::uint8_t>(rig.target.layout.block_bytes(), 0));
}

TEST_CASE("copier: a store writes only the slots that are still the writer's") {
  Rig rig(6);
  rig.hand_out_all();
  auto generations = rig.generations();
  hand_out(*rig.arena, rig.slots[3]);  // aborted, and given to another writer
  Copier copier(2);
  const Completion done = wait_for(copier, copier.store(rig.store_route(), rig.ids, rig.slots, generations));
  for (std::size_t i = 0; i < 6; ++i)
    CHECK(done.statuses[i] == (i == 3 ? BlockStatus::kStale : BlockStatus::kOk));
  CHECK(rig.arena->slot(rig.slots[3])[0] == 0);
  generations.pop_back();
  CHECK_THROWS_AS(copier.store(rig.store_route(), rig.ids, rig.slots, generations), Invalid);
  const std::vector<SlotId> beyond = {static_cast<SlotId>(rig.arena->pages())};
  CHECK_THROWS_AS(slot_generations(*rig.arena, beyond), Invalid);
}

TEST_CASE("copier: an empty job completes at once, once") {
  Rig rig(1);
  Copier copier(1);
  const JobId job = copier.store(rig.store_route(), {}, {}, {});
  CHECK(readable(copier.eventfd()));
  CHECK(wait_for(copier, job).statuses.empty());
  CHECK_FALSE(readable(copier.eventfd()));
}

TEST_CASE("copier: the eventfd is readable exactly while completions wait") {
  Rig rig(2);
  rig.fill_all();
  Copier copier(2);
  CHECK_FALSE(readable(copier.eventfd()));
  const JobId first = rig.load(copier), second = rig.load(copier);
  wait_for(copier, first);
  REQUIRE(readable(copier.eventfd(), 60'000));
  const auto taken = copier.completions();
  REQUIRE(taken.size() == 1);
  CHECK(taken[0].job == second);
  CHECK_FALSE(readable(copier.eventfd()));
  CHECK(copier.completions().empty());
}

TEST_CASE("copier: unknown and taken jobs") {
  Rig rig(2);
  rig.fill_all();
  Copier copier(1);
  CHECK_THROWS_AS(copier.progress(1), Invalid);
  CHECK_THROWS_AS(copier.wait(0, 0), Invalid);
  CHECK_THROWS_AS(copier.cancel(7), Invalid);
  const JobId job = rig.load(copier);
  wait_for(copier, job);
  CHECK_THROWS_AS(copier.progress(job), Invalid);
  CHECK_THROWS_AS(copier.wait(job, 0), Invalid);
  CHECK_NOTHROW(copier.cancel(job));
  CHECK_THROWS_AS(copier.wait(job, -1), Invalid);
  CHECK_THROWS_AS(copier.quiesce(std::numeric_limits<double>::quiet_NaN()), Invalid);
  CHECK_THROWS_AS(Copier(0), Invalid);
  CHECK_THROWS_AS(Copier(1, 0), Invalid);
}

TEST_CASE("copier: queue_max bounds jobs until their completions are taken") {
  Rig rig(2);
  rig.fill_all();
  Copier copier(1, 2);
  rig.load(copier);
  rig.load(copier);
  CHECK_THROWS_AS(rig.load(copier), Full);
  std::size_t taken = 0;
  while (taken < 2) {
    REQUIRE(readable(copier.eventfd(), 60'000));
    taken += copier.completions().size();
  }
  CHECK_NOTHROW(rig.load(copier));
}

TEST_CASE("copier: cancel drops what has not begun, keeps a prefix, and still completes once") {
  Rig rig(200);
  rig.fill_all();
  Copier copier(1);
  const auto zeros = std::vector<std::uint8_t>(rig.target.layout.block_bytes(), 0);
  std::size_t dropped = 0;
  for (int round = 0; round < 20; ++round) {
    rig.target.fill(0);
    const JobId job = rig.load(copier);
    while (round % 2 && copier.progress(job) == 0) std::this_thread::yield();  // also in the middle
    copier.cancel(job);
    copier.cancel(job);
    const Completion done = wait_for(copier, job);
    const std::size_t kept = count(done, BlockStatus::kOk);
    REQUIRE(kept + count(done, BlockStatus::kDropped) == 200);
    dropped += 200 - kept;
    for (std::size_t i = 0; i < 200; ++i) {
      REQUIRE((done.statuses[i] == BlockStatus::kOk) == (i < kept));
      if (i < kept) REQUIRE(rig.target.block(rig.ids[i]) == rig.source.block(rig.ids[i]));
      if (i == kept) REQUIRE(rig.target.block(rig.ids[i]) == zeros);
    }
  }
  CHECK(dropped > 0);
  CHECK(copier.completions().empty());
}

TEST_CASE("copier: after quiesce nothing writes, and it can be used again") {
  Rig rig(200);
  rig.fill_all();
  Copier copier(3);
  for (int round = 0; round < 10; ++round) {
    std::vector<JobId> jobs;
    for (int i = 0; i < 5; ++i) jobs.push_back(rig.load(copier));
    REQUIRE(copier.quiesce(kLong));
    rig.target.fill(0xEE);  // a copy still running would be seen here, and by the thread sanitizer
    const auto done = copier.completions();
    REQUIRE(done.size() == jobs.size());
    for (std::uint32_t i = 0; i < rig.blocks; i += 20)
      REQUIRE(rig.target.block(i) == std::vector<std::uint8_t>(rig.target.layout.block_bytes(), 0xEE));
  }
  CHECK(count(wait_for(copier, rig.load(copier)), BlockStatus::kOk) == 200);
}

TEST_CASE("copier: quiesce tells the truth at its timeout") {
  Rig rig(200);
  rig.fill_all();
  Copier copier(1);
  bool gave_up = false;
  // A copy is rarely caught in the act: tried until it is, or until that cannot be chance any more.
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!gave_up && std::chrono::steady_clock::now() < until) {
    const JobId job = rig.load(copier);
    while (copier.progress(job) == 0) std::this_thread::yield();
    gave_up = !copier.quiesce(0);
    wait_for(copier, job);
  }
  CHECK(gave_up);
  CHECK(copier.quiesce(kLong));
}

TEST_CASE("copier: close with jobs in flight joins, completes everything, refuses more") {
  Rig rig(200);
  rig.fill_all();
  Copier copier(2);
  std::vector<JobId> jobs;
  for (int i = 0; i < 10; ++i) jobs.push_back(rig.load(copier));
  copier.close();
  copier.close();
  rig.target.fill(0);
  CHECK_THROWS_AS(rig.load(copier), Invalid);
  CHECK(wait_for(copier, jobs[9]).statuses.size() == 200);
  CHECK(copier.completions().size() == 9);
}

TEST_CASE("copier: destruction with jobs in flight is safe, and the arena outlives its other holders") {
  for (int round = 0; round < 20; ++round) {
    Rig rig(100);
    rig.fill_all();
    std::weak_ptr<Arena> watched = rig.arena;
    {
      Copier copier(2);
      rig.load(copier);
      rig.load(copier);
      rig.arena.reset();
    }
    CHECK(watched.expired());
  }
}

TEST_CASE("copier: a finished job does not keep the arena") {
  Rig rig(4);
  rig.fill_all();
  std::weak_ptr<Arena> watched = rig.arena;
  Copier copier(1);
  rig.load(copier);
  rig.arena.reset();
  REQUIRE(copier.quiesce(kLong));
  CHECK(watched.expired());
}

TEST_CASE("copier: two waiters, one completion") {
  Rig rig(50);
  rig.fill_all();
  Copier copier(1);
  for (int round = 0; round < 50; ++round) {
    const JobId job = rig.load(copier);
    std::atomic<int> got{0}, refused{0};
    const auto waiter = [&] {
      try {
        if (copier.wait(job, kLong)) got.fetch_add(1);
      } catch (const Invalid&) {
        refused.fetch_add(1);
      }
    };
    std::thread a(waiter), b(waiter);
    a.join();
    b.join();
    REQUIRE(got.load() == 1);
    REQUIRE(refused.load() == 1);
  }
}

TEST_CASE("copier: many submitters, cancels and quiesces at once: every job completes exactly once") {
  constexpr int kSubmitters = 3, kJobs = 200;
  Rig rig(8);
  rig.fill_all();
  std::vector<Paged> targets;
  for (int i = 0; i < kSubmitters; ++i) targets.emplace_back(Shape::kHeadMajor, 4, 2, 8);
  Copier copier(3, 64);
  std::mutex mutex;
  std::map<JobId, int> seen, submitted;
  std::atomic<int> running{kSubmitters};

  const auto submitter = [&](int who) {
    const auto& mine = targets[static_cast<std::size_t>(who)];
    for (int i = 0; i < kJobs;) {
      try {
        const JobId job = copier.load({rig.arena, rig.format, mine.layout}, rig.ids, rig.slots, rig.keys);
        ++i;
        {
          const std::lock_guard lock(mutex);
          ++submitted[job];
        }
        if (i % 3 == 0) copier.cancel(job);
        if (i % 50 == 0) copier.quiesce(kLong);
      } catch (const Full&) {
        std::this_thread::yield();
      }
    }
    running.fetch_sub(1);
  };
  std::vector<std::thread> submitters;
  for (int i = 0; i < kSubmitters; ++i) submitters.emplace_back(submitter, i);

  std::size_t taken = 0;
  while (taken < kSubmitters * kJobs) {
    // Only the eventfd wakes this loop: a lost wake-up is a failure here.
    if (!readable(copier.eventfd(), 60'000)) break;
    for (const Completion& completion : copier.completions()) {
      ++taken;
      const std::lock_guard lock(mutex);
      ++seen[completion.job];
      for (const BlockStatus status : completion.statuses)
        CHECK((status == BlockStatus::kOk || status == BlockStatus::kDropped));
    }
  }
  for (auto& thread : submitters) thread.join();
  CHECK(taken == kSubmitters * kJobs);
  CHECK(seen == submitted);
  CHECK_FALSE(readable(copier.eventfd()));
}
