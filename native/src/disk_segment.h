// A segment as the disk pool knows it: where its records lie, what is under way in it, how far it is synced.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "mover.h"
#include "record.h"
#include "types.h"

namespace kv {

// See disk_pool.h. kGone: a position without a file.
enum class SegmentState : std::uint8_t {
  kGone,
  kCreating,
  kFree,
  kOpening,
  kFilling,
  kSealing,
  kSealed,
  kEvacuating,
  kBroken
};
inline constexpr std::size_t kSegmentStates = 9;

// Which of the 81 transitions exist. From kGone also what a survey may find.
bool segment_may_move(SegmentState from, SegmentState to) noexcept;
std::string_view name_of(SegmentState state) noexcept;

// A record, from the moment it is ordered. 16 B.
struct DiskRecord {
  NodeId node = kNone;  // kNone: dead
  std::uint32_t page = 0;
  std::uint32_t payload_crc = 0;
  std::uint16_t format = 0;  // see DiskFormats
  bool copy = false;         // of a record that is being evacuated; not yet the node's own
};

// Names a record of a pool.
struct RecordRef {
  std::uint32_t segment = kNone;
  std::uint32_t record = kNone;
  friend bool operator==(const RecordRef&, const RecordRef&) = default;
};

// What a CREATING, OPENING or SEALING segment waits for.
enum class SegmentStep : std::uint8_t {
  kStart,       // its writes to end
  kRecordsSync, // of what it holds
  kPages,       // its file, header or footer to be written
  kPagesSync,   // of that
  kReady,       // OPENING: to be filled
};

struct DiskSegment {
  SegmentState state = SegmentState::kGone;
  SegmentStep step = SegmentStep::kStart;
  bool passed_over = false;    // could not be evacuated: not tried again before something has changed
  std::uint8_t failures = 0;   // of evacuations, since it was sealed
  std::uint32_t pages = 0;     // of the file
  std::uint64_t sequence = 0;
  std::uint64_t old_sequence = 0;  // of the life whose records the file still has; 0 once a new header is synced
  std::uint64_t nonce = 0;
  std::uint32_t age = 0;       // when it began to be filled, in ticks of the pool's clock
  std::uint32_t next_page = 0; // first one that no record has
  std::vector<DiskRecord> records;
  std::size_t live = 0;        // records that are not dead
  std::uint32_t live_pages = 0;     // of those
  std::uint32_t trimmed_pages = 0;  // of those that an account gave up for others of its own: see trim()
  std::size_t writing = 0;     // orders under way into it
  std::size_t readers = 0;     // orders under way from it
  int error = 0;               // errno that made it BROKEN

  // Syncs, numbered. What ended is on the medium when the sync that want_sync() named is done.
  std::uint64_t asked = 0, done = 0, wanted = 0;
  std::uint64_t awaited = 0;   // by its own step
  bool dirty = false;          // something ended that no sync was asked for
  bool unproven = false;       // a sync failed: whether what ended before it is on the medium, nobody knows
  bool adopted = false;        // unsealed when it was taken up, and not synced since
  bool footless = false;       // no footer is written: it has no room, or would hide what could not be read for now

  // No footer is larger, whoever dies until then.
  std::uint32_t end_page(std::size_t more) const noexcept {
    const std::uint32_t footer = footer_pages(records.size() + more);
    return pages < footer ? 0 : pages - footer;
  }
  bool idle() const noexcept { return writing == 0 && readers == 0; }
  bool synced() const noexcept { return !dirty && !unproven && done == asked; }
  // The sync that covers everything that has ended: 0, or higher than done, when there is one to wait for.
  std::uint64_t want_sync() noexcept {
    const std::uint64_t number = dirty ? asked + 1 : asked;
    if (number > wanted) wanted = number;
    return number;
  }
};

// Block formats by a small number: every record names one, and there are few.
class DiskFormats {
 public:
  static constexpr std::size_t kMax = 1024;

  // Its number; kNone when there are too many.
  std::uint32_t number(const SlotFormat& format) {
    for (std::size_t i = 0; i < formats_.size(); ++i) {
      const std::size_t at = (last_ + i) % formats_.size();
      const SlotFormat& known = formats_[at];
      if (known.layers != format.layers || known.heads != format.heads || known.cell_bytes != format.cell_bytes)
        continue;
      last_ = at;
      return static_cast<std::uint32_t>(at);
    }
    if (formats_.size() == kMax) return kNone;
    formats_.push_back(format);
    last_ = formats_.size() - 1;
    return static_cast<std::uint32_t>(last_);
  }
  const SlotFormat& operator[](std::size_t number) const noexcept { return formats_[number]; }

 private:
  std::vector<SlotFormat> formats_;
  std::size_t last_ = 0;  // where the last one was found: the next is mostly the same
};

}  // namespace kv
