// What the tests of surveys share: a directory whose segments are written behind its back.
#pragma once

#include <doctest/doctest.h>

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "disk_directory.h"
#include "disk_kit.h"
#include "disk_survey.h"

namespace kv::test {

inline constexpr std::size_t kSegment = kSegmentBytesMin;
inline constexpr std::uint32_t kPages = kSegment / kPageBytes;
inline const Key kRoot = key_of(1'000'000);

// Several cells with padding between them, so that their sums and not only the table's are asked.
inline constexpr SlotFormat kTwoPages{2, 2, 1700};

struct Surveyed {
  TempDir at;
  DiskDirectory::Options options;
  StoreId id;

  explicit Surveyed(std::size_t segments = 16) {
    options.path = at.path("disk");
    options.capacity_bytes = segments * kSegment;
    options.segment_bytes = kSegment;
    options.direct = direct_works(at.path());
    id = DiskDirectory::open(options)->id();
  }

  std::shared_ptr<DiskDirectory> open() const { return DiskDirectory::open(options); }
  // Looks at the directory as it is now.
  static std::unique_ptr<DiskSurvey> survey(std::shared_ptr<DiskDirectory> directory, int threads = 2) {
    auto survey = std::make_unique<DiskSurvey>(std::move(directory));
    survey->read(threads);
    CHECK(survey->bytes_read() == survey->bytes_in_all());
    return survey;
  }
  std::unique_ptr<DiskSurvey> survey(int threads = 2) const { return survey(open(), threads); }
  // Its only segment, as it is found now.
  FoundSegment found() const {
    const auto all = survey();
    REQUIRE(all->segments().size() == 1);
    return all->segments()[0];
  }

  SegmentImage image(std::uint32_t number, std::uint64_t sequence, std::uint32_t pages = kPages) const {
    return SegmentImage({id, number, pages, sequence, key_of(number * 1000 + sequence).hash()});
  }
  // Segment 0, with the first blocks of a chain.
  SegmentImage with_records(std::size_t n, const SlotFormat& format = kTwoPages) const {
    SegmentImage segment = image(0, 5);
    for (const RecordHeader& record : chain_of(kRoot, 1, n, format)) segment.append(record);
    return segment;
  }
  // Writes one byte of a segment that is there.
  void poke(std::uint32_t number, std::size_t offset, std::uint8_t byte) const {
    const Fd fd(::open(segment_path(options.path, number).c_str(), O_WRONLY | O_CLOEXEC));
    REQUIRE(::pwrite(fd.get(), &byte, 1, static_cast<off_t>(offset)) == 1);
  }
};

inline bool same(const std::vector<FooterEntry>& a, const std::vector<FooterEntry>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::uint8_t bytes[2][kFooterEntryBytes];
    encode(a[i], bytes[0]);
    encode(b[i], bytes[1]);
    if (std::memcmp(bytes[0], bytes[1], kFooterEntryBytes) != 0) return false;
  }
  return true;
}

inline std::vector<FooterEntry> without(std::vector<FooterEntry> entries, std::size_t i) {
  entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(i));
  return entries;
}

}  // namespace kv::test
