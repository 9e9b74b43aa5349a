#include "disk.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <string>
#include <system_error>

namespace kv {

void check_depth(std::size_t depth) {
  if (depth < 1 || depth > kDiskDepthMax)
    throw Invalid("depth: must be in [1, " + std::to_string(kDiskDepthMax) + "], got " + std::to_string(depth));
}

void check_request(const DiskRequest& request) {
  constexpr auto kOffsetMax = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (request.fd < 0) throw Invalid("request: no file");
  if (request.op == DiskOp::kRead || request.op == DiskOp::kWrite) {
    if (request.pieces.empty() || request.pieces.size() > kPiecesMax)
      throw Invalid("request: expected 1 to " + std::to_string(kPiecesMax) + " pieces, got " +
                    std::to_string(request.pieces.size()));
    std::uint64_t room = kOffsetMax - std::min(request.offset, kOffsetMax);
    for (const iovec& piece : request.pieces) {
      if (piece.iov_base == nullptr || piece.iov_len == 0) throw Invalid("request: an empty piece");
      if (piece.iov_len > room) throw Invalid("request: leaves the range of file offsets");
      room -= piece.iov_len;
    }
  } else if (!request.pieces.empty()) {
    throw Invalid("request: only a read or write has pieces");
  }
  if (request.op == DiskOp::kAllocate &&
      (request.length == 0 || request.offset > kOffsetMax || request.length > kOffsetMax - request.offset))
    throw Invalid("request: length is not a range of file offsets");
}

void advance(DiskRequest& request, std::size_t n) noexcept {
  request.offset += n;
  while (n > 0 && !request.pieces.empty()) {
    iovec& piece = request.pieces.front();
    const std::size_t part = std::min(n, piece.iov_len);
    piece.iov_base = static_cast<std::uint8_t*>(piece.iov_base) + part;
    piece.iov_len -= part;
    n -= part;
    if (piece.iov_len == 0) request.pieces = request.pieces.subspan(1);
  }
}

int settle(DiskRequest& request, std::int64_t answer) noexcept {
  if (answer == -EINTR || answer == -EAGAIN) return kGoOn;
  if (answer < 0) return static_cast<int>(-answer);
  if (request.op == DiskOp::kSync || request.op == DiskOp::kAllocate) return 0;
  if (answer == 0) return EIO;
  advance(request, static_cast<std::size_t>(answer));
  return request.pieces.empty() ? 0 : kGoOn;
}

std::unique_ptr<Disk> open_disk(std::string_view kind, std::size_t depth, int threads) {
  if (kind == "uring") return open_uring(depth);
  if (kind == "threads") return open_threads(depth, threads);
  if (kind != "auto") throw Invalid("io: must be auto, uring or threads, got \"" + std::string(kind) + "\"");
  try {
    return open_uring(depth);
  } catch (const std::system_error&) {  // Disk::kind() says which one it became
    return open_threads(depth, threads);
  }
}

}  // namespace kv
