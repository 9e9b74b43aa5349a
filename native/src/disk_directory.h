// A directory of segment files, held by one process at a time.
//
//   kvstore.disk        one page: format version and a random id of this directory
//   lock                flock()ed while somebody uses it
//   segment-000007.kvs  see record.h
//
// Capacity is the sum of the files' sizes: a file is never made when it would not fit. When the directory was opened
// with a lower capacity than before, files that were never finished are removed at once; the others hold blocks, and
// whoever uses the directory has to choose those that leave, and to discard() their files.
//
// Other files may lie in the directory, as long as kvstore.disk does: they are neither read, counted nor touched.
// Files that bear a segment's name are ours.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fd.h"
#include "record.h"

namespace kv {

inline constexpr std::size_t kSegmentBytesMin = std::size_t{1} << 20;
inline constexpr std::size_t kSegmentBytesMax = std::size_t{kSegmentPagesMax} * kPageBytes;
inline constexpr std::size_t kSegmentsMax = 65536;  // numbers are below it

struct SegmentFile {
  Fd fd;
  std::uint32_t number = 0;   // in its name
  std::uint32_t pages = 0;    // of the file, a begun page counts; what it will have, after add()
  SegmentHeader header;       // as it lay on the disk when the directory was opened; empty unless usable
  // The header is this directory's, and of this file. Else the file was never finished or is damaged, and of any size:
  // discard() it and add() another.
  bool usable = false;
  std::size_t bytes() const { return std::size_t{pages} * kPageBytes; }
};

class DiskDirectory {
 public:
  struct Options {
    std::string path;
    std::size_t capacity_bytes = 0;  // of all segments; 0 = as large as it is (tools)
    std::size_t segment_bytes = 0;   // of new ones
    bool direct = true;              // O_DIRECT; without it the page cache is between
    bool create = true;              // make it if absent
  };

  // Makes (mode 0700, its parent must exist) or opens it, takes the lock, opens every segment and reads its header.
  // Raises this process's soft limit of open files when the segments need it.
  // Invalid, with what to do: another process holds it; it is no directory of this format, or of another
  // version; it holds files that are not ours and no kvstore.disk; anyone may write to it; a link or a pipe has the
  // name of one of our files; the file system refuses O_DIRECT; the hard limit of open files is too low; an option
  // is out of its range. std::system_error for anything the system refuses.
  static std::shared_ptr<DiskDirectory> open(Options options);
  DiskDirectory(const DiskDirectory&) = delete;
  DiskDirectory& operator=(const DiskDirectory&) = delete;

  const Options& options() const noexcept { return options_; }
  const StoreId& id() const noexcept { return id_; }
  // Names that add() made and discard() took away are on the medium once this has been synced (Mover::sync).
  int fd() const noexcept { return directory_.get(); }
  // In no order; positions stay as they are (add() appends).
  std::vector<SegmentFile>& segments() noexcept { return segments_; }
  const std::vector<SegmentFile>& segments() const noexcept { return segments_; }
  std::size_t bytes() const noexcept;  // of all segments, those that are still being made included
  bool over_capacity() const noexcept;
  bool room_for_another() const noexcept;
  // Unfinished files that open() removed for want of capacity.
  std::size_t removed() const noexcept { return removed_; }

  // A new empty file, for Mover::create; its position. Broken unless there is room for another; std::system_error.
  std::uint32_t add();
  // A file that could not be made after all, is not usable, or has no room: it is deleted, and its position stays empty
  // (no fd, 0 pages).
  void discard(std::uint32_t position) noexcept;

 private:
  explicit DiskDirectory(Options options) : options_(std::move(options)) {}

  void check_options() const;
  void open_directory();
  bool is_ours() const;
  void take_lock();
  void make_manifest();
  void read_manifest();
  void open_segments();
  SegmentFile open_segment(std::uint32_t number) const;
  void remove_unfinished();

  std::string path_of(const std::string& name) const { return options_.path + "/" + name; }
  bool exists(const std::string& name) const;
  Fd open_file(const std::string& name, int flags) const;
  int direct_flag() const noexcept;
  [[noreturn]] void refuse_direct() const;

  Options options_;
  Fd directory_, lock_;
  StoreId id_{};
  std::vector<SegmentFile> segments_;
  std::size_t removed_ = 0;
};

}  // namespace kv
