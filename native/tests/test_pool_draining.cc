#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>

#include "pool_fixture.h"

using namespace kv;
using test::Fixture;
using test::keys_of;
using test::kFormat;

TEST_CASE("pool draining: a rotten chain waits for each of its readers, whatever others release") {
  Fixture f(8);
  const auto a = f.save(f.root, keys_of(100, 20));
  const auto b = f.save(f.root, keys_of(300, 4));
  f.index.pin(a[9]);
  f.index.pin(a[9]);
  f.index.pin(a[19]);
  f.index.pin(b[3]);
  for (NodeId node : a) CHECK(f.pool.drop(node));
  f.check();
  CHECK(f.pool.counts().draining == 20);
  f.index.unpin(b[3]);
  f.index.unpin(a[9]);
  CHECK(f.pool.counts().draining == 20);
  f.index.unpin(a[9]);  // the first ten still have the other reader
  f.check();
  CHECK(f.pool.counts().draining == 20);
  f.index.pin(a[9]);  // later readers were given none of them
  f.index.unpin(a[19]);
  f.check();
  CHECK(f.pool.counts().draining == 0);
  f.index.unpin(a[9]);
  f.check();
  CHECK(f.pool.evict(kFormat, 100) == 4);
  CHECK(f.index.size() == 0);
}

TEST_CASE("pool draining: an unpin costs what it frees, however many slots wait for others") {
  Fixture f(128);
  const std::size_t slots = 400;
  const auto a = f.save(f.root, keys_of(1000, slots));
  const auto b = f.save(f.root, keys_of(5000, 1));
  f.index.pin(a.back());
  for (NodeId node : a) CHECK(f.pool.drop(node));
  const auto pairs = [&] {  // the fastest of some: what others do on the machine is not in it
    auto best = std::chrono::steady_clock::duration::max();
    for (int round = 0; round < 20; ++round) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < 200; ++i) f.index.pin(b[0]), f.index.unpin(b[0]);
      best = std::min(best, std::chrono::steady_clock::now() - start);
    }
    return best;
  };
  const auto beside = pairs();
  f.index.unpin(a.back());
  CHECK(f.pool.counts().draining == 0);
  CHECK(beside < 4 * pairs());
  f.check();
}
