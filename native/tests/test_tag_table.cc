#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "id_map.h"
#include "index.h"
#include "kit.h"
#include "tag_table.h"

using namespace kv;
using test::key_of;
using test::Random;

namespace kv {
// Reaches the index's table, whose work is counted.
struct IndexProbe {
  static std::uint64_t moved_slots(const Index& index) { return index.table_.moved_slots(); }
};
}  // namespace kv

namespace {

constexpr std::size_t kRunMax = 2048;  // full slots in a row: at load 0.875 a thousand is already one in 10^4

bool holds(const TagTable& table, std::uint32_t tag, std::uint32_t value) {
  return table.find(tag, [&](std::uint32_t v) { return v == value; }) != nullptr;
}

}  // namespace

TEST_CASE("tag table: no insertion moves more than a batch and a run, whatever the size") {
  Random random(1);
  TagTable table;
  std::uint64_t most = 0, before = 0;
  for (std::uint32_t i = 0; i < 400000; ++i) {
    table.prepare(1);
    table.insert(static_cast<std::uint32_t>(random.next()), i);
    most = std::max(most, table.moved_slots() - before);
    before = table.moved_slots();
  }
  CHECK(most > 0);
  CHECK(most <= TagTable::kBatch + kRunMax);
  CHECK(table.moved_slots() < 8 * table.size());  // every entry has moved a few times in all
}

TEST_CASE("tag table: room for n costs O(n), however many entries there are") {
  Random random(2);
  TagTable table;
  constexpr std::size_t n = 8192;
  std::uint64_t most = 0;
  for (std::size_t call = 0; call < 60; ++call) {
    const std::uint64_t before = table.moved_slots();
    table.prepare(n);
    for (std::size_t i = 0; i < n; ++i) table.insert(static_cast<std::uint32_t>(random.next()), 7);
    most = std::max(most, table.moved_slots() - before);
  }
  CHECK(most > n);
  CHECK(most <= (TagTable::kMovesPerInsert + 8) * n + TagTable::kBatch + kRunMax);
}

TEST_CASE("tag table: prepared insertions never grow the table, also in the middle of a move") {
  Random random(3);
  TagTable table;
  for (std::size_t n : {1u, 5000u, 1u, 3u, 60000u, 100u, 100000u}) {
    table.prepare(n);
    const std::uint64_t moved = table.moved_slots();
    const bool moving = table.moving();
    for (std::size_t i = 0; i < n; ++i) table.insert(static_cast<std::uint32_t>(random.next()), 7);
    if (!moving) CHECK(table.moved_slots() == moved);  // a growth would have begun to move
  }
}

TEST_CASE("tag table: an entry costs at most 11.5 bytes, growing included") {
  Random random(4);
  TagTable table;
  const double fixed = TagTable::kReleaseSlots * sizeof(TagTable::Entry) + 8 * kPageBytes;
  double worst = 0;
  for (std::uint32_t i = 0; i < 600000; ++i) {
    table.prepare(1);
    table.insert(static_cast<std::uint32_t>(random.next()), i);
    if (i > 50000) worst = std::max(worst, (static_cast<double>(table.memory_bytes()) - fixed) / (i + 1));
  }
  CHECK(worst <= 11.5);
  CHECK(worst > 8);
}

TEST_CASE("tag table: agrees with a multiset through every stage of a growth") {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    TagTable table;
    std::set<std::pair<std::uint32_t, std::uint32_t>> naive;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> list;  // the same, for picking one
    std::uint32_t next = 0;
    std::size_t stages = 0;
    // Few tags (so that many are equal), the ends of the range, and tags that share a home.
    const auto any_tag = [&]() -> std::uint32_t {
      switch (random.below(4)) {
        case 0: return random.below(500) * 8589934u;
        case 1: return random.chance(50) ? random.below(300) : 0xFFFFFFFFu - random.below(300);
        default: return static_cast<std::uint32_t>(random.next());
      }
    };
    for (int step = 0; step < 60000; ++step) {
      const bool shrink = step % 20000 > 14000;
      if (list.empty() || random.chance(shrink ? 30 : 70)) {
        const std::pair<std::uint32_t, std::uint32_t> entry{any_tag(), next++};
        table.prepare(1);
        table.insert(entry.first, entry.second);
        naive.insert(entry);
        list.push_back(entry);
      } else {
        const std::size_t i = random.below(list.size());
        const auto [tag, value] = list[i];
        TagTable::Entry* entry = table.find(tag, [&](std::uint32_t v) { return v == value; });
        REQUIRE(entry != nullptr);
        table.erase(entry);
        naive.erase(list[i]);
        list[i] = list.back();
        list.pop_back();
        REQUIRE(!holds(table, tag, value));
        if (random.chance(30)) {  // back again, perhaps into the other array
          table.prepare(1);
          table.insert(tag, value);
          naive.insert({tag, value});
          list.push_back({tag, value});
        }
      }
      stages += table.moving();
      REQUIRE(table.size() == naive.size());
      for (int look = 0; look < 3 && !list.empty(); ++look) {
        const auto [tag, value] = list[random.below(list.size())];
        REQUIRE(holds(table, tag, value));
        REQUIRE(!holds(table, tag, next));
      }
      if (step % 2500 > 0 && step % 977 > 0) continue;
      std::size_t seen = 0;
      table.each([&](std::uint32_t tag, std::uint32_t value) { seen += naive.contains({tag, value}); });
      REQUIRE(seen == naive.size());
      for (const auto& [tag, value] : list) REQUIRE(holds(table, tag, value));
    }
    CHECK(stages > 1000);
  }
}

TEST_CASE("tag table: a copy-free move leaves an empty table behind") {
  TagTable table;
  CHECK(table.find(5, [](std::uint32_t) { return true; }) == nullptr);
  for (std::uint32_t i = 0; i < 1000; ++i) table.prepare(1), table.insert(i << 20, i);
  table = TagTable{};
  CHECK(table.size() == 0);
  CHECK(table.find(5u << 20, [](std::uint32_t) { return true; }) == nullptr);
  table.prepare(1);
  table.insert(5, 6);
  CHECK(holds(table, 5, 6));
}

TEST_CASE("id map: ids come back as they went in") {
  IdMap map;
  for (std::uint32_t id : {0u, 1u, 0x80000000u, 0xFFFFFFFEu, 77u}) map.set(id, id / 2);
  std::map<std::uint32_t, std::uint32_t> seen;
  map.each([&](std::uint32_t id, std::uint32_t value) { seen[id] = value; });
  CHECK(seen.size() == 5);
  for (auto [id, value] : seen) CHECK(value == id / 2);
}

TEST_CASE("index: saving 8192 blocks moves O(8192) table slots at any size") {
  Index index(400000);
  const NodeId root = index.root(key_of(0));
  std::uint64_t most = 0;
  for (std::uint64_t call = 0; call < 30; ++call) {
    const std::uint64_t before = IndexProbe::moved_slots(index);
    const std::vector<Key> keys = test::keys_of(1 + call * kKeysMax, kKeysMax);
    REQUIRE(index.resolve(root, keys).empty());
    index.prepare(keys.size());
    NodeId up = root;
    for (const Key& key : keys) up = index.make(up, key);
    ++index.node(up).holders;  // keeps the chain
    most = std::max(most, IndexProbe::moved_slots(index) - before);
  }
  CHECK(index.size() == 30 * kKeysMax);
  CHECK(most > 0);
  CHECK(most <= (TagTable::kMovesPerInsert + 8) * kKeysMax + TagTable::kBatch + kRunMax);
}
