// Work that falls into independent pieces, done by threads that live as long as the call.
#pragma once

#include <cstddef>
#include <functional>

namespace kv {

// Runs work(0) … work(pieces - 1) on `threads` threads (this one included); the first exception is thrown
// after all have ended. Invalid unless threads is in [1, 256].
void for_pieces(int threads, std::size_t pieces, const std::function<void(std::size_t)>& work);

}  // namespace kv
