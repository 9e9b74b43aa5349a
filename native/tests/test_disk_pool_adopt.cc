// What a pool finds of an earlier one: records joined by keys, newest first, parents before children.
#include <array>
#include <filesystem>
#include <fstream>
#include <utility>

#include "disk_pool_kit.h"

using namespace kv;
using test::chain_of;
using test::kBlock;
using test::key_of;
using test::Rig;
using test::RigOptions;
using test::SegmentImage;
using test::sorted;
using test::TempDir;

namespace {

constexpr std::uint32_t kPages = test::kSmallSegment / kPageBytes;

// A directory without segments; its id.
StoreId make_directory(const std::string& path) {
  DiskDirectory::Options options;
  options.path = path;
  options.capacity_bytes = 6 * test::kSmallSegment;
  options.segment_bytes = test::kSmallSegment;
  return DiskDirectory::open(options)->id();
}

SegmentImage image(const StoreId& store, std::uint32_t number, std::uint64_t sequence) {
  return SegmentImage({store, number, kPages, sequence, 1000 + sequence});
}

std::size_t files(const std::string& path) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(path)) count += entry.path().extension() == ".kvs";
  return count;
}

}  // namespace

TEST_CASE("disk pool adopt: what was flushed is there again, right, and sealed in the background") {
  TempDir dir;
  {
    Rig rig(dir.path());
    rig.save(rig.root(), 1, 100);
    rig.save(rig.node(50), 1000, 30);
    CHECK(rig.flush() == 0);
    rig.settle();
  }
  {
    Rig rig(dir.path());
    CHECK(rig.adopted.readable == 130);
    CHECK(rig.adopted.segments == 2);
    CHECK(rig.adopted.unsealed == 1);
    CHECK(rig.adopted.orphaned + rig.adopted.older + rig.adopted.no_room + rig.adopted.rotten == 0);
    std::vector<NodeId> nodes;
    for (std::uint64_t name = 1; name <= 100; ++name) nodes.push_back(rig.node(name));
    CHECK(rig.read(nodes).ok == sorted(nodes));
    CHECK(rig.index.node(rig.node(1000)).parent == rig.node(50));
    CHECK(rig.pool->take_stored().empty());
    rig.settle();
    CHECK(rig.pool->counts().sealed == 2);
    CHECK(rig.pool->counts().sealing == 0);
  }
  Rig rig(dir.path());
  CHECK(rig.adopted.readable == 130);
  CHECK(rig.adopted.unsealed == 0);
  CHECK(rig.flush() == 0);
  rig.save(rig.node(1029), 2000, 10);  // and it goes on
  CHECK(rig.holds(2009));
}

TEST_CASE("disk pool adopt: an old head with younger blocks below it does not take them along") {
  TempDir dir;
  {
    Rig rig(dir.path());
    const auto head = rig.save(rig.root(), 1, 5);
    rig.save(rig.root(), 1000, 79);  // to the end of the first segment
    rig.save(head[4], 10, 5);
    rig.save(rig.root(), 3000, 79);
    CHECK(rig.flush() == 0);
  }
  Rig rig(dir.path());
  CHECK(rig.adopted.readable == 168);
  for (std::uint64_t first = 10000; rig.holds(1000) && first < 40000; first += 1000) {
    rig.save(rig.root(), first, 40);
    rig.settle();
  }
  CHECK(rig.node(1000) == kNone);
  CHECK(rig.holds(5));
  CHECK(rig.holds(14));
}

TEST_CASE("disk pool adopt: once, first, and of this directory") {
  TempDir dir, other;
  {
    Rig rig(dir.path());
    rig.settle();
  }
  RigOptions options;
  Index index(100);
  auto arena = Arena::create("test", kHugeBytes);
  DiskDirectory::Options where;
  where.path = dir.path();
  where.capacity_bytes = 6 * test::kSmallSegment;
  where.segment_bytes = test::kSmallSegment;
  auto directory = DiskDirectory::open(where);
  auto mover = std::make_unique<Mover>(open_disk("threads", 8, 2), arena, Mover::Limits{});
  DiskPool pool(index, arena, directory, std::move(mover), {});
  CHECK_THROWS_AS(pool.pump(), Invalid);
  CHECK_THROWS_AS(pool.flush(), Invalid);
  where.path = other.path();
  DiskSurvey wrong(DiskDirectory::open(where));
  wrong.read(1);
  CHECK_THROWS_AS(pool.adopt(wrong), Invalid);
  DiskSurvey unread(directory);
  CHECK_THROWS_AS(pool.adopt(unread), Invalid);
  DiskSurvey survey(directory);
  survey.read(1);
  CHECK(pool.adopt(survey).readable == 0);
  CHECK_THROWS_AS(pool.adopt(survey), Invalid);
  pool.check();
}

TEST_CASE("disk pool adopt: of two records the newer one, whatever the order of files") {
  for (const bool newer_first : {false, true}) {
    CAPTURE(newer_first);
    TempDir dir;
    const StoreId store = make_directory(dir.path());
    const auto chain = chain_of(key_of(0), 1, 10, kBlock);
    SegmentImage old = image(store, newer_first ? 1 : 0, 5), young = image(store, newer_first ? 0 : 1, 6);
    for (const RecordHeader& header : chain) old.append(header);
    for (std::size_t i = 0; i < 4; ++i) young.append(chain[9 - i]);  // children first: the join does not mind
    old.seal();
    young.seal();
    old.save(dir.path());
    young.save(dir.path());
    Rig rig(dir.path());
    CHECK(rig.adopted.readable == 10);
    CHECK(rig.adopted.older == 4);
    std::vector<NodeId> nodes;
    for (std::uint64_t name = 1; name <= 10; ++name) nodes.push_back(rig.node(name));
    CHECK(rig.read(nodes).ok == sorted(nodes));
    CHECK(rig.pool->nodes(newer_first ? 0 : 1, 1).size() == 4);
    // New segments come after both.
    rig.save(rig.root(), 100, 5);
    const auto& segments = rig.directory->segments();
    DiskSurvey survey(rig.directory);
    survey.read(1);
    std::uint64_t newest = 0;
    for (const SegmentFile& segment : segments) {
      std::vector<std::uint8_t> page(kPageBytes);
      std::ifstream in(test::segment_path(dir.path(), segment.number), std::ios::binary);
      in.read(reinterpret_cast<char*>(page.data()), kPageBytes);
      SegmentHeader header;
      if (decode(page.data(), header)) newest = std::max(newest, header.sequence);
    }
    CHECK(newest >= 7);
  }
}

TEST_CASE("disk pool adopt: a chain that does not reach its root, or contradicts another, is dropped") {
  TempDir dir;
  const StoreId store = make_directory(dir.path());
  SegmentImage segment = image(store, 3, 2);
  const auto whole = chain_of(key_of(0), 1, 3, kBlock);
  for (const RecordHeader& header : whole) segment.append(header);
  auto headless = chain_of(key_of(0), 10, 4, kBlock);
  for (std::size_t i = 1; i < 4; ++i) segment.append(headless[i]);
  RecordHeader deep = test::record_of(key_of(20), key_of(2), key_of(0), 7, kBlock);  // its parent is at depth 2
  segment.append(deep);
  RecordHeader twice = test::record_of(key_of(3), key_of(1), key_of(0), 2, kBlock);  // known after another parent
  segment.append(twice);
  RecordHeader on_block = test::record_of(key_of(21), key_of(1), key_of(1), 1, kBlock);  // block 1 is no root
  segment.append(on_block);
  segment.seal();
  segment.save(dir.path());
  Rig rig(dir.path());
  CHECK(rig.adopted.readable + rig.adopted.orphaned == 9);
  CHECK(rig.adopted.orphaned >= 5);
  CHECK(rig.holds(1) != rig.holds(21));  // of two that contradict each other the later one counts
  CHECK(rig.node(11) == kNone);
  CHECK(rig.node(20) == kNone);
}

TEST_CASE("disk pool adopt: an index that is full, or knows the nodes already") {
  TempDir dir;
  {
    Rig rig(dir.path());
    rig.save(rig.root(), 1, 60);
    rig.save(rig.root(), 1000, 60);
    CHECK(rig.flush() == 0);
  }
  {
    RigOptions options;
    options.nodes_max = 50;
    Rig rig(dir.path(), options);
    CHECK(rig.adopted.readable == 50);
    CHECK(rig.adopted.no_room + rig.adopted.orphaned == 70);
    CHECK(rig.adopted.no_room >= 1);
    rig.settle();
  }
  Index index(1000);
  const NodeId root = index.root(key_of(0));
  const NodeId first = index.make(root, key_of(1));
  const NodeId second = index.make(first, key_of(2));
  index.pin(second);
  auto arena = Arena::create("test", kHugeBytes);
  DiskDirectory::Options where;
  where.path = dir.path();
  where.capacity_bytes = 6 * test::kSmallSegment;
  where.segment_bytes = test::kSmallSegment;
  auto directory = DiskDirectory::open(where);
  DiskSurvey survey(directory);
  survey.read(2);
  auto mover = std::make_unique<Mover>(open_disk("threads", 8, 2), arena, Mover::Limits{});
  DiskPool pool(index, arena, directory, std::move(mover), {});
  CHECK(pool.adopt(survey).readable >= 50);  // what the small index had no room for was not sealed again
  pool.check();
  index.check();
  CHECK(pool.readable(std::vector<NodeId>{first, second}) == std::vector<std::uint8_t>{1, 1});
  pool.close(0);
  index.unpin(second);
  CHECK(index.size() == 0);
  index.check();
}

TEST_CASE("disk pool adopt: files that were never finished are made anew, empty ones are used") {
  TempDir dir;
  std::uint32_t empty = kNone;
  {
    Rig rig(dir.path());
    rig.save(rig.root(), 1, 10);
    CHECK(rig.flush() == 0);
    rig.settle();
    for (std::size_t i = 0; i < rig.pool->segments(); ++i)
      if (rig.pool->nodes(i, 1).empty()) empty = rig.directory->segments()[i].number;
  }
  const std::size_t before = files(dir.path());
  std::filesystem::resize_file(test::segment_path(dir.path(), empty), 12345);
  Rig rig(dir.path());
  CHECK(rig.adopted.readable == 10);
  CHECK(files(dir.path()) == before - 1);
  rig.settle();
  CHECK(files(dir.path()) == before);
  CHECK(rig.pool->counts().broken == 0);
}

TEST_CASE("disk pool adopt: the capacity holds when segments get another size") {
  TempDir dir;
  {
    Rig rig(dir.path());
    for (std::uint64_t first = 1000; first < 6000; first += 1000) rig.save(rig.root(), first, 84);
    rig.settle();
    CHECK(rig.flush() == 0);
    CHECK(rig.pool->counts().file_bytes == 6 * test::kSmallSegment);
  }
  RigOptions options;
  options.segments = 3;
  options.segment_bytes = 2 * test::kSmallSegment;
  Rig rig(dir.path(), options);
  CHECK(rig.adopted.readable > 0);
  for (std::uint64_t first = 30000; first < 40000; first += 1000) {
    rig.save(rig.root(), first, 160);
    CHECK(rig.pool->counts().file_bytes <= 6 * test::kSmallSegment);
  }
  rig.settle();
  for (const SegmentFile& segment : rig.directory->segments())
    if (segment.fd) CHECK(segment.bytes() == 2 * test::kSmallSegment);
  CHECK(rig.holds(39000));
}

TEST_CASE("disk pool adopt: many records in a moment") {
  TempDir dir;
  const StoreId store = make_directory(dir.path());
  const SlotFormat tiny{1, 1, 64};  // one page: 2 with its header
  constexpr std::uint32_t kLarge = 16384;
  // Footers alone: records are believed until they are read, so the files may be holes.
  constexpr std::size_t kEach = 7000, kFiles = 3;
  std::uint64_t name = 1;
  for (std::uint32_t f = 0; f < kFiles; ++f) {
    const SegmentHeader header{store, f, kLarge, f + 1, 77 + f};
    std::vector<FooterEntry> entries;
    Key up = key_of(0);
    for (std::size_t i = 0; i < kEach; ++i) {
      const std::uint32_t depth = static_cast<std::uint32_t>(i % 100) + 1;
      if (depth == 1) up = key_of(0);
      entries.push_back({key_of(name), up, depth, static_cast<std::uint32_t>(1 + 2 * i), 1, tiny});
      up = key_of(name++);
    }
    std::vector<std::uint8_t> page(kPageBytes);
    encode(header, page.data());
    const Footer end = footer(entries, header);
    std::ofstream out(test::segment_path(dir.path(), f), std::ios::binary);
    out.write(reinterpret_cast<const char*>(page.data()), kPageBytes);
    out.seekp(static_cast<std::streamoff>(std::size_t{end.page} * kPageBytes));
    out.write(reinterpret_cast<const char*>(end.bytes.data()), static_cast<std::streamsize>(end.bytes.size()));
  }
  RigOptions options;
  options.segment_bytes = std::size_t{kLarge} * kPageBytes;
  options.nodes_max = 100000;
  Rig rig(dir.path(), options);
  CHECK(rig.adopted.readable == kEach * kFiles);
  CHECK(rig.holds(1));
  CHECK(rig.holds(name - 1));
}
