// One contract, every implementation of it: io_uring, threads, and each of them below a FaultyDisk without
// faults. Where the kernel forbids io_uring, threads take its place, and the output says so.
#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "disk.h"
#include "disk_faulty.h"
#include "disk_kit.h"
#include "zeroed.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr double kLong = 60;  // seconds: a timeout that only a bug reaches
constexpr std::size_t kDepth = 16;

std::unique_ptr<Disk> open_best(std::size_t depth) {
  try {
    return open_uring(depth);
  } catch (const std::system_error& error) {
    static bool said = false;
    if (!std::exchange(said, true))
      MESSAGE("no io_uring here (" << std::string(error.what()) << "): the threads implementation runs in its place");
    return open_threads(depth, 4);
  }
}

struct Implementation {
  std::string name;
  std::function<std::unique_ptr<Disk>(std::size_t)> open;
};

std::vector<Implementation> implementations() {
  const auto threads = [](std::size_t depth) { return open_threads(depth, 4); };
  return {{"uring", open_best},
          {"threads", threads},
          {"faulty uring", [](std::size_t depth) { return faulty_disk(open_best(depth), ""); }},
          {"faulty threads", [=](std::size_t depth) { return faulty_disk(threads(depth), ""); }}};
}

// Memory, in pages, and the pieces of one request in it.
struct Pages {
  explicit Pages(std::size_t n) : bytes(n * kPageBytes) {}
  std::uint8_t* page(std::size_t i) { return &bytes[i * kPageBytes]; }
  iovec piece(std::size_t first, std::size_t n = 1) { return {page(first), n * kPageBytes}; }
  void fill(std::uint64_t seed) {
    Random random(seed);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(random.next());
  }
  bool equals(Pages& other) { return std::memcmp(&bytes[0], &other.bytes[0], bytes.size()) == 0; }

  Zeroed<std::uint8_t> bytes;
};

struct File {
  explicit File(const TempDir& dir, const std::string& name = "f")
      : path(dir.path(name)),
        fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | (direct_works(dir.path()) ? O_DIRECT : 0), 0600)) {
    REQUIRE(fd);
  }
  std::size_t size() const {
    struct stat info{};
    REQUIRE(::fstat(fd.get(), &info) == 0);
    return static_cast<std::size_t>(info.st_size);
  }
  void write(Pages& pages) const {
    const auto n = static_cast<ssize_t>(pages.bytes.size());
    REQUIRE(::pwrite(fd.get(), pages.page(0), pages.bytes.size(), 0) == n);
  }

  std::string path;
  Fd fd;
};

DiskRequest transfer(std::uint64_t tag, DiskOp op, int fd, std::size_t page, std::span<iovec> pieces) {
  return {.tag = tag, .op = op, .fd = fd, .offset = page * kPageBytes, .pieces = pieces};
}

// The next n ends, by tag.
std::map<std::uint64_t, int> ends(Disk& disk, std::size_t n) {
  std::vector<DiskDone> done;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(kLong);
  while (done.size() < n && std::chrono::steady_clock::now() < until) disk.collect(done, kLong);
  REQUIRE(done.size() == n);
  std::map<std::uint64_t, int> errors;
  for (const DiskDone& one : done) REQUIRE(errors.emplace(one.tag, one.error).second);
  return errors;
}

int error_of(Disk& disk, const DiskRequest& request) {
  disk.submit(request);
  return ends(disk, 1).at(request.tag);
}

}  // namespace

TEST_CASE("disk: what was written in pieces is read in other pieces") {
  for (const auto& [name, open] : implementations()) {
    CAPTURE(name);
    const TempDir dir;
    const File file(dir);
    Pages out(8), in(8);
    out.fill(1);
    const auto disk = open(kDepth);
    iovec three[] = {out.piece(0, 3), out.piece(3), out.piece(4, 4)};
    REQUIRE(error_of(*disk, transfer(1, DiskOp::kWrite, file.fd.get(), 5, three)) == 0);
    CHECK(file.size() == 13 * kPageBytes);
    iovec reversed[] = {in.piece(6, 2), in.piece(0, 6)};  // the first two pages land at the end
    REQUIRE(error_of(*disk, transfer(2, DiskOp::kRead, file.fd.get(), 5, reversed)) == 0);
    CHECK(std::memcmp(in.page(6), out.page(0), 2 * kPageBytes) == 0);
    CHECK(std::memcmp(in.page(0), out.page(2), 6 * kPageBytes) == 0);
    REQUIRE(error_of(*disk, {.tag = 3, .op = DiskOp::kSync, .fd = file.fd.get()}) == 0);
  }
}

TEST_CASE("disk: as many requests at once as the depth, each ends once, and then as many again") {
  for (const auto& [name, open] : implementations()) {
    CAPTURE(name);
    const TempDir dir;
    const File file(dir);
    Pages out(kDepth), in(kDepth);
    out.fill(2);
    const auto disk = open(kDepth);
    REQUIRE(disk->depth() == kDepth);
    std::vector<iovec> pieces(kDepth);
    for (const DiskOp op : {DiskOp::kWrite, DiskOp::kRead, DiskOp::kRead}) {
      for (std::size_t i = 0; i < kDepth; ++i) {
        pieces[i] = (op == DiskOp::kWrite ? out : in).piece(i);
        disk->submit(transfer(100 + i, op, file.fd.get(), i, {&pieces[i], 1}));
      }
      iovec extra = in.piece(0);
      CHECK_THROWS_AS(disk->submit(transfer(0, DiskOp::kRead, file.fd.get(), 0, {&extra, 1})), Broken);
      const auto errors = ends(*disk, kDepth);
      for (std::size_t i = 0; i < kDepth; ++i) CHECK(errors.at(100 + i) == 0);
    }
    CHECK(in.equals(out));
  }
}

TEST_CASE("disk: the end of the file is EIO, wherever in a request it comes") {
  for (const auto& [name, open] : implementations()) {
    CAPTURE(name);
    const TempDir dir;
    const File file(dir);
    Pages memory(4);
    file.write(memory);
    const auto disk = open(kDepth);
    const auto read = [&](std::size_t page, std::size_t n) {
      std::vector<iovec> pieces;
      for (std::size_t i = 0; i < n; ++i) pieces.push_back(memory.piece(i));
      return error_of(*disk, transfer(1, DiskOp::kRead, file.fd.get(), page, pieces));
    };
    CHECK(read(0, 4) == 0);
    CHECK(read(3, 1) == 0);
    CHECK(read(3, 2) == EIO);
    CHECK(read(1, 4) == EIO);
    CHECK(read(4, 1) == EIO);
    CHECK(read(1000, 3) == EIO);
    REQUIRE(::ftruncate(file.fd.get(), static_cast<off_t>(2 * kPageBytes + 100)) == 0);
    CHECK(read(0, 2) == 0);
    CHECK(read(0, 3) == EIO);
    CHECK(read(2, 1) == EIO);
  }
}

TEST_CASE("disk: what the system refuses is its errno, and the next request is served") {
  for (const auto& [name, open] : implementations()) {
    CAPTURE(name);
    const TempDir dir;
    const File file(dir);
    Pages memory(1);
    file.write(memory);
    iovec piece = memory.piece(0);
    const auto disk = open(kDepth);
    const auto error = [&](DiskOp op, int fd) {
      if (op == DiskOp::kSync) return error_of(*disk, {.tag = 7, .op = op, .fd = fd});
      piece = memory.piece(0);
      return error_of(*disk, transfer(7, op, fd, 0, {&piece, 1}));
    };
    const Fd full(::open("/dev/full", O_RDWR | O_CLOEXEC));
    REQUIRE(full);
    CHECK(error(DiskOp::kWrite, full.get()) == ENOSPC);
    const Fd reader(::open(file.path.c_str(), O_RDONLY | O_CLOEXEC));
    CHECK(error(DiskOp::kWrite, reader.get()) == EBADF);
    CHECK(error(DiskOp::kSync, 1 << 20) == EBADF);
    CHECK(error(DiskOp::kRead, file.fd.get()) == 0);
  }
}

TEST_CASE("disk: allocation makes the file reach that far") {
  for (const auto& [name, open] : implementations()) {
    CAPTURE(name);
    const TempDir dir;
    const File file(dir);
    const auto disk = open(kDepth);
    const int error =
        error_of(*disk, {.tag = 1, .op = DiskOp::kAllocate, .fd = file.fd.get(), .length = 10 * kPageBytes});
    if (error == 0) CHECK(file.size() == 10 * kPageBytes);
    else CHECK(error == EOPNOTSUPP);
  }
}

TEST_CASE("disk: a malformed request is Invalid and takes no room") {
  for (const auto& [name, open] : implementations()) {
    CAPTURE(name);
    const TempDir dir;
    const File file(dir);
    Pages memory(1);
    file.write(memory);
    const int fd = file.fd.get();
    const auto disk = open(1);
    iovec good = memory.piece(0), empty{memory.page(0), 0}, nowhere{nullptr, kPageBytes};
    std::vector<iovec> many(kPiecesMax + 1, good);
    const auto refused = [&](const DiskRequest& request) { CHECK_THROWS_AS(disk->submit(request), Invalid); };
    refused(transfer(1, DiskOp::kRead, -1, 0, {&good, 1}));
    refused(transfer(1, DiskOp::kRead, fd, 0, {}));
    refused(transfer(1, DiskOp::kWrite, fd, 0, many));
    refused(transfer(1, DiskOp::kRead, fd, 0, {&empty, 1}));
    refused(transfer(1, DiskOp::kRead, fd, 0, {&nowhere, 1}));
    refused(transfer(1, DiskOp::kRead, fd, (~std::uint64_t{0} >> 1) / kPageBytes, {&good, 1}));
    refused({.tag = 1, .op = DiskOp::kRead, .fd = fd, .offset = ~std::uint64_t{0}, .pieces = {&good, 1}});
    refused({.tag = 1, .op = DiskOp::kSync, .fd = fd, .pieces = {&good, 1}});
    refused({.tag = 1, .op = DiskOp::kAllocate, .fd = fd});
    refused({.tag = 1, .op = DiskOp::kAllocate, .fd = fd, .offset = 1, .length = ~std::uint64_t{0} >> 1});
    CHECK(error_of(*disk, transfer(1, DiskOp::kRead, fd, 0, {&good, 1})) == 0);
    many.resize(kPiecesMax, good);
    CHECK(error_of(*disk, transfer(1, DiskOp::kWrite, fd, 0, many)) == 0);
    CHECK(file.size() == kPiecesMax * kPageBytes);
  }
}

TEST_CASE("disk: collect looks, waits until its timeout, and returns when it is woken") {
  for (const auto& [name, open] : implementations()) {
    CAPTURE(name);
    const auto disk = open(kDepth);
    std::vector<DiskDone> done;
    const auto seconds = [&](double timeout_s) {
      const auto start = std::chrono::steady_clock::now();
      disk->collect(done, timeout_s);
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    CHECK(seconds(0) < kLong / 2);
    CHECK(seconds(-1) < kLong / 2);
    CHECK(seconds(0.02) >= 0.02);
    disk->wake();  // before it waits
    CHECK(seconds(kLong) < kLong / 2);
    CHECK(seconds(0.02) >= 0.02);  // and that was all of it
    for (int i = 0; i < 100; ++i) {
      std::thread waker([&] { disk->wake(); });
      CHECK(seconds(kLong) < kLong / 2);
      waker.join();
    }
    CHECK(done.empty());
  }
}

TEST_CASE("disk: after its destruction nothing touches the memory") {
  for (const auto& [name, open] : implementations()) {
    CAPTURE(name);
    const TempDir dir;
    const File file(dir);
    Pages out(256), in(256);
    out.fill(3);
    file.write(out);
    std::vector<iovec> pieces(kDepth);
    {
      const auto disk = open(kDepth);
      for (std::size_t i = 0; i < kDepth; ++i) {
        pieces[i] = in.piece(i * 16, 16);
        disk->submit(transfer(i, DiskOp::kRead, file.fd.get(), i * 16, {&pieces[i], 1}));
      }
      std::vector<DiskDone> done;
      disk->collect(done, 0);
    }
    CHECK(in.equals(out));
  }
}

TEST_CASE("disk: one thread makes it, another one uses and destroys it") {
  for (const auto& [name, open] : implementations()) {
    CAPTURE(name);
    const TempDir dir;
    const File file(dir);
    Pages memory(1);
    file.write(memory);
    auto disk = open(kDepth);
    int error = -1;
    std::thread owner([&, mine = std::move(disk)]() mutable {
      iovec piece = memory.piece(0);
      mine->submit(transfer(1, DiskOp::kRead, file.fd.get(), 0, {&piece, 1}));
      std::vector<DiskDone> done;
      mine->collect(done, kLong);
      if (done.size() == 1) error = done[0].error;
      mine.reset();
    });
    owner.join();
    CHECK(error == 0);
  }
}

TEST_CASE("disk: random requests beside an image of the file") {
  constexpr std::size_t kFilePages = 64;
  for (const auto& [name, open] : implementations()) {
    CAPTURE(name);
    const TempDir dir;
    const File file(dir);
    Pages image(kFilePages), memory(kFilePages);
    image.fill(4);
    file.write(image);
    const auto disk = open(kDepth);
    Random random(5);
    for (int round = 0; round < 40; ++round) {
      // Ranges side by side, in their own part of the memory, some read and some written, all at once.
      std::vector<std::vector<iovec>> pieces;
      std::map<std::uint64_t, std::pair<std::size_t, std::size_t>> reads;
      std::size_t page = random.below(8), tag = 0;
      while (pieces.size() < kDepth && page < kFilePages) {
        const std::size_t n = std::min<std::size_t>(1 + random.below(6), kFilePages - page);
        const bool writes = random.chance(50);
        if (writes)
          for (std::size_t i = 0; i < n * kPageBytes; ++i)
            memory.page(page)[i] = image.page(page)[i] = static_cast<std::uint8_t>(random.next());
        std::vector<iovec> list;
        for (std::size_t i = 0; i < n;) {
          const std::size_t part = 1 + random.below(n - i);
          list.push_back(memory.piece(page + i, part));
          i += part;
        }
        pieces.push_back(std::move(list));
        disk->submit(transfer(tag, writes ? DiskOp::kWrite : DiskOp::kRead, file.fd.get(), page, pieces.back()));
        if (!writes) reads[tag] = {page, n};
        ++tag;
        page += n;
      }
      for (const auto& [which, error] : ends(*disk, pieces.size())) {
        REQUIRE(error == 0);
        const auto read = reads.find(which);
        if (read == reads.end()) continue;
        const auto [first, n] = read->second;
        REQUIRE(std::memcmp(memory.page(first), image.page(first), n * kPageBytes) == 0);
      }
    }
  }
}

TEST_CASE("disk: what the kernel cut short goes on where it stopped") {
  Pages memory(3);
  iovec pieces[] = {memory.piece(0), memory.piece(1, 2)};
  DiskRequest request = transfer(1, DiskOp::kWrite, 3, 10, pieces);
  CHECK(settle(request, -EINTR) == kGoOn);
  CHECK(settle(request, -EAGAIN) == kGoOn);
  CHECK(request.bytes() == 3 * kPageBytes);
  CHECK(settle(request, 512) == kGoOn);
  CHECK(request.offset == 10 * kPageBytes + 512);
  CHECK(request.pieces.size() == 2);
  CHECK(request.pieces[0].iov_base == memory.page(0) + 512);
  CHECK(settle(request, 2 * kPageBytes - 512) == kGoOn);
  CHECK(request.pieces.size() == 1);
  CHECK(request.pieces[0].iov_base == memory.page(2));
  CHECK(settle(request, kPageBytes) == 0);
  CHECK(settle(request, 0) == EIO);
  CHECK(settle(request, -ENOSPC) == ENOSPC);
}

TEST_CASE("disk: opening by name") {
  CHECK(open_disk("threads", 8, 2)->kind() == "threads");
  const auto best = open_disk("auto", 8, 2);
  CHECK((best->kind() == "uring" || best->kind() == "threads"));
  CHECK_THROWS_AS(open_disk("aio", 8, 2), Invalid);
  CHECK_THROWS_AS(open_disk("auto", 0, 2), Invalid);
  CHECK_THROWS_AS(open_disk("auto", kDiskDepthMax + 1, 2), Invalid);
  CHECK_THROWS_AS(open_disk("threads", 8, 0), Invalid);
  CHECK(open_disk("auto", kDiskDepthMax, 1)->depth() == kDiskDepthMax);
}
