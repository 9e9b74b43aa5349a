#include <doctest/doctest.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <map>
#include <set>
#include <string>
#include <thread>

#include "disk_faulty.h"
#include "disk_kit.h"
#include "zeroed.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr double kLong = 60;  // seconds: a timeout that only a bug reaches
constexpr std::size_t kFilePages = 8;

// A file of kFilePages pages of 0xAA, memory of as many pages of 0x55, and a disk that fails.
struct Rig {
  explicit Rig(const std::string& spec = "")
      : fd(::open(dir.path("f").c_str(),
                  O_RDWR | O_CREAT | O_CLOEXEC | (direct_works(dir.path()) ? O_DIRECT : 0), 0600)),
        memory(kFilePages * kPageBytes), faults(std::make_shared<Faults>(parse_faults(spec))),
        disk(faulty_disk(open_threads(16, 2), faults)) {
    REQUIRE(fd);
    restore();
  }
  void restore() {
    fill(0xAA);
    REQUIRE(::pwrite(fd.get(), &memory[0], memory.size(), 0) == static_cast<ssize_t>(memory.size()));
    fill(0x55);
  }
  void fill(std::uint8_t value) { std::memset(&memory[0], value, memory.size()); }

  void submit(DiskOp op, std::uint64_t tag = 1, std::size_t page = 0, std::size_t pages = kFilePages) {
    DiskRequest request{.tag = tag, .op = op, .fd = fd.get(), .offset = page * kPageBytes};
    if (op == DiskOp::kAllocate) request.length = pages * kPageBytes;
    if (op == DiskOp::kRead || op == DiskOp::kWrite) {
      pieces[tag] = {&memory[page * kPageBytes], pages * kPageBytes};
      request.pieces = {&pieces[tag], 1};
    }
    disk->submit(request);
  }
  int end() {
    std::vector<DiskDone> done;
    disk->collect(done, kLong);
    REQUIRE(done.size() == 1);
    return done[0].error;
  }
  int error(DiskOp op, std::size_t page = 0, std::size_t pages = kFilePages) {
    submit(op, 1, page, pages);
    return end();
  }
  std::vector<std::uint8_t> file() const {
    Zeroed<std::uint8_t> bytes(kFilePages * kPageBytes);
    REQUIRE(::pread(fd.get(), &bytes[0], bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    return {&bytes[0], &bytes[0] + bytes.size()};
  }
  std::vector<std::uint8_t> seen() const { return {&memory[0], &memory[0] + memory.size()}; }

  TempDir dir;
  Fd fd;
  Zeroed<std::uint8_t> memory;
  std::map<std::uint64_t, iovec> pieces;
  std::shared_ptr<Faults> faults;
  std::unique_ptr<Disk> disk;
};

std::size_t wrong_bits(const std::vector<std::uint8_t>& bytes, std::uint8_t right) {
  std::size_t bits = 0;
  for (const std::uint8_t byte : bytes) bits += static_cast<std::size_t>(std::popcount<std::uint8_t>(byte ^ right));
  return bits;
}

constexpr std::size_t kBits = kFilePages * kPageBytes * 8;

}  // namespace

TEST_CASE("faults: a specification is read whole, or refused by name") {
  const FaultSpec spec = parse_faults(
      "seed=7,read_eio=0.01,write_eio=0.02,write_enospc=0.001,short=0.03,flip_read=0.04,flip_write=0.05,torn=0.06,"
      "sync_eio=0.07,slow_ms=5:0.1,stall_ms=5000:1e-3");
  CHECK(spec.seed == 7);
  CHECK(spec.read_eio == 0.01);
  CHECK(spec.write_eio == 0.02);
  CHECK(spec.write_enospc == 0.001);
  CHECK(spec.shortened == 0.03);
  CHECK(spec.flip_read == 0.04);
  CHECK(spec.flip_write == 0.05);
  CHECK(spec.torn == 0.06);
  CHECK(spec.sync_eio == 0.07);
  CHECK(spec.slow_ms == 5);
  CHECK(spec.slow == 0.1);
  CHECK(spec.stall_ms == 5000);
  CHECK(spec.stall == 0.001);
  CHECK(parse_faults("").read_eio == 0);
  CHECK(parse_faults("seed=18446744073709551615").seed == ~std::uint64_t{0});

  const auto refused = [](const char* text, const char* part) {
    CAPTURE(text);
    bool named = false;
    try {
      parse_faults(text);
    } catch (const Invalid& error) {
      named = std::string(error.what()).find(part) != std::string::npos;
    }
    CHECK(named);
  };
  refused("seed=7,fire=0.1", "\"fire=0.1\": unknown name");
  refused("read_eio", "read_eio");
  refused("read_eio=", "read_eio=");
  refused("read_eio=x", "read_eio=x");
  refused("read_eio=0.1x", "read_eio=0.1x");
  refused("read_eio=1.1", "read_eio=1.1");
  refused("read_eio=-0.1", "read_eio=-0.1");
  refused("read_eio=nan", "read_eio=nan");
  refused("seed=-1", "seed=-1");
  refused("seed=0.5", "seed=0.5");
  refused("slow_ms=5", "slow_ms=5");
  refused("slow_ms=5:2", "slow_ms=5:2");
  refused("stall_ms=1e7:0.1", "stall_ms=1e7:0.1");
  refused("torn=0.1,torn=0.2", "torn=0.2");
  refused("torn=0.1,", "name=value");
  refused(",torn=0.1", "name=value");
}

TEST_CASE("faults: a failing request moves nothing") {
  SUBCASE("read") {
    Rig rig("read_eio=1");
    CHECK(rig.error(DiskOp::kRead) == EIO);
    CHECK(wrong_bits(rig.seen(), 0x55) == 0);
    CHECK(rig.error(DiskOp::kWrite) == 0);
  }
  SUBCASE("write") {
    Rig rig("write_eio=1");
    CHECK(rig.error(DiskOp::kWrite) == EIO);
    CHECK(wrong_bits(rig.file(), 0xAA) == 0);
    CHECK(rig.error(DiskOp::kRead) == 0);
    CHECK(rig.faults->counts().errors == 1);
    CHECK(rig.faults->counts().requests == 2);
  }
  SUBCASE("a full disk") {
    Rig rig("write_enospc=1");
    CHECK(rig.error(DiskOp::kWrite) == ENOSPC);
    CHECK(rig.error(DiskOp::kAllocate) == ENOSPC);
    CHECK(rig.error(DiskOp::kSync) == 0);
    CHECK(wrong_bits(rig.file(), 0xAA) == 0);
  }
  SUBCASE("sync") {
    Rig rig("sync_eio=1");
    CHECK(rig.error(DiskOp::kSync) == EIO);
    CHECK(rig.error(DiskOp::kWrite) == 0);
  }
}

TEST_CASE("faults: a flip is one bit, on the way in or on the way out") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CAPTURE(seed);
    {
      Rig rig("flip_read=1,seed=" + std::to_string(seed));
      CHECK(rig.error(DiskOp::kRead) == 0);
      CHECK(wrong_bits(rig.seen(), 0xAA) == 1);
      CHECK(wrong_bits(rig.file(), 0xAA) == 0);
    }
    {
      Rig rig("flip_write=1,short=0.5,seed=" + std::to_string(seed));
      CHECK(rig.error(DiskOp::kWrite) == 0);
      CHECK(wrong_bits(rig.seen(), 0x55) == 0);
      CHECK(wrong_bits(rig.file(), 0x55) == 1);
      CHECK(rig.faults->counts().flipped_writes == 1);
    }
  }
}

TEST_CASE("faults: a torn write leaves its first sectors, and the old bytes behind them") {
  Rig rig("torn=1,seed=3");
  const auto before = rig.file();
  std::set<std::size_t> cuts;
  for (int round = 0; round < 40; ++round) {
    REQUIRE(rig.error(DiskOp::kWrite) == EIO);
    const auto file = rig.file();
    std::size_t cut = 0;
    while (cut < file.size() && file[cut] == 0x55) ++cut;
    REQUIRE(cut < file.size());
    REQUIRE(cut % 512 == 0);
    REQUIRE(std::equal(file.begin() + static_cast<std::ptrdiff_t>(cut), file.end(),
                       before.begin() + static_cast<std::ptrdiff_t>(cut)));
    cuts.insert(cut);
    rig.restore();
  }
  CHECK(cuts.size() > 10);
  CHECK(std::any_of(cuts.begin(), cuts.end(), [](std::size_t cut) { return cut % kPageBytes != 0; }));
}

TEST_CASE("faults: a shortened request is whole at its end") {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    Rig rig("short=1,seed=" + std::to_string(seed));
    rig.faults->record();
    CHECK(rig.error(DiskOp::kWrite) == 0);
    CHECK(wrong_bits(rig.file(), 0x55) == 0);
    const auto log = rig.faults->log();
    REQUIRE(log.size() == 2);
    CHECK(log[0].offset == 0);
    CHECK(log[1].offset == log[0].length);
    CHECK(log[0].length + log[1].length == kFilePages * kPageBytes);
    CHECK(log[0].ended < log[1].begun);
    rig.fill(0);
    CHECK(rig.error(DiskOp::kRead) == 0);
    CHECK(wrong_bits(rig.seen(), 0x55) == 0);
  }
}

TEST_CASE("faults: the same seed is the same fate, another seed another one") {
  const auto fates = [](const std::string& more, std::uint64_t seed) {
    Rig rig("write_eio=0.3,seed=" + std::to_string(seed) + more);
    std::vector<int> errors;
    for (int i = 0; i < 40; ++i) errors.push_back(rig.error(DiskOp::kWrite, 0, 1));
    return errors;
  };
  const auto first = fates("", 1);
  CHECK(std::count(first.begin(), first.end(), EIO) > 3);
  CHECK(std::count(first.begin(), first.end(), 0) > 15);
  CHECK(first == fates("", 1));
  CHECK(first == fates(",flip_write=0.5,sync_eio=1", 1));  // a chance of its own for each
  CHECK(first != fates("", 2));
}

TEST_CASE("faults: switches at run time") {
  Rig rig;
  CHECK(rig.error(DiskOp::kWrite) == 0);
  rig.faults->fail(DiskOp::kWrite, ENOSPC);
  CHECK(rig.error(DiskOp::kWrite) == ENOSPC);
  CHECK(rig.error(DiskOp::kRead) == 0);
  rig.faults->fail(DiskOp::kWrite, 0);
  CHECK(rig.error(DiskOp::kWrite) == 0);
  rig.faults->set(parse_faults("read_eio=1"));
  CHECK(rig.error(DiskOp::kRead) == EIO);
  rig.faults->set({});
  rig.faults->spoil(rig.fd.get(), 3 * kPageBytes + 10, 3 * kPageBytes + 11);
  CHECK(rig.error(DiskOp::kRead) == EIO);
  CHECK(rig.error(DiskOp::kRead, 0, 3) == 0);
  CHECK(rig.error(DiskOp::kRead, 3, 1) == EIO);
  CHECK(rig.error(DiskOp::kRead, 4, 4) == 0);
  CHECK(rig.error(DiskOp::kWrite) == 0);
}

TEST_CASE("faults: what is held waits until it is released, and nothing else does") {
  Rig rig;
  rig.faults->hold(DiskOp::kRead);
  rig.submit(DiskOp::kRead, 2, 0, 1);
  rig.submit(DiskOp::kRead, 3, 1, 1);
  CHECK(rig.faults->held() == 2);
  CHECK(rig.error(DiskOp::kWrite, 4, 1) == 0);
  std::vector<DiskDone> done;
  rig.disk->collect(done, 0.01);
  CHECK(done.empty());
  std::thread other([&] { rig.faults->release(DiskOp::kRead); });  // wakes the collect that waits
  while (done.size() < 2) rig.disk->collect(done, kLong);
  other.join();
  CHECK(rig.faults->held() == 0);
  CHECK(done[0].error == 0);
  CHECK(done[1].error == 0);

  rig.faults->hold(DiskOp::kWrite);
  rig.submit(DiskOp::kWrite, 5, 0, 1);
  rig.disk.reset();  // lets go of it
  CHECK(rig.faults->held() == 0);
  CHECK(rig.file()[0] == 0xAA);
}

TEST_CASE("faults: a slow or stalled request ends later, and others do not wait for it") {
  Rig rig("stall_ms=30:1");
  const auto start = std::chrono::steady_clock::now();
  rig.submit(DiskOp::kRead, 1, 0, 1);
  rig.faults->set({});
  CHECK(rig.error(DiskOp::kWrite, 1, 1) == 0);
  CHECK(rig.faults->held() == 1);
  CHECK(rig.end() == 0);
  CHECK(std::chrono::steady_clock::now() - start >= std::chrono::milliseconds(30));
  CHECK(rig.faults->counts().delayed == 1);
  rig.faults->set(parse_faults("slow_ms=3:1"));
  for (int i = 0; i < 10; ++i) CHECK(rig.error(DiskOp::kRead) == 0);
}

TEST_CASE("faults: the log tells what reached the file, and what was safe when") {
  Rig rig;
  CHECK(rig.error(DiskOp::kWrite) == 0);
  CHECK(rig.faults->log().empty());
  rig.faults->record();
  CHECK(rig.error(DiskOp::kRead) == 0);
  rig.fill(0x11);
  CHECK(rig.error(DiskOp::kWrite, 2, 1) == 0);
  CHECK(rig.error(DiskOp::kSync) == 0);
  const std::size_t synced = rig.faults->moment();
  rig.faults->fail(DiskOp::kWrite, EIO);
  CHECK(rig.error(DiskOp::kWrite, 3, 1) == EIO);  // the disk never saw it
  rig.faults->fail(DiskOp::kWrite, 0);
  rig.faults->set(parse_faults("flip_write=1"));
  CHECK(rig.error(DiskOp::kWrite, 3, 1) == 0);
  CHECK(rig.error(DiskOp::kAllocate) == 0);

  const auto log = rig.faults->log();
  REQUIRE(log.size() == 4);
  CHECK(log[0].op == DiskOp::kWrite);
  CHECK(log[0].fd == rig.fd.get());
  CHECK(log[0].offset == 2 * kPageBytes);
  CHECK(log[0].bytes == std::vector<std::uint8_t>(kPageBytes, 0x11));
  CHECK(log[1].op == DiskOp::kSync);
  CHECK(log[0].begun < log[0].ended);
  CHECK(log[0].ended < log[1].begun);
  CHECK(log[1].ended < synced);
  CHECK(log[1].error == 0);
  CHECK(wrong_bits(log[2].bytes, 0x11) == 1);
  CHECK(log[2].begun >= synced);
  CHECK(log[3].op == DiskOp::kAllocate);
  CHECK(log[3].length == kFilePages * kPageBytes);
  // What the log says is what the file has.
  const auto file = rig.file();
  CHECK(std::equal(log[2].bytes.begin(), log[2].bytes.end(), file.begin() + 3 * kPageBytes));
}
