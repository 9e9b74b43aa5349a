#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "paged.h"

using namespace kv;
using namespace kv::testing;

namespace {

const Shape kShapes[] = {Shape::kHeadMajor, Shape::kTokenMajor, Shape::kPacked};

// A published block of one rank that covers the whole slot.
struct OneBlock {
  Paged source, target;
  Route store, load;
  SlotId slot = 3;
  Key key = key_of(1);
  std::unique_ptr<CopyScratch> scratch = std::make_unique<CopyScratch>();

  explicit OneBlock(Shape shape = Shape::kHeadMajor, std::size_t row = 128)
      : source(shape, 3, 2, 4, 16, row), target(shape, 3, 2, 4, 16, row) {
    const SlotFormat format{3, 2, static_cast<std::uint32_t>(source.cell_bytes())};
    const auto arena = Arena::create("t", kHugeBytes);
    store = {arena, format, source.layout};
    load = {arena, format, target.layout};
    store.check();
    hand_out(*arena, slot);
    REQUIRE(store_block(store, 1, target_of(*arena, slot), *scratch) == BlockStatus::kOk);
    publish(*arena, format, slot, key);
    target.fill(0);
  }

  Arena& arena() { return *store.arena; }
  ControlEntry& control() { return arena().control(slot); }
  std::uint8_t* bytes() { return arena().slot(slot); }
  BlockStatus load_it() { return load_block(load, 2, slot, key, *scratch); }
  BlockStatus verify_it() { return verify_slot(arena(), load.format, slot, key, *scratch); }
};

}  // namespace

TEST_CASE("a stored block is canonical: cells in order, padding zeroed, a sum per cell") {
  for (const Shape shape : kShapes) {
    CAPTURE(static_cast<int>(shape));
    OneBlock one(shape);
    const SlotFormat& format = one.store.format;
    for (std::uint32_t layer = 0; layer < 3; ++layer) {
      for (std::uint32_t head = 0; head < 2; ++head) {
        const auto expected = one.source.cell(layer, head, 1);
        const std::uint8_t* cell = one.bytes() + format.cell_offset(layer, head);
        REQUIRE(std::memcmp(cell, expected.data(), expected.size()) == 0);
        for (std::size_t i = format.cell_bytes; i < format.cell_stride(); ++i) REQUIRE(cell[i] == 0);
        std::uint32_t sum = 0;
        std::memcpy(&sum, one.bytes() + format.table_offset() + 4 * (layer * 2 + head), 4);
        REQUIRE(sum == crc32c(expected.data(), expected.size()));
      }
    }
    CHECK(table_crc(one.arena(), format, one.slot) == crc32c(one.bytes() + format.table_offset(), 4 * 6));
  }
}

TEST_CASE("a loaded block equals the stored one and touches no other block") {
  for (const Shape shape : kShapes) {
    for (const std::size_t row : {24, 128, 4096}) {  // below a line, short pieces, pieces copied in place
      CAPTURE(static_cast<int>(shape));
      CAPTURE(row);
      OneBlock one(shape, row);
      one.target.fill(0xEE);
      const auto untouched = one.target.block(0);
      REQUIRE(one.load_it() == BlockStatus::kOk);
      CHECK(one.target.block(2) == one.source.block(1));
      for (const BlockId other : {0u, 1u, 3u}) CHECK(one.target.block(other) == untouched);
      CHECK(one.verify_it() == BlockStatus::kOk);
    }
  }
}

TEST_CASE("shapes are interchangeable: what one engine stored, another loads") {
  const Paged source(Shape::kTokenMajor, 2, 4, 3);
  Paged target(Shape::kHeadMajor, 2, 4, 3);
  const SlotFormat format{2, 4, static_cast<std::uint32_t>(source.cell_bytes())};
  const auto arena = Arena::create("t", kHugeBytes);
  const auto scratch = std::make_unique<CopyScratch>();
  hand_out(*arena, 0);
  REQUIRE(store_block({arena, format, source.layout}, 2, target_of(*arena, 0), *scratch) == BlockStatus::kOk);
  publish(*arena, format, 0, key_of(1));
  REQUIRE(load_block({arena, format, target.layout}, 0, 0, key_of(1), *scratch) == BlockStatus::kOk);
  CHECK(target.block(0) == source.block(2));
}

TEST_CASE("everything that is not this READY block is stale, and writes nothing") {
  OneBlock one;
  const auto before = one.target.block(2);
  const auto stale = [&] {
    CHECK(one.load_it() == BlockStatus::kStale);
    CHECK(one.verify_it() == BlockStatus::kStale);
    CHECK(one.target.block(2) == before);
  };
  SUBCASE("another key's fingerprint") { one.key = key_of(2); stale(); }
  SUBCASE("a key that differs in the fingerprint's last byte") { one.key.bytes[15] ^= 1; stale(); }
  SUBCASE("still filling") { one.control().state.store(static_cast<std::uint32_t>(SlotState::kFilling)); stale(); }
  SUBCASE("draining") { one.control().state.store(static_cast<std::uint32_t>(SlotState::kDraining)); stale(); }
  SUBCASE("free") { one.control().state.store(static_cast<std::uint32_t>(SlotState::kFree)); stale(); }
  SUBCASE("another length") { one.control().length += 1; stale(); }
  SUBCASE("nobody has summed it") { one.control().checked = 0; stale(); }
}

TEST_CASE("any flipped bit of a cell or of the table is corrupt") {
  OneBlock one;
  const SlotFormat& format = one.load.format;
  std::vector<std::size_t> offsets;
  for (std::uint32_t layer = 0; layer < 3; ++layer)
    for (std::uint32_t head = 0; head < 2; ++head)
      for (const std::size_t i : {std::size_t{0}, std::size_t{777}, std::size_t{format.cell_bytes - 1}})
        offsets.push_back(format.cell_offset(layer, head) + i);
  for (std::size_t i = 0; i < 4 * format.cells(); ++i) offsets.push_back(format.table_offset() + i);
  for (const std::size_t offset : offsets) {
    CAPTURE(offset);
    one.bytes()[offset] ^= 0x10;
    REQUIRE(one.load_it() == BlockStatus::kCorrupt);
    REQUIRE(one.verify_it() == BlockStatus::kCorrupt);
    one.bytes()[offset] ^= 0x10;
    REQUIRE(one.load_it() == BlockStatus::kOk);
  }
  one.control().crc ^= 1;
  CHECK(one.load_it() == BlockStatus::kCorrupt);
}

TEST_CASE("ranks: each stores its own cells, each verifies just its own") {
  const Paged low(Shape::kHeadMajor, 3, 2, 2), high(Shape::kTokenMajor, 3, 2, 2);
  const auto arena = Arena::create("t", kHugeBytes);
  const SlotFormat format{3, 4, static_cast<std::uint32_t>(low.cell_bytes())};
  const auto scratch = std::make_unique<CopyScratch>();
  const auto at_heads = [](PagedLayout layout, std::uint32_t start) {
    layout.head_start = start;
    return layout;
  };
  hand_out(*arena, 0);
  REQUIRE(store_block({arena, format, at_heads(low.layout, 0)}, 1, target_of(*arena, 0), *scratch) == BlockStatus::kOk);
  const Route above{arena, format, at_heads(high.layout, 2)};
  REQUIRE(store_block(above, 0, target_of(*arena, 0), *scratch) == BlockStatus::kOk);
  publish(*arena, format, 0, key_of(1));

  Paged target(Shape::kHeadMajor, 3, 2, 1);
  const Route upper{arena, format, at_heads(target.layout, 2)};
  REQUIRE(load_block(upper, 0, 0, key_of(1), *scratch) == BlockStatus::kOk);
  CHECK(target.block(0) == high.block(0));

  arena->slot(0)[format.cell_offset(1, 0)] ^= 1;  // the other rank's
  CHECK(load_block(upper, 0, 0, key_of(1), *scratch) == BlockStatus::kOk);
  arena->slot(0)[format.cell_offset(1, 3)] ^= 1;  // its own
  CHECK(load_block(upper, 0, 0, key_of(1), *scratch) == BlockStatus::kCorrupt);

  // A pipeline rank: the middle layer only.
  Paged middle(Shape::kHeadMajor, 1, 2, 1);
  middle.layout.layer_start = 1;
  CHECK(load_block({arena, format, middle.layout}, 0, 0, key_of(1), *scratch) == BlockStatus::kCorrupt);
  middle.layout.layer_start = 2;
  REQUIRE(load_block({arena, format, middle.layout}, 0, 0, key_of(1), *scratch) == BlockStatus::kOk);
  CHECK(middle.cell(0, 1, 0) == low.cell(2, 1, 1));
}

TEST_CASE("a slot that is not FILLING is never written") {
  OneBlock one;
  const std::vector<std::uint8_t> before(one.bytes(), one.bytes() + one.store.format.slot_bytes());
  CHECK(store_block(one.store, 0, target_of(one.arena(), one.slot), *one.scratch) == BlockStatus::kStale);
  CHECK(std::memcmp(one.bytes(), before.data(), before.size()) == 0);
}

TEST_CASE("a slot that was handed to another writer is never written by the former one") {
  OneBlock one;
  const Target former = target_of(one.arena(), one.slot);
  hand_out(one.arena(), one.slot);
  const std::vector<std::uint8_t> before(one.bytes(), one.bytes() + one.store.format.slot_bytes());
  CHECK(store_block(one.store, 0, former, *one.scratch) == BlockStatus::kStale);
  CHECK(store_block(one.store, 0, {one.slot, former.generation + 2}, *one.scratch) == BlockStatus::kStale);
  CHECK(std::memcmp(one.bytes(), before.data(), before.size()) == 0);
  CHECK(store_block(one.store, 0, target_of(one.arena(), one.slot), *one.scratch) == BlockStatus::kOk);
  CHECK(std::memcmp(one.bytes(), before.data(), before.size()) != 0);
}

TEST_CASE("layouts that overlap, overflow or miss something are refused by name") {
  const Paged good(Shape::kTokenMajor, 2, 2, 4);
  const auto refused = [&](const char* name, const std::function<void(PagedLayout&)>& spoil) {
    PagedLayout layout = good.layout;
    CHECK_NOTHROW(layout.check_and_simplify());
    spoil(layout);
    try {
      layout.check_and_simplify();
      FAIL_CHECK("accepted a bad " << name);
    } catch (const Invalid& error) {
      CHECK(std::string(error.what()).rfind(name, 0) == 0);
    }
  };
  refused("blocks", [](PagedLayout& l) { l.blocks = 0; });
  refused("heads", [](PagedLayout& l) { l.heads = 0; });
  refused("pieces", [](PagedLayout& l) { l.pieces = 0; });
  refused("piece_bytes", [](PagedLayout& l) { l.piece_bytes = 0; });
  refused("bases", [](PagedLayout& l) { l.layers = 0; });
  refused("bases", [](PagedLayout& l) { l.bases.pop_back(); });
  refused("bases[1]", [](PagedLayout& l) { l.bases[1] = 0; });
  refused("bases[0]", [](PagedLayout& l) { l.bases[0] = ~std::uint64_t{0} - 100; });
  refused("block_stride", [](PagedLayout& l) { l.block_stride -= 1; });
  refused("block_stride", [](PagedLayout& l) { l.block_stride = std::size_t{1} << 60; });
  refused("block_stride", [](PagedLayout& l) { l.block_stride = ~std::size_t{0}; });
  refused("head_stride", [](PagedLayout& l) { l.head_stride -= 1; });
}

TEST_CASE("routes and ids outside their bounds are refused by name") {
  OneBlock one;
  Route& route = one.store;
  CHECK_NOTHROW(route.check());
  SUBCASE("cell bytes") { route.format.cell_bytes += 1; CHECK_THROWS_AS(route.check(), Invalid); }
  SUBCASE("layers") { route.layout.layer_start = 1; CHECK_THROWS_AS(route.check(), Invalid); }
  SUBCASE("heads") { route.layout.head_start = kNone; CHECK_THROWS_AS(route.check(), Invalid); }
  SUBCASE("format") {
    CHECK_THROWS_AS(check_format({0, 1, 1}), Invalid);
    CHECK_THROWS_AS(check_format({1, 0, 1}), Invalid);
    CHECK_THROWS_AS(check_format({1, 1, 0}), Invalid);
    CHECK_THROWS_AS(check_format({256, 257, 64}), Invalid);
    CHECK_THROWS_AS(check_format({2, 1, 0x80000000u}), Invalid);
    CHECK_NOTHROW(check_format({256, 256, 64}));
  }
  SUBCASE("ids") {
    const auto pages = static_cast<SlotId>(one.arena().pages());
    const auto per_slot = static_cast<SlotId>(route.format.slot_bytes() / kPageBytes);
    const std::vector<SlotId> last = {pages - per_slot}, beyond = {0, pages - per_slot + 1}, none = {kNone};
    CHECK_NOTHROW(check_slots(one.arena(), route.format, last));
    CHECK_THROWS_AS(check_slots(one.arena(), route.format, beyond), Invalid);
    CHECK_THROWS_AS(check_slots(one.arena(), route.format, none), Invalid);
    const std::vector<BlockId> ok = {0, 3}, bad = {0, 4};
    CHECK_NOTHROW(check_blocks(route.layout, ok));
    CHECK_THROWS_AS(check_blocks(route.layout, bad), Invalid);
  }
}

TEST_CASE("a slot reused under its readers: never OK with wrong bytes, never called corrupt") {
  // The writer gives the slot to one block after another. With the same key each time only the generation
  // tells the versions apart; with a key per version the fingerprint does too.
  for (const bool same_key : {true, false}) {
    CAPTURE(same_key);
    constexpr std::uint32_t kVersions = 8;
    constexpr int kRounds = 400, kRoundsMax = 1'000'000;
    const Paged source(Shape::kHeadMajor, 4, 2, kVersions);
    const SlotFormat format{4, 2, static_cast<std::uint32_t>(source.cell_bytes())};
    const auto arena = Arena::create("t", kHugeBytes);
    const auto client = Arena::attach(arena->data_fd(), arena->control_fd(), kHugeBytes);
    std::vector<std::vector<std::uint8_t>> expected;
    for (BlockId version = 0; version < kVersions; ++version) expected.push_back(source.block(version));
    const auto key_for = [&](std::uint64_t version) { return key_of(same_key ? 1 : version); };

    std::atomic<bool> stop{false};
    std::atomic<int> ok{0}, wrong{0}, corrupt{0};
    const auto read = [&] {
      Paged target(Shape::kTokenMajor, 4, 2, 1);
      const Route route{client, format, target.layout};
      const auto scratch = std::make_unique<CopyScratch>();
      for (std::uint64_t i = 0; !stop.load(); ++i) {
        const std::uint64_t version = i % kVersions;
        const BlockStatus status = load_block(route, 0, 5, key_for(version), *scratch);
        if (status == BlockStatus::kCorrupt) corrupt.fetch_add(1);
        if (status != BlockStatus::kOk) continue;
        ok.fetch_add(1);
        const auto got = target.block(0);
        const bool right = same_key ? std::find(expected.begin(), expected.end(), got) != expected.end()
                                    : got == expected[version];
        if (!right) wrong.fetch_add(1);
      }
    };
    std::thread readers[] = {std::thread(read), std::thread(read)};
    const Route route{arena, format, source.layout};
    const auto scratch = std::make_unique<CopyScratch>();
    for (int round = 0; round < kRounds || (ok.load() < 50 && round < kRoundsMax); ++round) {
      const auto version = static_cast<BlockId>(round) % kVersions;
      hand_out(*arena, 5);
      store_block(route, version, target_of(*arena, 5), *scratch);
      publish(*arena, format, 5, key_for(version));
      if (round % 4 == 0) std::this_thread::yield();
    }
    stop.store(true);
    for (auto& reader : readers) reader.join();
    CHECK(ok.load() >= 50);
    CHECK(wrong.load() == 0);
    CHECK(corrupt.load() == 0);
  }
}
