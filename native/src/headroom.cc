#include "headroom.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace kv {
namespace {

struct Names {
  const char* limit;
  const char* usage;
  const char* inactive_file;
  const char* active_file;
};
constexpr Names kV2 = {"memory.max", "memory.current", "inactive_file", "active_file"};
constexpr Names kV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"};

// "max" and missing files read as no number: no limit.
std::optional<std::size_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::size_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// The number after `field` in a file of "field number" lines.
std::size_t field_in(const std::string& path, const std::string& field) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    std::size_t value = 0;
    if (words >> name >> value && name == field) return value;
  }
  return 0;
}

void consider(const std::string& directory, const Names& names, Headroom& least) {
  const auto limit = number_in(directory + "/" + names.limit);
  const auto usage = number_in(directory + "/" + names.usage);
  if (!limit || !usage) return;
  const std::string stat = directory + "/memory.stat";
  const std::size_t cache = field_in(stat, names.inactive_file) + field_in(stat, names.active_file);
  const std::size_t held = *usage > cache ? *usage - cache : 0;
  const std::size_t bytes = *limit > held ? *limit - held : 0;
  if (bytes < least.bytes) least = {bytes, directory + "/" + names.limit};
}

}  // namespace

Headroom memory_headroom(const std::string& proc, const std::string& cgroups) {
  Headroom least{std::numeric_limits<std::size_t>::max(), "nothing"};
  if (const std::size_t kib = field_in(proc + "/meminfo", "MemAvailable:"); kib > 0)
    least = {kib * 1024, proc + "/meminfo MemAvailable"};
  std::ifstream memberships(proc + "/self/cgroup");  // lines "id:controllers:path"
  std::string line;
  while (std::getline(memberships, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool v2 = controllers == ",,";
    if (!v2 && controllers.find(",memory,") == std::string::npos) continue;
    const std::string root = v2 ? cgroups : cgroups + "/memory";
    // Inside a container the path may be the host's: the directories that exist count, the mount's root always.
    std::string path = line.substr(second + 1);
    while (!path.empty() && path != "/") {
      consider(root + path, v2 ? kV2 : kV1, least);
      const std::size_t slash = path.rfind('/');
      path.resize(slash == std::string::npos ? 0 : slash);
    }
    consider(root, v2 ? kV2 : kV1, least);
  }
  return least;
}

}  // namespace kv
