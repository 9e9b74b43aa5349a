#include <doctest/doctest.h>

#include <map>
#include <set>
#include <string>

#include "free_ids.h"
#include "id_map.h"
#include "kit.h"
#include "slabs.h"

using namespace kv;
using test::Random;

TEST_CASE("free ids: next and take agree with std::set") {
  for (std::size_t limit : {0ul, 1ul, 63ul, 64ul, 65ul, 4096ul, 4097ul, 300000ul}) {
    CAPTURE(limit);
    Random random(limit);
    FreeIds ids(limit);
    std::set<std::size_t> naive;
    const std::size_t start = random.below(limit + 1), stop = start + random.below(limit - start + 1);
    ids.add_range(start, stop);
    for (std::size_t i = start; i < stop; ++i) naive.insert(i);
    for (int step = 0; step < 3000; ++step) {
      REQUIRE(ids.count() == naive.size());
      const std::size_t at = random.below(limit + 2);
      const auto next = naive.lower_bound(at);
      REQUIRE(ids.next(at) == (next == naive.end() ? kNone : *next));
      REQUIRE(ids.has(at) == naive.contains(at));
      if (at >= limit) continue;
      if (random.chance(50))
        ids.add(at), naive.insert(at);
      else if (random.chance(50))
        ids.remove(at), naive.erase(at);
      else
        naive.erase(ids.take(at));
    }
  }
}

TEST_CASE("id map: same answers as std::map") {
  Random random(7);
  IdMap map;
  std::map<std::uint32_t, std::uint32_t> naive;
  for (int step = 0; step < 200000; ++step) {
    const std::uint32_t id = random.below(step % 20000 < 10000 ? 3000 : 50) * 4096;
    if (random.chance(50)) {
      map.set(id, static_cast<std::uint32_t>(step));
      naive[id] = static_cast<std::uint32_t>(step);
    } else {
      REQUIRE(map.erase(id) == (naive.erase(id) == 1));
    }
    REQUIRE(map.size() == naive.size());
    const std::uint32_t other = random.below(3000) * 4096;
    REQUIRE(map.find(other) == (naive.contains(other) ? naive[other] : kNone));
  }
  std::size_t seen = 0;
  map.each([&](std::uint32_t id, std::uint32_t value) { seen += naive.at(id) == value; });
  CHECK(seen == naive.size());
}

TEST_CASE("slabs: wrong sizes name the key to change") {
  CHECK_THROWS_WITH_AS(Slabs(kHugeBytes, 4096), doctest::Contains("slab_bytes"), Invalid);
  CHECK_THROWS_WITH_AS(Slabs(0, kHugeBytes), doctest::Contains("capacity_bytes"), Invalid);
  Slabs slabs(4 * kHugeBytes, 2 * kHugeBytes);
  CHECK_THROWS_WITH_AS(slabs.class_for(2 * kHugeBytes + 1), doctest::Contains("slab_bytes"), Invalid);
  CHECK_THROWS_WITH_AS(slabs.class_for(0), doctest::Contains("format"), Invalid);
  CHECK(slabs.find_class(kHugeBytes) == kClassesMax);
  const std::size_t c = slabs.class_for(kHugeBytes - 5);
  CHECK(slabs.slot_bytes(c) == kHugeBytes);
  CHECK(slabs.find_class(kHugeBytes) == c);
}

TEST_CASE("slabs: neighbours in ascending order, freed slots first in the same slab") {
  Slabs slabs(2 * kHugeBytes, kHugeBytes);
  const std::size_t c = slabs.class_for(3 * kPageBytes);
  const std::size_t per_slab = 512 / 3;
  for (std::uint32_t i = 0; i < per_slab; ++i) CHECK(slabs.take(c) == i * 3);
  CHECK(slabs.take(c) == 512);  // the next slab: two pages of the first are left over
  slabs.give(30), slabs.give(33), slabs.give(9);
  for (std::uint32_t i = 1; i < per_slab; ++i) slabs.take(c);
  CHECK(slabs.take(c) == 9);
  CHECK(slabs.take(c) == 30);
  CHECK(slabs.take(c) == 33);
  CHECK(slabs.take(c) == kNone);
  slabs.check();
  CHECK(slabs.locate(1).slab == kNone);     // inside a slot
  CHECK(slabs.locate(510).slab == kNone);   // the tail of a slab
  CHECK(slabs.locate(kNone).slab == kNone);
  CHECK_THROWS_AS(slabs.give(1), Broken);
}

TEST_CASE("slabs: an empty slab changes its class; the partial last slab serves what fits") {
  Slabs slabs(5 * kHugeBytes, 2 * kHugeBytes);  // two whole slabs and half a one
  CHECK(slabs.slabs() == 3);
  const std::size_t big = slabs.class_for(2 * kHugeBytes), small = slabs.class_for(kHugeBytes);
  const SlotId a = slabs.take(big), b = slabs.take(big);
  CHECK(slabs.take(big) == kNone);  // the half slab is free but too small
  CHECK(slabs.free_slabs() == 1);
  const SlotId c = slabs.take(small);
  CHECK(c == 2 * 1024);
  CHECK(slabs.take(small) == kNone);
  CHECK(slabs.capacity_slots() == 3);
  slabs.give(a);
  CHECK(slabs.take(small) == a);
  CHECK(slabs.take(small) == a + 512);
  slabs.check();
  slabs.give(b), slabs.give(c);
  slabs.check();
}

TEST_CASE("slabs: at most kClassesMax sizes in use, unused sizes make room") {
  Slabs slabs(66 * kHugeBytes, kHugeBytes);
  std::vector<SlotId> taken;
  for (std::size_t i = 1; i <= kClassesMax; ++i) taken.push_back(slabs.take(slabs.class_for(i * kPageBytes)));
  CHECK_THROWS_WITH_AS(slabs.class_for(100 * kPageBytes), doctest::Contains("slot sizes"), Invalid);
  slabs.give(taken[10]);
  CHECK(slabs.class_for(100 * kPageBytes) == 10);
  CHECK(slabs.find_class(11 * kPageBytes) == kClassesMax);
  slabs.check();
}

TEST_CASE("slabs: random takes and gives never overlap and keep the counts") {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const std::size_t capacity = 9 * kHugeBytes, slab_bytes = 2 * kHugeBytes;
    Slabs slabs(capacity, slab_bytes);
    std::map<SlotId, std::size_t> taken;  // slot -> bytes
    const std::size_t sizes[] = {kPageBytes * 100, kPageBytes * 333, kHugeBytes, kHugeBytes * 2};
    for (int step = 0; step < 2000; ++step) {
      if (random.chance(seed % 2 ? 55 : 45)) {
        const std::size_t bytes = sizes[random.below(4)];
        const SlotId slot = slabs.take(slabs.class_for(bytes));
        if (slot == kNone) continue;
        const std::size_t start = slot * kPageBytes, stop = start + bytes;
        REQUIRE(stop <= capacity);
        REQUIRE(start / slab_bytes == (stop - 1) / slab_bytes);
        const auto next = taken.upper_bound(slot);
        if (next != taken.end()) REQUIRE(stop <= next->first * kPageBytes);
        if (next != taken.begin()) REQUIRE(std::prev(next)->first * kPageBytes + std::prev(next)->second <= start);
        taken[slot] = bytes;
      } else if (!taken.empty()) {
        auto it = taken.begin();
        std::advance(it, random.below(taken.size()));
        slabs.give(it->first);
        taken.erase(it);
      }
      slabs.check();
      REQUIRE(slabs.taken_slots() == taken.size());
      REQUIRE(slabs.free_slots() + slabs.taken_slots() == slabs.capacity_slots());
    }
    for (auto [slot, bytes] : taken) slabs.give(slot);
    slabs.check();
    CHECK(slabs.free_slabs() == slabs.slabs());
    CHECK(slabs.capacity_slots() == 0);
  }
}
