#include <doctest/doctest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include "copy.h"
#include "kept.h"
#include "ledger.h"
#include "memfd.h"
#include "survey.h"

using namespace kv;
using test::format_of_pages;
using test::key_of;
using test::write_block;

namespace {

constexpr std::size_t kPages = kHugeBytes / kPageBytes;
const SlotFormat kFormat = format_of_pages(4);
const Owner kOwner{1, 2, 3};

LedgerBlock block_of(std::uint64_t name, std::uint32_t crc) {
  return {key_of(name), key_of(0), 1, static_cast<std::uint32_t>(kFormat.length()), crc};
}

// Reaches into an entry as a process that is cut short, or damage, would.
LedgerEntry& entry_of(Ledger& ledger, SlotId slot) { return const_cast<LedgerEntry&>(ledger.entry(slot)); }

Verdict verdict_of(const std::shared_ptr<Ledger>& ledger, const std::shared_ptr<Arena>& arena, SlotId slot) {
  Survey survey(ledger, arena);
  survey.verify(1);
  for (const Found& found : survey.found())
    if (found.slot == slot) return found.verdict;
  return Verdict::kFree;
}

}  // namespace

TEST_CASE("ledger: what one process wrote another one reads") {
  const auto mine = Ledger::create("test", kPages);
  mine->filling(4, 7, kOwner, kFormat);
  mine->filling(8, 1, {}, kFormat);
  mine->ready(8, block_of(1, 99));
  mine->filling(12, 3, {}, kFormat);
  mine->free(12);
  mine->free(16, 5);
  const auto next = Ledger::adopt(mine->fd(), kPages);
  CHECK(next->used() == std::vector<SlotId>{4, 8, 12, 16});
  CHECK(next->state(4) == SlotState::kFilling);
  CHECK(next->entry(4).generation == 7);
  CHECK(next->entry(4).owner == kOwner);
  CHECK(next->state(8) == SlotState::kReady);
  CHECK(next->entry(8).key == key_of(1));
  CHECK(next->entry(8).sum == ledger_sum(next->entry(8)));
  CHECK(next->state(12) == SlotState::kFree);
  CHECK(next->entry(12).generation == 3);
  CHECK(next->entry(16).generation == 5);
}

TEST_CASE("ledger: looking for entries does not make pages of what was never written") {
  constexpr std::size_t kMany = std::size_t{1} << 20;  // 128 MiB of entries
  const auto ledger = Ledger::create("test", kMany);
  ledger->filling(0, 1, {}, kFormat);
  ledger->filling(kMany - 1, 1, {}, kFormat);
  CHECK(ledger->used() == std::vector<SlotId>{0, kMany - 1});
  struct stat info{};
  REQUIRE(fstat(ledger->fd(), &info) == 0);
  CHECK(info.st_blocks * 512 <= 2 * static_cast<off_t>(kHugeBytes));  // where the kernel gives huge pages at once
}

TEST_CASE("ledger: a foreign file, another size and an unsealed memfd are refused") {
  const auto ledger = Ledger::create("test", kPages);
  CHECK_THROWS_WITH_AS(Ledger::adopt(ledger->fd(), kPages + 1), doctest::Contains("bytes"), Invalid);
  const Fd unsealed = make_memfd("unsealed", kPages * sizeof(LedgerEntry));
  CHECK_THROWS_WITH_AS(Ledger::adopt(unsealed.get(), kPages), doctest::Contains("sealed"), Invalid);
  CHECK_THROWS_AS(Ledger::create("test", 0), Invalid);
  CHECK(ftruncate(ledger->fd(), 0) != 0);
}

TEST_CASE("ledger: a publish that is cut short at any byte leaves the slot FILLING, with its owner") {
  const auto arena = Arena::create("test", kHugeBytes);
  const auto ledger = Ledger::create("test", kPages);
  const std::uint32_t crc = write_block(*arena, 4, kFormat, key_of(1));
  ledger->filling(4, 7, kOwner, kFormat);
  LedgerEntry before;
  std::memcpy(&before, &ledger->entry(4), sizeof before);
  ledger->ready(4, block_of(1, crc));
  LedgerEntry after;
  std::memcpy(&after, &ledger->entry(4), sizeof after);
  auto* bytes = reinterpret_cast<std::uint8_t*>(&entry_of(*ledger, 4));
  for (std::size_t cut = 0; cut <= offsetof(LedgerEntry, state); ++cut) {
    CAPTURE(cut);
    std::memcpy(bytes, &before, sizeof before);
    std::memcpy(bytes, &after, cut);
    CHECK(verdict_of(ledger, arena, 4) == Verdict::kFilling);
    CHECK(ledger->entry(4).owner == kOwner);
    CHECK(ledger->entry(4).generation == 7);
  }
  std::memcpy(bytes, &after, sizeof after);
  CHECK(verdict_of(ledger, arena, 4) == Verdict::kReady);
}

TEST_CASE("ledger: a hand-out that is cut short at any byte leaves the slot FREE") {
  const auto arena = Arena::create("test", kHugeBytes);
  const auto ledger = Ledger::create("test", kPages);
  ledger->filling(4, 7, {}, kFormat);
  ledger->ready(4, block_of(1, write_block(*arena, 4, kFormat, key_of(1))));
  ledger->free(4);
  LedgerEntry before;
  std::memcpy(&before, &ledger->entry(4), sizeof before);
  ledger->filling(4, 8, kOwner, format_of_pages(8));
  LedgerEntry after;
  std::memcpy(&after, &ledger->entry(4), sizeof after);
  auto* bytes = reinterpret_cast<std::uint8_t*>(&entry_of(*ledger, 4));
  for (std::size_t cut = 0; cut <= offsetof(LedgerEntry, state); ++cut) {
    CAPTURE(cut);
    std::memcpy(bytes, &before, sizeof before);
    std::memcpy(bytes, &after, cut);
    CHECK(verdict_of(ledger, arena, 4) == Verdict::kFree);
    CHECK(ledger->entry(4).generation >= 7);  // generations never go back
  }
}

TEST_CASE("ledger: a READY entry with any one byte changed is not believed") {
  const auto arena = Arena::create("test", kHugeBytes);
  const auto ledger = Ledger::create("test", kPages);
  ledger->filling(4, 7, kOwner, kFormat);
  ledger->ready(4, block_of(1, write_block(*arena, 4, kFormat, key_of(1))));
  REQUIRE(verdict_of(ledger, arena, 4) == Verdict::kReady);
  auto* bytes = reinterpret_cast<std::uint8_t*>(&entry_of(*ledger, 4));
  for (std::size_t at = 0; at < offsetof(LedgerEntry, state); ++at) {
    CAPTURE(at);
    bytes[at] ^= 0x10;
    CHECK(verdict_of(ledger, arena, 4) == Verdict::kTorn);
    bytes[at] ^= 0x10;
  }
  for (std::uint32_t state : {3u, 4u, 0x100u, 0xFFFFFFFFu}) {
    entry_of(*ledger, 4).state = state;
    CHECK(verdict_of(ledger, arena, 4) == Verdict::kTorn);
  }
}

TEST_CASE("survey: bytes that do not match their sums are found, wherever they are") {
  const auto arena = Arena::create("test", kHugeBytes);
  const auto ledger = Ledger::create("test", kPages);
  std::vector<std::size_t> places = {0, kFormat.cell_bytes - 1, kFormat.table_offset(), kFormat.length() - 1};
  for (SlotId i = 0; i < places.size() + 1; ++i) {
    const SlotId slot = 4 * i;
    ledger->filling(slot, 1, {}, kFormat);
    ledger->ready(slot, block_of(i, write_block(*arena, slot, kFormat, key_of(i))));
    if (i < places.size()) arena->slot(slot)[places[i]] ^= 1;
  }
  Survey survey(ledger, arena);
  CHECK(survey.claimed_bytes() == (places.size() + 1) * kFormat.length());
  CHECK(survey.verified_bytes() == 0);
  survey.verify(3);
  CHECK(survey.verified_bytes() == survey.claimed_bytes());
  for (std::size_t i = 0; i < places.size(); ++i) CHECK(survey.found()[i].verdict == Verdict::kRotten);
  CHECK(survey.found().back().verdict == Verdict::kReady);
  CHECK_THROWS_AS(survey.verify(0), Invalid);
}

TEST_CASE("survey: a slot that is being filled in an impossible way makes the whole arena unsafe") {
  const auto arena = Arena::create("test", kHugeBytes);
  const auto ledger = Ledger::create("test", kPages);
  ledger->filling(4, 1, kOwner, SlotFormat{0, 1, 64});
  CHECK_THROWS_WITH_AS(Survey(ledger, arena), doctest::Contains("impossible"), Invalid);
  ledger->filling(4, 1, kOwner, kFormat);
  ledger->filling(kPages - 1, 1, kOwner, kFormat);  // leaves the arena
  CHECK_THROWS_AS(Survey(ledger, arena), Invalid);
  CHECK_THROWS_AS(Survey(Ledger::create("test", 2 * kPages), arena), Invalid);
}
