// Python's view of the router's tables: RouterIndex, PrefixLru, EngineBlocks, fingerprints, long arrays of events.
//
// Keys come as bytes or as contiguous arrays, results of events leave as bytes: an event of one block costs one call,
// and a call some 100 ns. Their owner is the router's loop. Only passes over everything (cleared, check, keys_of) and
// batches of kReleaseKeys release the GIL; a table that is in such a call refuses every other one.
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>

#include "bindings.h"
#include "engine_blocks.h"
#include "msgpack.h"
#include "prefix_lru.h"
#include "router_index.h"

namespace kv {

namespace {

using nb::literals::operator""_a;

// Taking the GIL back may cost 5 ms behind a busy thread: not worth it for less than about a millisecond.
constexpr std::size_t kReleaseKeys = 16384;

// ---- arguments ---------------------------------------------------------------------------------------

// bytes, or anything with a contiguous buffer whose elements are bytes or `width` wide, for the length of a call.
class PackedArg {
 public:
  PackedArg(nb::handle object, std::size_t width, const char* name) {
    if (PyBytes_Check(object.ptr())) {
      bytes_ = {reinterpret_cast<const std::uint8_t*>(PyBytes_AS_STRING(object.ptr())),
                static_cast<std::size_t>(PyBytes_GET_SIZE(object.ptr()))};
    } else {
      borrow(object, width, name);
    }
    if (bytes_.size() % width != 0)
      fail(name, std::to_string(bytes_.size()) + " bytes are not a multiple of " + std::to_string(width));
  }
  ~PackedArg() {
    if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
  }
  PackedArg(const PackedArg&) = delete;
  PackedArg& operator=(const PackedArg&) = delete;

  std::span<const std::uint8_t> bytes() const { return bytes_; }

 private:
  [[noreturn]] static void fail(const char* name, const std::string& what) { throw Invalid(std::string(name) + ": " + what); }

  void borrow(nb::handle object, std::size_t width, const char* name) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      buffer_.obj = nullptr;
      fail(name, "expected bytes or a C-contiguous array; use numpy.ascontiguousarray()");
    }
    const auto itemsize = static_cast<std::size_t>(buffer_.itemsize);
    const std::string format = buffer_.format == nullptr ? "B" : buffer_.format;
    if ((itemsize != 1 && itemsize != width) || format.find_first_not_of("@=<bBcqQlLiI") != std::string::npos) {
      PyBuffer_Release(&buffer_);  // the destructor of a half-made object does not run
      fail(name, "elements of " + std::to_string(itemsize) + " bytes, format '" + format + "'; expected bytes or integers of " +
                     std::to_string(width) + " bytes");
    }
    bytes_ = {static_cast<const std::uint8_t*>(buffer_.buf), static_cast<std::size_t>(buffer_.len)};
  }

  Py_buffer buffer_{};
  std::span<const std::uint8_t> bytes_;
};

class KeysArg {
 public:
  KeysArg(nb::handle object, std::size_t width, const char* name = "keys")
      : packed_(object, checked(width), name), width_(width) {}
  Fingerprints get() const { return {packed_.bytes().data(), packed_.bytes().size() / width_, width_}; }

 private:
  static std::size_t checked(std::size_t width) {
    if (width != 8 && width != 16 && width != 32)
      throw Invalid("width: a key has 8, 16 or 32 bytes, got " + std::to_string(width));
    return width;
  }

  PackedArg packed_;
  std::size_t width_;
};

std::uint32_t tier_arg(int tier, bool or_all) {
  if (or_all && tier == -1) return kRouterTiers;
  if (tier < 0) throw Invalid("tier: must be in [0, " + std::to_string(kRouterTiers) + "), got " + std::to_string(tier));
  return static_cast<std::uint32_t>(tier);
}

nb::bytes packed_prints(const std::vector<std::uint64_t>& prints) {
  return nb::bytes(reinterpret_cast<const char*>(prints.data()), prints.size() * sizeof(std::uint64_t));
}

// A table and whether a call without the GIL is in it. The flag is only read and written with the GIL.
template <class T>
struct Owned {
  template <class... A>
  explicit Owned(A... arguments) : table(arguments...) {}

  T& get() {
    if (busy) throw Broken("router: two threads use one table; it belongs to one");
    return table;
  }
  const T& get() const { return const_cast<Owned*>(this)->get(); }
  // Whether a pass through all of it is worth a release.
  bool large() const { return get().size() >= kReleaseKeys; }

  // Runs f(table), without the GIL if that is worth it.
  template <class F>
  auto run(bool release, F&& f) {
    T& mine = get();
    if (!release) return f(mine);
    struct Flag {
      bool& flag;
      ~Flag() { flag = false; }
    } flag{busy};
    busy = true;
    const nb::gil_scoped_release nogil;
    return f(mine);
  }

  T table;
  bool busy = false;
};

// ---- the index ---------------------------------------------------------------------------------------

using IndexHandle = Owned<RouterIndex>;

template <auto Call>
std::size_t index_event(IndexHandle& self, std::uint32_t replica, int tier, nb::handle keys, std::size_t width) {
  const KeysArg packed(keys, width);
  const Fingerprints prints = packed.get();
  const std::uint32_t where = tier_arg(tier, false);
  return self.run(prints.size() >= kReleaseKeys,
                  [&](RouterIndex& index) { return (index.*Call)(replica, where, prints); });
}

template <auto Call>
nb::object index_find(IndexHandle& self, nb::handle keys, std::size_t width) {
  const KeysArg packed(keys, width);
  const Fingerprints prints = packed.get();
  return matrix_result(
      self.run(prints.size() >= kReleaseKeys, [&](const RouterIndex& index) { return (index.*Call)(prints); }),
      kRouterTiers);
}

nb::object index_blocks(IndexHandle& self, std::uint32_t replica) {
  const auto& counts = self.get().blocks(replica);
  return vector_result(std::vector<std::int64_t>(counts.begin(), counts.end()));
}

void bind_router_index(nb::module_& m) {
  nb::class_<IndexHandle>(m, "RouterIndex")
      .def(nb::init<std::size_t, std::size_t>(), "nodes_max"_a, "replicas_max"_a = 64)
      .def("add_replica", [](IndexHandle& x) { return x.get().add_replica(); })
      .def(
          "remove_replica",
          [](IndexHandle& x, std::uint32_t replica) {
            x.run(x.large(), [&](RouterIndex& index) { index.remove_replica(replica); });
          },
          "replica"_a)
      .def("stored", &index_event<&RouterIndex::stored>, "replica"_a, "tier"_a, "keys"_a, "width"_a = 8)
      .def("removed", &index_event<&RouterIndex::removed>, "replica"_a, "tier"_a, "keys"_a, "width"_a = 8)
      .def(
          "cleared",
          [](IndexHandle& x, std::uint32_t replica, int tier) {
            const std::uint32_t where = tier_arg(tier, true);
            return x.run(x.large(), [&](RouterIndex& index) { return index.cleared(replica, where); });
          },
          "replica"_a, "tier"_a = -1)
      .def(
          "touch",
          [](IndexHandle& x, nb::handle keys, std::size_t width) {
            const KeysArg packed(keys, width);
            return x.run(packed.get().size() >= kReleaseKeys,
                         [&](RouterIndex& index) { return index.touch(packed.get()); });
          },
          "keys"_a, "width"_a = 8)
      .def("find", &index_find<&RouterIndex::find>, "keys"_a, "width"_a = 8)
      .def("find_bisected", &index_find<&RouterIndex::find_bisected>, "keys"_a, "width"_a = 8)
      .def("blocks", &index_blocks, "replica"_a)
      .def(
          "keys_of",
          [](IndexHandle& x, std::uint32_t replica, int tier) {
            const std::uint32_t where = tier_arg(tier, false);
            return vector_result(
                x.run(x.large(), [&](const RouterIndex& index) { return index.keys_of(replica, where); }));
          },
          "replica"_a, "tier"_a)
      .def("check", [](IndexHandle& x) { x.run(x.large(), [](const RouterIndex& index) { index.check(); }); })
      .def_prop_ro("nodes", [](const IndexHandle& x) { return x.get().size(); })
      .def_prop_ro("nodes_max", [](const IndexHandle& x) { return x.get().nodes_max(); })
      .def_prop_ro("replicas_max", [](const IndexHandle& x) { return x.get().replicas_max(); })
      .def_prop_ro("evicted", [](const IndexHandle& x) { return x.get().evicted(); })
      .def_prop_ro("memory_bytes", [](const IndexHandle& x) { return x.get().memory_bytes(); });
}

// ---- replicas without events ---------------------------------------------------------------------------

using LruHandle = Owned<PrefixLru>;

void bind_prefix_lru(nb::module_& m) {
  nb::class_<LruHandle>(m, "PrefixLru")
      .def(nb::init<std::size_t>(), "capacity"_a)
      .def("__len__", [](const LruHandle& x) { return x.get().size(); })
      .def("match", [](LruHandle& x, nb::handle keys) { return x.get().match(KeysArg(keys, 8).get()); }, "keys"_a)
      .def(
          "touch", [](LruHandle& x, nb::handle keys) { return vector_result(x.get().touch(KeysArg(keys, 8).get())); },
          "keys"_a)
      .def("drop", [](LruHandle& x, nb::handle keys) { return x.get().drop(KeysArg(keys, 8).get()); }, "keys"_a)
      .def("clear", [](LruHandle& x) { x.get().clear(); })
      .def("check", [](LruHandle& x) { x.run(x.large(), [](const PrefixLru& lru) { lru.check(); }); })
      .def_prop_ro("capacity", [](const LruHandle& x) { return x.get().capacity(); })
      .def_prop_ro("memory_bytes", [](const LruHandle& x) { return x.get().memory_bytes(); });
}

// ---- engines' hashes -----------------------------------------------------------------------------------

using BlocksHandle = Owned<EngineBlocks>;

// None, an integer of 64 bits (signed or not), or bytes of which the first eight count.
std::optional<std::uint64_t> parent_arg(nb::handle parent) {
  if (parent.is_none()) return std::nullopt;
  if (PyLong_Check(parent.ptr())) return PyLong_AsUnsignedLongLongMask(parent.ptr());
  const BytesArg bytes(parent, "parent");
  std::uint64_t word;
  if (bytes.span().size() < sizeof word)
    throw Invalid("parent: a hash has at least 8 bytes, got " + std::to_string(bytes.span().size()));
  std::memcpy(&word, bytes.span().data(), sizeof word);
  return word;
}

// Token ids; a uint32 array, or its bytes as unpack_tokens() makes them. memcpy of unaligned bytes would cost more than
// it gains: every machine we run on reads them, and numpy and CPython align to eight anyway.
std::span<const std::uint32_t> tokens_span(const PackedArg& packed) {
  if (reinterpret_cast<std::uintptr_t>(packed.bytes().data()) % alignof(std::uint32_t) != 0)
    throw Invalid("tokens: must be aligned to 4 bytes; copy them");
  return {reinterpret_cast<const std::uint32_t*>(packed.bytes().data()), packed.bytes().size() / sizeof(std::uint32_t)};
}

nb::bytes engine_stored(BlocksHandle& self, nb::handle parent, nb::handle hashes, std::size_t width, nb::handle tokens,
                        std::uint32_t block_tokens, std::uint64_t seed, nb::handle extra, int tier) {
  const KeysArg names(hashes, width, "hashes");
  const PackedArg ids(tokens, sizeof(std::uint32_t), "tokens");
  const BytesArg bound(extra, "extra");
  const TokenChain chain{tokens_span(ids), block_tokens, seed, bound.span()};
  return packed_prints(self.get().stored(parent_arg(parent), names.get(), chain, tier_arg(tier, false)));
}

void bind_engine_blocks(nb::module_& m) {
  nb::class_<BlocksHandle>(m, "EngineBlocks")
      .def(nb::init<std::size_t>(), "blocks_max"_a)
      .def("__len__", [](const BlocksHandle& x) { return x.get().size(); })
      .def("stored", &engine_stored, "parent"_a.none(), "hashes"_a, "width"_a, "tokens"_a, "block_tokens"_a, "seed"_a,
           "extra"_a = nb::bytes(""), "tier"_a = 0)
      .def(
          "removed",
          [](BlocksHandle& x, nb::handle hashes, std::size_t width, int tier) {
            const KeysArg names(hashes, width, "hashes");
            return packed_prints(x.get().removed(names.get(), tier_arg(tier, false)));
          },
          "hashes"_a, "width"_a, "tier"_a = 0)
      .def(
          "take_evicted",
          [](BlocksHandle& x, int tier) { return packed_prints(x.get().take_evicted(tier_arg(tier, false))); },
          "tier"_a = 0)
      .def(
          "clear",
          [](BlocksHandle& x, int tier) {
            const std::uint32_t where = tier_arg(tier, true);
            x.run(x.large(), [&](EngineBlocks& blocks) { blocks.clear(where); });
          },
          "tier"_a = -1)
      .def("check", [](BlocksHandle& x) { x.run(x.large(), [](const EngineBlocks& blocks) { blocks.check(); }); })
      .def_prop_ro("blocks_max", [](const BlocksHandle& x) { return x.get().blocks_max(); })
      .def_prop_ro("orphans", [](const BlocksHandle& x) { return x.get().orphans(); })
      .def_prop_ro("evicted", [](const BlocksHandle& x) { return x.get().evicted(); })
      .def_prop_ro("memory_bytes", [](const BlocksHandle& x) { return x.get().memory_bytes(); });
}

nb::object py_token_fingerprints(nb::handle tokens, std::uint32_t block_tokens, std::uint64_t seed, nb::handle extra,
                                 std::uint64_t parent) {
  const PackedArg ids(tokens, sizeof(std::uint32_t), "tokens");
  const BytesArg bound(extra, "extra");
  return vector_result(token_fingerprints({tokens_span(ids), block_tokens, seed, bound.span(), parent}));
}

}  // namespace

void bind_router(nb::module_& module) {
  module.attr("ROUTER_KEYS_MAX") = kRouterKeysMax;
  module.attr("ROUTER_TOKENS_MAX") = kRouterTokensMax;
  bind_router_index(module);
  bind_prefix_lru(module);
  bind_engine_blocks(module);
  module.def("token_fingerprints", &py_token_fingerprints, "tokens"_a, "block_tokens"_a, "seed"_a,
             "extra"_a = nb::bytes(""), "parent"_a = 0);
  module.def(
      "unpack_tokens",
      [](nb::handle data) {
        const std::vector<std::uint32_t> tokens = unpack_tokens(BytesArg(data, "tokens").span());
        return nb::bytes(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(std::uint32_t));
      },
      "data"_a);
  module.def(
      "unpack_hashes", [](nb::handle data) { return packed_prints(unpack_hashes(BytesArg(data, "hashes").span())); },
      "data"_a);
}

}  // namespace kv
