#include "ledger.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>

#include "crc.h"
#include "memfd.h"

namespace kv {

namespace {

std::size_t bytes_for(std::size_t pages) { return pages * sizeof(LedgerEntry); }

}  // namespace

std::uint32_t ledger_sum(const LedgerEntry& entry) noexcept {
  return crc32c(reinterpret_cast<const std::uint8_t*>(&entry), offsetof(LedgerEntry, sum));
}

std::shared_ptr<Ledger> Ledger::create(const std::string& name, std::size_t pages) {
  if (pages == 0 || pages >= kNone) throw Invalid("ledger: need 1 to 2^32 - 2 pages, got " + std::to_string(pages));
  Fd fd = make_memfd("kvstore-ledger" + (name.empty() ? "" : ":" + name), bytes_for(pages));
  add_seals(fd.get(), kSizeSeals | F_SEAL_SEAL);
  return std::shared_ptr<Ledger>(new Ledger(std::move(fd), pages));
}

std::shared_ptr<Ledger> Ledger::adopt(int fd, std::size_t pages) {
  check_sealed(fd, "ledger", bytes_for(pages), kSizeSeals | F_SEAL_SEAL);
  return std::shared_ptr<Ledger>(new Ledger(duplicate(fd), pages));
}

Ledger::Ledger(Fd fd, std::size_t pages)
    : fd_(std::move(fd)), pages_(pages), pid_(getpid()),
      entries_(reinterpret_cast<LedgerEntry*>(map_memfd(fd_.get(), bytes_for(pages), PROT_READ | PROT_WRITE))) {}

Ledger::~Ledger() {
  if (pid_ == getpid()) munmap(static_cast<void*>(entries_), bytes_for(pages_));
}

// A killed process's stores are seen in the order in which it made them; the fences keep the compiler to it.
void Ledger::set_state(SlotId slot, SlotState state) noexcept {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  __atomic_store_n(&entries_[slot].state, static_cast<std::uint32_t>(state), __ATOMIC_RELEASE);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

SlotState Ledger::state(SlotId slot) const noexcept {
  return static_cast<SlotState>(__atomic_load_n(&entries_[slot].state, __ATOMIC_ACQUIRE));
}

void Ledger::filling(SlotId slot, std::uint64_t generation, const Owner& owner, const SlotFormat& format) noexcept {
  LedgerEntry& entry = entries_[slot];
  __atomic_store_n(&entry.generation, generation, __ATOMIC_RELAXED);
  entry.owner = owner;
  entry.format = format;
  set_state(slot, SlotState::kFilling);
}

void Ledger::ready(SlotId slot, const LedgerBlock& block) noexcept {
  LedgerEntry& entry = entries_[slot];
  entry.key = block.key;
  entry.parent = block.parent;
  touch(slot);
  entry.depth = block.depth;
  entry.length = block.length;
  entry.crc = block.crc;
  entry.sum = ledger_sum(entry);
  set_state(slot, SlotState::kReady);
}

void Ledger::touch(SlotId slot) noexcept {
  __atomic_store_n(&entries_[slot].sequence, ++sequence_, __ATOMIC_RELAXED);
}

void Ledger::free(SlotId slot) noexcept { set_state(slot, SlotState::kFree); }

void Ledger::free(SlotId slot, std::uint64_t generation) noexcept {
  free(slot);
  __atomic_store_n(&entries_[slot].generation, generation, __ATOMIC_RELAXED);
}

std::vector<SlotId> Ledger::used() const {
  std::vector<SlotId> slots;
  const auto bytes = static_cast<off_t>(bytes_for(pages_));
  for (off_t at = 0; at < bytes;) {
    off_t start = lseek(fd_.get(), at, SEEK_DATA);
    if (start < 0 && errno == ENXIO) break;  // nothing but holes from here on
    if (start < 0) throw std::system_error(errno, std::generic_category(), "ledger: SEEK_DATA");
    const off_t hole = lseek(fd_.get(), start, SEEK_HOLE);
    const off_t stop = hole < 0 ? bytes : hole;
    for (; start < stop; start += sizeof(LedgerEntry)) {
      const auto slot = static_cast<SlotId>(start / static_cast<off_t>(sizeof(LedgerEntry)));
      if (__atomic_load_n(&entries_[slot].generation, __ATOMIC_RELAXED) > 0) slots.push_back(slot);
    }
    at = stop;
  }
  return slots;
}

}  // namespace kv
