// The two arrays of a KV event that are long, read straight from msgpack: token ids and block hashes. A Python list
// of them costs 30 ns an element to make and as much again to turn into an array, this costs two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "fingerprint.h"
#include "types.h"

namespace kv {

// Reads one msgpack value; Invalid, naming the field, at whatever it does not expect.
class MsgpackReader {
 public:
  MsgpackReader(std::span<const std::uint8_t> data, const char* field) : data_(data), field_(field) {}

  // Elements of the array that begins here, at most `most`.
  std::size_t array(std::size_t most) {
    const std::uint8_t head = byte();
    std::uint64_t n = 0;
    if ((head & 0xF0) == 0x90) n = head & 0x0F;
    else if (head == 0xDC || head == 0xDD) n = number(head == 0xDC ? 2 : 4);
    else fail("expected a msgpack array");
    if (n > most) fail(std::to_string(n) + " elements, the most is " + std::to_string(most));
    return n;
  }

  // An integer as 64 bits; a negative one in two's complement.
  std::uint64_t integer() { return integer(byte()); }

  // A block hash: an integer, or the first eight of 8 to 64 bytes.
  std::uint64_t hash() {
    const std::uint8_t head = byte();
    if (head != 0xC4 && head != 0xC5) return integer(head);
    const std::uint64_t length = number(head == 0xC4 ? 1 : 2);
    if (length < 8 || length > 64) fail("a hash of " + std::to_string(length) + " bytes; 8 to 64 are expected");
    const std::span<const std::uint8_t> bytes = take(length);
    std::uint64_t word;
    std::memcpy(&word, bytes.data(), sizeof word);
    return word;
  }

  void end() const {
    if (!data_.empty()) fail(std::to_string(data_.size()) + " bytes behind its end");
  }

  [[noreturn]] void fail(const std::string& what) const { throw Invalid(std::string(field_) + ": " + what); }

 private:
  std::span<const std::uint8_t> take(std::size_t n) {
    if (n > data_.size()) fail("ends in the middle of a value");
    const auto taken = data_.first(n);
    data_ = data_.subspan(n);
    return taken;
  }
  std::uint8_t byte() { return take(1)[0]; }
  std::uint64_t number(std::size_t bytes) {  // big-endian
    std::uint64_t value = 0;
    for (const std::uint8_t b : take(bytes)) value = value << 8 | b;
    return value;
  }
  std::uint64_t integer(std::uint8_t head) {
    if (head < 0x80) return head;
    if (head >= 0xE0) return ~std::uint64_t{0xFF} | head;
    if (head >= 0xCC && head <= 0xCF) return number(std::size_t{1} << (head - 0xCC));
    if (head < 0xD0 || head > 0xD3) fail("expected an integer");
    const unsigned bits = 8u << (head - 0xD0);
    return static_cast<std::uint64_t>(static_cast<std::int64_t>(number(bits / 8) << (64 - bits)) >> (64 - bits));
  }

  std::span<const std::uint8_t> data_;
  const char* field_;
};

// Token ids of an array of integers below 2^32. Nothing is allocated before the bytes are known to be there.
inline std::vector<std::uint32_t> unpack_tokens(std::span<const std::uint8_t> data) {
  MsgpackReader reader(data, "tokens");
  std::vector<std::uint32_t> out;
  const std::size_t n = reader.array(kRouterTokensMax);
  if (n > data.size()) reader.fail("ends in the middle of a value");
  out.resize(n);
  for (std::uint32_t& token : out) {
    const std::uint64_t value = reader.integer();
    if (value > 0xFFFFFFFFu) reader.fail("a token id is below 2^32");
    token = static_cast<std::uint32_t>(value);
  }
  reader.end();
  return out;
}

inline std::vector<std::uint64_t> unpack_hashes(std::span<const std::uint8_t> data) {
  MsgpackReader reader(data, "hashes");
  std::vector<std::uint64_t> out;
  const std::size_t n = reader.array(kRouterKeysMax);
  if (n > data.size()) reader.fail("ends in the middle of a value");
  out.resize(n);
  for (std::uint64_t& hash : out) hash = reader.hash();
  reader.end();
  return out;
}

}  // namespace kv
