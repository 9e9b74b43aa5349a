// Moves blocks between slots of an arena and records of segment files, on threads of its own.
//
// One thread submits to the disk and collects from it; others verify what was read. Neighbouring records of a
// job travel in one request (at most kMergeBytes, kReadMergeBytes of a read), header pages and slots alternating,
// and nothing is copied. Reads go before writes, and both before chores: each kind has a share of the disk's
// depth, so that none starves another. Within a kind jobs begin in the order in which they came; reads take
// turns, a request each, so that a short one does not wait for another's whole chain.
//
//   read       record → FILLING slot. kOk only if the header is the expected one and every sum agrees. What the
//              disk refuses to read as a whole is read again record by record: a bad sector costs one block.
//   write      READY slot, which does not change meanwhile → record
//   relocate   record → record, verified on its way, through memory of the mover's own; the same second try
//   pages      bytes as they are (headers, footers)
//   sync       what ended before it was submitted is on the medium
//   create     a file, allocated, written once from end to end with zeros, synced, then its header page, synced
//
// Jobs end by notices, in the order in which the disk is done: several for one job, each for some of its
// orders; the last one says so. eventfd() is readable while notices() has a job's last one, an error, or one that
// ended a millisecond or more after notices() was last emptied: a fast disk would else wake its reader for each
// request. What ended sooner is told with whatever ends next; who cannot wait for that just asks.
//
// Any thread may call. Whatever a job needs is allocated by who submits it, so the mover's own threads never run
// out of memory; the one exception, a record above kMergeBytes on its relocation, ends as kError with ENOMEM.
// Memory of its own: a page of header for each record under way, and 8 MiB (or one record) for relocations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "arena.h"
#include "disk.h"
#include "record.h"
#include "types.h"

namespace kv {

using MoveId = std::uint64_t;

inline constexpr std::size_t kMergeBytes = std::size_t{2} << 20;
// Larger ones gain nothing, and a virtual disk read them more slowly.
inline constexpr std::size_t kReadMergeBytes = std::size_t{1} << 20;

enum class MoveStatus : std::uint8_t {
  kOk = 0,
  kCorrupt = 1,  // the disk gave bytes, but not those that were written
  kError = 2,    // the disk said no
  kDropped = 3,  // cancelled before it was submitted
};

// A record and what must be true of it.
struct RecordAt {
  int fd = -1;
  std::uint32_t page = 0;   // of its header
  std::uint64_t nonce = 0;  // of its segment
  Key key;
  std::uint32_t payload_crc = 0;
  SlotFormat format;
};

struct ReadOrder {
  RecordAt from;
  SlotId slot = kNone;
};

struct WriteOrder {
  int fd = -1;
  std::uint32_t page = 0;
  RecordHeader header;
  SlotId slot = kNone;
};

struct RelocateOrder {
  RecordAt from;
  int fd = -1;
  std::uint32_t page = 0;
  RecordHeader header;  // of the new record: the same key, format and payload_crc
};

struct Notice {
  MoveId job = 0;
  std::size_t first = 0;             // statuses are of orders [first, first + size)
  std::vector<MoveStatus> statuses;  // one for pages, sync and create
  bool last = false;                 // nothing of the job is under way any more
  int error = 0;                     // errno of a kError
  std::size_t bytes = 0;             // payload of those that are kOk; of pages and create, what was written
  double seconds = 0;                // from the first submission of the job to this notice; 0 before it
};

class Mover {
 public:
  struct Limits {
    // Under way, headers included; a single larger record is moved by itself.
    std::size_t read_bytes_max = std::size_t{64} << 20;
    std::size_t write_bytes_max = std::size_t{32} << 20;
    int verify_threads = 1;
  };
  static constexpr std::size_t kOrdersMax = 65536;  // in one job
  static constexpr std::size_t kJobsMax = 65536;    // whose last notice was not taken
  static constexpr std::size_t kDepthMin = 8;       // of the disk
  static constexpr int kVerifyThreadsMax = 64;

  // Invalid on a disk or limits too small. From here on the disk belongs to a thread of the mover.
  Mover(std::unique_ptr<Disk> disk, std::shared_ptr<Arena> arena, Limits limits);
  ~Mover();  // close(). A forked child, which has none of the threads, must leak its copy instead.
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  int eventfd() const noexcept;
  std::string_view disk_kind() const noexcept;

  // Invalid (nothing was begun) on a slot outside the arena, too many orders, or a record that is none; Full
  // beyond kJobsMax; Invalid after close(). A job without orders ends with one empty notice. Until a job's last
  // notice its files stay open, its slots are the mover's, and no two records of its orders overlap.
  MoveId read(std::vector<ReadOrder> orders);
  MoveId write(std::vector<WriteOrder> orders);
  MoveId relocate(std::vector<RelocateOrder> orders);
  // `bytes`: whole pages, at least one, copied.
  MoveId pages(int fd, std::uint32_t page, const std::vector<std::uint8_t>& bytes);
  MoveId sync(int fd);
  // The file exists already and is not longer than `pages` (Invalid). At the end it has exactly that many.
  // Errors: ENOSPC and whatever else. Written in pieces of 1 MiB, one after the other, one file at a time, so
  // that it disturbs little.
  MoveId create(int fd, std::uint32_t pages, const SegmentHeader& header);

  // Orders not yet submitted become kDropped; the job still ends, with a last notice. A creation ends as
  // kDropped after the piece that is being written. No effect on a job that has ended.
  void cancel(MoveId job);
  std::vector<Notice> notices();
  // Jobs that have not ended.
  std::size_t under_way() const;
  // Until nothing is under way; false at the timeout.
  bool drain(double timeout_s);
  // Drops what was not submitted, waits for the disk, ends the threads. Notices can still be taken.
  void close();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kv
