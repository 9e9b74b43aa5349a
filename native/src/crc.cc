#include "crc.h"

#include <atomic>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "crc_kernels.h"
#include "types.h"

namespace kv {
namespace crc {
namespace {

constexpr ByteTables kTables = byte_tables();

template <bool Copy>
KV_RACY std::uint32_t plain(std::uint32_t state, std::uint8_t* target, const std::uint8_t* source, std::size_t n) {
  for (; n >= 8; n -= 8, source += 8) {
    std::uint64_t word;
    std::memcpy(&word, source, 8);
    if constexpr (Copy) {
      std::memcpy(target, &word, 8);
      target += 8;
    }
    word ^= state;
    state = kTables[7][word & 0xFF] ^ kTables[6][word >> 8 & 0xFF] ^ kTables[5][word >> 16 & 0xFF] ^
            kTables[4][word >> 24 & 0xFF] ^ kTables[3][word >> 32 & 0xFF] ^ kTables[2][word >> 40 & 0xFF] ^
            kTables[1][word >> 48 & 0xFF] ^ kTables[0][word >> 56];
  }
  for (; n > 0; --n) {
    const std::uint8_t byte = *source++;
    if constexpr (Copy) *target++ = byte;
    state = (state >> 8) ^ kTables[0][(state ^ byte) & 0xFF];
  }
  return state;
}

std::uint32_t plain_sum(std::uint32_t state, const std::uint8_t* data, std::size_t n) {
  return plain<false>(state, nullptr, data, n);
}

}  // namespace

const Kernel kPlain = {"plain", [] { return true; }, plain_sum, plain<true>, plain<true>};

namespace {

#if defined(__x86_64__)
const Kernel* const kKernels[] = {&kVpclmulqdq512, &kPclmul128, &kSse42, &kPlain};
#else
const Kernel* const kKernels[] = {&kPlain};
#endif

const Kernel* best() {
  for (const Kernel* kernel : kKernels)
    if (kernel->runs_here()) return kernel;
  return &kPlain;
}

std::atomic<const Kernel*>& active() {
  static std::atomic<const Kernel*> kernel{best()};
  return kernel;
}

}  // namespace
}  // namespace crc

std::uint32_t crc32c(const void* data, std::size_t n, std::uint32_t value) noexcept {
  const crc::Kernel* kernel = crc::active().load(std::memory_order_relaxed);
  return ~kernel->sum(~value, static_cast<const std::uint8_t*>(data), n);
}

std::uint32_t copy_crc(void* target, const void* source, std::size_t n, std::uint32_t value, Stores stores) noexcept {
  const crc::Kernel* kernel = crc::active().load(std::memory_order_relaxed);
  const auto run = stores == Stores::kStream ? kernel->stream : kernel->copy;
  return ~run(~value, static_cast<std::uint8_t*>(target), static_cast<const std::uint8_t*>(source), n);
}

void copy_bytes(void* target, const void* source, std::size_t n, Stores stores) noexcept {
#if defined(__x86_64__)
  auto* to = static_cast<std::uint8_t*>(target);
  const auto* from = static_cast<const std::uint8_t*>(source);
  if (stores == Stores::kStream && reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
    for (; n >= 64; n -= 64, to += 64, from += 64) {
      for (int i = 0; i < 4; ++i)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i,
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i));
    }
  }
  if (n > 0) std::memcpy(to, from, n);
#else
  (void)stores;
  if (n > 0) std::memcpy(target, source, n);
#endif
}

// The thread sanitizer does not model fences and GCC says so; what they order is hidden from it anyway
// (KV_RACY).
#if defined(__SANITIZE_THREAD__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wtsan"
#endif

void load_fence() noexcept { std::atomic_thread_fence(std::memory_order_acquire); }

void store_fence() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

std::vector<std::string_view> crc_paths() {
  std::vector<std::string_view> names;
  for (const crc::Kernel* kernel : crc::kKernels)
    if (kernel->runs_here()) names.push_back(kernel->name);
  return names;
}

std::string_view crc_path() { return crc::active().load(std::memory_order_relaxed)->name; }

void set_crc_path(std::string_view name) {
  std::string known;
  for (const crc::Kernel* kernel : crc::kKernels) {
    if (!kernel->runs_here()) continue;
    if (kernel->name == name) {
      crc::active().store(kernel, std::memory_order_relaxed);
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(kernel->name);
  }
  throw Invalid("crc path: \"" + std::string(name) + "\" is not one of " + known);
}

}  // namespace kv
