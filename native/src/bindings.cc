// The Python module and its exception table; hashing, sums and the arena. kvstore/_native.pyi is the contract.
#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <optional>
#include <system_error>

#include "copy.h"
#include "crc.h"
#include "engine.h"
#include "hash.h"

namespace kv {
namespace {

using nb::literals::operator""_a;

// ---- exceptions --------------------------------------------------------------------------------------

void raise_os_error(PyObject* type, int code, const char* what) {
  const nb::tuple args = nb::make_tuple(code, what);  // (errno, text) lets Python pick the subclass
  PyErr_SetObject(type, args.ptr());
}

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const Invalid& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const Broken& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  } catch (const Full& e) {
    raise_os_error(PyExc_BlockingIOError, EAGAIN, e.what());
  } catch (const std::system_error& e) {
    raise_os_error(PyExc_OSError, e.code().value(), e.what());
  }
}

// ---- keys --------------------------------------------------------------------------------------------

nb::bytes py_blake2b(nb::handle data, nb::handle key, nb::handle person, std::size_t digest_size) {
  const BytesArg bytes(data, "data"), key_bytes(key, "key"), person_bytes(person, "person");
  std::vector<std::uint8_t> digest;
  {
    const nb::gil_scoped_release nogil;
    digest = blake2b(bytes.span(),
                     {.key = key_bytes.span(), .person = person_bytes.span(), .digest_bytes = digest_size});
  }
  return nb::bytes(digest.data(), digest.size());
}

nb::object py_chain_keys(nb::handle parent, const Array& tokens, std::uint32_t block_tokens, nb::handle extra,
                         const std::optional<Array>& extra_offsets) {
  const Key start = key_arg(parent, "parent");
  const BytesArg extra_bytes(extra, "extra");
  ChainInput input{.tokens = vector_arg<std::uint32_t>(tokens, "tokens"),
                   .block_tokens = block_tokens,
                   .extra = extra_bytes.span()};
  if (extra_offsets) {
    input.extra_offsets = vector_arg<std::uint32_t>(*extra_offsets, "extra_offsets");
    if (input.extra_offsets.empty()) throw Invalid("extra_offsets: expected full blocks + 1 entries, got 0");
  }
  std::vector<Key> keys;
  {
    const nb::gil_scoped_release nogil;
    keys = chain_keys(start, input);
  }
  return keys_result(keys);
}

void bind_keys(nb::module_& m) {
  m.def("blake2b", &py_blake2b, "data"_a, nb::kw_only(), "key"_a = nb::bytes(""), "person"_a = nb::bytes(""),
        "digest_size"_a = 32);
  m.def("chain_keys", &py_chain_keys, "parent"_a, "tokens"_a, "block_tokens"_a, "extra"_a = nb::bytes(""),
        "extra_offsets"_a = nb::none());
  m.def("keys_digest", [](const Array& keys) { return keys_digest(keys_arg(keys, "keys")); }, "keys"_a);
  m.def(
      "keys_digests", [](const Array& keys) { return vector_result(keys_digests(keys_arg(keys, "keys"))); },
      "keys"_a);
}

// ---- sums --------------------------------------------------------------------------------------------

using WritableArray = nb::ndarray<nb::device::cpu>;

std::uint32_t py_crc32c(nb::handle data, std::uint32_t value) {
  const BytesArg bytes(data, "data");
  const nb::gil_scoped_release nogil;
  return crc32c(bytes.span().data(), bytes.span().size(), value);
}

std::uint32_t py_copy_crc(const WritableArray& target, const Array& source) {
  const auto to = vector_arg<std::uint8_t>(Array(target), "target");
  const auto from = vector_arg<std::uint8_t>(source, "source");
  check_same_length(to.size(), "target", from.size(), "source");
  if (to.data() < from.data() + from.size() && from.data() < to.data() + to.size())
    throw Invalid("source: overlaps target");
  auto* bytes = static_cast<std::uint8_t*>(target.data());
  const nb::gil_scoped_release nogil;
  const std::uint32_t crc = copy_crc(bytes, from.data(), from.size(), 0, Stores::kStream);
  store_fence();
  return crc;
}

void bind_sums(nb::module_& m) {
  m.def("crc32c", &py_crc32c, "data"_a, "value"_a = 0);
  m.def("crc_paths", [] {
    std::vector<std::string> names;
    for (const auto name : crc_paths()) names.emplace_back(name);
    return names;
  });
  m.def("crc_path", [] { return std::string(crc_path()); });
  m.def("set_crc_path", [](const std::string& name) { set_crc_path(name); }, "name"_a);
  m.def("copy_crc", &py_copy_crc, "target"_a, "source"_a);
}

// ---- arena -------------------------------------------------------------------------------------------

void check_window(const Arena& arena, SlotId slot, std::size_t length) {
  const std::size_t start = std::size_t{slot} * kPageBytes;
  if (start >= arena.capacity_bytes() || length > arena.capacity_bytes() - start)
    throw Invalid("slot: [" + std::to_string(slot) + " pages, +" + std::to_string(length) +
                  " bytes) leaves the arena of " + std::to_string(arena.pages()) + " pages");
}

nb::object arena_view(const ArenaHandle& self, SlotId slot, std::size_t length) {
  auto held = std::make_unique<std::shared_ptr<Arena>>(self.get());
  Arena& arena = **held;
  check_window(arena, slot, length);
  const nb::capsule owner(held.release(), [](void* p) noexcept { delete static_cast<std::shared_ptr<Arena>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, std::uint8_t>(arena.slot(slot), {length}, owner), nb::rv_policy::reference);
}

ControlView arena_control(const ArenaHandle& self, SlotId slot) {
  check_window(*self.get(), slot, kPageBytes);
  return read_control(self.get()->control(slot));
}

void bind_arena(nb::module_& m) {
  nb::class_<ControlView>(m, "ControlSnapshot")
      .def_ro("generation", &ControlView::generation)
      .def_prop_ro("state", [](const ControlView& v) { return static_cast<std::uint32_t>(v.state); })
      .def_ro("length", &ControlView::length)
      .def_ro("crc", &ControlView::crc)
      .def_ro("checked", &ControlView::checked)
      .def_prop_ro("fingerprint", [](const ControlView& v) { return nb::bytes(v.fingerprint.data(), 16); });

  // Methods that release the GIL hold a share of their own first: close() may run meanwhile.
  nb::class_<ArenaHandle>(m, "Arena")
      .def_static(
          "create",
          [](const std::string& name, std::size_t capacity_bytes) {
            return ArenaHandle{Arena::create(name, capacity_bytes)};
          },
          "name"_a, "capacity_bytes"_a)
      .def_static(
          "adopt",
          [](const std::string& name, int data_fd, std::size_t capacity_bytes) {
            return ArenaHandle{Arena::adopt(name, data_fd, capacity_bytes)};
          },
          "name"_a, "data_fd"_a, "capacity_bytes"_a)
      .def_static(
          "attach",
          [](int data_fd, int control_fd, std::size_t capacity_bytes) {
            return ArenaHandle{Arena::attach(data_fd, control_fd, capacity_bytes)};
          },
          "data_fd"_a, "control_fd"_a, "capacity_bytes"_a)
      .def(
          "prefault",
          [](const ArenaHandle& self, int threads, bool huge_pages, bool lock) {
            const auto arena = self.get();
            const nb::gil_scoped_release nogil;
            return arena->prefault(threads, huge_pages, lock);
          },
          "threads"_a, "huge_pages"_a = true, "lock"_a = false)
      .def(
          "populate",
          [](const ArenaHandle& self, int threads) {
            const auto arena = self.get();
            const nb::gil_scoped_release nogil;
            arena->populate(threads);
          },
          "threads"_a)
      .def("close",
           [](ArenaHandle& self) {
             std::shared_ptr<Arena> arena = std::move(self.arena);
             self.arena = nullptr;
             const nb::gil_scoped_release nogil;  // unmapping many GiB takes a while
             arena.reset();
           })
      .def_prop_ro("prefaulted_bytes", [](const ArenaHandle& self) { return self.get()->prefaulted_bytes(); })
      .def_prop_ro("capacity_bytes", [](const ArenaHandle& self) { return self.get()->capacity_bytes(); })
      .def_prop_ro("pages", [](const ArenaHandle& self) { return self.get()->pages(); })
      .def_prop_ro("data_fd", [](const ArenaHandle& self) { return self.get()->data_fd(); })
      .def_prop_ro("control_fd", [](const ArenaHandle& self) { return self.get()->control_fd(); })
      .def("view", &arena_view, "slot"_a, "length"_a)
      .def("control", &arena_control, "slot"_a);
}

void bind_constants(nb::module_& m) {
  m.attr("NONE") = kNone;
  m.attr("PAGE_BYTES") = kPageBytes;
  m.attr("KEYS_MAX") = kKeysMax;
  m.attr("OK") = static_cast<int>(BlockStatus::kOk);
  m.attr("STALE") = static_cast<int>(BlockStatus::kStale);
  m.attr("CORRUPT") = static_cast<int>(BlockStatus::kCorrupt);
  m.attr("DROPPED") = static_cast<int>(BlockStatus::kDropped);
  m.attr("FREE") = static_cast<int>(SlotState::kFree);
  m.attr("FILLING") = static_cast<int>(SlotState::kFilling);
  m.attr("READY") = static_cast<int>(SlotState::kReady);
  m.attr("DRAINING") = static_cast<int>(SlotState::kDraining);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::register_exception_translator(&translate);
  bind_constants(m);
  bind_keys(m);
  bind_sums(m);
  bind_arena(m);
  bind_copies(m);
  bind_keep(m);
  bind_metadata(m);
  bind_disk(m);
  bind_router(m);
}

}  // namespace kv
