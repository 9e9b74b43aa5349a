#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "crc.h"
#include "types.h"

using namespace kv;

namespace {

// Leaves the path as it was found.
class PathKept {
 public:
  PathKept() : before_(crc_path()) {}
  ~PathKept() { set_crc_path(before_); }

 private:
  std::string before_;
};

std::vector<std::uint8_t> random_bytes(std::size_t n, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::uint8_t> bytes(n);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

// Bit by bit, straight from the polynomial: shares nothing with the tables or the folds.
std::uint32_t slow_crc(const std::uint8_t* data, std::size_t n, std::uint32_t value) {
  std::uint32_t r = ~value;
  for (std::size_t i = 0; i < n; ++i) {
    r ^= data[i];
    for (int bit = 0; bit < 8; ++bit) r = (r >> 1) ^ (r & 1 ? 0x82F63B78u : 0u);
  }
  return ~r;
}

}  // namespace

TEST_CASE("crc32c known answers (RFC 3720 B.4) on every path") {
  const PathKept kept;
  std::vector<std::uint8_t> zeros(32, 0), ones(32, 0xFF), up(32), down(32);
  for (std::size_t i = 0; i < 32; ++i) {
    up[i] = static_cast<std::uint8_t>(i);
    down[i] = static_cast<std::uint8_t>(31 - i);
  }
  for (const auto path : crc_paths()) {
    CAPTURE(path);
    set_crc_path(path);
    CHECK(crc32c(zeros.data(), 32) == 0x8A9136AAu);
    CHECK(crc32c(ones.data(), 32) == 0x62A8AB43u);
    CHECK(crc32c(up.data(), 32) == 0x46DD794Eu);
    CHECK(crc32c(down.data(), 32) == 0x113FDB5Cu);
    CHECK(crc32c("123456789", 9) == 0xE3069283u);
    CHECK(crc32c(nullptr, 0) == 0);
    CHECK(crc32c(nullptr, 0, 0x12345678u) == 0x12345678u);
  }
}

TEST_CASE("plain agrees with the polynomial itself") {
  const PathKept kept;
  set_crc_path("plain");
  const auto data = random_bytes(300, 1);
  for (std::size_t n = 0; n < data.size(); ++n)
    REQUIRE(crc32c(data.data(), n, 99) == slow_crc(data.data(), n, 99));
}

TEST_CASE("all paths agree over lengths, alignments, seeds and kinds of store") {
  const PathKept kept;
  std::mt19937 random(20261);
  const auto source = random_bytes(10000, 2);
  std::vector<std::uint8_t> target(source.size());
  constexpr int kRounds = 3000;
  for (int round = 0; round < kRounds; ++round) {
    // Half short, where heads and tails are everything; some long enough for every main loop.
    const std::size_t n = round % 2 ? random() % 300 : random() % 8200;
    const std::size_t from = random() % 130, to = 1 + random() % 130;
    const auto value = static_cast<std::uint32_t>(random());
    set_crc_path("plain");
    const std::uint32_t expected = crc32c(source.data() + from, n, value);
    for (const auto path : crc_paths()) {
      set_crc_path(path);
      CAPTURE(path);
      CAPTURE(n);
      CAPTURE(from);
      CAPTURE(to);
      REQUIRE(crc32c(source.data() + from, n, value) == expected);
      for (const Stores stores : {Stores::kStream, Stores::kCached}) {
        std::memset(target.data(), 0xA5, target.size());
        REQUIRE(copy_crc(target.data() + to, source.data() + from, n, value, stores) == expected);
        store_fence();
        REQUIRE(std::memcmp(target.data() + to, source.data() + from, n) == 0);
        REQUIRE(target[to - 1] == 0xA5);  // nothing before or behind was touched
        REQUIRE(target[to + n] == 0xA5);
      }
    }
  }
}

TEST_CASE("sums continue across pieces, on mixed paths") {
  const PathKept kept;
  const auto data = random_bytes(5000, 3);
  const std::uint32_t whole = crc32c(data.data(), data.size());
  const auto paths = crc_paths();
  std::vector<std::uint8_t> target(data.size());
  for (std::size_t cut : {0, 1, 63, 64, 100, 777, 2500, 4999}) {
    set_crc_path(paths[cut % paths.size()]);
    std::uint32_t value = copy_crc(target.data(), data.data(), cut, 0, Stores::kStream);
    set_crc_path(paths[(cut + 1) % paths.size()]);
    value = copy_crc(target.data() + cut, data.data() + cut, data.size() - cut, value, Stores::kCached);
    CHECK(value == whole);
    CHECK(target == data);
  }
}

TEST_CASE("copy_bytes copies exactly its bytes") {
  const auto source = random_bytes(2000, 4);
  std::vector<std::uint8_t> target(2200);
  std::mt19937 random(5);
  for (int round = 0; round < 500; ++round) {
    const std::size_t n = random() % 1500, from = random() % 100, to = 1 + random() % 100;
    for (const Stores stores : {Stores::kStream, Stores::kCached}) {
      std::memset(target.data(), 0x5A, target.size());
      copy_bytes(target.data() + to, source.data() + from, n, stores);
      store_fence();
      REQUIRE(std::memcmp(target.data() + to, source.data() + from, n) == 0);
      REQUIRE(target[to - 1] == 0x5A);
      REQUIRE(target[to + n] == 0x5A);
    }
  }
}

TEST_CASE("a path this CPU cannot run, or nobody knows, is refused") {
  const std::string before(crc_path());
  CHECK(before == crc_paths().front());
  CHECK(crc_paths().back() == "plain");
  CHECK_THROWS_AS(set_crc_path("md5"), Invalid);
  CHECK(crc_path() == before);
}
