// kvcore._core.compress: the chooser, and sealing pages; python/kvcore/compress.py is the public
// face.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/text.h"
#include "bindings/doc.h"
#include "bindings/errors.h"
#include "compress/chooser.h"
#include "compress/seal.h"
#include "compress/sealer.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

using compress::HeadStatistics;
using pages::PageClass;
using pages::PageSpec;
using Numbers = py::array_t<double, py::array::c_style | py::array::forcecast>;
using ByFormat = std::map<std::string, Numbers>;

Format format_of(const std::string& name) {
  for (const Format f : {Format::kInt8, Format::kFp8, Format::kK4, Format::kV4, Format::kV3})
    if (name == pages::name_of(f)) return f;
  throw ErrorException{
      invalid_argument(text("format='", name, "' is unknown: allowed int8, fp8, k4, v4, v3"))};
}

// One number per (layer, KV head).
const double* flat(const char* field, const Numbers& given, std::size_t heads) {
  if (given.ndim() != 1 || static_cast<std::size_t>(given.size()) != heads)
    throw ErrorException{
        invalid_argument(text(field, " has ", given.size(), " entries in ", given.ndim(),
                              " dimensions: allowed ", heads, " in one (layers x KV heads)"))};
  return given.data();
}

std::vector<double> row(const char* field, const Numbers& given, std::size_t heads, std::size_t i) {
  if (given.ndim() != 2 || static_cast<std::size_t>(given.shape(0)) != heads)
    throw ErrorException{invalid_argument(text(field, " has ", given.ndim(), " dimensions and ",
                                               given.ndim() == 0 ? 0 : given.shape(0),
                                               " rows: allowed [", heads, ", head_dim]"))};
  const double* at = given.data() + static_cast<py::ssize_t>(i) * given.shape(1);
  return {at, at + given.shape(1)};
}

std::vector<HeadStatistics> statistics_of(const py::handle& s) {
  const auto numbers = [&](const char* field) { return s.attr(field).cast<Numbers>(); };
  const Numbers keys = numbers("key_weight"), energy = numbers("key_energy"),
                values = numbers("value_weight");
  const auto key_error = s.attr("key_error").cast<ByFormat>();
  const auto value_error = s.attr("value_error").cast<ByFormat>();
  const auto heads = static_cast<std::size_t>(values.size());
  std::vector<HeadStatistics> out(heads);
  for (std::size_t i = 0; i < heads; ++i) {
    HeadStatistics& h = out[i];
    h.key_weight = row("key_weight", keys, heads, i);
    h.key_energy = row("key_energy", energy, heads, i);
    for (const auto& [name, error] : key_error)
      h.key_error.emplace_back(format_of(name), row("key_error", error, heads, i));
    for (const auto& [name, error] : value_error)
      h.value_error.emplace_back(format_of(name), flat("value_error", error, heads)[i]);
    h.value_weight = flat("value_weight", values, heads)[i];
  }
  return out;
}

PageClass choose(const PageSpec& spec, const py::handle& statistics, std::int64_t budget_bytes,
                 double max_key_error) {
  compress::Profile profile;
  profile.budget_bytes = budget_bytes;
  profile.max_key_error = max_key_error;
  return unwrap(compress::choose(spec, statistics_of(statistics), profile));
}

py::array_t<double> predicted_error(const PageClass& table, const py::handle& statistics) {
  const auto& o = table.spec().options();
  const std::vector<double> errors =
      unwrap(compress::predicted_error(table, statistics_of(statistics)));
  py::array_t<double> out({py::ssize_t{o.num_layers}, py::ssize_t{o.num_kv_heads}, py::ssize_t{2}});
  std::copy(errors.begin(), errors.end(), out.mutable_data());
  return out;
}

void bind_chooser(py::module_& m) {
  m.def("choose", &choose, py::arg("spec"), py::arg("statistics"), py::arg("budget_bytes"),
        py::arg("max_key_error") = compress::Profile{}.max_key_error);
  m.def("predicted_error", &predicted_error, py::arg("table"), py::arg("statistics"));
  m.def(
      "budget_bytes",
      [](const PageSpec& spec, const std::string& profile) {
        return unwrap(compress::profile_of(spec, profile)).budget_bytes;
      },
      py::arg("spec"), py::arg("profile"));
}

void bind_seal(py::module_& m) {
  m.def(
      "seal_pages",
      [](pages::Pool& pool, const std::vector<std::int32_t>& pages, std::int32_t class_number) {
        const py::gil_scoped_release release;
        unwrap(compress::seal_pages(pool, pages, class_number));
      },
      py::arg("pool"), py::arg("pages"), py::arg("class_number"), doc("compress.seal_pages"));
}

constexpr double kLeast = 1e-30;

py::array_t<float> of_heads(const std::vector<compress::HeadMeans>& heads, auto value) {
  py::array_t<float> out(static_cast<py::ssize_t>(heads.size()));
  for (std::size_t i = 0; i < heads.size(); ++i)
    out.mutable_data()[i] = static_cast<float>(value(heads[i]));
  return out;
}

py::array_t<float> of_channels(const std::vector<compress::HeadMeans>& heads, auto value) {
  const auto dim = static_cast<py::ssize_t>(value(heads[0]).size());
  py::array_t<float> out({static_cast<py::ssize_t>(heads.size()), dim});
  float* to = out.mutable_data();
  for (const compress::HeadMeans& head : heads)
    for (const double x : value(head)) *to++ = static_cast<float>(x);
  return out;
}

// The fields of kvcore.compress.PageStatistics; nothing before a round is complete.
py::dict observed(compress::Sealer& sealer) {
  using compress::HeadMeans;
  py::dict out, key_error, value_error;
  if (sealer.meter() == nullptr || sealer.meter()->rounds() == 0) return out;
  const std::vector<HeadMeans>& heads = sealer.meter()->means();
  for (std::size_t i = 0; i < compress::kKeyFormats.size(); ++i)
    key_error[pages::name_of(compress::kKeyFormats[i])] = of_channels(
        heads, [i](const HeadMeans& h) -> const auto& { return h.key_error[i]; });
  for (std::size_t i = 0; i < compress::kValueFormats.size(); ++i)
    value_error[pages::name_of(compress::kValueFormats[i])] = of_heads(
        heads,
        [i](const HeadMeans& h) { return h.value_lost[i] / std::max(h.value_energy, kLeast); });
  out["key_energy"] = of_channels(
      heads, [](const HeadMeans& h) -> const auto& { return h.key_energy; });
  out["key_error"] = key_error;
  out["constant_share"] = of_heads(heads, [](const HeadMeans& h) {
    const double sum = std::accumulate(h.key_energy.begin(), h.key_energy.end(), 0.0);
    return 1 - sum / static_cast<double>(h.key_energy.size()) / std::max(h.key_square, kLeast);
  });
  out["value_energy"] = of_heads(heads, [](const HeadMeans& h) { return h.value_energy; });
  out["value_error"] = value_error;
  return out;
}

void bind_sealer(py::module_& m) {
  using compress::Sealer;
  using PageList = std::vector<std::int32_t>;
  const auto pages = py::arg("pages"), table = py::arg("table");
  py::class_<Sealer>(m, "Sealer", doc("compress.Sealer"))
      .def(py::init([](std::shared_ptr<pages::Pool> pool, const std::vector<PageClass>& classes,
                       bool measure) {
             return unwrap(Sealer::make(std::move(pool), classes, measure));
           }),
           py::arg("pool").none(false), py::arg("classes"), py::arg("measure") = false)
      .def(
          "offer",
          [](Sealer& s, const std::vector<PageClass>& classes) { unwrap(s.offer(classes)); },
          py::arg("classes"), doc("compress.Sealer.offer"))
      .def("observed", &observed, doc("compress.Sealer.observed"))
      .def(
          "restart",
          [](Sealer& s) {
            if (s.meter()) s.meter()->restart();
          },
          doc("compress.Sealer.restart"))
      .def_property_readonly(
          "rounds", [](Sealer& s) { return s.meter() ? s.meter()->rounds() : 0; },
          doc("compress.Sealer.rounds"))
      .def(
          "hold", [](Sealer& s, const PageList& p, std::int32_t t) { unwrap(s.hold(p, t)); }, pages,
          table, doc("compress.Sealer.hold"))
      .def(
          "drop", [](Sealer& s, const PageList& p, std::int32_t t) { unwrap(s.drop(p, t)); }, pages,
          table, doc("compress.Sealer.drop"))
      .def(
          "faithful",
          [](const Sealer& s, const PageList& p, std::int32_t t) {
            return unwrap(s.faithful(p, t));
          },
          pages, table, doc("compress.Sealer.faithful"))
      .def(
          "computed", [](Sealer& s, const PageList& p) { unwrap(s.computed(p)); }, pages,
          doc("compress.Sealer.computed"))
      .def(
          "add",
          [](Sealer& s, const PageList& p, std::int32_t t, bool high_first) {
            return unwrap(s.add(p, t, high_first));
          },
          pages, py::arg("table") = 0, py::arg("high_first") = false, doc("compress.Sealer.add"))
      .def(
          "exchange",
          [](Sealer& s, const PageList& p, std::int32_t t) { return unwrap(s.exchange(p, t)); },
          pages, table, doc("compress.Sealer.exchange"))
      .def(
          "step",
          [](Sealer& s, bool busy) {
            const py::gil_scoped_release release;
            unwrap(s.step(busy));
          },
          py::arg("busy"), doc("compress.Sealer.step"))
      .def(
          "run",
          [](Sealer& s, std::int64_t max_pages) {
            const py::gil_scoped_release release;
            return unwrap(s.run(max_pages));
          },
          py::arg("max_pages"), doc("compress.Sealer.run"))
      .def_property_readonly("tables", &Sealer::tables, doc("compress.Sealer.tables"))
      .def_property_readonly(
          "class_number", [](const Sealer& s) { return s.class_number(s.least()); },
          doc("compress.Sealer.class_number"))
      .def_property_readonly("waiting", &Sealer::waiting, doc("compress.Sealer.waiting"))
      .def_property_readonly("held", &Sealer::held, doc("compress.Sealer.held"))
      .def_property_readonly("sealed", &Sealer::sealed, doc("compress.Sealer.sealed"))
      .def_property_readonly("refused", &Sealer::refused, doc("compress.Sealer.refused"))
      .def_property_readonly("under_way", &Sealer::under_way, doc("compress.Sealer.under_way"))
      .def_property("step_pages", &Sealer::step_pages, &Sealer::set_step_pages,
                    doc("compress.Sealer.step_pages"));
}

}  // namespace

void bind_compress(py::module_ m) {
  bind_chooser(m);
  bind_seal(m);
  bind_sealer(m);
}

}  // namespace kvcore::bindings
