// What may lie on the medium when the power fails: files made of a recorded log, cut at some moment.
//
// A write is safe once a sync of its file has begun after the write's end, and has ended well. Of every other write
// that has begun, nothing, all, or any part may be there, each by itself: sectors of 512 bytes are the unit, and mostly
// whole pages go together. The same holds for the length of a file, and for its name until the directory was synced.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "disk_faulty.h"
#include "disk_kit.h"

namespace kv::test {

using Bytes = std::vector<std::uint8_t>;
using Files = std::map<std::uint32_t, Bytes>;  // by number

class CrashLog {
 public:
  // `before`: the files when recording began. `fds`: the file of each number, during the record.
  CrashLog(Files before, const std::map<std::uint32_t, int>& fds, int directory, std::vector<LoggedWrite> log)
      : before_(std::move(before)), log_(std::move(log)) {
    for (const LoggedWrite& entry : log_)
      moments_ = std::max(moments_, 1 + (entry.ended == LoggedWrite::kNotEnded ? entry.begun : entry.ended));
    for (const auto& [number, fd] : fds) {
      File& file = files_[number];
      for (const LoggedWrite& entry : log_) {
        if (entry.fd != fd || entry.op == DiskOp::kSync) continue;
        if (file.writes.empty() && !before_.contains(number)) {
          file.made = entry.begun;
          file.named = safe_at(directory, entry.begun);
        }
        file.writes.push_back({&entry, safe_at(fd, entry.ended)});
      }
    }
    for (const auto& [number, bytes] : before_)
      if (!files_.contains(number)) taken_away_.push_back(number);
  }
  CrashLog(const CrashLog&) = delete;
  CrashLog& operator=(const CrashLog&) = delete;

  std::size_t moments() const { return moments_; }
  const Files& before() const { return before_; }
  // Calls each(number, entry, safe) for what was written to a file, in the order in which it began; `safe`: from
  // which moment on.
  template <class Each>
  void writes(Each each) const {
    for (const auto& [number, file] : files_)
      for (const Write& write : file.writes) each(number, *write.entry, write.safe);
  }

  // Everything of which the number is below `moment` has happened.
  Files image(std::size_t moment, Random& random) const {
    Files out;
    for (const auto& [number, file] : files_) {
      if (file.made != kNever && file.made >= moment) continue;
      if (file.made != kNever && file.named >= moment && random.chance(50)) continue;
      const auto known = before_.find(number);
      Bytes bytes = known == before_.end() ? Bytes{} : known->second;
      for (const Write& write : file.writes) {
        if (write.entry->begun >= moment) break;
        apply(*write.entry, write.safe < moment, bytes, random);
      }
      out.emplace(number, std::move(bytes));
    }
    for (std::uint32_t number : taken_away_)  // maybe not yet, on the medium
      if (random.chance(30)) out.emplace(number, before_.at(number));
    return out;
  }

 private:
  static constexpr std::size_t kNever = LoggedWrite::kNotEnded;
  static constexpr std::size_t kSector = 512;

  struct Write {
    const LoggedWrite* entry;
    std::size_t safe;  // the moment at which it became so
  };
  struct File {
    std::size_t made = kNever;  // first heard of, if not before the record
    std::size_t named = 0;      // its name was synced
    std::vector<Write> writes;
  };

  // When the first sync of that file was over that began after this moment.
  std::size_t safe_at(int fd, std::size_t moment) const {
    std::size_t safe = kNever;
    for (const LoggedWrite& entry : log_)
      if (entry.op == DiskOp::kSync && entry.fd == fd && entry.begun > moment && entry.error == 0)
        safe = std::min(safe, entry.ended);
    return safe;
  }

  static void apply(const LoggedWrite& entry, bool safe, Bytes& bytes, Random& random) {
    const std::size_t end = entry.offset + entry.length;
    if (entry.op == DiskOp::kAllocate) {
      if (bytes.size() < end && (safe || random.chance(50))) bytes.resize(end);
      return;
    }
    enum class Fate { kAll, kNone, kPages, kSectors, kPrefix };
    const std::uint32_t dice = random.below(100);
    const Fate fate = safe || dice < 20 ? Fate::kAll
                      : dice < 45       ? Fate::kNone
                      : dice < 75       ? Fate::kPages
                      : dice < 90       ? Fate::kSectors
                                        : Fate::kPrefix;
    if (fate == Fate::kNone) return;
    if (bytes.size() < end) bytes.resize(end);
    const std::size_t unit = fate == Fate::kSectors ? kSector : fate == Fate::kPages ? kPageBytes : entry.length;
    const std::size_t length =
        fate == Fate::kPrefix ? random.below(entry.length / kSector) * kSector : std::size_t{entry.length};
    for (std::size_t at = 0; at < length; at += unit)
      if (fate == Fate::kAll || fate == Fate::kPrefix || random.chance(50))
        std::memcpy(bytes.data() + entry.offset + at, entry.bytes.data() + at, std::min(unit, length - at));
  }

  Files before_;
  std::vector<LoggedWrite> log_;
  std::map<std::uint32_t, File> files_;
  std::vector<std::uint32_t> taken_away_;
  std::size_t moments_ = 0;
};

// A directory whose segments are written again and again; only what differs is.
class ImageDirectory {
 public:
  explicit ImageDirectory(const std::string& path) : path_(path) {}
  const std::string& path() const { return path_; }

  void hold(const Files& files) {
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      if (entry.path().extension() == ".kvs" && !files.contains(number_of(entry.path())))
        std::filesystem::remove(entry.path());
    for (const auto& [number, bytes] : files) {
      const std::string name = segment_path(path_, number);
      if (there_.contains(number) && there_[number] == bytes && std::filesystem::exists(name)) continue;
      const Fd fd(::open(name.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
      for (std::size_t at = 0; at < bytes.size();) {
        const ssize_t n = ::pwrite(fd.get(), bytes.data() + at, bytes.size() - at, static_cast<off_t>(at));
        if (n <= 0) throw std::system_error(errno, std::generic_category(), name);
        at += static_cast<std::size_t>(n);
      }
    }
    there_ = files;
  }
  // As they are, before a process works on them.
  Files files() {
    there_.clear();
    Files out;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      if (entry.path().extension() != ".kvs") continue;
      Bytes& bytes = out[number_of(entry.path())];
      bytes.resize(entry.file_size());
      std::ifstream in(entry.path(), std::ios::binary);
      in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    }
    return out;
  }
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      if (entry.path().extension() == ".kvs") sum += entry.file_size();
    return sum;
  }

 private:
  static std::uint32_t number_of(const std::filesystem::path& path) {
    return static_cast<std::uint32_t>(std::stoul(path.stem().string().substr(8)));
  }

  std::string path_;
  Files there_;
};

}  // namespace kv::test
