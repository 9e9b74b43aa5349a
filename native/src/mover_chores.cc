// Jobs of one order that move no block: pages, sync, create.
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "mover_jobs.h"

namespace kv::moves {
namespace {

void check_file(int fd) {
  if (fd < 0) throw Invalid("fd: no file");
}

// A job whose only run is one order.
class Chore : public Job {
 public:
  Chore(Share kind, int fd, std::size_t bytes) : Job(kind, 1), fd_(fd), bytes_(bytes) {
    runs.push_back({0, 1, bytes});
  }
  std::size_t payload_bytes(std::size_t) const noexcept override { return bytes_; }

 protected:
  Next ask(Lane& lane, DiskOp op, std::uint64_t offset) const noexcept {
    lane.request.op = op;
    lane.request.fd = fd_;
    lane.request.offset = offset;
    lane.request.pieces = {};
    return Next::kDisk;
  }
  Next write(Lane& lane, std::uint64_t offset, std::uint8_t* from, std::size_t bytes) const noexcept {
    ask(lane, DiskOp::kWrite, offset);
    lane.pieces[0] = {from, bytes};
    lane.request.pieces = lane.pieces.first(1);
    return Next::kDisk;
  }
  Next end(Lane& lane, MoveStatus status, int error = 0) noexcept {
    lane.error = error;
    statuses[0] = status;
    return Next::kEnd;
  }
  Next end(Lane& lane, int error) noexcept {
    return end(lane, error == 0 ? MoveStatus::kOk : MoveStatus::kError, error);
  }

 private:
  const int fd_;
  const std::size_t bytes_;
};

class PagesJob final : public Chore {
 public:
  PagesJob(int fd, std::uint32_t page, const std::vector<std::uint8_t>& bytes)
      : Chore(Share::kPages, fd, bytes.size()), offset_(std::uint64_t{page} * kPageBytes), memory_(bytes.size()) {
    std::memcpy(&memory_[0], bytes.data(), bytes.size());
  }
  Next begin(Lane& lane) noexcept override { return write(lane, offset_, &memory_[0], memory_.size()); }
  Next went(Lane& lane, int error) noexcept override { return end(lane, error); }

 private:
  const std::uint64_t offset_;
  Zeroed<std::uint8_t> memory_;
};

class SyncJob final : public Chore {
 public:
  explicit SyncJob(int fd) : Chore(Share::kPages, fd, 0) {}
  Next begin(Lane& lane) noexcept override { return ask(lane, DiskOp::kSync, 0); }
  Next went(Lane& lane, int error) noexcept override { return end(lane, error); }
};

// The header comes last: a file without one was never finished, whatever a crash left of it. Written from end
// to end because a first write into allocated blocks is much slower than a later one (LAWS H30).
class CreateJob final : public Chore {
 public:
  CreateJob(int fd, std::size_t bytes, const SegmentHeader& header, std::uint8_t* zeros)
      : Chore(Share::kCreations, fd, bytes), bytes_(bytes), header_(kPageBytes), zeros_(zeros) {
    encode(header, &header_[0]);
  }

  Next begin(Lane& lane) noexcept override {
    ask(lane, DiskOp::kAllocate, 0);
    lane.request.length = bytes_;
    return Next::kDisk;
  }

  Next went(Lane& lane, int error) noexcept override {
    const bool unsupported = error == EOPNOTSUPP || error == ENOSYS;
    if (error != 0 && !(step_ == Step::kAllocate && unsupported)) return end(lane, error);
    if (step_ == Step::kSyncHeader) return end(lane, 0);
    if (cancelled.load(std::memory_order_relaxed)) return end(lane, MoveStatus::kDropped);
    switch (step_) {
      case Step::kAllocate:
      case Step::kZeros:
        if (written_ < bytes_) return write_zeros(lane);
        step_ = Step::kSync;
        return ask(lane, DiskOp::kSync, 0);
      case Step::kSync:
        step_ = Step::kHeader;
        return write(lane, 0, &header_[0], kPageBytes);
      case Step::kHeader:
      case Step::kSyncHeader: break;
    }
    step_ = Step::kSyncHeader;
    return ask(lane, DiskOp::kSync, 0);
  }

 private:
  enum class Step { kAllocate, kZeros, kSync, kHeader, kSyncHeader };  // what is under way

  Next write_zeros(Lane& lane) noexcept {
    step_ = Step::kZeros;
    const std::size_t bytes = std::min(kZeroBytes, bytes_ - written_);
    write(lane, written_, zeros_, bytes);
    written_ += bytes;
    return Next::kDisk;
  }

  const std::size_t bytes_;
  Zeroed<std::uint8_t> header_;
  std::uint8_t* const zeros_;
  Step step_ = Step::kAllocate;
  std::size_t written_ = 0;
};

}  // namespace

std::unique_ptr<Job> pages_job(int fd, std::uint32_t page, const std::vector<std::uint8_t>& bytes) {
  check_file(fd);
  if (bytes.empty() || bytes.size() % kPageBytes != 0)
    throw Invalid("bytes: expected whole pages, got " + std::to_string(bytes.size()) + " bytes");
  if (page + bytes.size() / kPageBytes > kSegmentPagesMax) throw Invalid("page: leaves the largest segment");
  return std::make_unique<PagesJob>(fd, page, bytes);
}

std::unique_ptr<Job> sync_job(int fd) {
  check_file(fd);
  return std::make_unique<SyncJob>(fd);
}

std::unique_ptr<Job> create_job(int fd, std::uint32_t pages, const SegmentHeader& header, std::uint8_t* zeros) {
  check_file(fd);
  if (pages < kSegmentPagesMin || pages > kSegmentPagesMax)
    throw Invalid("pages: must be in [" + std::to_string(kSegmentPagesMin) + ", " + std::to_string(kSegmentPagesMax) +
                  "], got " + std::to_string(pages));
  const std::size_t bytes = std::size_t{pages} * kPageBytes;
  struct stat info{};
  if (::fstat(fd, &info) != 0) throw std::system_error(errno, std::generic_category(), "create: fstat");
  if (static_cast<std::size_t>(info.st_size) > bytes) throw Invalid("fd: the file is longer than its pages");
  return std::make_unique<CreateJob>(fd, bytes, header, zeros);
}

}  // namespace kv::moves
