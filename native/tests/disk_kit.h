// What the tests of the disk tier share: a temporary directory, blocks with right sums, and whole segments made
// in memory, so that a test can tear and flip them as it likes.
#pragma once

#include <fcntl.h>
#include <stdlib.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "crc.h"
#include "fd.h"
#include "kit.h"
#include "record.h"

namespace kv::test {

// A directory of its own under the system's temporary one (mode 0700), gone at the end with all it holds.
class TempDir {
 public:
  TempDir() : path_((std::filesystem::temp_directory_path() / "kvstore-test-XXXXXX").string()) {
    if (::mkdtemp(path_.data()) == nullptr) throw std::system_error(errno, std::generic_category(), path_);
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string path(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Whether files of that directory can be opened with O_DIRECT (tmpfs before Linux 6.6 cannot).
inline bool direct_works(const std::string& directory) {
  const std::string name = directory + "/direct-probe";
  const Fd fd(::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600));
  ::unlink(name.c_str());
  return static_cast<bool>(fd);
}

inline StoreId store_of(std::uint64_t name) {
  StoreId id;
  const Key key = key_of(name);
  std::memcpy(id.data(), key.bytes.data(), id.size());
  return id;
}

inline std::string segment_path(const std::string& directory, std::uint32_t number) {
  char name[32];
  std::snprintf(name, sizeof name, "/segment-%06u.kvs", number);
  return directory + name;
}

// A slot as a save leaves it: cells of the key's bytes, paddings zero, a sum per cell. What kept.h's
// write_block puts into a slot that was all zeros.
struct Payload {
  std::vector<std::uint8_t> bytes;  // format.slot_bytes()
  std::uint32_t crc = 0;            // of the table
};

inline Payload payload_of(const Key& key, const SlotFormat& format) {
  Payload out{std::vector<std::uint8_t>(format.slot_bytes()), 0};
  for (std::size_t cell = 0; cell < format.cells(); ++cell) {
    std::uint8_t* at = out.bytes.data() + cell * format.cell_stride();
    for (std::size_t i = 0; i < format.cell_bytes; ++i)
      at[i] = static_cast<std::uint8_t>(key.bytes[i % key.bytes.size()] + cell + i / key.bytes.size());
    const std::uint32_t crc = crc32c(at, format.cell_bytes);
    std::memcpy(out.bytes.data() + format.table_offset() + 4 * cell, &crc, 4);
  }
  out.crc = crc32c(out.bytes.data() + format.table_offset(), 4 * format.cells());
  return out;
}

// A record of such a block; nonce and sequence are its segment's to give.
inline RecordHeader record_of(const Key& key, const Key& parent, const Key& root, std::uint32_t depth,
                              const SlotFormat& format) {
  RecordHeader header;
  header.key = key;
  header.parent = parent;
  header.root = root;
  header.depth = depth;
  header.format = format;
  header.payload_crc = payload_of(key, format).crc;
  return header;
}

// The blocks key_of(first) … key_of(first + n - 1), each the child of the one before, the first of the root.
inline std::vector<RecordHeader> chain_of(const Key& root, std::uint64_t first, std::size_t n,
                                          const SlotFormat& format) {
  std::vector<RecordHeader> chain;
  for (std::size_t i = 0; i < n; ++i) {
    const Key parent = i == 0 ? root : chain.back().key;
    chain.push_back(record_of(key_of(first + i), parent, root, static_cast<std::uint32_t>(i + 1), format));
  }
  return chain;
}

// A segment's file, in memory.
class SegmentImage {
 public:
  // Zeros behind the header, as creation leaves them.
  explicit SegmentImage(const SegmentHeader& header) : header_(header), bytes_(header.pages * kPageBytes) {
    encode(header, bytes_.data());
  }

  // A record with the block's own payload, or with another one; the page of its header.
  std::uint32_t append(const RecordHeader& record) {
    return append(record, payload_of(record.key, record.format).bytes);
  }
  std::uint32_t append(RecordHeader record, const std::vector<std::uint8_t>& payload) {
    record.nonce = header_.nonce;
    record.sequence = header_.sequence;
    const std::uint32_t at = next_;
    if (at + record.pages() > header_.pages) throw std::length_error("the segment is full");
    encode(record, page(at));
    std::memcpy(page(at + kHeaderPages), payload.data(), payload.size());
    entries_.push_back(footer_entry(record, at));
    next_ += record.pages();
    return at;
  }
  // As after a write that failed and left nothing.
  void skip(std::uint32_t pages) { next_ += pages; }
  void seal() {
    const Footer end = footer(entries_, header_);
    std::memcpy(page(end.page), end.bytes.data(), end.bytes.size());
  }
  // The next life of the same file: what is there stays where it is until it is written over.
  void reopen(const SegmentHeader& header) {
    header_ = header;
    encode(header, page(0));
    entries_.clear();
    next_ = 1;
  }

  std::uint8_t* page(std::uint32_t number) { return bytes_.data() + number * kPageBytes; }
  const SegmentHeader& header() const { return header_; }
  const std::vector<FooterEntry>& entries() const { return entries_; }
  std::uint32_t next() const { return next_; }  // first page that no record has

  // Into the directory, under the number that the header says.
  void save(const std::string& directory) const { save(directory, bytes_.size()); }
  // Only its first bytes.
  void save(const std::string& directory, std::size_t bytes) const {
    std::ofstream out(segment_path(directory, header_.segment), std::ios::binary | std::ios::trunc);
    out.write(reinterpret_cast<const char*>(bytes_.data()), static_cast<std::streamsize>(bytes));
    if (!out.flush()) throw std::runtime_error("cannot write a segment");
  }

 private:
  SegmentHeader header_;
  std::vector<std::uint8_t> bytes_;
  std::vector<FooterEntry> entries_;
  std::uint32_t next_ = 1;
};

}  // namespace kv::test
