#include <doctest/doctest.h>

#include <random>

#include "runs.h"

using namespace kv;

using Ids = std::vector<std::uint32_t>;

namespace {

SlotsExpected expected(std::size_t count, std::uint32_t pages_per_slot, std::uint64_t pages = 1000) {
  return {count, pages_per_slot, pages};
}

}  // namespace

TEST_CASE("slots: neighbours join when that is shorter, order is kept") {
  CHECK(pack_slots(Ids{}, 4).empty());
  CHECK(pack_slots(Ids{8, 12, 16, 4, 8}, 4) == Ids{8, 3, 4, 2});
  CHECK(pack_slots(Ids{8, 12, 4, 8}, 4) == Ids{8, 12, 4, 8});  // two pairs are no shorter
  CHECK(pack_slots(Ids{5, 5}, 1) == Ids{5, 5});
  CHECK(pack_slots(Ids{kNone - 1}, 3) == Ids{kNone - 1});
  CHECK(unpack_slots(Ids{8, 3, 4, 2}, expected(5, 4)) == Ids{8, 12, 16, 4, 8});
  CHECK(unpack_slots(Ids{}, expected(0, 4)).empty());
}

TEST_CASE("slots: unpack undoes pack, which never takes more than a number a slot") {
  std::mt19937 random(7);
  for (int round = 0; round < 400; ++round) {
    const std::uint32_t pages = 1 + random() % 5;
    Ids slots;
    for (std::size_t i = random() % 50; i > 0; --i) {
      if (!slots.empty() && random() % 2 && slots.back() + 2 * pages <= 100)
        slots.push_back(slots.back() + pages);
      else
        slots.push_back((random() % 19) * pages);
    }
    const Ids packed = pack_slots(slots, pages);
    REQUIRE(packed.size() <= slots.size());
    REQUIRE(unpack_slots(packed, expected(slots.size(), pages)) == slots);
  }
}

TEST_CASE("slots: what comes from the wire must be exactly what was expected") {
  CHECK_THROWS_AS(pack_slots(Ids{kNone}, 1), Invalid);
  CHECK_THROWS_AS(pack_slots(Ids{1, 7, 9, kNone}, 1), Invalid);
  CHECK_THROWS_AS(pack_slots(Ids{1}, 0), Invalid);
  CHECK_THROWS_AS(unpack_slots(Ids{1, 4}, expected(4, 0)), Invalid);
  CHECK_THROWS_AS(unpack_slots(Ids{1, 0}, expected(3, 1)), Invalid);
  CHECK_THROWS_AS(unpack_slots(Ids{0, kNone}, expected(3, 1)), Invalid);
  CHECK_THROWS_AS(unpack_slots(Ids{0, 2}, expected(3, 1)), Invalid);
  CHECK_THROWS_AS(unpack_slots(Ids{0, 4}, expected(3, 1)), Invalid);
  CHECK_THROWS_AS(unpack_slots(Ids{0, 2, 5}, expected(4, 1)), Invalid);
  CHECK_THROWS_AS(unpack_slots(Ids{1, 2, 3}, expected(2, 1)), Invalid);
  CHECK_THROWS_AS(unpack_slots(Ids{0, 1u << 21}, expected(1u << 21, 1, 1u << 30)), Invalid);
  CHECK_THROWS_AS(unpack_slots(Ids{1000}, expected(1, 1)), Invalid);
  CHECK_THROWS_AS(unpack_slots(Ids{997}, expected(1, 4)), Invalid);
  CHECK_NOTHROW(unpack_slots(Ids{996}, expected(1, 4)));
  CHECK_THROWS_AS(unpack_slots(Ids{990, 3}, expected(3, 4)), Invalid);
  CHECK_NOTHROW(unpack_slots(Ids{988, 3}, expected(3, 4)));
  CHECK_THROWS_AS(unpack_slots(Ids{0}, expected(1, 4, 3)), Invalid);
}
