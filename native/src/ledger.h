// The ledger: what a daemon that was killed would have told the next one about every slot, kept all the time,
// because SIGKILL leaves no moment to write a snapshot. One memfd beside each kept arena, written by the pool,
// never handed to a client.
//
// One entry per page of the arena, sparse: only first pages of slots are touched. An
// entry is two cache lines; a hand-out writes the second, a publish both.
//
//   FREE     only `generation` counts, so that generations go on
//   FILLING  generation, owner, format: somebody may be writing, and who that is
//   READY    all of it, under `sum`
//
// `state` is stored last. Whatever was cut short then shows the state before: FREE, or FILLING whose fields a
// publish does not touch. A READY entry that does not match its sum is damage, and is not believed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fd.h"
#include "types.h"

namespace kv {

// Who may write to a FILLING slot: 16 bytes that mean something to the caller (an engine's id).
using Owner = std::array<std::uint8_t, 16>;

struct alignas(64) LedgerEntry {
  Key key;
  Key parent;                // the root's key at depth 1
  std::uint64_t generation;  // of the last hand-out
  Owner owner;
  SlotFormat format;
  std::uint32_t depth;
  std::uint32_t length;
  std::uint32_t crc;       // CRC32C of the slot's CRC table
  std::uint32_t sum;       // CRC32C of everything above
  std::uint32_t state;     // SlotState; read and written through the functions below
  std::uint64_t sequence;  // of the last use: 1, 2, 3, …; decides who leaves first, nothing else
};
static_assert(sizeof(LedgerEntry) == 128);
static_assert(offsetof(LedgerEntry, sum) == 112 && offsetof(LedgerEntry, generation) == 64);

std::uint32_t ledger_sum(const LedgerEntry& entry) noexcept;

// What a publish adds to an entry.
struct LedgerBlock {
  Key key;
  Key parent;
  std::uint32_t depth = 0;
  std::uint32_t length = 0;
  std::uint32_t crc = 0;
};

class Ledger {
 public:
  // An empty ledger for an arena of that many pages.
  static std::shared_ptr<Ledger> create(const std::string& name, std::size_t pages);
  // A ledger that another daemon has left; the caller keeps fd. Invalid unless it is what create() made for
  // an arena of that size.
  static std::shared_ptr<Ledger> adopt(int fd, std::size_t pages);
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // The slot was handed out. Before anyone is told so.
  void filling(SlotId slot, std::uint64_t generation, const Owner& owner, const SlotFormat& format) noexcept;
  // The slot that is FILLING holds this now.
  void ready(SlotId slot, const LedgerBlock& block) noexcept;
  // The block was used now, and its chain with it.
  void touch(SlotId slot) noexcept;
  // Nothing of the slot is worth anything. Its generation stays.
  void free(SlotId slot) noexcept;
  // The same for a slot that will not be handed on as it was: its next generation is `generation` + 1.
  void free(SlotId slot, std::uint64_t generation) noexcept;

  const LedgerEntry& entry(SlotId slot) const noexcept { return entries_[slot]; }
  SlotState state(SlotId slot) const noexcept;
  // Every slot that was ever handed out, ascending. Skips what was never written without touching it.
  std::vector<SlotId> used() const;
  // The next use gets a sequence above this one.
  void continue_after(std::uint64_t sequence) noexcept { sequence_ = sequence; }

  std::size_t pages() const noexcept { return pages_; }
  int fd() const noexcept { return fd_.get(); }

 private:
  Ledger(Fd fd, std::size_t pages);
  void set_state(SlotId slot, SlotState state) noexcept;

  Fd fd_;
  std::size_t pages_;
  int pid_;  // who mapped: a forked child has no mapping to unmap
  LedgerEntry* entries_;
  std::uint64_t sequence_ = 0;
};

}  // namespace kv
