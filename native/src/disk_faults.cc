#include <algorithm>
#include <cerrno>
#include <charconv>
#include <string>

#include "disk_faulty.h"

namespace kv {
namespace {

constexpr double kDelayMaxMs = 1e6;

struct Chance {
  std::string_view name;
  double FaultSpec::*chance;
  double FaultSpec::*time_ms;  // null: it has none
};

constexpr Chance kChances[] = {
    {"read_eio", &FaultSpec::read_eio, nullptr},
    {"write_eio", &FaultSpec::write_eio, nullptr},
    {"write_enospc", &FaultSpec::write_enospc, nullptr},
    {"sync_eio", &FaultSpec::sync_eio, nullptr},
    {"torn", &FaultSpec::torn, nullptr},
    {"short", &FaultSpec::shortened, nullptr},
    {"flip_read", &FaultSpec::flip_read, nullptr},
    {"flip_write", &FaultSpec::flip_write, nullptr},
    {"slow_ms", &FaultSpec::slow, &FaultSpec::slow_ms},
    {"stall_ms", &FaultSpec::stall, &FaultSpec::stall_ms},
};

[[noreturn]] void refuse(std::string_view part, const std::string& why) {
  throw Invalid("faults: \"" + std::string(part) + "\": " + why);
}

template <class Number>
Number number(std::string_view part, std::string_view text, Number most) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc{} || end != text.data() + text.size() || !(value >= 0 && value <= most))
    refuse(part, "expected a number in [0, " + std::to_string(most) + "], got \"" + std::string(text) + "\"");
  return value;
}

void parse_part(std::string_view part, FaultSpec& spec) {
  const std::size_t equals = part.find('=');
  if (equals == std::string_view::npos) refuse(part, "expected name=value");
  const std::string_view name = part.substr(0, equals), value = part.substr(equals + 1);
  if (name == "seed") {
    spec.seed = number(part, value, ~std::uint64_t{0});
    return;
  }
  const auto known =
      std::find_if(std::begin(kChances), std::end(kChances), [&](const Chance& c) { return c.name == name; });
  if (known == std::end(kChances)) {
    std::string names = "seed";
    for (const Chance& chance : kChances) names += ", " + std::string(chance.name);
    refuse(part, "unknown name; there are " + names);
  }
  if (known->time_ms == nullptr) {
    spec.*known->chance = number(part, value, 1.0);
    return;
  }
  const std::size_t colon = value.find(':');
  if (colon == std::string_view::npos) refuse(part, "expected milliseconds:chance");
  spec.*known->time_ms = number(part, value.substr(0, colon), kDelayMaxMs);
  spec.*known->chance = number(part, value.substr(colon + 1), 1.0);
}

// SplitMix64's finisher: as good as independent for different inputs.
std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// The throws of one request: a word for each kind of fault, and one (null) that belongs to none.
class Dice {
 public:
  Dice(std::uint64_t seed, std::uint64_t request) : state_(mix(mix(seed + 0x9E3779B97F4A7C15ull) ^ request)) {}
  std::uint64_t word(double FaultSpec::*fault) const {
    const auto kind = static_cast<std::uint64_t>(
        std::find_if(std::begin(kChances), std::end(kChances), [&](const Chance& c) { return c.chance == fault; }) -
        std::begin(kChances));
    return mix(state_ + (kind + 1) * 0x9E3779B97F4A7C15ull);
  }
  bool happens(const FaultSpec& spec, double FaultSpec::*fault) const { return share(word(fault)) < spec.*fault; }
  static double share(std::uint64_t word) { return static_cast<double>(word >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

std::size_t index(DiskOp op) { return static_cast<std::size_t>(op); }

}  // namespace

FaultSpec parse_faults(std::string_view text) {
  FaultSpec spec;
  std::vector<std::string_view> seen;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    const std::string_view part = text.substr(0, comma);
    parse_part(part, spec);
    const std::string_view name = part.substr(0, part.find('='));
    if (std::find(seen.begin(), seen.end(), name) != seen.end()) refuse(part, "named twice");
    seen.push_back(name);
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
    if (text.empty()) refuse("", "expected name=value after the last comma");
  }
  return spec;
}

// ---- switches ----------------------------------------------------------------------------------------------

void Faults::set(const FaultSpec& spec) {
  const std::lock_guard lock(mutex_);
  spec_ = spec;
}

void Faults::fail(DiskOp op, int error) {
  const std::lock_guard lock(mutex_);
  failing_[index(op)] = error;
}

void Faults::spoil(int fd, std::uint64_t start, std::uint64_t stop) {
  const std::lock_guard lock(mutex_);
  spoiled_.push_back({fd, start, stop});
}

void Faults::hold(DiskOp op, std::optional<int> fd) {
  const std::lock_guard lock(mutex_);
  holding_[index(op)] = true;
  held_fd_[index(op)] = fd;
}

void Faults::release(DiskOp op) {
  const std::lock_guard lock(mutex_);
  holding_[index(op)] = false;
  for (Disk* disk : disks_) disk->wake();
}

std::size_t Faults::held() const {
  const std::lock_guard lock(mutex_);
  return held_;
}

FaultCounts Faults::counts() const {
  const std::lock_guard lock(mutex_);
  FaultCounts counts = counts_;
  counts.requests = requests_;
  return counts;
}

bool Faults::holds(const DiskRequest& request) const {
  const std::lock_guard lock(mutex_);
  const std::optional<int> fd = held_fd_[index(request.op)];
  return holding_[index(request.op)] && (!fd || *fd == request.fd);
}

void Faults::change_held(std::ptrdiff_t by) {
  const std::lock_guard lock(mutex_);
  held_ += static_cast<std::size_t>(by);
}

// ---- chance ------------------------------------------------------------------------------------------------

Faults::Fate Faults::decide(const DiskRequest& request, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t n = requests_++;
  const Dice dice(spec_.seed, n);
  Fate fate;
  decide_error(request, bytes, n, fate);
  fate.dice = dice.word(nullptr);
  const bool moves = request.op == DiskOp::kRead || request.op == DiskOp::kWrite;
  if (moves && fate.error == 0) {
    fate.flipped = dice.happens(spec_, request.op == DiskOp::kRead ? &FaultSpec::flip_read : &FaultSpec::flip_write);
    fate.shortened = bytes > kPageBytes && dice.happens(spec_, &FaultSpec::shortened);
  }
  if (dice.happens(spec_, &FaultSpec::slow)) fate.delay_s = Dice::share(fate.dice) * spec_.slow_ms / 1e3;
  if (dice.happens(spec_, &FaultSpec::stall)) fate.delay_s += spec_.stall_ms / 1e3;
  if (fate.torn) ++counts_.torn;
  else if (fate.error != 0) ++counts_.errors;
  if (fate.shortened) ++counts_.shortened;
  if (fate.flipped) ++(request.op == DiskOp::kRead ? counts_.flipped_reads : counts_.flipped_writes);
  if (fate.delay_s > 0) ++counts_.delayed;
  return fate;
}

void Faults::decide_error(const DiskRequest& request, std::size_t bytes, std::uint64_t n, Fate& fate) const {
  const Dice dice(spec_.seed, n);
  const auto fails = [&](double FaultSpec::*fault, int error) {
    if (fate.error == 0 && dice.happens(spec_, fault)) fate.error = error;
  };
  fate.error = failing_[index(request.op)];
  switch (request.op) {
    case DiskOp::kRead:
      fails(&FaultSpec::read_eio, EIO);
      for (const Spoiled& bad : spoiled_)
        if (bad.fd == request.fd && request.offset < bad.stop && bad.start < request.offset + bytes) fate.error = EIO;
      break;
    case DiskOp::kWrite:
      fails(&FaultSpec::write_enospc, ENOSPC);
      fails(&FaultSpec::write_eio, EIO);
      if (fate.error == 0 && dice.happens(spec_, &FaultSpec::torn)) fate.error = EIO, fate.torn = true;
      break;
    case DiskOp::kAllocate: fails(&FaultSpec::write_enospc, ENOSPC); break;
    case DiskOp::kSync: fails(&FaultSpec::sync_eio, EIO); break;
  }
}

// ---- the log -----------------------------------------------------------------------------------------------

void Faults::record() {
  const std::lock_guard lock(mutex_);
  recording_ = true;
}

std::size_t Faults::moment() const {
  const std::lock_guard lock(mutex_);
  return moment_;
}

std::vector<LoggedWrite> Faults::log() const {
  const std::lock_guard lock(mutex_);
  return log_;
}

std::optional<std::size_t> Faults::log_begin(const DiskRequest& request) {
  const std::lock_guard lock(mutex_);
  if (!recording_ || request.op == DiskOp::kRead) return std::nullopt;
  LoggedWrite write;
  write.op = request.op;
  write.fd = request.fd;
  write.offset = request.offset;
  write.length = request.length;
  for (const iovec& piece : request.pieces) {
    const auto* bytes = static_cast<const std::uint8_t*>(piece.iov_base);
    write.bytes.insert(write.bytes.end(), bytes, bytes + piece.iov_len);
  }
  if (request.op == DiskOp::kWrite) write.length = write.bytes.size();
  write.begun = moment_++;
  log_.push_back(std::move(write));
  return log_.size() - 1;
}

void Faults::log_end(std::size_t position, int error) {
  const std::lock_guard lock(mutex_);
  log_[position].ended = moment_++;
  log_[position].error = error;
}

}  // namespace kv
