// Who is next at the disk, and when it is told: kinds of jobs, several jobs of a kind, a disk that is slow.
#include <algorithm>
#include <vector>

#include "mover_rig.h"

using namespace kv;
using namespace kv::test;
using namespace kv::test::moving;

using Block = MoverRig::Block;

TEST_CASE("mover: a kind that hangs does not hold up the others") {
  MoverRig rig("", {}, Mover::kDepthMin);
  const auto old = rig.blocks(1, 2), fresh = rig.blocks(1, 2, 50);
  rig.save(old);
  const auto hang = [&](DiskOp op, auto begin) {
    rig.faults->hold(op);
    std::vector<MoveId> jobs;
    for (int i = 0; i < 20; ++i) jobs.push_back(begin());
    return jobs;
  };
  const auto go_on = [&](DiskOp op, const std::vector<MoveId>& jobs) {
    rig.faults->release(op);
    for (const MoveId job : jobs) CHECK(MoverRig::count(rig.wait(job), MoveStatus::kOk) == 1);
  };
  auto orders = rig.reads(old);
  const auto reads = hang(DiskOp::kRead, [&] {
    orders[0].slot += 2;  // a slot for each
    return rig.mover->read(orders);
  });
  rig.save(fresh);
  CHECK(MoverRig::count(rig.wait(rig.mover->sync(rig.file())), MoveStatus::kOk) == 1);
  CHECK(MoverRig::count(rig.wait(rig.mover->create(rig.file(1), 64, {})), MoveStatus::kOk) == 1);
  go_on(DiskOp::kRead, reads);

  const auto syncs = hang(DiskOp::kSync, [&] { return rig.mover->sync(rig.file()); });
  rig.save(fresh);
  CHECK(MoverRig::count(rig.wait(rig.mover->read(rig.reads(fresh))), MoveStatus::kOk) == 1);
  go_on(DiskOp::kSync, syncs);

  const auto writes = hang(DiskOp::kWrite, [&] { return rig.mover->write(rig.writes(fresh)); });
  CHECK(MoverRig::count(rig.wait(rig.mover->read(rig.reads(old))), MoveStatus::kOk) == 1);
  go_on(DiskOp::kWrite, writes);
}

TEST_CASE("mover: reads take turns, so a short one does not wait for a whole chain") {
  MoverRig rig("", {.read_bytes_max = 1 << 20, .write_bytes_max = 1 << 20});
  std::vector<Block> blocks;
  for (std::uint64_t i = 0; i < 40; ++i) {
    blocks.push_back(rig.block(i, format_of_pages(63)));
    rig.next_page += 1;  // no neighbours
  }
  rig.save(blocks);
  rig.faults->hold(DiskOp::kRead);
  const MoveId chain = rig.mover->read(rig.reads({blocks.begin(), blocks.begin() + 38}));
  REQUIRE(MoverRig::eventually([&] { return rig.faults->held() == 4; }));
  const MoveId first = rig.mover->read(rig.reads({blocks[38]})), second = rig.mover->read(rig.reads({blocks[39]}));
  rig.faults->release(DiskOp::kRead);
  REQUIRE(rig.mover->drain(kLong));
  std::vector<MoveId> order;
  for (const Notice& notice : rig.mover->notices()) order.push_back(notice.job);
  REQUIRE(order.size() == 40);
  for (const MoveId job : {first, second}) CHECK(std::find(order.begin(), order.end(), job) - order.begin() < 15);
  CHECK(order.back() == chain);
}

TEST_CASE("mover: a disk that is slow is told of block by block") {
  MoverRig rig("slow_ms=40:1", {.read_bytes_max = 1});
  const auto blocks = rig.blocks(6, 255);
  rig.save(blocks);
  const MoveId job = rig.mover->read(rig.reads(blocks));
  std::size_t told = 0;
  while (!rig.outcomes[job].ended) {
    REQUIRE(readable(rig.mover->eventfd(), 60'000));
    rig.take();
    ++told;
  }
  CHECK(told >= 3);  // each waits for a random time, which may be shorter than a millisecond
  CHECK(MoverRig::count(rig.outcomes[job], MoveStatus::kOk) == 6);
}

TEST_CASE("mover: a chain goes on whatever comes after it") {
  MoverRig rig("", {.read_bytes_max = 1});  // one request at a time
  std::vector<Block> blocks;
  for (std::uint64_t i = 0; i < 14; ++i) blocks.push_back(rig.block(i, format_of_pages(200)));
  rig.save(blocks);
  const std::vector<Block> four(blocks.begin(), blocks.begin() + 4);
  const MoveId chain = rig.mover->read(rig.reads(four));
  // Whoever ends asks again, as engines do: at every moment something newer waits.
  std::vector<MoveId> short_ones;
  for (std::size_t i = 0; i < 4; ++i) short_ones.push_back(rig.mover->read(rig.reads({blocks[4 + i]})));
  std::size_t again = 0;
  while (!rig.outcomes[chain].ended && again < 200) {
    for (std::size_t i = 0; i < 4; ++i) {
      if (!rig.outcomes[short_ones[i]].ended) continue;
      short_ones[i] = rig.mover->read(rig.reads({blocks[4 + i]}));
      ++again;
    }
    REQUIRE(readable(rig.mover->eventfd(), 60'000));
    rig.take();
  }
  CHECK(again < 40);  // four turns of five
  REQUIRE(rig.mover->drain(kLong));
}
