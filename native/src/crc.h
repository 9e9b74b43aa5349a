// CRC32C (Castagnoli) of bytes, alone or folded into a copy (LAWS A6).
//
// One implementation is chosen at the first call, best first: vpclmulqdq512, pclmul128, sse42, plain. All
// return the same sums; they differ in speed only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace kv {

// How a copy writes its target.
enum class Stores {
  kStream,  // non-temporal: no read of the target's lines, nothing left in the cache; end with store_fence()
  kCached,  // ordinary: the target is read again at once, or is small scratch
};

// `value` continues an earlier sum: crc32c(b, crc32c(a)) == crc32c(a || b). Starts at 0.
std::uint32_t crc32c(const void* data, std::size_t n, std::uint32_t value = 0) noexcept;

// Copies n bytes (any alignment, no overlap) and returns their CRC32C, continuing `value`. Every source
// byte is read once, so the sum is of exactly the bytes written even while someone else writes the source.
std::uint32_t copy_crc(void* target, const void* source, std::size_t n, std::uint32_t value, Stores stores) noexcept;

// Copies n bytes without a sum, for scattering short pieces that were summed on their way in.
void copy_bytes(void* target, const void* source, std::size_t n, Stores stores) noexcept;

// Orders streamed stores before everything after it. Free where there are none.
void store_fence() noexcept;

// Orders all loads before it (a copy's) before all loads after it (the check that the source did not change).
void load_fence() noexcept;

// Names this CPU can run, best first; the one in use; for tests, force one (Invalid if not in the list).
std::vector<std::string_view> crc_paths();
std::string_view crc_path();
void set_crc_path(std::string_view name);

}  // namespace kv
