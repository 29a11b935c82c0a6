// kvcore._core.prefix: RadixTree and ClusterIndex; python/kvcore/prefix.py is the public face.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/doc.h"
#include "bindings/errors.h"
#include "bindings/key_list.h"
#include "bindings/tokens.h"
#include "prefix/cluster_index.h"
#include "prefix/radix_tree.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

using pages::Pool;
using prefix::Applied;
using prefix::ClusterIndex;
using prefix::Match;
using prefix::RadixTree;

std::unique_ptr<RadixTree> make_tree(std::shared_ptr<Pool> pool,
                                     const std::optional<std::string>& secret) {
  std::optional<std::span<const std::byte>> key;
  if (secret) key = std::as_bytes(std::span(*secret));
  return unwrap(RadixTree::make(std::move(pool), key));
}

py::tuple stats_tuple(const RadixTree& tree) {
  const prefix::RadixStats s = tree.stats();
  return py::make_tuple(s.nodes, s.pages, s.evictable_pages, s.protected_pages, s.hits, s.misses,
                        s.hit_tokens, s.evicted_pages);
}

void bind_tree(py::module_& m) {
  py::class_<RadixTree>(m, "RadixTree")
      .def(py::init(&make_tree), py::arg("pool"), py::arg("secret") = py::none())
      .def("_match",
           [](RadixTree& t, const std::string& ns, const py::object& tokens) {
             Match match = unwrap(t.match(ns, token_span(token_array(tokens))));
             return py::make_tuple(std::move(match.pages), match.num_tokens, match.node);
           })
      .def("_peek",
           [](const RadixTree& t, const std::string& ns, const py::object& tokens) {
             return t.peek(ns, token_span(token_array(tokens)));
           })
      .def("_insert",
           [](RadixTree& t, const std::string& ns, const py::object& tokens,
              const std::vector<std::int32_t>& pages) {
             return unwrap(t.insert(ns, token_span(token_array(tokens)), pages));
           })
      .def(
          "lock", [](RadixTree& t, std::int64_t node) { unwrap(t.lock(node)); }, py::arg("node"),
          doc("prefix.RadixTree.lock"))
      .def(
          "unlock", [](RadixTree& t, std::int64_t node) { unwrap(t.unlock(node)); },
          py::arg("node"), doc("prefix.RadixTree.unlock"))
      .def("evict", &RadixTree::evict, py::arg("num_pages"), doc("prefix.RadixTree.evict"))
      .def("freeable_bytes", &RadixTree::freeable_bytes, doc("prefix.RadixTree.freeable_bytes"))
      .def("clear", &RadixTree::clear, doc("prefix.RadixTree.clear"))
      .def("_stats", &stats_tuple)
      .def("_drain_events",
           [](RadixTree& t) {
             const prefix::PrefixEvents e = t.drain_events();
             return py::make_tuple(key_list(e.stored), key_list(e.removed), e.lost);
           })
      .def(
          "keys", [](const RadixTree& t) { return key_list(t.keys()); },
          doc("prefix.RadixTree.keys"));
}

const char* name_of(Applied applied) {
  switch (applied) {
    case Applied::kOk:
      return "ok";
    case Applied::kStale:
      return "stale";
    case Applied::kResync:
      return "resync";
  }
  return "resync";
}

void bind_cluster(py::module_& m) {
  py::class_<ClusterIndex>(m, "ClusterIndex", doc("prefix.ClusterIndex"))
      .def(py::init<>())
      .def(
          "apply",
          [](ClusterIndex& c, const std::string& worker, std::uint64_t incarnation,
             std::uint64_t seq, const py::iterable& stored, const py::iterable& removed) {
            const auto in = keys_of("stored", stored);
            const auto out = keys_of("removed", removed);
            return name_of(c.apply(worker, incarnation, seq, in, out));
          },
          py::arg("worker_id"), py::arg("incarnation"), py::arg("seq"), py::arg("stored"),
          py::arg("removed"), doc("prefix.ClusterIndex.apply"))
      .def(
          "apply_snapshot",
          [](ClusterIndex& c, const std::string& worker, std::uint64_t incarnation,
             std::uint64_t seq, const py::iterable& keys) {
            return name_of(c.apply_snapshot(worker, incarnation, seq, keys_of("keys", keys)));
          },
          py::arg("worker_id"), py::arg("incarnation"), py::arg("seq"), py::arg("keys"),
          doc("prefix.ClusterIndex.apply_snapshot"))
      .def(
          "drop", [](ClusterIndex& c, const std::string& worker) { return c.drop(worker); },
          py::arg("worker_id"), doc("prefix.ClusterIndex.drop"))
      .def(
          "query",
          [](const ClusterIndex& c, const py::iterable& keys) {
            py::dict out;
            for (const auto& [worker, units] : c.query(keys_of("keys", keys)))
              out[py::bytes(worker)] = units;
            return out;
          },
          py::arg("keys"), doc("prefix.ClusterIndex.query"))
      .def_property_readonly("num_workers", &ClusterIndex::num_workers,
                             doc("prefix.ClusterIndex.num_workers"))
      .def_property_readonly("num_keys", &ClusterIndex::num_keys,
                             doc("prefix.ClusterIndex.num_keys"));
}

}  // namespace

void bind_prefix(py::module_ m) {
  bind_tree(m);
  bind_cluster(m);
}

}  // namespace kvcore::bindings
