#include <cerrno>
#include <cstring>

#include "engine.h"
#include "mover_rig.h"

using namespace kv;
using namespace kv::test;
using namespace kv::test::moving;

namespace {

using Block = MoverRig::Block;

std::size_t requests(const MoverRig& rig) { return rig.faults->counts().requests; }

}  // namespace

TEST_CASE("mover: what was written is read, and every order is told of exactly once") {
  MoverRig rig;
  CHECK_FALSE(readable(rig.mover->eventfd()));
  std::vector<Block> blocks;
  for (std::uint64_t i = 0; i < 60; ++i) blocks.push_back(rig.block(i, format_of_pages(1 + i % 20)));
  std::size_t payload = 0;
  for (const Block& block : blocks) payload += block.header.format.slot_bytes();

  const Outcome written = rig.wait(rig.mover->write(rig.writes(blocks)));
  CHECK(MoverRig::count(written, MoveStatus::kOk) == 60);
  CHECK(written.bytes == payload);
  const Outcome read = rig.wait(rig.mover->read(rig.reads(blocks)));
  CHECK(MoverRig::count(read, MoveStatus::kOk) == 60);
  CHECK(read.bytes == payload);
  for (const Block& block : blocks) REQUIRE(rig.arrived(block));
  CHECK(rig.mover->under_way() == 0);
  CHECK_FALSE(readable(rig.mover->eventfd()));
  CHECK(rig.mover->notices().empty());
}

TEST_CASE("mover: a record on the disk is its header and the slot") {
  MoverRig rig;
  const auto blocks = rig.blocks(2, 3);
  rig.save(blocks);
  const auto file = rig.contents(0);
  for (const Block& block : blocks) {
    RecordHeader header;
    REQUIRE(decode(&file[block.page * kPageBytes], header));
    CHECK(header.key == block.header.key);
    CHECK(header.nonce == MoverRig::kNonce);
    CHECK(std::memcmp(&file[(block.page + 1) * kPageBytes], rig.arena->slot(block.slot), 3 * kPageBytes) == 0);
  }
}

TEST_CASE("mover: neighbours travel together") {
  MoverRig rig;
  const auto all_in_one = [&](std::vector<Block> blocks, std::size_t expected, std::size_t expected_reads = 0) {
    if (expected_reads == 0) expected_reads = expected;
    const std::size_t before = requests(rig);
    const Outcome written = rig.wait(rig.mover->write(rig.writes(blocks)));
    CHECK(written.notices == expected);
    CHECK(requests(rig) - before == expected);
    const Outcome read = rig.wait(rig.mover->read(rig.reads(blocks)));
    CHECK(read.notices == expected_reads);
    CHECK(requests(rig) - before == expected + expected_reads);
    CHECK(MoverRig::count(read, MoveStatus::kOk) == blocks.size());
  };
  SUBCASE("as many as there are") { all_in_one(rig.blocks(8, 16), 1); }
  SUBCASE("but no gap") {
    auto blocks = rig.blocks(4, 2);
    rig.next_page += 1;
    for (const Block& more : rig.blocks(4, 2, 10)) blocks.push_back(more);
    all_in_one(blocks, 2);
  }
  SUBCASE("but not backwards") {
    auto blocks = rig.blocks(4, 2);
    std::reverse(blocks.begin(), blocks.end());
    all_in_one(blocks, 4);
  }
  SUBCASE("but at most kMergeBytes, and of reads kReadMergeBytes") { all_in_one(rig.blocks(16, 63), 2, 4); }
  SUBCASE("but at most 64 records") { all_in_one(rig.blocks(100, 1), 2); }
  SUBCASE("but a large one goes by itself") { all_in_one(rig.blocks(2, 600), 2); }
  SUBCASE("but not from two files") {
    const auto blocks = rig.blocks(2, 2);
    rig.save({blocks[0]}, 0);
    rig.save({blocks[1]}, 1);
    auto orders = rig.reads(blocks);
    orders[1].from.fd = rig.file(1);
    const Outcome read = rig.wait(rig.mover->read(orders));
    CHECK(read.notices == 2);
    CHECK(MoverRig::count(read, MoveStatus::kOk) == 2);
  }
}

TEST_CASE("mover: what is not the expected record is corrupt, its neighbours are not") {
  MoverRig rig;
  const auto blocks = rig.blocks(10, 2);
  rig.save(blocks);
  auto orders = rig.reads(blocks);
  const auto offset = [&](std::size_t i) { return blocks[i].page * kPageBytes; };
  rig.flip(0, offset(0) + 20);                                                    // header
  rig.flip(0, offset(1) + kPageBytes + 5);                                        // cell
  rig.flip(0, offset(2) + kPageBytes + blocks[2].header.format.table_offset());  // table
  orders[3].from.nonce ^= 1;                                                      // an earlier life of the segment
  orders[4].from.key = key_of(999);
  orders[5].from.payload_crc ^= 1;
  orders[6].from.format = {1, 2, orders[6].from.format.cell_bytes / 2 - 32};  // another shape of the same size
  REQUIRE(orders[6].from.format.slot_bytes() == blocks[6].header.format.slot_bytes());
  const Outcome read = rig.wait(rig.mover->read(orders));
  for (std::size_t i = 0; i < 10; ++i) {
    CAPTURE(i);
    CHECK(read.statuses[i] == (i < 7 ? MoveStatus::kCorrupt : MoveStatus::kOk));
    if (i >= 7) CHECK(rig.arrived(blocks[i]));
  }
  CHECK(read.error == 0);
  CHECK(read.bytes == 3 * blocks[0].header.format.slot_bytes());
}

TEST_CASE("mover: a bad sector costs one block") {
  MoverRig rig;
  const auto blocks = rig.blocks(8, 2);
  rig.save(blocks);
  const std::size_t bad = blocks[5].page * kPageBytes + 5000;
  rig.faults->spoil(rig.file(), bad, bad + 512);
  const Outcome read = rig.wait(rig.mover->read(rig.reads(blocks)));
  CHECK(read.notices == 1);
  CHECK(read.error == EIO);
  for (std::size_t i = 0; i < 8; ++i) CHECK(read.statuses[i] == (i == 5 ? MoveStatus::kError : MoveStatus::kOk));
  for (std::size_t i = 0; i < 8; ++i) CHECK(rig.arrived(blocks[i]) == (i != 5));

  rig.faults->fail(DiskOp::kRead, EIO);
  CHECK(MoverRig::count(rig.wait(rig.mover->read(rig.reads(blocks))), MoveStatus::kError) == 8);
  CHECK(MoverRig::count(rig.wait(rig.mover->read(rig.reads({blocks[0]}))), MoveStatus::kError) == 1);
  // Behind the end of the file.
  rig.faults->fail(DiskOp::kRead, 0);
  rig.faults->set({});
  auto beyond = rig.reads({blocks[7]});
  beyond[0].from.page += 100;
  const Outcome none = rig.wait(rig.mover->read(beyond));
  CHECK(none.statuses[0] == MoveStatus::kError);
  CHECK(none.error == EIO);
}

TEST_CASE("mover: a failed write says so for every record of it") {
  MoverRig rig;
  const auto blocks = rig.blocks(8, 2);
  rig.faults->fail(DiskOp::kWrite, ENOSPC);
  const Outcome written = rig.wait(rig.mover->write(rig.writes(blocks)));
  CHECK(MoverRig::count(written, MoveStatus::kError) == 8);
  CHECK(written.error == ENOSPC);
  CHECK(written.bytes == 0);
}

TEST_CASE("mover: pages and syncs") {
  MoverRig rig;
  std::vector<std::uint8_t> bytes(3 * kPageBytes);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 7);
  const Outcome written = rig.wait(rig.mover->pages(rig.file(), 2, bytes));
  CHECK(written.statuses == std::vector{MoveStatus::kOk});
  CHECK(written.bytes == bytes.size());
  const auto file = rig.contents(0);
  REQUIRE(file.size() == 5 * kPageBytes);
  CHECK(std::equal(bytes.begin(), bytes.end(), file.begin() + 2 * kPageBytes));
  CHECK(rig.wait(rig.mover->sync(rig.file())).statuses == std::vector{MoveStatus::kOk});
  rig.faults->fail(DiskOp::kSync, EIO);
  const Outcome failed = rig.wait(rig.mover->sync(rig.file()));
  CHECK(failed.statuses == std::vector{MoveStatus::kError});
  CHECK(failed.error == EIO);
}

TEST_CASE("mover: a created file has exactly its pages, zeros behind a header") {
  MoverRig rig;
  SegmentHeader header;
  header.segment = 3;
  header.nonce = 77;
  header.pages = 300;  // not a multiple of the pieces it is written in
  const auto check_made = [&](const Outcome& outcome) {
    REQUIRE(outcome.statuses == std::vector{MoveStatus::kOk});
    CHECK(outcome.bytes == 300 * kPageBytes);
    auto file = rig.contents(0);
    REQUIRE(file.size() == 300 * kPageBytes);
    SegmentHeader found;
    REQUIRE(decode(file.data(), found));
    CHECK(found.nonce == 77);
    CHECK(std::all_of(file.begin() + kPageBytes, file.end(), [](std::uint8_t byte) { return byte == 0; }));
  };
  SUBCASE("allocated") { check_made(rig.wait(rig.mover->create(rig.file(), 300, header))); }
  SUBCASE("without fallocate") {
    rig.faults->fail(DiskOp::kAllocate, EOPNOTSUPP);
    check_made(rig.wait(rig.mover->create(rig.file(), 300, header)));
  }
  SUBCASE("after a try that failed in the middle") {
    rig.wait(rig.mover->pages(rig.file(), 0, std::vector<std::uint8_t>(5 * kPageBytes, 0xEE)));
    check_made(rig.wait(rig.mover->create(rig.file(), 300, header)));
  }
  SUBCASE("no room") {
    rig.faults->fail(DiskOp::kAllocate, ENOSPC);
    CHECK(rig.wait(rig.mover->create(rig.file(), 300, header)).error == ENOSPC);
    rig.faults->fail(DiskOp::kAllocate, EOPNOTSUPP);
    rig.faults->fail(DiskOp::kWrite, ENOSPC);
    const Outcome outcome = rig.wait(rig.mover->create(rig.file(), 300, header));
    CHECK(outcome.statuses == std::vector{MoveStatus::kError});
    CHECK(outcome.error == ENOSPC);
  }
  SUBCASE("no header before everything is on the medium") {
    rig.faults->record();
    rig.wait(rig.mover->create(rig.file(), 300, header));
    const auto log = rig.faults->log();
    REQUIRE(log.size() == 6);  // allocate, two pieces, sync, header, sync
    CHECK(log[0].op == DiskOp::kAllocate);
    CHECK(log[3].op == DiskOp::kSync);
    CHECK(log[4].offset == 0);
    CHECK(log[4].length == kPageBytes);
    CHECK(log[5].op == DiskOp::kSync);
    for (std::size_t i = 1; i < log.size(); ++i) CHECK(log[i - 1].ended < log[i].begun);
  }
  SUBCASE("a failed sync is a failed creation") {
    rig.faults->fail(DiskOp::kSync, EIO);
    CHECK(rig.wait(rig.mover->create(rig.file(), 300, header)).error == EIO);
    SegmentHeader found;
    CHECK_FALSE(decode(rig.contents(0).data(), found));
  }
}

TEST_CASE("mover: cancelling drops what was not submitted, and the job still ends") {
  MoverRig rig("", {.read_bytes_max = 1 << 20, .write_bytes_max = 1 << 20});
  std::vector<Block> blocks;
  for (std::uint64_t i = 0; i < 20; ++i) {
    blocks.push_back(rig.block(i, format_of_pages(63)));  // 256 KiB with its header
    rig.next_page += 1;                                   // no neighbours
  }
  rig.save(blocks);
  rig.faults->hold(DiskOp::kRead);
  const MoveId job = rig.mover->read(rig.reads(blocks));
  REQUIRE(MoverRig::eventually([&] { return rig.faults->held() == 4; }));  // 1 MiB is under way, no more
  const MoveId behind = rig.mover->read(rig.reads({blocks[0]}));
  rig.mover->cancel(job);
  rig.mover->cancel(behind);
  CHECK(rig.wait(behind).statuses == std::vector{MoveStatus::kDropped});
  CHECK(rig.mover->under_way() == 1);
  CHECK_FALSE(rig.mover->drain(0.01));
  rig.faults->release(DiskOp::kRead);
  const Outcome read = rig.wait(job);
  for (std::size_t i = 0; i < 20; ++i)
    CHECK(read.statuses[i] == (i < 4 ? MoveStatus::kOk : MoveStatus::kDropped));
  rig.mover->cancel(job);  // has ended: no effect
  CHECK_THROWS_AS(rig.mover->cancel(job + 2), Invalid);
  CHECK(rig.mover->drain(0));
}

TEST_CASE("mover: a cancelled creation ends after the piece that is being written") {
  MoverRig rig;
  rig.faults->hold(DiskOp::kWrite);
  SegmentHeader header;
  const MoveId job = rig.mover->create(rig.file(), 1024, header);
  REQUIRE(MoverRig::eventually([&] { return rig.faults->held() == 1; }));
  const MoveId waiting = rig.mover->create(rig.file(1), 1024, header);
  rig.mover->cancel(job);
  rig.faults->release(DiskOp::kWrite);
  CHECK(rig.wait(job).statuses == std::vector{MoveStatus::kDropped});
  CHECK(rig.wait(waiting).statuses == std::vector{MoveStatus::kOk});
}

TEST_CASE("mover: nothing is begun when any order is bad") {
  MoverRig rig;
  const auto blocks = rig.blocks(2, 2);
  const auto read_refused = [&](auto change) {
    auto orders = rig.reads(blocks);
    change(orders[1]);
    CHECK_THROWS_AS(rig.mover->read(orders), Invalid);
  };
  read_refused([](ReadOrder& order) { order.slot = kNone; });
  read_refused([&](ReadOrder& order) { order.slot = static_cast<SlotId>(rig.arena->pages() - 1); });
  read_refused([](ReadOrder& order) { order.from.fd = -1; });
  read_refused([](ReadOrder& order) { order.from.page = 0; });  // the segment's header
  read_refused([](ReadOrder& order) { order.from.page = kNone; });
  read_refused([](ReadOrder& order) { order.from.page = kSegmentPagesMax - 2; });
  read_refused([](ReadOrder& order) { order.from.format.layers = 0; });
  CHECK_THROWS_AS(rig.mover->read(std::vector<ReadOrder>(Mover::kOrdersMax + 1)), Invalid);
  auto orders = rig.writes(blocks);
  orders[0].slot = kNone;
  CHECK_THROWS_AS(rig.mover->write(orders), Invalid);
  RelocateOrder move{blocks[0].at(rig.file()), rig.file(1), 1, blocks[1].header};
  CHECK_THROWS_AS(rig.mover->relocate({move}), Invalid);
  CHECK_THROWS_AS(rig.mover->pages(rig.file(), 1, {}), Invalid);
  CHECK_THROWS_AS(rig.mover->pages(rig.file(), 1, std::vector<std::uint8_t>(100)), Invalid);
  CHECK_THROWS_AS(rig.mover->pages(rig.file(), kNone, std::vector<std::uint8_t>(kPageBytes)), Invalid);
  CHECK_THROWS_AS(rig.mover->sync(-1), Invalid);
  CHECK_THROWS_AS(rig.mover->create(rig.file(), 1, {}), Invalid);
  CHECK_THROWS_AS(rig.mover->create(rig.file(), kSegmentPagesMax + 1, {}), Invalid);
  rig.wait(rig.mover->pages(rig.file(), 99, std::vector<std::uint8_t>(kPageBytes)));
  CHECK_THROWS_AS(rig.mover->create(rig.file(), 99, {}), Invalid);  // it is longer
  CHECK(requests(rig) == 1);

  const Outcome nothing = rig.wait(rig.mover->read({}));
  CHECK(nothing.statuses.empty());
  CHECK(nothing.notices == 1);
  CHECK_THROWS_AS(Mover(open_threads(Mover::kDepthMin - 1, 1), rig.arena, {}), Invalid);
  CHECK_THROWS_AS(Mover(open_threads(8, 1), nullptr, {}), Invalid);
  CHECK_THROWS_AS(Mover(open_threads(8, 1), rig.arena, {.verify_threads = 0}), Invalid);
}

TEST_CASE("mover: jobs whose notices nobody takes are bounded") {
  MoverRig rig;
  for (std::size_t i = 0; i < Mover::kJobsMax; ++i) rig.mover->read({});
  CHECK_THROWS_AS(rig.mover->read({}), Full);
  CHECK(rig.mover->under_way() == 0);
  CHECK(rig.mover->notices().size() == Mover::kJobsMax);
  CHECK(MoverRig::count(rig.wait(rig.mover->sync(rig.file())), MoveStatus::kOk) == 1);
}

TEST_CASE("mover: close drops what waits, waits for the disk, and keeps the notices") {
  MoverRig rig("", {.read_bytes_max = 1});
  const auto blocks = rig.blocks(10, 255);
  rig.save(blocks);
  rig.faults->hold(DiskOp::kRead);
  const MoveId job = rig.mover->read(rig.reads(blocks));
  const MoveId created = rig.mover->create(rig.file(1), 2000, {});
  REQUIRE(MoverRig::eventually([&] { return rig.faults->held() == 1; }));
  std::thread closer([&] { rig.mover->close(); });
  rig.faults->release(DiskOp::kRead);
  closer.join();
  rig.mover->close();
  CHECK(rig.mover->under_way() == 0);
  CHECK_THROWS_AS(rig.mover->sync(rig.file()), Invalid);
  rig.wipe_targets();  // a read still under way would be seen here, and by the thread sanitizer
  const Outcome read = rig.wait(job);
  CHECK(MoverRig::count(read, MoveStatus::kOk) >= 1);
  CHECK(MoverRig::count(read, MoveStatus::kOk) + MoverRig::count(read, MoveStatus::kDropped) == 10);
  CHECK(rig.wait(created).statuses.size() == 1);
  for (const Block& block : blocks) CHECK(*rig.arena->slot(block.target) == 0);
}

TEST_CASE("mover: destruction with jobs in flight is safe") {
  for (int round = 0; round < 5; ++round) {
    MoverRig rig;
    const auto blocks = rig.blocks(20, 20);
    rig.save(blocks);
    rig.mover->read(rig.reads(blocks));
    rig.mover->write(rig.writes(blocks));
    rig.mover->create(rig.file(2), 400, {});
    rig.mover.reset();
    rig.wipe_targets();
  }
}

TEST_CASE("mover: its threads have names and block signals") {
  MoverRig rig;
  const auto blocks_all = [](const std::string& wanted) {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name, line;
      std::getline(std::ifstream(entry.path() / "comm"), name);
      std::ifstream status(entry.path() / "status");
      while (std::getline(status, line) && !line.starts_with("SigBlk:")) {}
      // All but SIGKILL, SIGSTOP and two of the C library's own, which it blocks too while a thread begins.
      if (name == wanted && line.ends_with("fffffffe7ffbfeff")) return true;
    }
    return false;
  };
  CHECK(MoverRig::eventually([&] { return blocks_all("kv-disk"); }));
  CHECK(MoverRig::eventually([&] { return blocks_all("kv-verify-0"); }));
}
