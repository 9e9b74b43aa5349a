// One segment of a survey, read by one thread: its footer, or page by page, or record by record.
#pragma once

#include <atomic>
#include <cstddef>

#include "disk_survey.h"

namespace kv {

using BytesRead = std::atomic<std::size_t>;  // of the whole survey

// The segment was opened once. Sealed, with the records that its footer tells of, or unsealed and still to be
// scanned. Two small reads.
void read_footer(const SegmentFile& file, FoundSegment& found);

// Finds the records of an unsealed segment and verifies them. Reads every page from 1 on, once.
void scan_records(const SegmentFile& file, FoundSegment& found, BytesRead& read);
std::size_t scan_bytes(const SegmentFile& file) noexcept;  // what it adds to `read`

// Takes away the records of a sealed segment that are not what its footer says.
void verify_records(const SegmentFile& file, FoundSegment& found, BytesRead& read);
std::size_t verify_bytes(const FoundSegment& found) noexcept;  // what it adds to `read`

}  // namespace kv
