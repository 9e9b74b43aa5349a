// Anonymous shared memory: made, sealed, checked when it comes from somebody else, mapped.
#pragma once

#include <fcntl.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "fd.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace kv {

inline constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// Close-on-exec, open to seals. std::system_error when the kernel refuses.
Fd make_memfd(const std::string& name, std::size_t bytes);
void add_seals(int fd, int seals);
// Invalid unless fd is a memfd of exactly that size with (at least) those seals: without them the other side
// could cut the file under our mapping (SIGBUS) or forge what it holds. `what` names it in the message.
void check_sealed(int fd, const char* what, std::size_t bytes, int seals);
// Another descriptor for the same file.
Fd duplicate(int fd);

// A shared mapping at a multiple of 2 MiB, as huge pages need it, that a forked child does not inherit and a
// core file does not contain. Unmapped with munmap(result, bytes).
std::uint8_t* map_memfd(int fd, std::size_t bytes, int protection);

}  // namespace kv
