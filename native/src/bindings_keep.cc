// Python's view of what outlives a daemon: Ledger, Survey, Adopted.
#include <nanobind/stl/string.h>

#include "bindings.h"
#include "pool.h"

namespace kv {

namespace {

using nb::literals::operator""_a;

nb::object owners_result(const Adopted& adopted) {
  std::vector<std::uint8_t> bytes;
  bytes.reserve(adopted.owners.size() * sizeof(Owner));
  for (const Owner& owner : adopted.owners) bytes.insert(bytes.end(), owner.begin(), owner.end());
  return matrix_result(std::move(bytes), sizeof(Owner));
}

void bind_ledger(nb::module_& m) {
  nb::class_<LedgerHandle>(m, "Ledger")
      .def_static(
          "create",
          [](const std::string& name, std::size_t pages) { return LedgerHandle{Ledger::create(name, pages)}; },
          "name"_a, "pages"_a)
      .def_static(
          "adopt", [](int fd, std::size_t pages) { return LedgerHandle{Ledger::adopt(fd, pages)}; }, "fd"_a, "pages"_a)
      .def_prop_ro("fd", [](const LedgerHandle& self) { return self.get()->fd(); })
      .def("close", [](LedgerHandle& self) { self.ledger = nullptr; });
}

void bind_survey(nb::module_& m) {
  nb::class_<SurveyHandle>(m, "Survey")
      .def(
          "__init__",
          [](SurveyHandle* self, const LedgerHandle& ledger, const ArenaHandle& arena) {
            new (self) SurveyHandle{std::make_shared<Survey>(ledger.get(), arena.get())};
          },
          "ledger"_a, "arena"_a)
      .def(
          "verify",
          [](const SurveyHandle& self, int threads) {
            const nb::gil_scoped_release nogil;
            self.survey->verify(threads);
          },
          "threads"_a)
      .def_prop_ro("claimed_bytes", [](const SurveyHandle& self) { return self.survey->claimed_bytes(); })
      .def_prop_ro("verified_bytes", [](const SurveyHandle& self) { return self.survey->verified_bytes(); });
}

void bind_adopted(nb::module_& m) {
  nb::class_<Adopted>(m, "Adopted")
      .def_ro("ready", &Adopted::ready)
      .def_ro("torn", &Adopted::torn)
      .def_ro("rotten", &Adopted::rotten)
      .def_ro("orphaned", &Adopted::orphaned)
      .def_ro("no_room", &Adopted::no_room)
      .def_prop_ro("nodes", [](const Adopted& a) { return vector_result(a.nodes); })
      .def_prop_ro("slots", [](const Adopted& a) { return vector_result(a.slots); })
      .def_prop_ro("owners", &owners_result);
}

}  // namespace

void bind_keep(nb::module_& module) {
  bind_ledger(module);
  bind_survey(module);
  bind_adopted(module);
}

}  // namespace kv
