#include "mover_jobs.h"

#include <algorithm>
#include <cerrno>
#include <new>
#include <string>
#include <utility>

namespace kv::moves {
namespace {

std::size_t record_bytes(const SlotFormat& format) { return record_pages(format) * kPageBytes; }
std::uint64_t offset_of(std::uint32_t page) { return std::uint64_t{page} * kPageBytes; }

bool same(const SlotFormat& a, const SlotFormat& b) {
  return a.layers == b.layers && a.heads == b.heads && a.cell_bytes == b.cell_bytes;
}

// ---- orders ------------------------------------------------------------------------------------------------

std::string at(std::size_t i) { return "orders[" + std::to_string(i) + "]: "; }

void check_count(std::size_t orders) {
  if (orders > Mover::kOrdersMax)
    throw Invalid("orders: at most " + std::to_string(Mover::kOrdersMax) + ", got " + std::to_string(orders));
}

// A record of this format can lie there.
void check_record(std::size_t i, int fd, std::uint32_t page, const SlotFormat& format) {
  if (fd < 0) throw Invalid(at(i) + "no file");
  check_format(format);
  if (page < kHeaderPages || page + record_bytes(format) / kPageBytes > kSegmentPagesMax)
    throw Invalid(at(i) + "page " + std::to_string(page) + ": no record of this format fits into a segment there");
}

void check_slot(std::size_t i, const Arena& arena, const SlotFormat& format, SlotId slot) {
  if (slot + format.slot_bytes() / kPageBytes > arena.pages())
    throw Invalid(at(i) + "slot " + std::to_string(slot) + " does not lie inside the arena of " +
                  std::to_string(arena.pages()) + " pages");
}

const SlotFormat& format_of(const ReadOrder& order) { return order.from.format; }
const SlotFormat& format_of(const WriteOrder& order) { return order.header.format; }
const SlotFormat& format_of(const RelocateOrder& order) { return order.header.format; }

// Whether b's record begins where a's ends.
bool follows(int a_fd, std::uint32_t a_page, const SlotFormat& a_format, int b_fd, std::uint32_t b_page) {
  return a_fd == b_fd && offset_of(a_page) + record_bytes(a_format) == offset_of(b_page);
}
bool follows(const ReadOrder& a, const ReadOrder& b) {
  return follows(a.from.fd, a.from.page, a.from.format, b.from.fd, b.from.page);
}
bool follows(const WriteOrder& a, const WriteOrder& b) {
  return follows(a.fd, a.page, a.header.format, b.fd, b.page);
}
bool follows(const RelocateOrder& a, const RelocateOrder& b) {
  return follows(a.from.fd, a.from.page, a.from.format, b.from.fd, b.from.page) &&
         follows(a.fd, a.page, a.header.format, b.fd, b.page);
}

// Neighbours travel together, as far as `most` bytes and kRunRecordsMax allow.
template <class Order>
std::vector<Run> runs_of(const std::vector<Order>& orders, std::size_t most = kMergeBytes) {
  std::vector<Run> runs;
  for (std::uint32_t i = 0; i < orders.size(); ++i) {
    const std::size_t bytes = record_bytes(format_of(orders[i]));
    const bool joins = i > 0 && follows(orders[i - 1], orders[i]) && runs.back().bytes + bytes <= most &&
                       i - runs.back().first < kRunRecordsMax;
    if (!joins) runs.push_back({i, i, 0});
    runs.back().stop = i + 1;
    runs.back().bytes += bytes;
  }
  return runs;
}

// ---- verification ------------------------------------------------------------------------------------------

bool is_expected(const RecordAt& expected, const std::uint8_t* header_page) {
  RecordHeader found;
  return decode(header_page, found) && found.nonce == expected.nonce && found.key == expected.key &&
         found.payload_crc == expected.payload_crc && same(found.format, expected.format);
}

MoveStatus judge(const RecordAt& expected, const std::uint8_t* header_page, const std::uint8_t* payload,
                 CopyScratch& scratch) {
  const bool right = is_expected(expected, header_page) &&
                     sums_agree(payload, expected.format, expected.payload_crc, scratch);
  return right ? MoveStatus::kOk : MoveStatus::kCorrupt;
}

// ---- jobs of records ---------------------------------------------------------------------------------------

// Orders [first, stop) that the lane is moving now: its run, or one of it.
Run under_way(const Lane& lane) { return lane.whole ? lane.run : Run{lane.at, lane.at + 1, 0}; }

void fail(Lane& lane, const Run& run, int error) {
  lane.error = error;
  for (std::uint32_t i = run.first; i < run.stop; ++i) lane.job->statuses[i] = MoveStatus::kError;
}

// A request for consecutive records, whose pieces are the first `count` of the lane's.
void build(Lane& lane, DiskOp op, int fd, std::uint32_t page, std::size_t count) {
  lane.request.op = op;
  lane.request.fd = fd;
  lane.request.offset = offset_of(page);
  lane.request.pieces = lane.pieces.first(count);
}

std::uint8_t* header_page(const Lane& lane, std::uint32_t order) {
  return lane.memory + (order - lane.run.first) * kPageBytes;
}

// A header page of the lane and a slot, for each record that it moves now.
template <class Order>
std::size_t pieces_of(Lane& lane, const Arena& arena, const std::vector<Order>& orders) {
  std::size_t count = 0;
  const Run now = under_way(lane);
  for (std::uint32_t i = now.first; i < now.stop; ++i) {
    lane.pieces[count++] = {header_page(lane, i), kPageBytes};
    lane.pieces[count++] = {arena.slot(orders[i].slot), format_of(orders[i]).slot_bytes()};
  }
  return count;
}

// After a read failed as a whole, or went through or failed for one record: whether there is another record of
// the run to read by itself.
bool read_on(Lane& lane, int error) {
  const bool first_try = std::exchange(lane.whole, false);
  if (first_try) lane.at = lane.run.first;
  if (first_try && lane.run.stop - lane.run.first > 1) return true;
  if (error != 0) lane.job->statuses[lane.at] = MoveStatus::kError, lane.error = error;
  return ++lane.at < lane.run.stop;
}

class ReadJob final : public Job {
 public:
  ReadJob(const Arena& arena, std::vector<ReadOrder> orders)
      : Job(Share::kReads, orders.size()), arena_(arena), orders_(std::move(orders)) {
    runs = runs_of(orders_, kReadMergeBytes);
  }

  Next begin(Lane& lane) noexcept override { return ask(lane); }

  Next went(Lane& lane, int error) noexcept override {
    if (error == 0 && lane.whole) return Next::kVerify;
    return read_on(lane, error) ? ask(lane) : Next::kVerify;
  }

  Next verify(Lane& lane, CopyScratch& scratch) noexcept override {
    for (std::uint32_t i = lane.run.first; i < lane.run.stop; ++i)
      if (statuses[i] == MoveStatus::kOk)
        statuses[i] = judge(orders_[i].from, header_page(lane, i), arena_.slot(orders_[i].slot), scratch);
    return Next::kEnd;
  }

  std::size_t payload_bytes(std::size_t order) const noexcept override {
    return orders_[order].from.format.slot_bytes();
  }

 private:
  Next ask(Lane& lane) noexcept {
    const RecordAt& first = orders_[under_way(lane).first].from;
    build(lane, DiskOp::kRead, first.fd, first.page, pieces_of(lane, arena_, orders_));
    return Next::kDisk;
  }

  const Arena& arena_;
  const std::vector<ReadOrder> orders_;
};

class WriteJob final : public Job {
 public:
  WriteJob(const Arena& arena, std::vector<WriteOrder> orders)
      : Job(Share::kWrites, orders.size()), arena_(arena), orders_(std::move(orders)) {
    runs = runs_of(orders_);
  }

  Next begin(Lane& lane) noexcept override {
    for (std::uint32_t i = lane.run.first; i < lane.run.stop; ++i) encode(orders_[i].header, header_page(lane, i));
    const WriteOrder& first = orders_[lane.run.first];
    build(lane, DiskOp::kWrite, first.fd, first.page, pieces_of(lane, arena_, orders_));
    return Next::kDisk;
  }

  Next went(Lane& lane, int error) noexcept override {
    if (error != 0) fail(lane, lane.run, error);
    return Next::kEnd;
  }

  std::size_t payload_bytes(std::size_t order) const noexcept override {
    return orders_[order].header.format.slot_bytes();
  }

 private:
  const Arena& arena_;
  const std::vector<WriteOrder> orders_;
};

// A run of records as it lies in the file, headers and all, goes through one piece of memory; the new headers
// take the place of the old ones there.
class RelocateJob final : public Job {
 public:
  explicit RelocateJob(std::vector<RelocateOrder> orders)
      : Job(Share::kRelocations, orders.size()), orders_(std::move(orders)) {
    runs = runs_of(orders_);
  }

  Next begin(Lane& lane) noexcept override {
    if (lane.run.bytes > kMergeBytes) {
      try {
        lane.large = Zeroed<std::uint8_t>(lane.run.bytes);
      } catch (const std::bad_alloc&) {
        fail(lane, lane.run, ENOMEM);
        return Next::kEnd;
      }
    }
    return read(lane);
  }

  Next went(Lane& lane, int error) noexcept override {
    if (lane.writing) return wrote(lane, error);
    if (error == 0 && lane.whole) return Next::kVerify;
    return read_on(lane, error) ? read(lane) : Next::kVerify;
  }

  Next verify(Lane& lane, CopyScratch& scratch) noexcept override {
    lane.whole = true;
    for (std::uint32_t i = lane.run.first; i < lane.run.stop; ++i) {
      std::uint8_t* record = record_of(lane, i);
      if (statuses[i] == MoveStatus::kOk) statuses[i] = judge(orders_[i].from, record, record + kPageBytes, scratch);
      if (statuses[i] == MoveStatus::kOk) encode(orders_[i].header, record);
      else lane.whole = false;
    }
    lane.writing = true;
    lane.at = lane.run.first;
    return write(lane);
  }

  std::size_t payload_bytes(std::size_t order) const noexcept override {
    return orders_[order].header.format.slot_bytes();
  }

 private:
  Next read(Lane& lane) noexcept {
    const RecordAt& first = orders_[under_way(lane).first].from;
    return ask(lane, DiskOp::kRead, first.fd, first.page);
  }

  // All of the run, or the next good one of it.
  Next write(Lane& lane) noexcept {
    while (!lane.whole && lane.at < lane.run.stop && statuses[lane.at] != MoveStatus::kOk) ++lane.at;
    if (lane.at == lane.run.stop) return end(lane);
    const RelocateOrder& first = orders_[under_way(lane).first];
    return ask(lane, DiskOp::kWrite, first.fd, first.page);
  }

  Next wrote(Lane& lane, int error) noexcept {
    const Run now = under_way(lane);
    if (error != 0) fail(lane, now, error);
    lane.at = now.stop;
    return lane.whole ? end(lane) : write(lane);
  }

  static Next end(Lane& lane) noexcept {
    lane.large = {};
    return Next::kEnd;
  }

  Next ask(Lane& lane, DiskOp op, int fd, std::uint32_t page) noexcept {
    const Run now = under_way(lane);
    std::uint8_t* const start = record_of(lane, now.first);
    std::uint8_t* const last = record_of(lane, now.stop - 1);
    const std::size_t bytes = static_cast<std::size_t>(last - start) + record_bytes(format_of(orders_[now.stop - 1]));
    lane.pieces[0] = {start, bytes};
    build(lane, op, fd, page, 1);
    return Next::kDisk;
  }

  // Where a record lies in memory: as far from the first one's as in the file.
  std::uint8_t* record_of(Lane& lane, std::uint32_t order) const noexcept {
    std::uint8_t* const start = lane.large.size() > 0 ? &lane.large[0] : lane.memory;
    return start + offset_of(orders_[order].from.page) - offset_of(orders_[lane.run.first].from.page);
  }

  const std::vector<RelocateOrder> orders_;
};

}  // namespace

std::unique_ptr<Job> read_job(const Arena& arena, std::vector<ReadOrder> orders) {
  check_count(orders.size());
  for (std::size_t i = 0; i < orders.size(); ++i) {
    const RecordAt& from = orders[i].from;
    check_record(i, from.fd, from.page, from.format);
    check_slot(i, arena, from.format, orders[i].slot);
  }
  return std::make_unique<ReadJob>(arena, std::move(orders));
}

std::unique_ptr<Job> write_job(const Arena& arena, std::vector<WriteOrder> orders) {
  check_count(orders.size());
  for (std::size_t i = 0; i < orders.size(); ++i) {
    check_record(i, orders[i].fd, orders[i].page, orders[i].header.format);
    check_slot(i, arena, orders[i].header.format, orders[i].slot);
  }
  return std::make_unique<WriteJob>(arena, std::move(orders));
}

std::unique_ptr<Job> relocate_job(std::vector<RelocateOrder> orders) {
  check_count(orders.size());
  for (std::size_t i = 0; i < orders.size(); ++i) {
    const RelocateOrder& order = orders[i];
    check_record(i, order.from.fd, order.from.page, order.from.format);
    check_record(i, order.fd, order.page, order.header.format);
    if (!same(order.from.format, order.header.format) || order.from.key != order.header.key ||
        order.from.payload_crc != order.header.payload_crc)
      throw Invalid(at(i) + "header: expected the block that is read");
  }
  return std::make_unique<RelocateJob>(std::move(orders));
}

}  // namespace kv::moves
