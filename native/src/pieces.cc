#include "pieces.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "types.h"

namespace kv {

void for_pieces(int threads, std::size_t pieces, const std::function<void(std::size_t)>& work) {
  constexpr int kThreadsMax = 256;
  if (threads < 1 || threads > kThreadsMax)
    throw Invalid("threads: must be in [1, " + std::to_string(kThreadsMax) + "], got " + std::to_string(threads));
  std::atomic<std::size_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto run = [&] {
    try {
      for (std::size_t i = next.fetch_add(1); i < pieces; i = next.fetch_add(1)) work(i);
    } catch (...) {
      next.store(pieces);
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    for (std::size_t i = 1; i < std::min<std::size_t>(static_cast<std::size_t>(threads), pieces); ++i)
      others.emplace_back(run);
    run();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace kv
