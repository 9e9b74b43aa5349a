// What a kept arena holds, before it is believed: every entry of its ledger, judged by its own sum and by the
// bytes of its slot. Made once, at start, by a daemon that adopts; HostPool::adopt takes it from there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "arena.h"
#include "ledger.h"
#include "types.h"

namespace kv {

enum class Verdict : std::uint8_t {
  kFree,     // handed out once, nothing in it now
  kFilling,  // somebody may be writing
  kClaimed,  // says READY, and its bytes were not looked at yet
  kReady,    // every sum agrees
  kTorn,     // the entry does not match its own sum, or cannot be true
  kRotten,   // the entry is right, the bytes are not what it says
};

struct Found {
  SlotId slot;
  std::uint32_t depth;  // kClaimed and kReady
  std::uint64_t sequence;
  Verdict verdict;
};

class Survey {
 public:
  // Reads the ledger. Invalid when a FILLING entry cannot be true: nothing of the arena is safe then.
  Survey(std::shared_ptr<Ledger> ledger, std::shared_ptr<Arena> arena);

  // Reads the bytes of every slot that says READY, on `threads` threads.
  void verify(int threads);
  std::size_t claimed_bytes() const noexcept { return claimed_bytes_; }
  std::size_t verified_bytes() const noexcept { return verified_bytes_.load(std::memory_order_relaxed); }

  const Ledger& ledger() const noexcept { return *ledger_; }
  const std::vector<Found>& found() const noexcept { return found_; }
  std::uint64_t last_sequence() const noexcept { return last_sequence_; }

 private:
  Verdict judge(SlotId slot) const;

  std::shared_ptr<Ledger> ledger_;
  std::shared_ptr<Arena> arena_;
  std::vector<Found> found_;
  std::uint64_t last_sequence_ = 0;
  std::size_t claimed_bytes_ = 0;
  std::atomic<std::size_t> verified_bytes_{0};
};

}  // namespace kv
