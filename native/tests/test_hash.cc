// Known answers come from Python's hashlib.blake2b, the oracle of the format.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>

#include "hash.h"

using namespace kv;

namespace {

std::string hex(std::span<const std::uint8_t> bytes) {
  std::string text;
  for (const std::uint8_t byte : bytes) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(byte));
    text += two;
  }
  return text;
}

// 0, 1, …, 255, 0, 1, …
std::vector<std::uint8_t> counting(std::size_t n) {
  std::vector<std::uint8_t> bytes(n);
  std::iota(bytes.begin(), bytes.end(), std::uint8_t{0});
  return bytes;
}

std::vector<std::uint32_t> some_tokens(std::size_t n) {
  std::vector<std::uint32_t> tokens(n);
  for (std::size_t i = 0; i < n; ++i) tokens[i] = static_cast<std::uint32_t>(i * 2654435761u);
  return tokens;
}

Key counting_key() {
  Key key;
  std::iota(key.bytes.begin(), key.bytes.end(), std::uint8_t{0});
  return key;
}

struct Vector {
  std::size_t data, key;
  std::string person;
  std::size_t digest;
  std::string expected;
};

const Vector kVectors[] = {
    {0, 0, "", 32, "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"},
    {3, 0, "", 32, "3d8c3d594928271f44aad7a04b177154806867bcf918e1549c0bc16f9da2b09b"},
    {127, 0, "", 32, "f2fe67ff342e21b8f45e8f2e0bcd1d9243245d50ee6c78042e9c491388791c72"},
    {128, 0, "", 32, "c3582f71ebb2be66fa5dd750f80baae97554f3b015663c8be377cfcb2488c1d1"},
    {129, 0, "", 32, "f7f3c46ba2564ff4c4c162da1f5b605f9f1c4aa6a20652a9f9a337c1a2f5b9c9"},
    {256, 0, "", 32, "39a7eb9fedc19aabc83425c6755dd90e6f9d0c804964a1f4aaeea3b9fb599835"},
    {1000, 0, "", 32, "c636324d47d89f2b2434dc2c994100663fbbaea880ff020fc5de89dd0f77a1ec"},
    {0, 32, "", 32, "4e51e7a913fc80137da52880fecca175bf81e117d5c68126dc2774033517ea0d"},
    {1, 64, "", 32, "34758b647135628297fb09c7930cd04e9528e5669112f5b1318493e14de77e55"},
    {128, 16, "kvstore-rt-v1", 32, "8041d668fece74e5c5fc829bfb0ff131e91b65683a3fc98bc50413ca52d365b8"},
    {200, 0, "kvstore-ns-v1", 32, "0de99e04f487f4989ce695fcec57e31df71c357f2cc1662f592cc8ee50192316"},
    {50, 0, "0123456789abcdef", 64,
     "04b3a7e696ad89686ef8075c9130cd1f18098a578b5ffc72c07aab5ffc27ea98"
     "e006353aeff29d3c310e7df66e60aed30edde6a21e42dd0ce6269248aa328e91"},
    {300, 64, "x", 1, "58"},
    {64, 0, "", 20, "11cc6661e922b0e407e0a57249c38d4ff76d8ec8"},
};

Blake2b::Params params_of(const Vector& v, std::span<const std::uint8_t> key) {
  return {.key = key,
          .person = {reinterpret_cast<const std::uint8_t*>(v.person.data()), v.person.size()},
          .digest_bytes = v.digest};
}

}  // namespace

TEST_CASE("blake2b matches hashlib, with key, person and digest size") {
  for (const Vector& v : kVectors) {
    CAPTURE(v.data);
    const auto key = counting(v.key);
    CHECK(hex(blake2b(counting(v.data), params_of(v, key))) == v.expected);
  }
}

TEST_CASE("blake2b does not care how the data is cut") {
  const auto data = counting(1000);
  for (const std::size_t cut : {1, 7, 64, 127, 128, 129, 500, 999}) {
    Blake2b hash({});
    for (std::size_t i = 0; i < data.size(); i += cut)
      hash.update(std::span(data).subspan(i, std::min(cut, data.size() - i)));
    std::uint8_t digest[32];
    hash.finish(digest);
    CHECK(hex(digest) == kVectors[6].expected);
  }
}

TEST_CASE("blake2b refuses parameters outside RFC 7693") {
  const auto long_key = counting(65);
  const auto long_person = counting(17);
  CHECK_THROWS_AS(blake2b({}, {.key = long_key}), Invalid);
  CHECK_THROWS_AS(blake2b({}, {.person = long_person}), Invalid);
  CHECK_THROWS_AS(blake2b({}, {.digest_bytes = 0}), Invalid);
  CHECK_THROWS_AS(blake2b({}, {.digest_bytes = 65}), Invalid);
}

TEST_CASE("chain keys match hashlib") {
  const auto tokens = some_tokens(100);
  const Key parent = counting_key();

  SUBCASE("one compression a block, the tail is ignored") {
    const auto keys = chain_keys(parent, {.tokens = tokens, .block_tokens = 16});
    REQUIRE(keys.size() == 6);
    CHECK(hex(keys[5].bytes) == "c13c2b5c739bf713d38787e571e6d868c78ab1b7916a3bbffc8b98dfee893eaf");
    CHECK(keys_digest(keys) == 13467824711372626693u);
  }
  SUBCASE("extras of 0, 28 (the last that fits one compression), 29, 1, 200 and 5 bytes") {
    const std::uint32_t lengths[] = {0, 28, 29, 1, 200, 5};
    std::vector<std::uint8_t> extra;
    std::vector<std::uint32_t> offsets = {0};
    for (const std::uint32_t length : lengths) {
      const auto piece = counting(length);
      extra.insert(extra.end(), piece.begin(), piece.end());
      offsets.push_back(static_cast<std::uint32_t>(extra.size()));
    }
    const auto keys =
        chain_keys(parent, {.tokens = tokens, .block_tokens = 16, .extra = extra, .extra_offsets = offsets});
    CHECK(hex(keys.back().bytes) == "8b609ab80073b1d64210d8971fd1b447b512e1227f4c18d6db80bed491aed576");
  }
  SUBCASE("blocks of 1 token and of all tokens") {
    CHECK(hex(chain_keys(parent, {.tokens = tokens, .block_tokens = 1}).back().bytes) ==
          "a6b5f2497adbaf8377bce048130625a90c01b03463ab549508b9fcb0e50f068e");
    CHECK(hex(chain_keys(parent, {.tokens = tokens, .block_tokens = 100}).back().bytes) ==
          "1650b37d15bf914e6a93de7a927f192c42a4ac96a545b7196340951053b1cdee");
  }
}

TEST_CASE("chain keys: fewer tokens than a block make no key") {
  const auto tokens = some_tokens(15);
  CHECK(chain_keys(counting_key(), {.tokens = tokens, .block_tokens = 16}).empty());
}

TEST_CASE("chain keys depend on where a block stands and on where extra ends") {
  const auto tokens = std::vector<std::uint32_t>(32, 7);
  const auto keys = chain_keys(counting_key(), {.tokens = tokens, .block_tokens = 16});
  CHECK(!(keys[0] == keys[1]));

  // The same bytes, cut elsewhere: "ab" + "" is not "a" + "b".
  const auto extra = counting(2);
  const std::vector<std::uint32_t> first = {0, 2, 2}, second = {0, 1, 2};
  const auto a = chain_keys(counting_key(), {.tokens = tokens, .extra = extra, .extra_offsets = first});
  const auto b = chain_keys(counting_key(), {.tokens = tokens, .extra = extra, .extra_offsets = second});
  CHECK(!(a[0] == b[0]));
  CHECK(!(a[1] == b[1]));
}

TEST_CASE("chain keys refuse bad cuts") {
  const auto tokens = some_tokens(32);
  const auto extra = counting(4);
  const auto with = [&](std::vector<std::uint32_t> offsets) {
    return chain_keys(counting_key(), {.tokens = tokens, .extra = extra, .extra_offsets = offsets});
  };
  CHECK_NOTHROW(with({0, 2, 4}));
  CHECK_THROWS_AS(with({0, 2}), Invalid);
  CHECK_THROWS_AS(with({0, 3, 2}), Invalid);
  CHECK_THROWS_AS(with({0, 2, 5}), Invalid);
  CHECK_THROWS_AS(with({}), Invalid);
  CHECK_THROWS_AS(chain_keys(counting_key(), {.tokens = tokens, .block_tokens = 0}), Invalid);
  CHECK_THROWS_AS(chain_keys(counting_key(), {.tokens = tokens, .block_tokens = kBlockTokensMax + 1}), Invalid);
}

TEST_CASE("keys digest sees order") {
  auto keys = chain_keys(counting_key(), {.tokens = some_tokens(64)});
  const std::uint64_t before = keys_digest(keys);
  std::swap(keys[1], keys[2]);
  CHECK(keys_digest(keys) != before);
  CHECK(keys_digest({}) == 0);
}

TEST_CASE("keys digests are those of every beginning") {
  const auto keys = chain_keys(counting_key(), {.tokens = some_tokens(160)});
  const auto sums = keys_digests(keys);
  REQUIRE(sums.size() == keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) CHECK(sums[i] == keys_digest(std::span(keys).first(i + 1)));
  CHECK(keys_digests({}).empty());
}
