// Between crc.cc (dispatch, portable kernel) and crc_x86.cc: the kernel table and the polynomial arithmetic
// behind every constant, computed by the compiler instead of quoted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "crc.h"

// Loads race with a slot's next writer by design: the generation check around the copy throws such bytes
// away (LAWS A4). So the thread sanitizer must not look into the kernels.
#if defined(__SANITIZE_THREAD__)
#define KV_RACY __attribute__((no_sanitize_thread))
#else
#define KV_RACY
#endif

namespace kv::crc {

// Works on the raw register: the caller inverts before and after.
struct Kernel {
  std::string_view name;
  bool (*runs_here)();
  std::uint32_t (*sum)(std::uint32_t state, const std::uint8_t* data, std::size_t n);
  std::uint32_t (*copy)(std::uint32_t state, std::uint8_t* target, const std::uint8_t* source, std::size_t n);
  std::uint32_t (*stream)(std::uint32_t state, std::uint8_t* target, const std::uint8_t* source, std::size_t n);
};

extern const Kernel kPlain;
#if defined(__x86_64__)
extern const Kernel kVpclmulqdq512;
extern const Kernel kPclmul128;
extern const Kernel kSse42;
#endif

inline constexpr std::uint32_t kPolynomial = 0x82F63B78;  // bit-reflected

// Times x modulo the polynomial; in the reflected register, x is a shift to the right.
constexpr std::uint32_t times_x(std::uint32_t r) { return (r >> 1) ^ (r & 1 ? kPolynomial : 0); }

// x^n mod P, reflected.
constexpr std::uint32_t x_power(std::uint32_t n) {
  std::uint32_t r = 0x80000000u;
  for (std::uint32_t i = 0; i < n; ++i) r = times_x(r);
  return r;
}

// A carry-less product of two reflected 64-bit numbers comes out one place low, so to move a 128-bit
// remainder ahead by `bits` its first (low) half is multiplied by x^(bits + 64 - 1) and its second by
// x^(bits - 1); a 32-bit reflected value sits in the upper half of the 64-bit operand.
struct FoldBy {
  std::uint64_t low;
  std::uint64_t high;
};
constexpr FoldBy fold_by(std::uint32_t bits) {
  return {std::uint64_t{x_power(bits + 63)} << 32, std::uint64_t{x_power(bits - 1)} << 32};
}

using ByteTables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b]: the register after byte b and then k zero bytes.
constexpr ByteTables byte_tables() {
  ByteTables tables{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t r = b;
    for (int bit = 0; bit < 8; ++bit) r = times_x(r);
    tables[0][b] = r;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::uint32_t b = 0; b < 256; ++b)
      tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xFF];
  return tables;
}

using ShiftTables = std::array<std::array<std::uint32_t, 256>, 4>;

// The register after `bytes` zero bytes, as four lookups (one per byte of the register).
constexpr ShiftTables shift_tables(std::uint32_t bytes) {
  ShiftTables tables{};
  for (std::uint32_t bit = 0; bit < 32; ++bit) {
    std::uint32_t r = std::uint32_t{1} << bit;
    for (std::uint32_t i = 0; i < 8 * bytes; ++i) r = times_x(r);
    for (std::uint32_t b = 0; b < 256; ++b)
      if (b >> (bit % 8) & 1) tables[bit / 8][b] ^= r;
  }
  return tables;
}

}  // namespace kv::crc
