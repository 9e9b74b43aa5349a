// What the disk pool is told, and what it tells.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "types.h"

namespace kv {

struct DiskOptions {
  double reinsert_share = 0.25;  // of a segment's bytes, written again at most
  std::size_t spare = 2;         // segments kept FREE or OPENING, so that a save does not wait
  std::size_t write_bytes_max = std::size_t{256} << 20;  // accepted and not yet on the disk
  // More records than this, and the oldest segment is given up although there is room: their nodes would crowd
  // the index, and no save would find a place for a new one.
  std::size_t records_max = kNone;
  std::size_t slice = 4096;  // nodes that one pump() looks at or gives up for an evacuation: about 0.3 us each
};

// Node ids are those of the call; what has failed or rotted may be gone from the index by now.
struct DiskEvent {
  enum class Kind : std::uint8_t { kWritten, kRead, kFlushed, kFailed, kNotMade };
  Kind kind = Kind::kWritten;
  std::uint64_t job = 0;            // of write(), read() or flush()
  std::vector<NodeId> ok;           // in the order of the call
  std::vector<NodeId> corrupt;      // of a read: rot, already dropped here
  std::vector<NodeId> failed;       // the disk refused, or cancel(), forget(), close(), a parent that failed
  bool last = false;                // of the job
  int error = 0;                    // errno; kFailed: a segment could not be opened, sealed or moved; kNotMade: no file
                                    // could be made, the tier goes on with those that it has
  std::size_t bytes = 0;            // payload of `ok`
  double seconds = 0;               // since the job's first submission
};

struct DiskCounts {
  std::size_t creating = 0, free = 0, opening = 0, filling = 0, sealing = 0, sealed = 0, evacuating = 0, broken = 0;
  std::size_t records = 0;          // readable
  std::size_t live_bytes = 0;       // of readable records, headers not counted
  std::size_t writing = 0;          // accepted, and not readable yet
  std::size_t capacity_bytes = 0;   // what was configured
  std::size_t file_bytes = 0;       // of all segments
};

// Records, since the last take.
struct DiskDropped {
  std::size_t evicted = 0;      // of evacuated segments, not used since they were written, and what was below them
  std::size_t reinserted = 0;   // of evacuated segments, written again
  std::size_t over_budget = 0;  // of evacuated segments, used, but more than reinsert_share or without room
  std::size_t over_limit = 0;   // of an account that wanted room for others of its own
  std::size_t rot = 0;
  std::size_t lost = 0;         // could not be written or moved, or their parent's could not
  std::size_t events_lost = 0;  // keys that take_stored() and take_removed() do not tell of
  std::size_t reinserted_bytes = 0;
  std::size_t compacted = 0;    // segments whose holes became room, and nothing that lived was given up
};

struct DiskAdopted {
  std::size_t readable = 0;
  std::size_t orphaned = 0;  // the chain does not reach a root, or contradicts the index
  std::size_t older = 0;     // there is another record of the same block, of a later segment
  std::size_t no_room = 0;   // the index is full, or there are too many roots or formats
  std::size_t rotten = 0;
  std::size_t segments = 0;  // with records that were taken up
  std::size_t unsealed = 0;  // of those; they are sealed in the background
};

}  // namespace kv
