// How long a loop is held by a disk pool: taking up what lies on the disk, and one pump() of an evacuation.
//
//   bench_disk_pool [RECORDS]    chains of 1000 blocks in segments of 1 GiB (sparse files: nothing is read of them)
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "disk_kit.h"
#include "disk_pool.h"

using namespace kv;
using namespace kv::test;

namespace {

using Clock = std::chrono::steady_clock;
const SlotFormat kTiny{1, 1, 64};  // one page: 2 with its header
constexpr std::size_t kChain = 1000;

double since(Clock::time_point begun) { return std::chrono::duration<double>(Clock::now() - begun).count(); }

// Only header and footer: a record is believed until it is read.
void write_segment(const std::string& path, const StoreId& store, std::uint32_t number,
                   std::vector<FooterEntry>& entries) {
  const SegmentHeader header{store, number, kSegmentPagesMax, number + 1, 77};
  std::vector<std::uint8_t> page(kPageBytes);
  encode(header, page.data());
  const Footer end = footer(entries, header);
  std::ofstream out(segment_path(path, number), std::ios::binary);
  out.write(reinterpret_cast<const char*>(page.data()), kPageBytes);
  out.seekp(static_cast<std::streamoff>(std::size_t{end.page} * kPageBytes));
  out.write(reinterpret_cast<const char*>(end.bytes.data()), static_cast<std::streamsize>(end.bytes.size()));
  entries.clear();
}

// Segments in which 16 chains grow in turns, as several conversations do.
std::size_t write_all(const std::string& path, const StoreId& store, std::size_t records) {
  const std::size_t each = (kSegmentPagesMax - 1) / 2 - 2000;
  std::vector<FooterEntry> entries;
  std::uint32_t segments = 0;
  std::uint64_t group = 0;
  for (std::size_t n = 0; n < records; group += 16 * kChain)
    for (std::size_t depth = 1; depth <= kChain && n < records; ++depth)
      for (std::uint64_t chain = 0; chain < 16 && n < records; ++chain, ++n) {
        const std::uint64_t name = 1 + group + chain * kChain + depth;
        const Key parent = depth == 1 ? key_of(0) : key_of(name - 1);
        entries.push_back({key_of(name), parent, static_cast<std::uint32_t>(depth),
                           static_cast<std::uint32_t>(1 + 2 * entries.size()), 1, kTiny});
        if (entries.size() == each) write_segment(path, store, segments++, entries);
      }
  if (!entries.empty()) write_segment(path, store, segments++, entries);
  return segments;
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t records = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000000;
  TempDir dir;
  DiskDirectory::Options where;
  where.path = dir.path();
  where.segment_bytes = kSegmentBytesMax;
  where.capacity_bytes = 64 * kSegmentBytesMax;
  where.direct = direct_works(dir.path());
  const StoreId store = DiskDirectory::open(where)->id();
  const std::size_t segments = write_all(dir.path(), store, records);
  where.capacity_bytes = std::max<std::size_t>(segments, 3) * kSegmentBytesMax;

  auto directory = DiskDirectory::open(where);
  auto begun = Clock::now();
  DiskSurvey survey(directory);
  survey.read(2);
  const double read_s = since(begun);
  Index index(2 * records);
  auto arena = Arena::create("bench", kHugeBytes);
  auto mover = std::make_unique<Mover>(open_disk("auto", 32, 2), arena, Mover::Limits{});
  DiskPool pool(index, arena, directory, std::move(mover), {});
  begun = Clock::now();
  const DiskAdopted adopted = pool.adopt(survey);
  const double adopt_s = since(begun);

  // There is no room for another segment, so the first pumps evacuate: nothing of it was used.
  std::vector<double> pumps_s;
  const std::size_t before = pool.counts().records;
  while (pool.counts().evacuating == 1 || pumps_s.empty()) {
    begun = Clock::now();
    pool.pump();
    pumps_s.push_back(since(begun));
  }
  std::sort(pumps_s.begin(), pumps_s.end());
  const double evacuation_s = std::accumulate(pumps_s.begin(), pumps_s.end(), 0.0);
  begun = Clock::now();
  pool.check();
  const double check_s = since(begun);
  const std::size_t evicted = before - pool.counts().records;
  std::printf("{\"records\": %zu, \"segments\": %zu, \"survey_s\": %.3f, ", adopted.readable, segments, read_s);
  std::printf("\"adopt_s\": %.3f, ", adopt_s);
  std::printf("\"evicted\": %zu, \"evicted_us\": %.2f, \"pump_ms_median\": %.2f, \"pump_ms_longest\": %.2f, ", evicted,
              evacuation_s * 1e6 / static_cast<double>(std::max<std::size_t>(evicted, 1)),
              pumps_s[pumps_s.size() / 2] * 1e3, pumps_s.back() * 1e3);
  std::printf("\"check_s\": %.3f, \"memory_bytes\": %zu}\n", check_s, pool.memory_bytes());
  return 0;
}
