// How fast are Mover reads and writes (CRC verified) against fio and against a bare Disk with the same requests?
//
// Segments of 1 GiB, made as the store makes them (written once), are overwritten and read as records of 2 MiB,
// 256 KiB and 64 KiB: neighbours in order, and in random order, where every record is a request of its own.
// fio does the same on the same files, with blocks of the record's payload, direct, io_uring, the same depth.
// The three follow each other, so that a busy machine slows all; medians of payload bytes per second.
// Usage: bench_disk DIRECTORY [rounds] [segments] [depth] [verify threads] [uring | threads]
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "copy.h"
#include "kept.h"
#include "mover.h"

using namespace kv;

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kPages = kSegmentPagesMax;
constexpr std::size_t kJobBytes = std::size_t{32} << 20;  // a prompt's worth
constexpr std::size_t kJobs = 8;                          // under way
constexpr std::uint64_t kNonce = 1;

struct Setup {
  std::string directory, io = "auto";
  int rounds = 5, segments = 2, verify_threads = 1;
  std::size_t depth = 64;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

[[noreturn]] void stop(const char* why) {
  std::fprintf(stderr, "bench_disk: %s\n", why);
  std::exit(1);
}

struct Bench {
  Setup setup;
  std::vector<std::string> paths;
  std::vector<int> fds;
  std::shared_ptr<Arena> arena;
  SlotFormat format;
  std::vector<WriteOrder> orders;  // all records; slots and sums repeat with the arena's size
  std::size_t slots = 0;

  std::size_t payload_bytes() const { return orders.size() * format.slot_bytes(); }
};

void run_jobs(const Bench& bench, Mover& mover, const std::vector<std::uint32_t>& order, bool writes) {
  const std::size_t per_job = std::max<std::size_t>(1, kJobBytes / bench.format.slot_bytes());
  std::size_t next = 0, open = 0;
  const auto submit = [&] {
    const std::size_t stop_at = std::min(order.size(), next + per_job);
    std::vector<ReadOrder> reads;
    std::vector<WriteOrder> mine;
    for (; next < stop_at; ++next) {
      const WriteOrder& one = bench.orders[order[next]];
      if (writes) mine.push_back(one);
      else reads.push_back({{one.fd, one.page, kNonce, one.header.key, one.header.payload_crc, bench.format},
                            static_cast<SlotId>(next % bench.slots * (bench.format.slot_bytes() / kPageBytes))});
    }
    if (writes) mover.write(std::move(mine));
    else mover.read(std::move(reads));
    ++open;
  };
  while (open < kJobs && next < order.size()) submit();
  while (open > 0) {
    pollfd entry{mover.eventfd(), POLLIN, 0};
    ::poll(&entry, 1, -1);
    for (const Notice& notice : mover.notices()) {
      for (const MoveStatus status : notice.statuses)
        if (status != MoveStatus::kOk) stop("a record was not moved");
      if (!notice.last) continue;
      --open;
      if (next < order.size()) submit();
    }
  }
}

// The same requests, unverified and without a mover.
void run_disk(const Bench& bench, Disk& disk, const std::vector<std::uint32_t>& order, bool writes) {
  const std::size_t slot_bytes = bench.format.slot_bytes(), record_bytes = slot_bytes + kPageBytes;
  const bool in_order = std::is_sorted(order.begin(), order.end());
  const std::size_t most = in_order ? std::clamp<std::size_t>(kMergeBytes / record_bytes, 1, 64) : 1;
  const std::size_t depth = std::min(disk.depth(), std::max<std::size_t>(1, (64 << 20) / (most * record_bytes)));
  std::vector<iovec> pieces(depth * 2 * most);
  void* headers = nullptr;
  if (::posix_memalign(&headers, kPageBytes, depth * most * kPageBytes) != 0) stop("no memory");
  std::vector<std::size_t> free(depth);
  std::iota(free.begin(), free.end(), std::size_t{0});
  std::vector<DiskDone> done;
  std::size_t next = 0;
  while (next < order.size() || free.size() < depth) {
    while (next < order.size() && !free.empty()) {
      const std::size_t lane = free.back();
      free.pop_back();
      const WriteOrder& first = bench.orders[order[next]];
      std::size_t count = 0;
      for (; count < most && next < order.size(); ++count, ++next) {
        const WriteOrder& one = bench.orders[order[next]];
        if (one.fd != first.fd || one.page != first.page + count * (record_bytes / kPageBytes)) break;
        const SlotId slot = writes ? one.slot : static_cast<SlotId>(next % bench.slots * (slot_bytes / kPageBytes));
        pieces[(lane * most + count) * 2] = {static_cast<std::uint8_t*>(headers) + (lane * most + count) * kPageBytes,
                                             kPageBytes};
        pieces[(lane * most + count) * 2 + 1] = {bench.arena->slot(slot), slot_bytes};
        if (writes) encode(one.header, static_cast<std::uint8_t*>(headers) + (lane * most + count) * kPageBytes);
      }
      disk.submit({.tag = lane,
                   .op = writes ? DiskOp::kWrite : DiskOp::kRead,
                   .fd = first.fd,
                   .offset = std::uint64_t{first.page} * kPageBytes,
                   .pieces = {&pieces[lane * most * 2], count * 2}});
    }
    done.clear();
    disk.collect(done, 60);
    for (const DiskDone& one : done) {
      if (one.error != 0) stop("the disk failed");
      free.push_back(one.tag);
    }
  }
  std::free(headers);
}

double run_fio(const Bench& bench, bool in_order, bool writes) {
  std::string files;
  for (const std::string& path : bench.paths) files += (files.empty() ? "" : ":") + path;
  const std::string kind = std::string(in_order ? "" : "rand") + (writes ? "write" : "read");
  const std::size_t block = bench.format.slot_bytes();
  const std::size_t depth = std::clamp<std::size_t>((64 << 20) / block, 8, bench.setup.depth);
  const std::string command =
      "fio --minimal --name=x --direct=1 --ioengine=io_uring --overwrite=1 --allow_file_create=0 --rw=" + kind +
      " --filename=" + files + " --filesize=" + std::to_string(std::size_t{kPages} * kPageBytes) +
      " --bs=" + std::to_string(block) + " --iodepth=" + std::to_string(depth);
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) stop("cannot start fio");
  std::string text;
  char part[4096];
  while (const std::size_t n = std::fread(part, 1, sizeof part, pipe)) text.append(part, n);
  if (::pclose(pipe) != 0) stop("fio failed");
  const int field = writes ? 47 : 6;  // KiB/s
  std::size_t at = 0;
  for (int i = 0; i < field && at != std::string::npos; ++i) at = text.find(';', at) + 1;
  return std::strtod(text.c_str() + at, nullptr) * 1024;
}

void lay_out(Bench& bench, std::size_t block_bytes) {
  const std::size_t cell = std::min<std::size_t>(block_bytes / 8, 16 << 10);
  bench.format = {static_cast<std::uint32_t>(block_bytes / cell / 8), 8, static_cast<std::uint32_t>(cell) - 64};
  const std::size_t pages = bench.format.slot_bytes() / kPageBytes;
  bench.slots = bench.arena->pages() / pages;
  std::vector<std::uint32_t> sums;
  for (std::size_t i = 0; i < bench.slots; ++i)
    sums.push_back(test::write_block(*bench.arena, static_cast<SlotId>(i * pages), bench.format, test::key_of(i)));
  bench.orders.clear();
  for (const int fd : bench.fds)
    for (std::uint32_t page = 1; page + pages + 1 < kPages; page += static_cast<std::uint32_t>(pages + 1)) {
      const std::size_t slot = bench.orders.size() % bench.slots;
      RecordHeader header;
      header.key = test::key_of(slot);
      header.nonce = kNonce;
      header.sequence = header.depth = 1;
      header.payload_crc = sums[slot];
      header.format = bench.format;
      bench.orders.push_back({fd, page, header, static_cast<SlotId>(slot * pages)});
    }
}

void measure(Bench& bench, std::size_t block_bytes, bool in_order) {
  std::vector<std::uint32_t> order(bench.orders.size());
  std::iota(order.begin(), order.end(), 0u);
  if (!in_order) std::shuffle(order.begin(), order.end(), std::mt19937(1));
  for (const bool writes : {true, false}) {
    std::vector<double> fio, disk, mover, over_fio, over_disk;
    for (int round = 0; round < bench.setup.rounds; ++round) {
      const auto rate = [&](const auto& work) {
        const auto start = Clock::now();
        work();
        return static_cast<double>(bench.payload_bytes()) / seconds_since(start);
      };
      // The mover comes after fio, so that its writes put right what fio has overwritten.
      fio.push_back(run_fio(bench, in_order, writes));
      const auto bare = open_disk(bench.setup.io, bench.setup.depth, 16);
      if (writes) lay_out(bench, block_bytes);
      disk.push_back(rate([&] { run_disk(bench, *bare, order, writes); }));
      Mover ours(open_disk(bench.setup.io, bench.setup.depth, 16), bench.arena,
                 {.verify_threads = bench.setup.verify_threads});
      mover.push_back(rate([&] { run_jobs(bench, ours, order, writes); }));
      over_fio.push_back(mover.back() / fio.back());
      over_disk.push_back(mover.back() / disk.back());
    }
    std::printf("%4zu KiB %-9s %-5s  fio %5.2f  disk %5.2f  mover %5.2f GB/s   mover/fio %.3f  mover/disk %.3f\n",
                block_bytes >> 10, in_order ? "in order" : "random", writes ? "write" : "read", median(fio) / 1e9,
                median(disk) / 1e9, median(mover) / 1e9, median(over_fio), median(over_disk));
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) stop("usage: bench_disk DIRECTORY [rounds] [segments] [depth] [verify threads] [uring | threads]");
  Bench bench;
  bench.setup.directory = argv[1];
  if (argc > 2) bench.setup.rounds = std::max(1, std::atoi(argv[2]));
  if (argc > 3) bench.setup.segments = std::max(1, std::atoi(argv[3]));
  if (argc > 4) bench.setup.depth = static_cast<std::size_t>(std::max(8, std::atoi(argv[4])));
  if (argc > 5) bench.setup.verify_threads = std::max(1, std::atoi(argv[5]));
  if (argc > 6) bench.setup.io = argv[6];
  bench.arena = Arena::create("bench", std::size_t{512} << 20);
  const bool huge = bench.arena->prefault(2, true, false);
  std::printf("depth %zu, %d verify threads, %s, arena %s\n", bench.setup.depth, bench.setup.verify_threads,
              std::string(open_disk(bench.setup.io, 8, 1)->kind()).c_str(), huge ? "on huge pages" : "on 4 KiB pages");
  {
    Mover maker(open_disk(bench.setup.io, bench.setup.depth, 16), bench.arena, {});
    for (int i = 0; i < bench.setup.segments; ++i) {
      bench.paths.push_back(bench.setup.directory + "/bench-" + std::to_string(i) + ".kvs");
      bench.fds.push_back(::open(bench.paths.back().c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_DIRECT, 0600));
      if (bench.fds.back() < 0) stop("cannot open a file there");
      maker.create(bench.fds.back(), kPages, {});
    }
    if (!maker.drain(600)) stop("creation takes too long");
  }
  for (const std::size_t block_bytes : {std::size_t{2} << 20, std::size_t{256} << 10, std::size_t{64} << 10}) {
    lay_out(bench, block_bytes);
    for (const bool in_order : {true, false}) measure(bench, block_bytes, in_order);
  }
  for (const std::string& path : bench.paths) ::unlink(path.c_str());
  return 0;
}
