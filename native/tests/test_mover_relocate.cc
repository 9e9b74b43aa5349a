// Relocation, and everything at once on a disk that fails.
#include <cerrno>
#include <cstring>

#include "mover_rig.h"

using namespace kv;
using namespace kv::test;
using namespace kv::test::moving;

namespace {

using Block = MoverRig::Block;

// Orders for neighbours of file 1, from page 1 on, in another life of it.
std::vector<RelocateOrder> relocations(MoverRig& rig, std::vector<Block>& blocks) {
  std::vector<RelocateOrder> orders;
  std::uint32_t page = 1;
  for (Block& block : blocks) {
    RelocateOrder order{block.at(rig.file(0)), rig.file(1), page, block.header};
    order.header.nonce = 0xB6B6;
    order.header.sequence = 2;
    orders.push_back(order);
    block.header = order.header;
    block.page = page;
    page += block.header.pages();
  }
  return orders;
}

}  // namespace

TEST_CASE("mover: relocated blocks are read from where they are now") {
  MoverRig rig;
  auto blocks = rig.blocks(30, 20);
  rig.save(blocks);
  const std::size_t before = rig.faults->counts().requests;
  const Outcome moved = rig.wait(rig.mover->relocate(relocations(rig, blocks)));
  CHECK(MoverRig::count(moved, MoveStatus::kOk) == 30);
  CHECK(rig.faults->counts().requests - before == 2 * moved.notices);
  CHECK(moved.notices == 2);  // 24 records of 84 KiB are 2 MiB
  CHECK(MoverRig::count(rig.wait(rig.mover->read(rig.reads(blocks, 1))), MoveStatus::kOk) == 30);
  for (const Block& block : blocks) REQUIRE(rig.arrived(block));
}

TEST_CASE("mover: a rotten or unreadable block is not relocated, its neighbours are") {
  MoverRig rig;
  auto blocks = rig.blocks(8, 2);
  rig.save(blocks);
  rig.flip(0, blocks[2].page * kPageBytes + kPageBytes + 9);
  rig.flip(0, blocks[7].page * kPageBytes + 9);
  const std::size_t bad = blocks[4].page * kPageBytes;
  rig.faults->spoil(rig.file(0), bad, bad + 1);
  const Outcome moved = rig.wait(rig.mover->relocate(relocations(rig, blocks)));
  CHECK(moved.error == EIO);
  const auto expected = [](std::size_t i) {
    return i == 2 || i == 7 ? MoveStatus::kCorrupt : i == 4 ? MoveStatus::kError : MoveStatus::kOk;
  };
  for (std::size_t i = 0; i < 8; ++i) CHECK(moved.statuses[i] == expected(i));
  const Outcome read = rig.wait(rig.mover->read(rig.reads(blocks, 1)));
  // The last one lies behind the end of the file: it was never written.
  const auto found = [](std::size_t i) {
    return i == 2 || i == 4 ? MoveStatus::kCorrupt : i == 7 ? MoveStatus::kError : MoveStatus::kOk;
  };
  for (std::size_t i = 0; i < 8; ++i) CHECK(read.statuses[i] == found(i));
}

TEST_CASE("mover: a relocation that cannot be written, or is of nothing good, writes nothing") {
  MoverRig rig;
  auto blocks = rig.blocks(4, 2);
  rig.save(blocks);
  const auto old = blocks;
  rig.faults->fail(DiskOp::kWrite, ENOSPC);
  const auto orders = relocations(rig, blocks);
  const Outcome full = rig.wait(rig.mover->relocate(orders));
  CHECK(MoverRig::count(full, MoveStatus::kError) == 4);
  CHECK(full.error == ENOSPC);
  rig.faults->fail(DiskOp::kWrite, 0);
  for (const Block& block : old) rig.flip(0, block.page * kPageBytes);
  CHECK(MoverRig::count(rig.wait(rig.mover->relocate(orders)), MoveStatus::kCorrupt) == 4);
  CHECK(rig.contents(1).empty());
}

TEST_CASE("mover: a record above the usual size is relocated by itself") {
  MoverRig rig;
  auto blocks = rig.blocks(3, 600);
  for (const Block& small : rig.blocks(3, 2, 20)) blocks.push_back(small);
  rig.save(blocks);
  const Outcome moved = rig.wait(rig.mover->relocate(relocations(rig, blocks)));
  CHECK(MoverRig::count(moved, MoveStatus::kOk) == 6);
  CHECK(moved.notices == 4);
  CHECK(MoverRig::count(rig.wait(rig.mover->read(rig.reads(blocks, 1))), MoveStatus::kOk) == 6);
  for (const Block& block : blocks) REQUIRE(rig.arrived(block));
}

TEST_CASE("mover: everything at once on a failing disk: what is told as read is right, and every job ends once") {
  constexpr int kRounds = 60;
  constexpr std::size_t kBlocks = 48;
  for (const std::uint64_t seed : {1, 2}) {
    CAPTURE(seed);
    MoverRig rig("", {.read_bytes_max = 256 << 10, .write_bytes_max = 128 << 10, .verify_threads = 2}, 16);
    std::vector<Block> blocks;
    for (std::uint64_t i = 0; i < kBlocks; ++i) blocks.push_back(rig.block(i, format_of_pages(1 + i % 7)));
    auto moved = blocks;
    rig.save(blocks);
    const auto orders = relocations(rig, moved);
    rig.wait(rig.mover->relocate(orders));
    rig.faults->set(parse_faults("read_eio=0.05,write_eio=0.05,short=0.1,flip_read=0.05,flip_write=0.03,torn=0.03,"
                                 "sync_eio=0.1,slow_ms=1:0.1,seed=" + std::to_string(seed)));
    Random random(seed);
    std::map<MoveId, std::pair<std::size_t, bool>> reads;  // job → its first block, and from which file
    std::size_t submitted = 0;
    const auto some = [&](const auto& all) {
      const std::size_t first = random.below(kBlocks), n = 1 + random.below(kBlocks - first);
      return std::pair(first, std::vector(all.begin() + static_cast<std::ptrdiff_t>(first),
                                          all.begin() + static_cast<std::ptrdiff_t>(first + n)));
    };
    // One read at a time, because targets may be the same; beside everything else.
    for (int round = 0; round < kRounds; ++round) {
      const bool second = random.chance(50);
      const auto [first, part] = some(second ? moved : blocks);
      const MoveId read = rig.mover->read(rig.reads(part, second ? 1 : 0));
      ++submitted;
      switch (random.below(5)) {
        case 0: rig.mover->write(rig.writes(some(blocks).second)), ++submitted; break;
        case 1: rig.mover->relocate(some(orders).second), ++submitted; break;
        case 2: rig.mover->sync(rig.file(0)), ++submitted; break;
        case 3: rig.mover->create(rig.file(2), 300, {}), ++submitted; break;
        default: if (random.chance(50)) rig.mover->cancel(read);
      }
      const Outcome outcome = rig.wait(read);
      REQUIRE(outcome.statuses.size() == part.size());
      for (std::size_t i = 0; i < part.size(); ++i) {
        if (outcome.statuses[i] == MoveStatus::kOk) REQUIRE(rig.arrived(part[i]));
        if (outcome.statuses[i] == MoveStatus::kError) REQUIRE(outcome.error == EIO);
      }
    }
    REQUIRE(rig.mover->drain(kLong));
    rig.take();
    std::size_t ended = 0;
    for (const auto& [id, outcome] : rig.outcomes) {
      REQUIRE(outcome.ended);
      for (const MoveStatus status : outcome.statuses) REQUIRE(status != MoverRig::kUnsaid);
      ++ended;
    }
    CHECK(ended == submitted + 2);

    // A disk that has recovered: everything is written again, and read.
    rig.faults->set({});
    rig.save(blocks);
    CHECK(MoverRig::count(rig.wait(rig.mover->read(rig.reads(blocks))), MoveStatus::kOk) == kBlocks);
  }
}

TEST_CASE("mover: several threads submit, cancel and take at once") {
  MoverRig rig("slow_ms=0.2:0.3,seed=3", {.verify_threads = 2}, 16);
  const auto blocks = rig.blocks(30, 3);
  rig.save(blocks);
  constexpr int kSubmitters = 3, kJobs = 60;
  const auto orders = rig.reads(blocks);
  const int fd = rig.file(0);
  const auto first_target = static_cast<SlotId>(rig.arena->pages() / 2);
  std::vector<std::thread> submitters;
  for (int who = 0; who < kSubmitters; ++who)
    submitters.emplace_back([&, who] {
      for (int i = 0; i < kJobs; ++i) {
        std::vector<ReadOrder> mine(orders.begin() + who * 10, orders.begin() + who * 10 + 10);
        SlotId target = first_target + static_cast<SlotId>(who * kJobs + i) * 30;  // nobody else's
        for (ReadOrder& order : mine) order.slot = target, target += 3;
        const MoveId job = rig.mover->read(std::move(mine));
        if (i % 3 == 0) rig.mover->cancel(job);
        if (i % 7 == 0) rig.mover->sync(fd);
      }
    });
  std::map<MoveId, int> lasts;
  const std::size_t expected = kSubmitters * (kJobs + (kJobs + 6) / 7);
  while (lasts.size() < expected) {
    // Only the eventfd wakes this loop: a lost wake-up is a failure here.
    if (!readable(rig.mover->eventfd(), 60'000)) break;
    for (const Notice& notice : rig.mover->notices()) {
      if (notice.last) ++lasts[notice.job];
      for (const MoveStatus status : notice.statuses)
        CHECK((status == MoveStatus::kOk || status == MoveStatus::kDropped));
    }
  }
  for (auto& thread : submitters) thread.join();
  CHECK(lasts.size() == expected);
  for (const auto& [job, times] : lasts) CHECK(times == 1);
  CHECK_FALSE(readable(rig.mover->eventfd()));
}
