// How much memory this process may still take, and what sets that bound.
#pragma once

#include <cstddef>
#include <string>

namespace kv {

struct Headroom {
  std::size_t bytes;
  std::string limited_by;  // the file that says so
};

// The least of MemAvailable and, for every memory cgroup (v1 and v2) from this process's own up to the
// root, limit - usage + file cache (which the kernel gives back first). The paths are parameters for tests.
Headroom memory_headroom(const std::string& proc = "/proc", const std::string& cgroups = "/sys/fs/cgroup");

}  // namespace kv
