// A mover with an arena and files on a disk that can fail.
#pragma once

#include <doctest/doctest.h>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "disk_faulty.h"
#include "disk_kit.h"
#include "kept.h"
#include "mover.h"

namespace kv::test::moving {

inline constexpr double kLong = 60;  // seconds: a timeout that only a bug reaches

inline bool readable(int fd, int timeout_ms = 0) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, timeout_ms) == 1;
}

// What a job came to, all its notices together.
struct Outcome {
  std::vector<MoveStatus> statuses;
  std::size_t notices = 0;
  std::size_t bytes = 0;
  int error = 0;
  bool ended = false;
};

struct MoverRig {
  explicit MoverRig(const std::string& spec = "", Mover::Limits limits = {}, std::size_t depth = 64)
      : direct(direct_works(dir.path())), arena(Arena::create("mover", 32 * kHugeBytes)),
        faults(std::make_shared<Faults>(parse_faults(spec))),
        mover(std::make_unique<Mover>(faulty_disk(open_disk("auto", depth, 8), faults), arena, limits)) {}

  // A file of this test, by number; open until its end.
  int file(int number = 0) {
    Fd& fd = files[number];
    if (!fd) {
      const std::string path = dir.path("f" + std::to_string(number));
      fd = Fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | (direct ? O_DIRECT : 0), 0600));
      REQUIRE(fd);
    }
    return fd.get();
  }

  // A block with right sums in a slot of the arena's first half, and the same slot in the second half for reads.
  struct Block {
    RecordHeader header;
    SlotId slot, target;
    std::uint32_t page = 0;
    RecordAt at(int fd) const { return {fd, page, header.nonce, header.key, header.payload_crc, header.format}; }
  };
  Block block(std::uint64_t name, const SlotFormat& format) {
    Block made;
    made.header.key = key_of(name);
    made.header.parent = key_of(name + 1'000'000);
    made.header.root = key_of(2'000'000);
    made.header.nonce = kNonce;
    made.header.sequence = 1;
    made.header.depth = 1;
    made.header.format = format;
    made.slot = next_slot;
    made.target = static_cast<SlotId>(next_slot + arena->pages() / 2);
    next_slot += made.header.payload_pages();
    REQUIRE(next_slot <= arena->pages() / 2);
    made.header.payload_crc = write_block(*arena, made.slot, format, made.header.key);
    made.page = next_page;
    next_page += made.header.pages();
    return made;
  }
  // Neighbours, from page `next_page` on.
  std::vector<Block> blocks(std::size_t n, std::size_t payload_pages, std::uint64_t first_name = 1) {
    std::vector<Block> made;
    for (std::size_t i = 0; i < n; ++i) made.push_back(block(first_name + i, format_of_pages(payload_pages)));
    return made;
  }

  std::vector<WriteOrder> writes(const std::vector<Block>& of, int number = 0) {
    std::vector<WriteOrder> orders;
    for (const Block& one : of) orders.push_back({file(number), one.page, one.header, one.slot});
    return orders;
  }
  std::vector<ReadOrder> reads(const std::vector<Block>& of, int number = 0) {
    std::vector<ReadOrder> orders;
    for (const Block& one : of) orders.push_back({one.at(file(number)), one.target});
    return orders;
  }

  // Collects notices until the job has ended. What others say is kept for their turn.
  Outcome wait(MoveId job) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(kLong);
    while (!outcomes[job].ended && std::chrono::steady_clock::now() < until) {
      if (!readable(mover->eventfd(), 60'000)) break;
      take();
    }
    REQUIRE(outcomes[job].ended);
    return outcomes[job];
  }
  void take() {
    for (const Notice& notice : mover->notices()) {
      Outcome& outcome = outcomes[notice.job];
      REQUIRE(!outcome.ended);
      if (outcome.statuses.size() < notice.first + notice.statuses.size())
        outcome.statuses.resize(notice.first + notice.statuses.size(), kUnsaid);
      for (std::size_t i = 0; i < notice.statuses.size(); ++i) {
        REQUIRE(outcome.statuses[notice.first + i] == kUnsaid);
        outcome.statuses[notice.first + i] = notice.statuses[i];
      }
      ++outcome.notices;
      outcome.bytes += notice.bytes;
      if (notice.error != 0) outcome.error = notice.error;
      outcome.ended = notice.last;
    }
  }
  void save(const std::vector<Block>& of, int number = 0) {
    const Outcome written = wait(mover->write(writes(of, number)));
    REQUIRE(count(written, MoveStatus::kOk) == of.size());
  }

  static std::size_t count(const Outcome& outcome, MoveStatus status) {
    return static_cast<std::size_t>(std::count(outcome.statuses.begin(), outcome.statuses.end(), status));
  }
  // What the sums cover; behind it a page may be filled up with anything.
  bool arrived(const Block& one) const {
    return std::memcmp(arena->slot(one.slot), arena->slot(one.target), one.header.format.length()) == 0;
  }
  void wipe_targets() {
    std::memset(arena->slot(static_cast<SlotId>(arena->pages() / 2)), 0, arena->capacity_bytes() / 2);
  }

  // Changes bytes of a file behind the disk's back.
  void flip(int number, std::size_t offset) {
    const std::string path = dir.path("f" + std::to_string(number));
    const Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    std::uint8_t byte = 0;
    REQUIRE(::pread(fd.get(), &byte, 1, static_cast<off_t>(offset)) == 1);
    byte ^= 0x10;
    REQUIRE(::pwrite(fd.get(), &byte, 1, static_cast<off_t>(offset)) == 1);
  }
  std::vector<std::uint8_t> contents(int number) {
    std::ifstream in(dir.path("f" + std::to_string(number)), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  // Until something is true that other threads make true.
  template <class Condition>
  static bool eventually(Condition condition) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(kLong);
    while (!condition() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    return condition();
  }

  static constexpr std::uint64_t kNonce = 0xA5A5;
  static constexpr auto kUnsaid = static_cast<MoveStatus>(0xFF);

  TempDir dir;
  bool direct;
  std::map<int, Fd> files;
  std::shared_ptr<Arena> arena;
  std::shared_ptr<Faults> faults;
  std::map<MoveId, Outcome> outcomes;
  SlotId next_slot = 0;
  std::uint32_t next_page = 1;
  std::unique_ptr<Mover> mover;
};

}  // namespace kv::test::moving
