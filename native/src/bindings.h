// What both halves of the Python module share: checked array arguments, owned array results, the arena
// handle and the exception table. Only bindings*.cc include this; nothing else in the core knows Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arena.h"
#include "ledger.h"
#include "runs.h"
#include "survey.h"
#include "types.h"

namespace kv {

namespace nb = nanobind;

// Defined in bindings_copier.cc: SlotFormat, PagedLayout, Copier, whole slots.
void bind_copies(nb::module_& module);
// Defined in bindings_disk.cc: DiskDirectory, DiskSurvey, DiskEvent, DiskPool.
void bind_disk(nb::module_& module);
// Defined in bindings_keep.cc: Ledger, Survey, Adopted.
void bind_keep(nb::module_& module);
// Defined in bindings_metadata.cc: Walk, Index, pools.
void bind_metadata(nb::module_& module);
// Defined in bindings_router.cc: RouterIndex, PrefixLru, EngineBlocks, fingerprints.
void bind_router(nb::module_& module);

// An array argument before its dtype and shape are checked. Taking it unchecked and checking by hand gives
// errors that name the argument, where an overload mismatch would only list signatures. Never converts.
using Array = nb::ndarray<nb::ro, nb::device::cpu>;

// The arena as Python holds it: close() drops this holder's share while pools, running copies and views
// keep theirs.
struct ArenaHandle {
  std::shared_ptr<Arena> arena;

  const std::shared_ptr<Arena>& get() const {
    if (!arena) throw Invalid("arena: this handle was closed; create or attach again");
    return arena;
  }
};

// The same for a ledger, which pools and surveys share.
struct LedgerHandle {
  std::shared_ptr<Ledger> ledger;

  const std::shared_ptr<Ledger>& get() const {
    if (!ledger) throw Invalid("ledger: this handle was closed");
    return ledger;
  }
};

struct SurveyHandle {
  std::shared_ptr<Survey> survey;
};

namespace detail {

inline std::string dtype_name(const nb::dlpack::dtype& dtype) {
  const char* kind = "dtype";
  switch (static_cast<nb::dlpack::dtype_code>(dtype.code)) {
    case nb::dlpack::dtype_code::Int: kind = "int"; break;
    case nb::dlpack::dtype_code::UInt: kind = "uint"; break;
    case nb::dlpack::dtype_code::Float: kind = "float"; break;
    case nb::dlpack::dtype_code::Bool: kind = "bool"; break;
    default: break;
  }
  return kind + std::to_string(dtype.bits);
}

inline std::string shape_name(const Array& array) {
  std::string text = "(";
  for (std::size_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + ")";
}

inline bool c_contiguous(const Array& array) {
  if (array.size() == 0) return true;  // such an array comes without strides
  std::int64_t expected = 1;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) != 1 && array.stride(i) != expected) return false;
    expected *= static_cast<std::int64_t>(array.shape(i));
  }
  return true;
}

template <typename T>
void check(const Array& array, const char* name, std::size_t ndim) {
  if (array.dtype() != nb::dtype<T>())
    throw Invalid(std::string(name) + ": expected " + dtype_name(nb::dtype<T>()) + ", got " +
                  dtype_name(array.dtype()) + "; convert it with astype()");
  if (array.ndim() != ndim)
    throw Invalid(std::string(name) + ": expected " + std::to_string(ndim) + " dimension(s), got shape " +
                  shape_name(array));
  if (!c_contiguous(array))
    throw Invalid(std::string(name) + ": must be C-contiguous; use numpy.ascontiguousarray()");
}

template <typename T>
nb::object own(std::vector<T> values, std::initializer_list<std::size_t> shape) {
  auto* held = new std::vector<T>(std::move(values));
  if (held->capacity() == 0) held->reserve(1);  // numpy wants a non-null pointer even for no elements
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T>(held->data(), shape, owner), nb::rv_policy::reference);
}

}  // namespace detail

// ---- arguments --------------------------------------------------------------------------------------

// A (n,) array of exactly T, C-contiguous. The span lives as long as the array argument.
template <typename T>
std::span<const T> vector_arg(const Array& array, const char* name) {
  detail::check<T>(array, name, 1);
  return {static_cast<const T*>(array.data()), array.size()};
}

// A (rows, columns) array of exactly T, C-contiguous; row-major.
template <typename T>
std::span<const T> matrix_arg(const Array& array, const char* name) {
  detail::check<T>(array, name, 2);
  return {static_cast<const T*>(array.data()), array.size()};
}

// A (n, 32) array of uint8, seen as keys.
inline std::span<const Key> keys_arg(const Array& array, const char* name) {
  static_assert(sizeof(Key) == 32 && alignof(Key) == 1);
  detail::check<std::uint8_t>(array, name, 2);
  if (array.shape(1) != sizeof(Key))
    throw Invalid(std::string(name) + ": expected shape (n, 32), got " + detail::shape_name(array));
  return {reinterpret_cast<const Key*>(array.data()), array.shape(0)};
}

inline void check_same_length(std::size_t a, const char* a_name, std::size_t b, const char* b_name) {
  if (a != b)
    throw Invalid(std::string(b_name) + ": has " + std::to_string(b) + " entries, " + a_name + " has " +
                  std::to_string(a));
}

// bytes | bytearray | memoryview (anything with a contiguous buffer), for the length of one call.
class BytesArg {
 public:
  BytesArg(nb::handle object, const char* name) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) {
      PyErr_Clear();
      throw Invalid(std::string(name) + ": expected bytes, bytearray or a contiguous memoryview");
    }
  }
  ~BytesArg() { PyBuffer_Release(&buffer_); }
  BytesArg(const BytesArg&) = delete;
  BytesArg& operator=(const BytesArg&) = delete;

  std::span<const std::uint8_t> span() const {
    return {static_cast<const std::uint8_t*>(buffer_.buf), static_cast<std::size_t>(buffer_.len)};
  }

 private:
  Py_buffer buffer_{};
};

inline Key key_arg(nb::handle object, const char* name) {
  const BytesArg bytes(object, name);
  if (bytes.span().size() != sizeof(Key))
    throw Invalid(std::string(name) + ": a key has 32 bytes, got " + std::to_string(bytes.span().size()));
  Key key;
  std::memcpy(key.bytes.data(), bytes.span().data(), sizeof(Key));
  return key;
}

// ---- results ----------------------------------------------------------------------------------------

// A fresh (n,) numpy array that owns `values`; nothing is copied.
template <typename T>
nb::object vector_result(std::vector<T> values) {
  const std::size_t n = values.size();
  return detail::own(std::move(values), {n});
}

// Numbers as they travel: little-endian bytes.
inline nb::bytes packed_result(std::span<const std::uint32_t> values) {
  return nb::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(std::uint32_t));
}

// Slots as they travel (runs.h); scattered ones, the usual case in an arena that is full, are copied once.
inline nb::bytes packed_slots(std::span<const SlotId> slots, std::uint32_t pages_per_slot) {
  if (!runs_are_shorter(slots, pages_per_slot)) return packed_result(slots);
  return packed_result(pack_slots(slots, pages_per_slot));
}

// A fresh (n / columns, columns) numpy array that owns `values`.
template <typename T>
nb::object matrix_result(std::vector<T> values, std::size_t columns) {
  const std::size_t rows = values.size() / columns;
  return detail::own(std::move(values), {rows, columns});
}

// A fresh (n, 32) uint8 array of keys.
inline nb::object keys_result(const std::vector<Key>& keys) {
  std::vector<std::uint8_t> bytes(keys.size() * sizeof(Key));
  if (!keys.empty()) std::memcpy(bytes.data(), keys.data(), bytes.size());
  return matrix_result(std::move(bytes), sizeof(Key));
}

}  // namespace kv
