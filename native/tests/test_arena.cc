#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <system_error>
#include <vector>

#include "arena.h"
#include "fd.h"
#include "headroom.h"

using namespace kv;

namespace {

constexpr std::size_t kCapacity = 4 * kHugeBytes;

bool mapped(const void* page) {
  unsigned char resident = 0;
  return mincore(const_cast<void*>(page), kPageBytes, &resident) == 0 || errno != ENOMEM;
}

// Runs `question` in a forked child; its answer comes back as the exit status.
template <typename Question>
bool ask_child(Question question) {
  std::cout.flush();  // or the child would print it again
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(question() ? 42 : 0);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  return WEXITSTATUS(status) == 42;
}

Fd memfd(std::size_t bytes, int seals) {
  Fd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(fd);
  REQUIRE(ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
  if (seals) REQUIRE(fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  return fd;
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

}  // namespace

TEST_CASE("arena: capacity is rounded down to 2 MiB, at least one, and aligned") {
  CHECK(Arena::create("t", 1)->capacity_bytes() == kHugeBytes);
  const auto arena = Arena::create("t", kCapacity + 4096);
  CHECK(arena->capacity_bytes() == kCapacity);
  CHECK(arena->pages() == kCapacity / kPageBytes);
  CHECK(reinterpret_cast<std::uintptr_t>(arena->slot(0)) % kHugeBytes == 0);
  CHECK(arena->control(0).generation.load() == 0);
  CHECK_THROWS_AS(Arena::create(std::string(300, 'x'), kCapacity), Invalid);
  CHECK_THROWS_AS(Arena::create("t", std::size_t{1} << 60), Invalid);
}

TEST_CASE("arena: fds are named, close on exec, and leave nothing in shared memory") {
  const auto arena = Arena::create("groupA", kCapacity);
  const auto link = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(arena->data_fd()));
  CHECK(link.string().find("kvstore-arena:groupA") != std::string::npos);
  CHECK((fcntl(arena->data_fd(), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK((fcntl(arena->control_fd(), F_GETFD) & FD_CLOEXEC) != 0);
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    CHECK(entry.path().filename().string().find("kvstore") == std::string::npos);
}

TEST_CASE("arena: neither region can be resized or sealed further") {
  const auto arena = Arena::create("t", kCapacity);
  for (const int fd : {arena->data_fd(), arena->control_fd()}) {
    CHECK(ftruncate(fd, 4096) != 0);
    CHECK(ftruncate(fd, static_cast<off_t>(2 * kCapacity)) != 0);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) != 0);
  }
}

TEST_CASE("arena: a client sees bytes and control of the daemon") {
  const auto daemon = Arena::create("t", kCapacity);
  const auto client = Arena::attach(daemon->data_fd(), daemon->control_fd(), kCapacity);
  CHECK(client->data_fd() == -1);
  CHECK_FALSE(client->writable_control());
  client->populate(2);
  CHECK(client->prefaulted_bytes() == kCapacity);
  std::memcpy(client->slot(3), "from the client", 15);
  CHECK(std::memcmp(daemon->slot(3), "from the client", 15) == 0);
  daemon->control(3).generation.store(7);
  CHECK(client->control(3).generation.load() == 7);
}

TEST_CASE("arena: a client cannot write control by any route") {
  const auto daemon = Arena::create("t", kCapacity);
  daemon->control(0).generation.store(5);
  const int fd = daemon->control_fd();
  const std::size_t bytes = daemon->pages() * sizeof(ControlEntry);
  const char forged[64] = {};

  CHECK(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
  CHECK(pwrite(fd, forged, sizeof forged, 0) == -1);
  CHECK(write(fd, forged, sizeof forged) == -1);
  CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kPageBytes) == -1);
  const Fd again(open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC));
  if (again) {
    CHECK(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, again.get(), 0) == MAP_FAILED);
    CHECK(pwrite(again.get(), forged, sizeof forged, 0) == -1);
  }

  const auto client = Arena::attach(daemon->data_fd(), fd, kCapacity);
  void* entries = static_cast<void*>(&client->control(0));
  CHECK(mprotect(entries, kPageBytes, PROT_READ | PROT_WRITE) == -1);
  CHECK(madvise(entries, kPageBytes, MADV_REMOVE) == -1);
  CHECK(daemon->control(0).generation.load() == 5);
  // The same write from the owner's mapping does land: the checks above can fail.
  daemon->control(0).generation.store(6);
  CHECK(client->control(0).generation.load() == 6);
}

TEST_CASE("arena: a forked child has neither mapping, and its copy of the object unmaps nothing") {
  const auto daemon = Arena::create("t", kCapacity);
  const auto client = Arena::attach(daemon->data_fd(), daemon->control_fd(), kCapacity);
  std::memcpy(client->slot(0), "x", 1);
  CHECK(mapped(client->slot(0)));
  CHECK(ask_child([&] {
    return !mapped(client->slot(0)) && !mapped(&client->control(0)) && !mapped(daemon->slot(0));
  }));

  auto doomed = Arena::attach(daemon->data_fd(), daemon->control_fd(), kCapacity);
  CHECK(ask_child([&] {
    // Something else now lives where the arena was.
    void* place = doomed->slot(0);
    if (mmap(place, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != place)
      return false;
    doomed.reset();
    return mapped(place);
  }));
}

TEST_CASE("arena: memory goes with the last holder") {
  const std::uint8_t* place = nullptr;
  {
    const auto arena = Arena::create("t", kCapacity);
    place = arena->slot(0);
    CHECK(mapped(place));
  }
  CHECK_FALSE(mapped(place));
}

TEST_CASE("arena: attach refuses what the daemon did not make") {
  const auto daemon = Arena::create("t", kCapacity);
  const std::size_t control_bytes = daemon->pages() * sizeof(ControlEntry);
  const int sizes = F_SEAL_SHRINK | F_SEAL_GROW;
  const auto attach = [&](int data, int control) { return Arena::attach(data, control, kCapacity); };
  CHECK_NOTHROW(attach(daemon->data_fd(), daemon->control_fd()));

  CHECK_THROWS_AS(attach(memfd(kCapacity, 0).get(), daemon->control_fd()), Invalid);              // unsealed
  CHECK_THROWS_AS(attach(memfd(kCapacity, F_SEAL_GROW).get(), daemon->control_fd()), Invalid);    // could shrink
  CHECK_THROWS_AS(attach(memfd(kHugeBytes, sizes).get(), daemon->control_fd()), Invalid);         // too small
  CHECK_THROWS_AS(attach(daemon->data_fd(), memfd(control_bytes, sizes).get()), Invalid);         // forgeable
  CHECK_THROWS_AS(attach(daemon->data_fd(), memfd(4096, sizes).get()), Invalid);
  CHECK_THROWS_AS(attach(daemon->control_fd(), daemon->data_fd()), Invalid);
  CHECK_THROWS_AS(attach(-1, daemon->control_fd()), std::system_error);
  CHECK_THROWS_AS(Arena::attach(daemon->data_fd(), daemon->control_fd(), kCapacity + 4096), Invalid);
  CHECK_THROWS_AS(Arena::attach(daemon->data_fd(), daemon->control_fd(), 0), Invalid);

  const auto path = std::filesystem::temp_directory_path() / ("arena-test-" + std::to_string(getpid()));
  const Fd file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  REQUIRE(file);
  std::filesystem::remove(path);
  REQUIRE(ftruncate(file.get(), static_cast<off_t>(kCapacity)) == 0);
  CHECK_THROWS_AS(attach(file.get(), daemon->control_fd()), Invalid);  // a file can always be cut
}

TEST_CASE("arena: prefault fills everything, keeps bytes, reports progress") {
  for (const bool huge : {true, false}) {
    CAPTURE(huge);
    const auto arena = Arena::create("t", kCapacity);
    std::memset(arena->slot(0), 0x77, 3);
    const bool all_huge = arena->prefault(2, huge, false);
    if (!huge) CHECK_FALSE(all_huge);
    CHECK(arena->prefaulted_bytes() == kCapacity);
    CHECK(arena->slot(0)[2] == 0x77);
    std::vector<unsigned char> resident(arena->pages());
    REQUIRE(mincore(arena->slot(0), kCapacity, resident.data()) == 0);
    CHECK(std::all_of(resident.begin(), resident.end(), [](unsigned char page) { return page & 1; }));
    CHECK_NOTHROW(arena->prefault(1, huge, false));  // again: nothing is missing, nothing is lost
    CHECK(arena->slot(0)[2] == 0x77);
  }
}

TEST_CASE("arena: prefault refuses what cannot be, before touching anything") {
  const auto daemon = Arena::create("t", kCapacity);
  CHECK_THROWS_AS(daemon->prefault(0, true, false), Invalid);
  CHECK_THROWS_AS(daemon->prefault(1000, true, false), Invalid);
  const auto client = Arena::attach(daemon->data_fd(), daemon->control_fd(), kCapacity);
  CHECK_THROWS_AS(client->prefault(1, true, false), Invalid);

  const std::size_t too_much = memory_headroom().bytes + (std::size_t{1} << 30);
  const auto oversized = Arena::create("t", too_much);
  try {
    oversized->prefault(2, true, false);
    FAIL("an arena larger than memory was accepted");
  } catch (const Invalid& error) {
    CHECK(std::string(error.what()).find("lower capacity_bytes") != std::string::npos);
  }
  CHECK(oversized->prefaulted_bytes() == 0);
}

TEST_CASE("arena: a memlock limit that is too small is named") {
  // In a child, because the limit cannot be raised again; as nobody, because root may lock anything.
  CHECK(ask_child([] {
    const rlimit limit{4096, 4096};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return false;
    if (getuid() == 0 && setuid(65534) != 0) return false;
    const auto arena = Arena::create("t", kCapacity);
    try {
      arena->prefault(1, false, true);
    } catch (const Invalid& error) {
      return std::string(error.what()).find("LimitMEMLOCK") != std::string::npos && arena->prefaulted_bytes() == 0;
    }
    return false;
  }));
}

TEST_CASE("headroom: the least of MemAvailable and every memory cgroup above us") {
  const auto root = std::filesystem::temp_directory_path() / ("headroom-test-" + std::to_string(getpid()));
  const auto proc = root / "proc", cgroups = root / "cgroup";
  write_file(proc / "meminfo", "MemTotal: 1000 kB\nMemAvailable:   1000 kB\n");
  const auto ask = [&] { return memory_headroom(proc.string(), cgroups.string()); };

  write_file(proc / "self/cgroup", "");
  CHECK(ask().bytes == 1000 * 1024);

  SUBCASE("v2: page cache counts as free, a parent's limit holds too") {
    write_file(proc / "self/cgroup", "0::/a/b\n");
    write_file(cgroups / "a/b/memory.max", "max\n");
    write_file(cgroups / "a/b/memory.current", "5000\n");
    CHECK(ask().bytes == 1000 * 1024);
    write_file(cgroups / "a/memory.max", "10000\n");
    write_file(cgroups / "a/memory.current", "6000\n");
    write_file(cgroups / "a/memory.stat", "anon 1\ninactive_file 900\nactive_file 100\n");
    CHECK(ask().bytes == 5000);
    CHECK(ask().limited_by == (cgroups / "a/memory.max").string());
    write_file(cgroups / "a/memory.current", "60000\n");
    CHECK(ask().bytes == 0);
  }
  SUBCASE("v1, in a container whose own path is not visible: the mount's root counts") {
    write_file(proc / "self/cgroup", "9:cpu:/elsewhere\n4:hugetlb,memory:/docker/123\n");
    write_file(cgroups / "memory/memory.limit_in_bytes", "8192\n");
    write_file(cgroups / "memory/memory.usage_in_bytes", "192\n");
    CHECK(ask().bytes == 8000);
  }
  std::filesystem::remove_all(root);
}
