// Python's view of the metadata: Index, HostPool, DevicePool. One thread owns all of it, so nothing here
// releases the GIL; every call is bounded by kKeysMax.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>
#include <string>

#include "bindings.h"
#include "check.h"
#include "device_pool.h"
#include "index.h"
#include "pool.h"
#include "runs.h"

namespace kv {

namespace {

using nb::literals::operator""_a;

std::span<const NodeId> nodes_arg(const Array& array) { return vector_arg<NodeId>(array, "nodes"); }
std::span<const SlotId> slots_arg(const Array& array) { return vector_arg<SlotId>(array, "slots"); }
std::span<const BlockId> blocks_arg(const Array& array) { return vector_arg<BlockId>(array, "blocks"); }

nb::bytes walk_packed(const Walk& walk, std::size_t start, std::size_t stop, std::uint32_t pages_per_slot) {
  if (start > stop || stop > walk.slots.size()) throw Invalid("start, stop: not inside the walk");
  return packed_slots(std::span(walk.slots).subspan(start, stop - start), pages_per_slot);
}

void bind_walk(nb::module_& m) {
  nb::class_<Walk>(m, "Walk")
      .def_ro("root", &Walk::root)
      .def_ro("depth", &Walk::depth)
      .def_ro("deepest", &Walk::deepest)
      .def_ro("gap_stop", &Walk::gap_stop)
      .def_prop_ro("nodes", [](const Walk& w) { return vector_result(w.nodes); })
      .def("packed", &walk_packed, "start"_a, "stop"_a, "pages_per_slot"_a);
}

nb::object keys_of(const Index& index, const Array& nodes) {
  std::vector<Key> keys;
  keys.reserve(nodes_arg(nodes).size());
  for (NodeId id : nodes_arg(nodes)) {
    index.require(id, "nodes");
    keys.push_back(index.node(id).key);
  }
  return keys_result(keys);
}

void bind_index(nb::module_& m) {
  nb::class_<Index>(m, "Index")
      .def(nb::init<std::size_t>(), "nodes_max"_a)
      .def("__len__", &Index::size)
      .def_prop_ro("nodes_max", &Index::nodes_max)
      .def("root", [](Index& x, nb::handle key) { return x.root(key_arg(key, "key")); }, "key"_a)
      .def("find", [](const Index& x, nb::handle key) { return x.find(key_arg(key, "key")); }, "key"_a)
      .def(
          "walk",
          [](const Index& x, nb::handle root, std::uint32_t n, const Array& positions, const Array& keys) {
            return x.walk(key_arg(root, "root"), n, vector_arg<std::uint32_t>(positions, "positions"),
                          keys_arg(keys, "keys"));
          },
          "root"_a, "n"_a, "positions"_a, "keys"_a)
      .def("digest", &Index::digest, "walk"_a, "length"_a)
      .def("keys", &keys_of, "nodes"_a)
      .def(
          "parent",
          [](const Index& x, NodeId id) {
            x.require(id, "node");
            return x.node(id).parent;
          },
          "node"_a)
      .def(
          "depth",
          [](const Index& x, NodeId id) {
            x.require(id, "node");
            return x.node(id).depth;
          },
          "node"_a)
      .def(
          "root_of",
          [](const Index& x, NodeId id) {
            x.require(id, "node");
            return x.root_of(id);
          },
          "node"_a)
      .def("pin", &Index::pin, "node"_a)
      .def("unpin", &Index::unpin, "node"_a)
      .def("pins", &Index::pins)
      .def_prop_ro("memory_bytes", &Index::memory_bytes)
      .def("check", &Index::check);
}

nb::dict host_counts(const HostPool& pool) {
  const HostCounts c = pool.counts();
  nb::dict out;
  out["free"] = c.free;
  out["filling"] = c.filling;
  out["ready"] = c.ready;
  out["draining"] = c.draining;
  out["free_slabs"] = c.free_slabs;
  out["used_bytes"] = c.used_bytes;
  return out;
}

nb::dict host_dropped(HostPool& pool) {
  const HostDropped d = pool.take_dropped();
  nb::dict out;
  out["evicted"] = d.evicted;
  out["orphaned"] = d.orphaned;
  out["lost"] = d.lost;
  out["no_room"] = d.no_room;
  out["over_limit"] = d.over_limit;
  out["rot"] = d.rot;
  out["events_lost"] = d.events_lost;
  return out;
}

Owner owner_arg(nb::handle owner) {
  const BytesArg bytes(owner, "owner");
  Owner out{};
  if (bytes.span().size() != 0 && bytes.span().size() != out.size())
    throw Invalid("owner: expected 16 bytes or none, got " + std::to_string(bytes.span().size()));
  std::copy(bytes.span().begin(), bytes.span().end(), out.begin());
  return out;
}

Reserved host_reserve(HostPool& pool, NodeId parent, const Array& keys, const SlotFormat& format, double now_s,
                      double stall_s, nb::handle owner) {
  return pool.reserve(parent, keys_arg(keys, "keys"), format, {now_s, stall_s, owner_arg(owner)});
}

nb::object host_publish(HostPool& pool, const Array& nodes, const Array& slots, const Array& crcs,
                        std::size_t length, std::uint32_t checked) {
  return vector_result(pool.publish(nodes_arg(nodes), slots_arg(slots),
                                    {vector_arg<std::uint32_t>(crcs, "crcs"), length, checked}));
}

void bind_host_pool(nb::module_& m) {
  nb::class_<Reserved>(m, "Reserved")
      .def_prop_ro("nodes", [](const Reserved& r) { return vector_result(r.nodes); })
      .def_prop_ro("slots", [](const Reserved& r) { return vector_result(r.slots); })
      .def_ro("filled", &Reserved::filled)
      .def_ro("elsewhere", &Reserved::elsewhere)
      .def_ro("dropped", &Reserved::dropped)
      .def_ro("over_limit", &Reserved::over_limit);
  nb::class_<HostPool>(m, "HostPool")
      .def(
          "__init__",
          [](HostPool* self, Index& index, const ArenaHandle& arena, std::size_t slab_bytes,
             const LedgerHandle* ledger) {
            new (self) HostPool(index, arena.get(), slab_bytes, ledger == nullptr ? nullptr : ledger->get());
          },
          "index"_a, "arena"_a, "slab_bytes"_a, "ledger"_a.none() = nb::none(), nb::keep_alive<1, 2>())
      .def("match", &HostPool::match, "walk"_a)
      .def(
          "slots", [](const HostPool& p, const Array& nodes) { return vector_result(p.slots(nodes_arg(nodes))); },
          "nodes"_a)
      .def(
          "missing", [](const HostPool& p, NodeId node) { return vector_result(p.missing(node)); }, "node"_a)
      .def(
          "ready_nodes",
          [](const HostPool& p, std::size_t start, std::size_t most) {
            return vector_result(p.ready_nodes(start, most));
          },
          "start"_a = 0, "most"_a = kNone)
      .def_prop_ro("slabs", &HostPool::slabs)
      .def("touch", &HostPool::touch, "node"_a)
      .def("reserve", &host_reserve, "parent"_a, "keys"_a, "format"_a, "now_s"_a, "stall_s"_a,
           "owner"_a = nb::bytes(""))
      .def("publish", &host_publish, "nodes"_a, "slots"_a, "crcs"_a, "length"_a, "checked"_a)
      .def(
          "abort",
          [](HostPool& p, const Array& nodes, const Array& slots) { p.abort(nodes_arg(nodes), slots_arg(slots)); },
          "nodes"_a, "slots"_a)
      .def(
          "adopt", [](HostPool& p, const SurveyHandle& survey, NodeId aside) { return p.adopt(*survey.survey, aside); },
          "survey"_a, "aside"_a)
      .def("drop", &HostPool::drop, "node"_a)
      .def("forget", &HostPool::forget, "node"_a)
      .def("evict", &HostPool::evict, "format"_a, "slots"_a)
      .def("claim", &HostPool::claim, "root"_a, "account"_a)
      .def(
          "set_limit",
          [](HostPool& p, Account account, std::optional<std::size_t> bytes) {
            p.set_limit(account, bytes.value_or(kUnlimited));
          },
          "account"_a, "bytes"_a.none())
      .def("settle_lanes", &HostPool::settle_lanes)
      .def("used_bytes", [](const HostPool& p, Account account) { return p.usage().used(account); }, "account"_a)
      .def("take_removed", [](HostPool& p) { return keys_result(p.take_removed()); })
      .def("take_dropped", &host_dropped)
      .def_prop_ro("capacity_slots", &HostPool::capacity_slots)
      .def_prop_ro("memory_bytes", &HostPool::memory_bytes)
      .def("counts", &host_counts)
      .def("check", &HostPool::check);
}

nb::dict device_counts(const DevicePool& pool) {
  const DeviceCounts c = pool.counts();
  nb::dict out;
  out["free"] = c.free;
  out["mapped"] = c.mapped;
  out["idle"] = c.idle;
  out["draining"] = c.draining;
  out["events_lost"] = c.events_lost;
  return out;
}

nb::object device_commit(DevicePool& pool, const Array& blocks, NodeId parent, const Array& keys) {
  return vector_result(pool.commit(blocks_arg(blocks), parent, keys_arg(keys, "keys")));
}

void bind_device_pool(nb::module_& m) {
  nb::class_<Allocation>(m, "Allocation")
      .def_prop_ro("blocks", [](const Allocation& a) { return vector_result(a.blocks); })
      .def_prop_ro("draining", [](const Allocation& a) { return vector_result(a.draining); })
      .def_prop_ro("draining_nodes", [](const Allocation& a) { return vector_result(a.draining_nodes); });
  nb::class_<DevicePool>(m, "DevicePool")
      .def(nb::init<Index&, HostPool*, std::size_t, std::size_t>(), "index"_a, "host"_a.none(), "blocks"_a,
           "idle_max"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("match", &DevicePool::match, "walk"_a)
      .def(
          "blocks_of",
          [](const DevicePool& p, const Array& nodes) { return vector_result(p.blocks_of(nodes_arg(nodes))); },
          "nodes"_a)
      .def(
          "indexed_nodes",
          [](const DevicePool& p, std::size_t start, std::size_t most) {
            return vector_result(p.indexed_nodes(start, most));
          },
          "start"_a = 0, "most"_a = kBlocksMax)
      .def("pin", [](DevicePool& p, const Array& blocks) { p.pin(blocks_arg(blocks)); }, "blocks"_a)
      .def("unpin", [](DevicePool& p, const Array& blocks) { p.unpin(blocks_arg(blocks)); }, "blocks"_a)
      .def("touch", &DevicePool::touch, "node"_a)
      .def("allocate", &DevicePool::allocate, "wanted"_a)
      .def("trim", &DevicePool::trim, "most"_a)
      .def("drained", [](DevicePool& p, const Array& blocks) { p.drained(blocks_arg(blocks)); }, "blocks"_a)
      .def("adopt", [](DevicePool& p, const Array& blocks) { p.adopt(blocks_arg(blocks)); }, "blocks"_a)
      .def("commit", &device_commit, "blocks"_a, "parent"_a, "keys"_a)
      .def("drop", &DevicePool::drop, "node"_a)
      .def("take_removed", [](DevicePool& p) { return keys_result(p.take_removed()); })
      .def("take_stored", [](DevicePool& p) { return keys_result(p.take_stored()); })
      .def("counts", &device_counts)
      .def_prop_ro("memory_bytes", &DevicePool::memory_bytes)
      .def("close", &DevicePool::close)
      .def("close_some", &DevicePool::close_some, "most"_a)
      .def("check", &DevicePool::check);
}

void bind_checks(nb::module_& m) {
  nb::class_<Checker>(m, "Checker")
      .def(nb::init<const Index&, const HostPool*>(), "index"_a, "host"_a.none() = nb::none(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("step", &Checker::step, "most"_a)
      .def_prop_ro("settled", &Checker::settled);
  nb::class_<DeviceChecker>(m, "DeviceChecker")
      .def(nb::init<const DevicePool&>(), "pool"_a, nb::keep_alive<1, 2>())
      .def("step", &DeviceChecker::step, "most"_a)
      .def_prop_ro("settled", &DeviceChecker::settled);
}

}  // namespace

void bind_metadata(nb::module_& module) {
  bind_walk(module);
  bind_index(module);
  bind_host_pool(module);
  bind_device_pool(module);
  bind_checks(module);
}

}  // namespace kv
