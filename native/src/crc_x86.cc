// The x86-64 kernels. Every function carries its own target attribute, so no file needs ISA flags and the
// rest of the library stays baseline.
#include "crc_kernels.h"

#if defined(__x86_64__)

// GCC 12's own intrinsic headers read a deliberately undefined vector (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstring>

namespace kv::crc {
namespace {

enum class Mode { kSum, kCopy, kStream };

#define KV_SSE42 __attribute__((target("sse4.2"))) KV_RACY
#define KV_PCLMUL __attribute__((target("sse4.2,pclmul"))) KV_RACY
#define KV_AVX512 __attribute__((target("sse4.2,pclmul,avx512f,avx512vl,avx512bw,vpclmulqdq"))) KV_RACY
#define KV_FORCE inline __attribute__((always_inline))

constexpr std::size_t kLine = 64;

// The hardware prefetcher stops at a page's end and needs a few lines to start again, which short cells pay
// for over and over. Reaching past the end is harmless: a block's next cell lies there.
constexpr std::size_t kAhead = 1024;

KV_FORCE void prefetch(const std::uint8_t* source) {
  _mm_prefetch(reinterpret_cast<const char*>(source + kAhead), _MM_HINT_T0);
}

// Bytes up to the target's next cache line: streamed stores need whole aligned lines to be worth it.
KV_FORCE std::size_t to_line(const std::uint8_t* target, std::size_t n) {
  const std::size_t gap = (kLine - reinterpret_cast<std::uintptr_t>(target) % kLine) % kLine;
  return gap < n ? gap : n;
}

// One chain of the crc32 instruction with ordinary stores: heads, tails and everything short.
template <Mode M>
KV_SSE42 KV_FORCE std::uint32_t chain(std::uint32_t state, std::uint8_t* target, const std::uint8_t* source,
                                      std::size_t n) {
  std::uint64_t wide = state;
  for (; n >= 8; n -= 8, source += 8) {
    std::uint64_t word;
    std::memcpy(&word, source, 8);
    wide = _mm_crc32_u64(wide, word);
    if constexpr (M != Mode::kSum) {
      std::memcpy(target, &word, 8);
      target += 8;
    }
  }
  state = static_cast<std::uint32_t>(wide);
  for (; n > 0; --n) {
    const std::uint8_t byte = *source++;
    state = _mm_crc32_u8(state, byte);
    if constexpr (M != Mode::kSum) *target++ = byte;
  }
  return state;
}

// ---- sse42: three independent chains hide the instruction's latency of three cycles ------------------

// Shifts by one and by two stripes. Short stripes take what long ones leave, down to a few lines.
template <std::size_t Stripe>
constexpr ShiftTables kShiftOne = shift_tables(Stripe);
template <std::size_t Stripe>
constexpr ShiftTables kShiftTwo = shift_tables(2 * Stripe);

KV_FORCE std::uint32_t shifted(const ShiftTables& tables, std::uint64_t r) {
  return tables[0][r & 0xFF] ^ tables[1][r >> 8 & 0xFF] ^ tables[2][r >> 16 & 0xFF] ^ tables[3][r >> 24 & 0xFF];
}

template <Mode M>
KV_SSE42 KV_FORCE std::uint64_t step(std::uint64_t state, std::uint8_t* target, const std::uint8_t* source) {
  long long word;
  std::memcpy(&word, source, 8);
  if constexpr (M == Mode::kStream) _mm_stream_si64(reinterpret_cast<long long*>(target), word);
  if constexpr (M == Mode::kCopy) std::memcpy(target, &word, 8);
  return _mm_crc32_u64(state, static_cast<std::uint64_t>(word));
}

// As many triple stripes as fit; returns the bytes done.
template <Mode M, std::size_t Stripe>
KV_SSE42 KV_FORCE std::size_t stripes(std::uint32_t& state, std::uint8_t* target, const std::uint8_t* source,
                                      std::size_t n) {
  constexpr std::size_t advance = M == Mode::kSum ? 0 : 1;
  std::size_t done = 0;
  for (; n - done >= 3 * Stripe; done += 3 * Stripe) {
    const std::uint8_t* from = source + done;
    std::uint8_t* to = target + advance * done;
    std::uint64_t a = state, b = 0, c = 0;
    for (std::size_t i = 0; i < Stripe; i += 8) {
      if (i % kLine == 0)
        for (std::size_t k = 0; k < 3; ++k) prefetch(from + k * Stripe + i);
      a = step<M>(a, to + advance * i, from + i);
      b = step<M>(b, to + advance * (Stripe + i), from + Stripe + i);
      c = step<M>(c, to + advance * (2 * Stripe + i), from + 2 * Stripe + i);
    }
    state = shifted(kShiftTwo<Stripe>, a) ^ shifted(kShiftOne<Stripe>, b) ^ static_cast<std::uint32_t>(c);
  }
  return done;
}

template <Mode M>
KV_SSE42 std::uint32_t sse42(std::uint32_t state, std::uint8_t* target, const std::uint8_t* source, std::size_t n) {
  constexpr std::size_t advance = M == Mode::kSum ? 0 : 1;
  if constexpr (M == Mode::kStream) {
    const std::size_t head = to_line(target, n);
    state = chain<M>(state, target, source, head);
    target += head, source += head, n -= head;
  }
  const std::size_t wide = stripes<M, 512>(state, target, source, n);
  target += advance * wide, source += wide, n -= wide;
  const std::size_t narrow = stripes<M, kLine>(state, target, source, n);
  return chain<M>(state, target + advance * narrow, source + narrow, n - narrow);
}

// ---- pclmul128: four 128-bit remainders, folded ahead by 64 bytes ------------------------------------

constexpr FoldBy kFold128 = fold_by(128);
constexpr FoldBy kFold256 = fold_by(256);
constexpr FoldBy kFold384 = fold_by(384);
constexpr FoldBy kFold512 = fold_by(512);
constexpr FoldBy kFold2048 = fold_by(2048);

KV_SSE42 KV_FORCE __m128i constant128(FoldBy by) {
  return _mm_set_epi64x(static_cast<long long>(by.high), static_cast<long long>(by.low));
}

KV_PCLMUL KV_FORCE __m128i fold128(__m128i r, __m128i by, __m128i next) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(r, by, 0x00), _mm_clmulepi64_si128(r, by, 0x11)), next);
}

// The 16 bytes of a remainder are congruent to all that was folded into them.
KV_SSE42 KV_FORCE std::uint32_t finish128(__m128i r) {
  const std::uint64_t state = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(r)));
  return static_cast<std::uint32_t>(_mm_crc32_u64(state, static_cast<std::uint64_t>(_mm_extract_epi64(r, 1))));
}

template <Mode M>
KV_PCLMUL KV_FORCE __m128i take128(std::uint8_t* target, const std::uint8_t* source) {
  const __m128i data = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  if constexpr (M == Mode::kStream) _mm_stream_si128(reinterpret_cast<__m128i*>(target), data);
  if constexpr (M == Mode::kCopy) _mm_storeu_si128(reinterpret_cast<__m128i*>(target), data);
  return data;
}

template <Mode M>
KV_PCLMUL std::uint32_t pclmul128(std::uint32_t state, std::uint8_t* target, const std::uint8_t* source,
                                  std::size_t n) {
  constexpr std::size_t advance = M == Mode::kSum ? 0 : 1;
  if constexpr (M == Mode::kStream) {
    const std::size_t head = to_line(target, n);
    state = chain<M>(state, target, source, head);
    target += head, source += head, n -= head;
  }
  if (n >= 128) {
    const __m128i by512 = constant128(kFold512);
    __m128i r[4];
    for (std::size_t i = 0; i < 4; ++i) r[i] = take128<M>(target + advance * 16 * i, source + 16 * i);
    r[0] = _mm_xor_si128(r[0], _mm_cvtsi32_si128(static_cast<int>(state)));
    source += 64, target += advance * 64, n -= 64;
    for (; n >= 64; n -= 64, source += 64, target += advance * 64) {
      prefetch(source);
      for (std::size_t i = 0; i < 4; ++i)
        r[i] = fold128(r[i], by512, take128<M>(target + advance * 16 * i, source + 16 * i));
    }
    const __m128i by128 = constant128(kFold128);
    state = finish128(fold128(fold128(fold128(r[0], by128, r[1]), by128, r[2]), by128, r[3]));
  }
  return chain<M>(state, target, source, n);
}

// ---- vpclmulqdq512: four 512-bit remainders, folded ahead by 256 bytes -------------------------------

KV_AVX512 KV_FORCE __m512i constant512(FoldBy by) { return _mm512_broadcast_i32x4(constant128(by)); }

KV_AVX512 KV_FORCE __m512i fold512(__m512i r, __m512i by, __m512i next) {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(r, by, 0x00), _mm512_clmulepi64_epi128(r, by, 0x11), next,
                                   kXorOfThree);
}

template <Mode M>
KV_AVX512 KV_FORCE __m512i take512(std::uint8_t* target, const std::uint8_t* source) {
  const __m512i data = _mm512_loadu_si512(source);
  if constexpr (M == Mode::kStream) _mm512_stream_si512(reinterpret_cast<__m512i*>(target), data);
  if constexpr (M == Mode::kCopy) _mm512_storeu_si512(target, data);
  return data;
}

// Lanes 0..2 move ahead to lane 3, which stays.
KV_AVX512 KV_FORCE std::uint32_t finish512(__m512i r) {
  const __m128i a = fold128(_mm512_extracti32x4_epi32(r, 0), constant128(kFold384), _mm512_extracti32x4_epi32(r, 3));
  const __m128i b = fold128(_mm512_extracti32x4_epi32(r, 1), constant128(kFold256), a);
  return finish128(fold128(_mm512_extracti32x4_epi32(r, 2), constant128(kFold128), b));
}

template <Mode M>
KV_AVX512 std::uint32_t vpclmulqdq512(std::uint32_t state, std::uint8_t* target, const std::uint8_t* source,
                                      std::size_t n) {
  constexpr std::size_t advance = M == Mode::kSum ? 0 : 1;
  if constexpr (M == Mode::kStream) {
    const std::size_t head = to_line(target, n);
    state = chain<M>(state, target, source, head);
    target += head, source += head, n -= head;
  }
  if (n >= 128) {
    const __m512i by512 = constant512(kFold512);
    const __m512i start = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state)));
    __m512i last;
    if (n >= 512) {
      const __m512i by2048 = constant512(kFold2048);
      __m512i r[4];
      for (std::size_t i = 0; i < 4; ++i) r[i] = take512<M>(target + advance * 64 * i, source + 64 * i);
      r[0] = _mm512_xor_si512(r[0], start);
      source += 256, target += advance * 256, n -= 256;
      for (; n >= 256; n -= 256, source += 256, target += advance * 256)
        for (std::size_t i = 0; i < 4; ++i) {
          prefetch(source + 64 * i);
          r[i] = fold512(r[i], by2048, take512<M>(target + advance * 64 * i, source + 64 * i));
        }
      last = fold512(fold512(fold512(r[0], by512, r[1]), by512, r[2]), by512, r[3]);
    } else {
      last = _mm512_xor_si512(take512<M>(target, source), start);
      source += 64, target += advance * 64, n -= 64;
    }
    for (; n >= 64; n -= 64, source += 64, target += advance * 64)
      last = fold512(last, by512, take512<M>(target, source));
    state = finish512(last);
  }
  return chain<M>(state, target, source, n);
}

// ---- the table -----------------------------------------------------------------------------------------

std::uint32_t sse42_sum(std::uint32_t state, const std::uint8_t* data, std::size_t n) {
  return sse42<Mode::kSum>(state, nullptr, data, n);
}
std::uint32_t pclmul128_sum(std::uint32_t state, const std::uint8_t* data, std::size_t n) {
  return pclmul128<Mode::kSum>(state, nullptr, data, n);
}
std::uint32_t vpclmulqdq512_sum(std::uint32_t state, const std::uint8_t* data, std::size_t n) {
  return vpclmulqdq512<Mode::kSum>(state, nullptr, data, n);
}

bool has_sse42() { return __builtin_cpu_supports("sse4.2"); }
bool has_pclmul() { return has_sse42() && __builtin_cpu_supports("pclmul"); }
bool has_vpclmulqdq512() {
  return has_pclmul() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("vpclmulqdq");
}

}  // namespace

const Kernel kSse42 = {"sse42", has_sse42, sse42_sum, sse42<Mode::kCopy>, sse42<Mode::kStream>};
const Kernel kPclmul128 = {"pclmul128", has_pclmul, pclmul128_sum, pclmul128<Mode::kCopy>, pclmul128<Mode::kStream>};
const Kernel kVpclmulqdq512 = {"vpclmulqdq512", has_vpclmulqdq512, vpclmulqdq512_sum, vpclmulqdq512<Mode::kCopy>,
                               vpclmulqdq512<Mode::kStream>};

}  // namespace kv::crc

#endif  // __x86_64__
