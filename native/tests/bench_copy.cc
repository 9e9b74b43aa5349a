// How fast are store_block and load_block against memcpy, on one thread? Two yardsticks: one memcpy of the
// whole block (contiguous on both sides, which paged memory is not) and memcpys of the very same pieces.
//
// 1 GiB of arena and 1 GiB of paged memory, both on huge pages, far larger than any cache slice a core gets.
// Every pass walks all blocks in a shuffled order (a part of them would stay in a large L3, where streamed
// stores meet dirty lines). memcpy, store and load follow each other, so that a busy machine slows all
// three; the median ratio over rounds is printed.
// Usage: bench_copy [rounds] [crc path]
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <numeric>
#include <random>
#include <vector>

#include "copy.h"
#include "crc.h"

using namespace kv;

namespace {

constexpr std::size_t kWorkingSet = std::size_t{1} << 30;

// CPU time of this thread: nothing here waits, and other programs' turns do not count.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double seconds(const auto& work) {
  const double start = cpu_seconds();
  work();
  return cpu_seconds() - start;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

std::uint8_t* huge_memory(std::size_t bytes) {
  void* start = mmap(nullptr, bytes + kHugeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) std::abort();
  auto* aligned = reinterpret_cast<std::uint8_t*>(round_up(reinterpret_cast<std::uintptr_t>(start), kHugeBytes));
  madvise(aligned, bytes, MADV_HUGEPAGE);
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i < bytes; i += 8) {
    const std::uint64_t word = random();
    std::memcpy(aligned + i, &word, 8);
  }
  return aligned;
}

struct Case {
  const char* name;
  std::size_t block_bytes;
  std::size_t cell_bytes;
  std::size_t piece_bytes;  // cell_bytes / 2: a run per plane; less: pieces interleaved with other heads
};

PagedLayout layout_of(const Case& c, std::uint8_t* memory, std::uint32_t heads) {
  PagedLayout layout;
  layout.heads = heads;
  layout.layers = static_cast<std::uint32_t>(c.block_bytes / (c.cell_bytes * heads));
  layout.planes = 2;
  layout.pieces = static_cast<std::uint32_t>(c.cell_bytes / 2 / c.piece_bytes);
  layout.piece_bytes = c.piece_bytes;
  const bool short_pieces = layout.pieces > 1;
  layout.piece_stride = c.piece_bytes * heads;
  layout.head_stride = short_pieces ? c.piece_bytes : c.cell_bytes / 2;
  layout.block_stride = c.cell_bytes / 2 * heads;
  layout.blocks = static_cast<std::uint32_t>(kWorkingSet / c.block_bytes);
  for (std::size_t i = 0; i < std::size_t{layout.layers} * 2; ++i)
    layout.bases.push_back(reinterpret_cast<std::uint64_t>(memory) + i * layout.blocks * layout.block_stride);
  layout.check_and_simplify();
  return layout;
}

void publish(const Arena& arena, const SlotFormat& format, SlotId slot, const Key& key) {
  ControlEntry& entry = arena.control(slot);
  entry.length = static_cast<std::uint32_t>(format.length());
  entry.crc = table_crc(arena, format, slot);
  entry.checked = 1;
  std::memcpy(entry.fingerprint, key.bytes.data(), 16);
  entry.state.store(static_cast<std::uint32_t>(SlotState::kReady));
}

// The load as memcpys, unchecked.
void load_pieces(const Route& route, BlockId block, const std::uint8_t* bytes) {
  const PagedLayout& layout = route.layout;
  for (std::uint32_t layer = 0; layer < layout.layers; ++layer)
    for (std::uint32_t head = 0; head < layout.heads; ++head) {
      const std::uint8_t* source = bytes + route.format.cell_offset(layer, head);
      for (std::uint32_t plane = 0; plane < layout.planes; ++plane) {
        std::uint8_t* target = layout.cell(layer, plane, block, head);
        for (std::uint32_t i = 0; i < layout.pieces; ++i, source += layout.piece_bytes)
          std::memcpy(target + i * layout.piece_stride, source, layout.piece_bytes);
      }
    }
}

void measure(const Case& c, const std::shared_ptr<Arena>& arena, std::uint8_t* memory, int rounds) {
  const auto heads = static_cast<std::uint32_t>(std::min<std::size_t>(8, c.block_bytes / c.cell_bytes));
  const PagedLayout layout = layout_of(c, memory, heads);
  const SlotFormat format{layout.layers, heads, static_cast<std::uint32_t>(c.cell_bytes)};
  const Route route{arena, format, layout};
  route.check();
  const std::size_t pages = format.slot_bytes() / kPageBytes;
  const auto slots = static_cast<std::uint32_t>(std::min<std::size_t>(arena->pages() / pages, layout.blocks));
  const auto scratch = std::make_unique<CopyScratch>();
  const Key key{};
  std::vector<std::uint32_t> order(slots);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));

  std::vector<double> copies, pieces, stores, loads;
  std::size_t bad = 0;
  for (int round = 0; round < rounds; ++round) {
    for (const auto i : order)
      arena->control(static_cast<SlotId>(i * pages)).state.store(static_cast<std::uint32_t>(SlotState::kFilling));
    stores.push_back(seconds([&] {
      for (const auto i : order) {
        const auto slot = static_cast<SlotId>(i * pages);
        const Target target{slot, arena->control(slot).generation.load()};
        bad += store_block(route, i, target, *scratch) != BlockStatus::kOk;
      }
    }));
    for (const auto i : order) publish(*arena, format, static_cast<SlotId>(i * pages), key);
    copies.push_back(seconds([&] {
      for (const auto i : order)
        std::memcpy(memory + (slots - 1 - i) * c.block_bytes, arena->slot(static_cast<SlotId>(i * pages)),
                    c.block_bytes);
    }));
    pieces.push_back(seconds([&] {
      for (const auto i : order) load_pieces(route, i, arena->slot(static_cast<SlotId>(i * pages)));
    }));
    loads.push_back(seconds([&] {
      for (const auto i : order)
        bad += load_block(route, slots - 1 - i, static_cast<SlotId>(i * pages), key, *scratch) != BlockStatus::kOk;
    }));
  }
  const auto ratio = [&](const std::vector<double>& yardstick, const std::vector<double>& ours) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < ours.size(); ++i) ratios.push_back(yardstick[i] / ours[i]);
    return median(ratios);
  };
  std::printf("%-11s block %4zu KiB cell %2zu KiB  memcpy %5.2f GB/s  store %4.2fx  load %4.2fx  "
              "pieces: load %4.2fx%s\n",
              c.name, c.block_bytes >> 10, c.cell_bytes >> 10,
              static_cast<double>(slots * c.block_bytes) / median(copies) / 1e9, ratio(copies, stores),
              ratio(copies, loads), ratio(pieces, loads), bad ? "  BAD STATUS" : "");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 7;
  if (argc > 2) set_crc_path(argv[2]);
  const auto arena = Arena::create("bench", kWorkingSet + kWorkingSet / 8);
  const bool huge = arena->prefault(2, true, false);
  std::uint8_t* memory = huge_memory(kWorkingSet);
  std::printf("path %s, arena %s\n", std::string(crc_path()).c_str(), huge ? "on huge pages" : "on 4 KiB pages");
  constexpr std::size_t k = 1024;
  const Case cases[] = {
      {"head-major", 2048 * k, 4 * k, 2 * k},   {"head-major", 2048 * k, 16 * k, 8 * k},
      {"head-major", 2048 * k, 64 * k, 32 * k}, {"head-major", 256 * k, 16 * k, 8 * k},
      {"head-major", 64 * k, 16 * k, 8 * k},    {"head-major", 64 * k, 4 * k, 2 * k},
      {"token-major", 2048 * k, 8 * k, 256},    {"token-major", 2048 * k, 4 * k, 128},
      {"token-major", 256 * k, 8 * k, 256},
  };
  for (const Case& c : cases) measure(c, arena, memory, rounds);
  return 0;
}
