// Where on the medium a block's record may lie at a moment, by the record of what was written alone: what is found
// without such a trace is a phantom, whatever the pool that found it thinks.
//
// A file lives many times. What a life has left may be found until the header of the next one is safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "crash_log.h"
#include "disk_pool.h"
#include "record.h"

namespace kv::test {

class Traces {
 public:
  explicit Traces(const CrashLog& log) {
    for (const auto& [number, bytes] : log.before()) take(number, 0, bytes, 0, 0);
    log.writes([this](std::uint32_t number, const LoggedWrite& entry, std::size_t safe) {
      if (entry.op == DiskOp::kWrite) take(number, entry.offset / kPageBytes, entry.bytes, entry.begun + 1, safe);
    });
    for (auto& [key, traces] : traces_)
      for (Trace& trace : traces) trace.to = end_of(trace);
  }

  // At or behind that place of the log.
  bool may_lie(const Key& key, std::size_t moment, DiskPool::Mark mark = {}) const {
    const auto known = traces_.find(key.bytes);
    if (known == traces_.end()) return false;
    return std::any_of(known->second.begin(), known->second.end(), [&](const Trace& t) {
      const bool behind = std::pair(t.sequence, t.page) >= std::pair(mark.sequence, mark.page);
      return t.from <= moment && moment <= t.to && behind;
    });
  }

 private:
  struct Trace {
    std::uint32_t file;
    std::uint32_t page;
    std::uint64_t nonce, sequence;
    std::size_t from, to;
  };
  struct Life {
    std::uint64_t nonce;
    std::size_t safe;
  };

  void take(std::uint32_t file, std::size_t first, const Bytes& bytes, std::size_t from, std::size_t safe) {
    for (std::size_t i = 0; (i + 1) * kPageBytes <= bytes.size(); ++i) {
      const std::uint8_t* page = bytes.data() + i * kPageBytes;
      SegmentHeader header;
      RecordHeader record;
      if (first + i == 0 && decode(page, header)) {
        lives_[file].push_back({header.nonce, safe});
      } else if (decode(page, record)) {
        const auto at = static_cast<std::uint32_t>(first + i);
        traces_[record.key.bytes].push_back({file, at, record.nonce, record.sequence, from, 0});
      }
    }
  }
  // When the first later life of its file was safe; 0 if its own never began: what an earlier one had left.
  std::size_t end_of(const Trace& trace) const {
    const auto lives = lives_.find(trace.file);
    if (lives == lives_.end()) return 0;
    const auto is_own = [&](const Life& life) { return life.nonce == trace.nonce; };
    const auto own = std::find_if(lives->second.begin(), lives->second.end(), is_own);
    if (own == lives->second.end()) return 0;
    std::size_t end = LoggedWrite::kNotEnded;
    for (auto life = own + 1; life != lives->second.end(); ++life)
      if (life->nonce != trace.nonce) end = std::min(end, life->safe);
    return end;
  }

  std::map<std::array<std::uint8_t, 32>, std::vector<Trace>> traces_;
  std::map<std::uint32_t, std::vector<Life>> lives_;
};

}  // namespace kv::test
