#include <doctest/doctest.h>

#include <random>

#include "runs.h"

using namespace kv;

using Ids = std::vector<std::uint32_t>;

TEST_CASE("runs: neighbours join, order is kept") {
  CHECK(slot_runs(Ids{}, 4).empty());
  CHECK(slot_runs(Ids{8, 12, 16, 4, 0, 20, 24}, 4) == Ids{8, 3, 4, 1, 0, 1, 20, 2});
  CHECK(slot_runs(Ids{5, 5}, 1) == Ids{5, 1, 5, 1});
  CHECK(slot_runs(Ids{kNone - 1}, 3) == Ids{kNone - 1, 1});
  CHECK(expand_runs(Ids{8, 3, 4, 1}, 4) == Ids{8, 12, 16, 4});
}

TEST_CASE("runs: expand undoes slot_runs") {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const std::uint32_t pages = 1 + random() % 5;
    Ids slots;
    for (std::size_t i = random() % 50; i > 0; --i) slots.push_back((random() % 20) * pages);
    REQUIRE(expand_runs(slot_runs(slots, pages), pages) == slots);
  }
}

TEST_CASE("runs: counts from the wire are bounded before use") {
  CHECK_THROWS_AS(slot_runs(Ids{kNone}, 1), Invalid);
  CHECK_THROWS_AS(slot_runs(Ids{1}, 0), Invalid);
  CHECK_THROWS_AS(expand_runs(Ids{1, 1}, 0), Invalid);
  CHECK_THROWS_AS(expand_runs(Ids{1, 0}, 1), Invalid);
  CHECK_THROWS_AS(expand_runs(Ids{0, kNone}, 1), Invalid);
  CHECK_THROWS_AS(expand_runs(Ids{kNone - 1, 2}, 1), Invalid);
  CHECK_THROWS_AS(expand_runs(Ids{0, 1u << 20, 0, 1}, 1), Invalid);
  CHECK_NOTHROW(expand_runs(Ids{kNone - 2, 2}, 1));
}
