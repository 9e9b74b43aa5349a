// What the tests of the disk's directory share.
#pragma once

#include <doctest/doctest.h>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <set>
#include <string>

#include "disk_directory.h"
#include "disk_kit.h"

namespace kv::test {

namespace fs = std::filesystem;

inline constexpr std::size_t kSegment = kSegmentBytesMin;
inline constexpr std::uint32_t kPages = kSegment / kPageBytes;

inline DiskDirectory::Options options_for(const TempDir& at, std::size_t segments) {
  DiskDirectory::Options options;
  options.path = at.path("disk");
  options.capacity_bytes = segments * kSegment;
  options.segment_bytes = kSegment;
  options.direct = direct_works(at.path());
  return options;
}

// What a tool asks for: as large as it is, nothing made.
inline DiskDirectory::Options tool_for(const TempDir& at) {
  DiskDirectory::Options options = options_for(at, 0);
  options.segment_bytes = 0;
  options.create = false;
  return options;
}

// Opening is Invalid, and its message holds the path and this.
inline void check_refused(const DiskDirectory::Options& options, const std::string& why) {
  try {
    DiskDirectory::open(options);
    FAIL_CHECK("opened, though: " << why);
  } catch (const Invalid& error) {
    const std::string text = error.what();
    CAPTURE(text);
    CHECK(text.find(options.path) != std::string::npos);
    CHECK(text.find(why) != std::string::npos);
  }
}

inline void write_file(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline std::set<std::string> names_in(const std::string& path) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(path)) names.insert(entry.path().filename());
  return names;
}

inline unsigned mode_of(const std::string& path) {
  struct stat info{};
  REQUIRE(::stat(path.c_str(), &info) == 0);
  return info.st_mode & 07777;
}

inline SegmentHeader header_for(const DiskDirectory& directory, std::uint32_t number, std::uint64_t sequence) {
  return {directory.id(), number, kPages, sequence, number + 1000};
}

inline std::set<std::uint32_t> numbers_of(const DiskDirectory& directory) {
  std::set<std::uint32_t> numbers;
  for (const SegmentFile& file : directory.segments())
    if (file.fd) numbers.insert(file.number);
  return numbers;
}

inline const SegmentFile& segment_of(const DiskDirectory& directory, std::uint32_t number) {
  const auto& all = directory.segments();
  const auto found = std::find_if(all.begin(), all.end(), [&](const SegmentFile& f) { return f.number == number; });
  REQUIRE(found != all.end());
  return *found;
}

// fork(), with nothing of ours in the child's output.
inline pid_t fork_quietly() {
  std::cout.flush();
  const pid_t pid = ::fork();
  REQUIRE(pid >= 0);
  return pid;
}

// Runs in a process of its own, whose exit status it returns.
inline int in_child(const std::function<int()>& work) {
  const pid_t pid = fork_quietly();
  if (pid == 0) ::_exit(work());
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace kv::test
