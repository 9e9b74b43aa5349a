// Python's view of the disk: DiskDirectory, DiskSurvey, DiskPool. The pool's owner is the daemon's loop; what
// reads or waits for the disk (survey, close) releases the GIL.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <optional>

#include "bindings.h"
#include "disk_faulty.h"
#include "disk_pool.h"
#include "pool.h"

namespace kv {

namespace {

using nb::literals::operator""_a;

struct DirectoryHandle {
  std::shared_ptr<DiskDirectory> directory;

  const std::shared_ptr<DiskDirectory>& get() const {
    if (!directory) throw Invalid("directory: this handle was closed; open it again");
    return directory;
  }
};

DirectoryHandle open_directory(const std::string& path, std::size_t capacity_bytes, std::size_t segment_bytes,
                               bool direct, bool create) {
  return {DiskDirectory::open({path, capacity_bytes, segment_bytes, direct, create})};
}

void bind_directory(nb::module_& m) {
  nb::class_<DirectoryHandle>(m, "DiskDirectory")
      .def_static("open", &open_directory, "path"_a, nb::kw_only(), "capacity_bytes"_a = 0,
                  "segment_bytes"_a = 128 << 20, "direct"_a = true, "create"_a = true)
      .def_prop_ro("path", [](const DirectoryHandle& self) { return self.get()->options().path; })
      .def_prop_ro("id",
                   [](const DirectoryHandle& self) {
                     const StoreId& id = self.get()->id();
                     return nb::bytes(id.data(), id.size());
                   })
      .def_prop_ro("bytes", [](const DirectoryHandle& self) { return self.get()->bytes(); })
      .def_prop_ro("segments", [](const DirectoryHandle& self) { return self.get()->segments().size(); })
      .def_prop_ro("removed", [](const DirectoryHandle& self) { return self.get()->removed(); })
      .def("close", [](DirectoryHandle& self) { self.directory = nullptr; });
}

// ---- survey --------------------------------------------------------------------------------------------

nb::dict survey_counts(const DiskSurvey& survey) {
  std::size_t by_state[4] = {}, records = 0, rotten = 0, payload = 0;
  for (const FoundSegment& segment : survey.segments()) {
    ++by_state[static_cast<std::size_t>(segment.state)];
    records += segment.records.size();
    rotten += segment.rotten;
    for (const FooterEntry& entry : segment.records) payload += entry.format.slot_bytes();
  }
  nb::dict out;
  out["segments"] = survey.segments().size();
  out["unfinished"] = by_state[0];
  out["empty"] = by_state[1];
  out["sealed"] = by_state[2];
  out["unsealed"] = by_state[3];
  out["records"] = records;
  out["rotten"] = rotten;
  out["payload_bytes"] = payload;
  return out;
}

nb::tuple survey_records(const DiskSurvey& survey, std::size_t segment) {
  if (segment >= survey.segments().size())
    throw Invalid("segment: there are " + std::to_string(survey.segments().size()));
  std::vector<Key> keys;
  std::vector<std::uint32_t> where;
  for (const FooterEntry& entry : survey.segments()[segment].records) {
    keys.push_back(entry.key);
    where.insert(where.end(), {entry.depth, entry.page});
  }
  return nb::make_tuple(keys_result(keys), matrix_result(std::move(where), 2));
}

void bind_survey(nb::module_& m) {
  nb::class_<DiskSurvey>(m, "DiskSurvey")
      .def(
          "__init__",
          [](DiskSurvey* self, const DirectoryHandle& directory) { new (self) DiskSurvey(directory.get()); },
          "directory"_a)
      .def("read", &DiskSurvey::read, "threads"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("verify", &DiskSurvey::verify, "threads"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("repair", &DiskSurvey::repair, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("bytes_in_all", &DiskSurvey::bytes_in_all)
      .def_prop_ro("bytes_read", &DiskSurvey::bytes_read)
      .def_prop_ro("errors", &DiskSurvey::errors)
      .def("counts", &survey_counts)
      .def("records", &survey_records, "segment"_a);
}

// ---- pool ----------------------------------------------------------------------------------------------

const char* kind_name(DiskEvent::Kind kind) {
  switch (kind) {
    case DiskEvent::Kind::kWritten: return "written";
    case DiskEvent::Kind::kRead: return "read";
    case DiskEvent::Kind::kFlushed: return "flushed";
    case DiskEvent::Kind::kFailed: return "failed";
    case DiskEvent::Kind::kNotMade: return "not_made";
  }
  return "";
}

// A forked child has the pool but none of its mover's threads: it leaks its copy, as with a copier.
struct DiskPoolHandle {
  std::unique_ptr<DiskPool> pool;
  std::string io;
  HostPool* above = nullptr;  // may publish behind what is here
  int pid = getpid();

  ~DiskPoolHandle() {
    if (pid != getpid()) static_cast<void>(pool.release());
    leave();
  }
  void leave() noexcept {
    if (above != nullptr) std::exchange(above, nullptr)->set_lower(nullptr);
  }

  DiskPool& get() const {
    if (pid != getpid()) throw Invalid("disk pool: made before a fork");
    if (!pool) throw Invalid("disk pool: closed");
    return *pool;
  }
  std::unique_ptr<DiskPool> take() {
    if (pid != getpid()) throw Invalid("disk pool: made before a fork");
    leave();
    return std::move(pool);
  }
};

// So many parameters because that is what a pool needs; all but the first three are named by the caller.
void make_pool(DiskPoolHandle* self, Index& index, const ArenaHandle& arena, const DirectoryHandle& directory,
               const std::string& io, std::size_t depth, int threads, double reinsert_share,
               std::size_t write_bytes_max, std::size_t records_max, const std::string& faults) {
  // Requests wait for a slow disk on threads of their own where there is no io_uring: 16 keep an NVMe busy.
  std::unique_ptr<Disk> disk = open_disk(io, depth, static_cast<int>(std::min<std::size_t>(depth, 16)));
  if (!faults.empty()) disk = faulty_disk(std::move(disk), faults);
  Mover::Limits limits;
  limits.verify_threads = threads;
  DiskOptions options;
  options.reinsert_share = reinsert_share;
  options.write_bytes_max = write_bytes_max;
  options.records_max = records_max;
  std::string kind(disk->kind());
  auto mover = std::make_unique<Mover>(std::move(disk), arena.get(), limits);
  auto pool = std::make_unique<DiskPool>(index, arena.get(), directory.get(), std::move(mover), options);
  new (self) DiskPoolHandle{std::move(pool), std::move(kind)};
}

nb::dict adopt_pool(DiskPoolHandle& self, const DiskSurvey& survey) {
  const DiskAdopted a = self.get().adopt(survey);
  nb::dict out;
  out["readable"] = a.readable;
  out["orphaned"] = a.orphaned;
  out["older"] = a.older;
  out["no_room"] = a.no_room;
  out["rotten"] = a.rotten;
  out["segments"] = a.segments;
  out["unsealed"] = a.unsealed;
  return out;
}

nb::dict pool_counts(const DiskPoolHandle& self) {
  const DiskCounts c = self.get().counts();
  nb::dict out;
  out["creating"] = c.creating;
  out["free"] = c.free;
  out["opening"] = c.opening;
  out["filling"] = c.filling;
  out["sealing"] = c.sealing;
  out["sealed"] = c.sealed;
  out["evacuating"] = c.evacuating;
  out["broken"] = c.broken;
  out["records"] = c.records;
  out["live_bytes"] = c.live_bytes;
  out["writing"] = c.writing;
  out["capacity_bytes"] = c.capacity_bytes;
  out["file_bytes"] = c.file_bytes;
  return out;
}

nb::dict pool_dropped(DiskPoolHandle& self) {
  const DiskDropped d = self.get().take_dropped();
  nb::dict out;
  out["evicted"] = d.evicted;
  out["reinserted"] = d.reinserted;
  out["over_budget"] = d.over_budget;
  out["over_limit"] = d.over_limit;
  out["compacted"] = d.compacted;
  out["rot"] = d.rot;
  out["lost"] = d.lost;
  out["events_lost"] = d.events_lost;
  out["reinserted_bytes"] = d.reinserted_bytes;
  return out;
}

nb::tuple pool_write(DiskPoolHandle& self, const Array& nodes, const Array& slots, const SlotFormat& format) {
  const auto ids = vector_arg<NodeId>(nodes, "nodes");
  const auto places = vector_arg<SlotId>(slots, "slots");
  check_same_length(ids.size(), "nodes", places.size(), "slots");
  const DiskPool::Begun begun = self.get().write(ids, places, format);
  return nb::make_tuple(begun.job, begun.accepted);
}

std::uint64_t pool_read(DiskPoolHandle& self, const Array& nodes, const Array& slots, const SlotFormat& format) {
  const auto ids = vector_arg<NodeId>(nodes, "nodes");
  const auto places = vector_arg<SlotId>(slots, "slots");
  check_same_length(ids.size(), "nodes", places.size(), "slots");
  return self.get().read(ids, places, format);
}

nb::object pool_readable(const DiskPoolHandle& self, const Array& nodes) {
  return vector_result(self.get().readable(vector_arg<NodeId>(nodes, "nodes")));
}

void bind_pool(nb::module_& m) {
  nb::class_<DiskEvent>(m, "DiskEvent")
      .def_prop_ro("kind", [](const DiskEvent& e) { return kind_name(e.kind); })
      .def_ro("job", &DiskEvent::job)
      .def_prop_ro("ok", [](const DiskEvent& e) { return vector_result(e.ok); })
      .def_prop_ro("corrupt", [](const DiskEvent& e) { return vector_result(e.corrupt); })
      .def_prop_ro("failed", [](const DiskEvent& e) { return vector_result(e.failed); })
      .def_ro("last", &DiskEvent::last)
      .def_ro("error", &DiskEvent::error)
      .def_ro("bytes", &DiskEvent::bytes)
      .def_ro("seconds", &DiskEvent::seconds);

  using Self = DiskPoolHandle;
  nb::class_<Self>(m, "DiskPool")
      .def("__init__", &make_pool, "index"_a, "arena"_a, "directory"_a, nb::kw_only(), "io"_a = "auto",
           "depth"_a = 64, "threads"_a = 1, "reinsert_share"_a = 0.25, "write_bytes_max"_a = std::size_t{256} << 20,
           "records_max"_a = std::size_t{kNone}, "faults"_a = "", nb::keep_alive<1, 2>())
      .def("adopt", &adopt_pool, "survey"_a)
      .def(
          "put_below",
          [](Self& self, HostPool& host) {
            self.leave();
            host.set_lower(&self.get());
            self.above = &host;
          },
          "host"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("eventfd", [](const Self& self) { return self.get().eventfd(); })
      .def_prop_ro("io", [](const Self& self) { return self.io; })
      .def_prop_ro("segments", [](const Self& self) { return self.get().segments(); })
      .def_prop_ro("memory_bytes", [](const Self& self) { return self.get().memory_bytes(); })
      .def("match", [](const Self& self, const Walk& walk) { return self.get().match(walk); }, "walk"_a)
      .def("readable", &pool_readable, "nodes"_a)
      .def(
          "missing", [](const Self& self, NodeId node) { return vector_result(self.get().missing(node)); }, "node"_a)
      .def(
          "nodes",
          [](const Self& self, std::size_t start, std::size_t most, bool coming) {
            return vector_result(self.get().nodes(start, most, coming));
          },
          "start"_a = 0, "most"_a = kNone, "coming"_a = false)
      .def(
          "present",
          [](const Self& self, const Array& nodes) {
            return vector_result(self.get().present(vector_arg<NodeId>(nodes, "nodes")));
          },
          "nodes"_a)
      .def(
          "touch", [](Self& self, const Array& nodes) { self.get().touch(vector_arg<NodeId>(nodes, "nodes")); },
          "nodes"_a)
      .def("write", &pool_write, "nodes"_a, "slots"_a, "format"_a)
      .def("read", &pool_read, "nodes"_a, "slots"_a, "format"_a)
      .def("cancel", [](Self& self, std::uint64_t job) { self.get().cancel(job); }, "job"_a)
      .def("flush", [](Self& self) { return self.get().flush(); })
      .def("pump", [](Self& self) { return self.get().pump(); })
      .def("resume", [](Self& self) { self.get().resume(); })
      .def("forget", [](Self& self, NodeId node) { return self.get().forget(node); }, "node"_a)
      .def("drop", [](Self& self, NodeId node) { return self.get().drop(node); }, "node"_a)
      .def("claim", [](Self& self, NodeId root, Account account) { self.get().claim(root, account); }, "root"_a,
           "account"_a)
      .def(
          "set_limit",
          [](Self& self, Account account, std::optional<std::size_t> bytes) {
            self.get().set_limit(account, bytes.value_or(kUnlimited));
          },
          "account"_a, "bytes"_a.none())
      .def("used_bytes", [](const Self& self, Account account) { return self.get().usage().used(account); },
           "account"_a)
      .def(
          "trim",
          [](Self& self, Account account, std::size_t bytes, NodeId keep) {
            return self.get().trim(account, bytes, keep);
          },
          "account"_a, "bytes"_a, "keep"_a = kNone)
      .def_prop_ro("mark",
                   [](const Self& self) {
                     const DiskPool::Mark mark = self.get().mark();
                     return nb::make_tuple(mark.sequence, mark.page);
                   })
      .def_prop_ro("forgotten",
                   [](const Self& self) {
                     const DiskPool::Mark mark = self.get().forgotten();
                     return nb::make_tuple(mark.sequence, mark.page);
                   })
      .def_prop_ro("oldest_sequence", [](const Self& self) { return self.get().oldest_sequence(); })
      .def(
          "forget_before",
          [](Self& self, const std::vector<std::tuple<NodeId, std::uint64_t, std::uint32_t>>& roots) {
            std::unordered_map<NodeId, DiskPool::Mark> marks;
            for (const auto& [root, sequence, page] : roots) marks[root] = {sequence, page};
            return self.get().forget_before(marks);
          },
          "roots"_a)
      .def("take_stored", [](Self& self) { return keys_result(self.get().take_stored()); })
      .def("take_removed", [](Self& self) { return keys_result(self.get().take_removed()); })
      .def("take_dropped", &pool_dropped)
      .def("counts", &pool_counts)
      .def("check", [](const Self& self) { self.get().check(); })
      .def(
          "close",
          [](Self& self, double timeout_s) {
            std::unique_ptr<DiskPool> pool = self.take();
            if (!pool) return;
            const nb::gil_scoped_release nogil;
            pool->close(timeout_s);
            pool.reset();  // its share of the directory, whose lock others wait for, goes with it
          },
          "timeout_s"_a = 2.0);
}

}  // namespace

void bind_disk(nb::module_& module) {
  bind_directory(module);
  bind_survey(module);
  bind_pool(module);
}

}  // namespace kv
