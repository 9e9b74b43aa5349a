// The arena: one memfd of block bytes and one memfd of control entries, mapped by the daemon and by every
// engine of the trust group.
//
// The data memfd is sealed against resizing; the control memfd also against any future writable mapping
// (F_SEAL_FUTURE_WRITE), so that a client can read the truth about a slot but cannot forge it.
// Both die with their last holder: nothing is left in /dev/shm after any exit.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "fd.h"
#include "types.h"

namespace kv {

// What everyone may know about a slot. One per page of the arena (only those of first pages are used).
// Writers (the daemon only): bump `generation` and set kFilling *before* a slot is handed out, fill the
// other fields, then store kReady with release. Readers: see copy.h.
struct alignas(64) ControlEntry {
  std::atomic<std::uint64_t> generation;
  std::atomic<std::uint32_t> state;  // SlotState
  std::uint32_t length;              // bytes of the block, CRC table included
  std::uint32_t crc;                 // CRC32C of the slot's CRC table
  std::uint32_t checked;             // 0 = none, 1 = the writer's CPU summed the cells
  std::uint8_t fingerprint[16];      // first half of the block key
  std::uint8_t reserved[24];
};
static_assert(sizeof(ControlEntry) == 64);

// A mapping of both regions. Made by the daemon with `create`, by a client with `attach`. Both mappings are
// MADV_DONTFORK on either side: a forked child can neither write nor keep memory alive.
class Arena {
 public:
  // Daemon: makes, sizes and seals both memfds. capacity is rounded down to 2 MiB (at least one).
  static std::shared_ptr<Arena> create(const std::string& name, std::size_t capacity_bytes);
  // Daemon, after another one's end: goes on with its block bytes and makes a fresh control region, every slot
  // FREE in generation 0 (HostPool::adopt fills it in). The caller keeps data_fd. Invalid unless size and
  // seals are what `create` made.
  static std::shared_ptr<Arena> adopt(const std::string& name, int data_fd, std::size_t capacity_bytes);
  // Client: maps fds it received (closed by the caller, nothing here keeps them). Control is mapped
  // read-only, data read-write. Invalid unless sizes and seals are exactly what `create` makes.
  static std::shared_ptr<Arena> attach(int data_fd, int control_fd, std::size_t capacity_bytes);

  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Daemon, once, before serving (LAWS G27): touch one byte per 2 MiB, MADV_COLLAPSE in `threads` pieces,
  // fall back to 4 KiB pages, then mlock if asked. Returns true if every piece became huge. Reports through
  // prefaulted_bytes(). Invalid, before anything is touched, when memory or the mlock limit is too small.
  bool prefault(int threads, bool huge_pages, bool lock);
  // Client, once at attach (LAWS G28): fill this process's page tables, of the control region too.
  void populate(int threads);
  std::size_t prefaulted_bytes() const { return prefaulted_.load(std::memory_order_relaxed); }

  std::uint8_t* slot(SlotId id) const { return data_ + std::size_t{id} * kPageBytes; }
  ControlEntry& control(SlotId id) const { return control_[id]; }

  std::size_t capacity_bytes() const { return capacity_; }
  std::size_t pages() const { return capacity_ / kPageBytes; }
  int data_fd() const { return data_fd_; }
  int control_fd() const { return control_fd_; }
  bool writable_control() const { return owner_; }

 private:
  Arena() = default;
  static std::shared_ptr<Arena> open(const std::string& name, Fd data, std::size_t capacity);
  void map_regions(int data_fd, int control_fd);
  void populate_control(std::size_t start, std::size_t bytes);
  void check_headroom() const;

  std::uint8_t* data_ = nullptr;
  ControlEntry* control_ = nullptr;
  std::size_t capacity_ = 0;
  int data_fd_ = -1;     // daemon only: handed to clients at attach
  int control_fd_ = -1;
  bool owner_ = false;
  int pid_ = 0;  // who mapped: a forked child inherits this object but not the mapping, and must not unmap
  std::atomic<std::size_t> prefaulted_{0};
};

}  // namespace kv
