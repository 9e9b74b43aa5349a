#include "memfd.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "types.h"

// Older C libraries do not know it; the kernel is asked and may say EINVAL.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif

namespace kv {

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

Fd make_memfd(const std::string& name, std::size_t bytes) {
  Fd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd = Fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));  // Linux < 6.3
  if (!fd) fail("arena: memfd_create");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    fail("arena: cannot size " + name + " to " + std::to_string(bytes) + " bytes");
  return fd;
}

void add_seals(int fd, int seals) {
  if (fcntl(fd, F_ADD_SEALS, seals) != 0) fail("arena: cannot seal the memfd");
}

void check_sealed(int fd, const char* what, std::size_t bytes, int seals) {
  struct stat info{};
  if (fstat(fd, &info) != 0) fail(std::string("arena: the ") + what + " fd");
  if (info.st_size != static_cast<off_t>(bytes))
    throw Invalid(std::string("arena: the ") + what + " fd has " + std::to_string(info.st_size) + " bytes, expected " +
                  std::to_string(bytes) + "; attach with the capacity the daemon announced");
  const int found = fcntl(fd, F_GET_SEALS);
  if (found < 0) throw Invalid(std::string("arena: the ") + what + " fd is not a memfd; it must come from the daemon");
  if ((found & seals) != seals)
    throw Invalid(std::string("arena: the ") + what + " fd is not sealed as the daemon seals it; refused");
}

Fd duplicate(int fd) {
  Fd copy(fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!copy) fail("arena: cannot duplicate a file descriptor");
  return copy;
}

std::uint8_t* map_memfd(int fd, std::size_t bytes, int protection) {
  // mmap alone does not promise 2 MiB alignment: reserve more, map inside, give back.
  const std::size_t reserved = round_up(bytes, kPageBytes) + kHugeBytes;
  void* start = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) fail("arena: cannot reserve " + std::to_string(reserved) + " bytes of address space");
  auto* base = static_cast<std::uint8_t*>(start);
  const std::size_t lead = round_up(reinterpret_cast<std::uintptr_t>(base), kHugeBytes) -
                           reinterpret_cast<std::uintptr_t>(base);
  std::uint8_t* aligned = base + lead;
  if (mmap(aligned, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(start, reserved);
    errno = error;
    fail("arena: cannot map the memfd");
  }
  const std::size_t mapped = round_up(bytes, kPageBytes);
  if (lead > 0) munmap(base, lead);
  munmap(aligned + mapped, reserved - lead - mapped);
  if (madvise(aligned, bytes, MADV_DONTFORK) != 0) {
    const int error = errno;
    munmap(aligned, bytes);
    errno = error;
    fail("arena: MADV_DONTFORK");
  }
  madvise(aligned, bytes, MADV_DONTDUMP);  // tenants' bytes do not belong in a core file; best effort
  return aligned;
}

}  // namespace kv
