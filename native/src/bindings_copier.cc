// Layouts, the copier and whole-slot checks, as Python sees them.
#include <nanobind/stl/optional.h>
#include <unistd.h>

#include <cstring>
#include <optional>

#include "bindings.h"
#include "copy.h"
#include "engine.h"
#include "runs.h"

namespace kv {
namespace {

using nb::literals::operator""_a;

// ---- layouts -----------------------------------------------------------------------------------------

void make_format(SlotFormat* self, std::uint32_t layers, std::uint32_t heads, std::uint32_t cell_bytes) {
  const SlotFormat format{layers, heads, cell_bytes};
  check_format(format);
  new (self) SlotFormat(format);
}

// So many parameters because that is what a strided tensor is; all but the first are named by the caller.
void make_layout(PagedLayout* self, const Array& bases, std::uint32_t blocks, std::uint32_t heads,
                 std::size_t block_stride, std::size_t head_stride, std::size_t piece_stride, std::size_t piece_bytes,
                 std::uint32_t pieces, std::uint32_t layer_start, std::uint32_t head_start) {
  const auto addresses = matrix_arg<std::uint64_t>(bases, "bases");
  if (bases.shape(0) > kCellsMax || bases.shape(1) > kPlanesMax)
    throw Invalid("bases: at most (" + std::to_string(kCellsMax) + ", " + std::to_string(kPlanesMax) + ")");
  PagedLayout layout{.bases = {addresses.begin(), addresses.end()},
                     .layers = static_cast<std::uint32_t>(bases.shape(0)),
                     .planes = static_cast<std::uint32_t>(bases.shape(1)),
                     .blocks = blocks,
                     .heads = heads,
                     .block_stride = block_stride,
                     .head_stride = head_stride,
                     .piece_stride = piece_stride,
                     .piece_bytes = piece_bytes,
                     .pieces = pieces,
                     .layer_start = layer_start,
                     .head_start = head_start};
  layout.check_and_simplify();
  new (self) PagedLayout(std::move(layout));
}

void bind_layouts(nb::module_& m) {
  nb::class_<SlotFormat>(m, "SlotFormat")
      .def("__init__", &make_format, "layers"_a, "heads"_a, "cell_bytes"_a)
      .def_ro("layers", &SlotFormat::layers)
      .def_ro("heads", &SlotFormat::heads)
      .def_ro("cell_bytes", &SlotFormat::cell_bytes)
      .def_prop_ro("cell_stride", &SlotFormat::cell_stride)
      .def_prop_ro("table_offset", &SlotFormat::table_offset)
      .def_prop_ro("length", &SlotFormat::length)
      .def_prop_ro("slot_bytes", &SlotFormat::slot_bytes);

  nb::class_<PagedLayout>(m, "PagedLayout")
      .def("__init__", &make_layout, "bases"_a, nb::kw_only(), "blocks"_a, "heads"_a, "block_stride"_a,
           "head_stride"_a, "piece_stride"_a, "piece_bytes"_a, "pieces"_a, "layer_start"_a = 0, "head_start"_a = 0);
}

// ---- copier ------------------------------------------------------------------------------------------

// A forked child has the object but none of its threads: closing it there would wait for ever, so the child
// leaks its copy.
struct CopierHandle {
  std::unique_ptr<Copier> copier;
  int pid = getpid();

  CopierHandle(int threads, std::size_t queue_max) : copier(std::make_unique<Copier>(threads, queue_max)) {}
  ~CopierHandle() {
    if (pid != getpid()) static_cast<void>(copier.release());
  }
  CopierHandle(const CopierHandle&) = delete;
  CopierHandle& operator=(const CopierHandle&) = delete;

  Copier& get() const {
    if (pid != getpid()) throw Invalid("copier: made before a fork; make one in this process");
    return *copier;
  }
};

// A completion as Python keeps it: the statuses become an array once.
struct CompletionResult {
  JobId job;
  nb::object status;
  std::size_t bytes;
  double seconds;
};

nb::object statuses_result(const std::vector<BlockStatus>& statuses) {
  std::vector<std::uint8_t> bytes(statuses.size());
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(statuses[i]);
  return vector_result(std::move(bytes));
}

CompletionResult completion_result(const Completion& done) {
  return {done.job, statuses_result(done.statuses), done.bytes, done.seconds};
}

template <typename T>
std::vector<T> ids_copy(const Array& array, const char* name) {
  const auto ids = vector_arg<T>(array, name);
  return {ids.begin(), ids.end()};
}

JobId copier_store(const CopierHandle& self, const ArenaHandle& arena, const SlotFormat& format,
                   const PagedLayout& layout, const Array& blocks, const Array& slots, const Array& generations) {
  return self.get().store({arena.get(), format, layout}, ids_copy<BlockId>(blocks, "blocks"),
                          ids_copy<SlotId>(slots, "slots"), ids_copy<std::uint64_t>(generations, "generations"));
}

JobId copier_load(const CopierHandle& self, const ArenaHandle& arena, const SlotFormat& format,
                  const PagedLayout& layout, const Array& blocks, const Array& slots, const Array& keys) {
  const auto wanted = keys_arg(keys, "keys");
  return self.get().load({arena.get(), format, layout}, ids_copy<BlockId>(blocks, "blocks"),
                         ids_copy<SlotId>(slots, "slots"), {wanted.begin(), wanted.end()});
}

std::optional<CompletionResult> copier_wait(const CopierHandle& self, JobId job, double timeout_s) {
  std::optional<Completion> done;
  {
    const nb::gil_scoped_release nogil;
    done = self.get().wait(job, timeout_s);
  }
  if (!done) return std::nullopt;
  return completion_result(*done);
}

nb::list copier_completions(const CopierHandle& self) {
  nb::list results;
  for (const Completion& done : self.get().completions()) results.append(nb::cast(completion_result(done)));
  return results;
}

void bind_copier(nb::module_& m) {
  nb::class_<CompletionResult>(m, "Completion")
      .def_ro("job", &CompletionResult::job)
      .def_ro("status", &CompletionResult::status)
      .def_ro("bytes", &CompletionResult::bytes)
      .def_ro("seconds", &CompletionResult::seconds);

  using NoGil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<CopierHandle>(m, "Copier")
      .def(nb::init<int, std::size_t>(), "threads"_a, nb::kw_only(), "queue_max"_a = 1024)
      .def_prop_ro("eventfd", [](const CopierHandle& self) { return self.get().eventfd(); })
      .def("store", &copier_store, "arena"_a, "format"_a, "layout"_a, "blocks"_a, "slots"_a, "generations"_a)
      .def("load", &copier_load, "arena"_a, "format"_a, "layout"_a, "blocks"_a, "slots"_a, "keys"_a)
      .def("progress", [](const CopierHandle& self, JobId job) { return self.get().progress(job); }, "job"_a)
      .def("cancel", [](const CopierHandle& self, JobId job) { self.get().cancel(job); }, "job"_a, NoGil())
      .def("completions", &copier_completions)
      .def("wait", &copier_wait, "job"_a, "timeout_s"_a)
      .def("quiesce", [](const CopierHandle& self, double timeout_s) { return self.get().quiesce(timeout_s); },
           "timeout_s"_a, NoGil())
      .def("close", [](const CopierHandle& self) { self.get().close(); }, NoGil());
}

// ---- slots -------------------------------------------------------------------------------------------

nb::object py_verify_slots(const ArenaHandle& handle, const SlotFormat& format, const Array& slots, const Array& keys) {
  const auto arena = handle.get();
  const auto ids = vector_arg<SlotId>(slots, "slots");
  const auto wanted = keys_arg(keys, "keys");
  check_same_length(ids.size(), "slots", wanted.size(), "keys");
  check_slots(*arena, format, ids);
  std::vector<BlockStatus> statuses(ids.size());
  {
    const nb::gil_scoped_release nogil;
    const auto scratch = std::make_unique_for_overwrite<CopyScratch>();
    for (std::size_t i = 0; i < ids.size(); ++i) statuses[i] = verify_slot(*arena, format, ids[i], wanted[i], *scratch);
  }
  return statuses_result(statuses);
}

nb::object py_table_crcs(const ArenaHandle& handle, const SlotFormat& format, const Array& slots) {
  const auto arena = handle.get();
  const auto ids = vector_arg<SlotId>(slots, "slots");
  check_slots(*arena, format, ids);
  std::vector<std::uint32_t> crcs(ids.size());
  {
    const nb::gil_scoped_release nogil;
    for (std::size_t i = 0; i < ids.size(); ++i) crcs[i] = table_crc(*arena, format, ids[i]);
  }
  return vector_result(std::move(crcs));
}

nb::object py_slot_generations(const ArenaHandle& handle, const Array& slots) {
  return vector_result(slot_generations(*handle.get(), vector_arg<SlotId>(slots, "slots")));
}

nb::bytes py_pack_slots(const Array& slots, std::uint32_t pages_per_slot) {
  return packed_slots(vector_arg<SlotId>(slots, "slots"), pages_per_slot);
}

nb::object py_unpack_slots(const nb::bytes& packed, std::size_t count, std::uint32_t pages_per_slot,
                           std::uint64_t pages) {
  if (packed.size() % sizeof(std::uint32_t) != 0) throw Invalid("slots: not a multiple of four bytes");
  static_assert(offsetof(PyBytesObject, ob_sval) % alignof(std::uint32_t) == 0);  // so it may be read in place
  const std::span numbers(static_cast<const std::uint32_t*>(packed.data()), packed.size() / sizeof(std::uint32_t));
  return vector_result(unpack_slots(numbers, {count, pages_per_slot, pages}));
}

void bind_slots(nb::module_& m) {
  m.def("verify_slots", &py_verify_slots, "arena"_a, "format"_a, "slots"_a, "keys"_a);
  m.def("table_crcs", &py_table_crcs, "arena"_a, "format"_a, "slots"_a);
  m.def("slot_generations", &py_slot_generations, "arena"_a, "slots"_a);
  m.def("pack_slots", &py_pack_slots, "slots"_a, "pages_per_slot"_a);
  m.def("unpack_slots", &py_unpack_slots, "packed"_a, "count"_a, "pages_per_slot"_a, "pages"_a);
}

}  // namespace

void bind_copies(nb::module_& module) {
  bind_layouts(module);
  bind_copier(module);
  bind_slots(module);
}

}  // namespace kv
