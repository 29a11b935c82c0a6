// kvcore._core.sched: placement and the load book; python/kvcore/sched.py is the public face.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <variant>
#include <vector>

#include "base/text.h"
#include "bindings/doc.h"
#include "bindings/errors.h"
#include "sched/load_book.h"
#include "sched/placement.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

sched::Role role_of(const std::string& name) {
  if (name == "mono") return sched::Role::kMono;
  if (name == "prefill") return sched::Role::kPrefill;
  if (name == "decode") return sched::Role::kDecode;
  throw ErrorException{
      invalid_argument(text("role='", name, "' is unknown: allowed mono, prefill, decode"))};
}

sched::WorkerLoad load_of(const py::handle& w) {
  const auto count = [&](const char* field) { return w.attr(field).cast<std::int64_t>(); };
  return {role_of(w.attr("role").cast<std::string>()),
          count("queued_tokens"),
          count("running"),
          count("matched_tokens"),
          w.attr("prefill_tokens_per_s").cast<double>(),
          count("free_frames"),
          count("num_frames"),
          count("frame_tokens"),
          count("max_context")};
}

sched::CostModel model_of(const py::handle& m) {
  const auto value = [&](const char* field) { return m.attr(field).cast<double>(); };
  return {value("unknown_tokens_per_s"),
          value("link_bytes_per_s"),
          value("stream_tail"),
          value("sequence_s"),
          value("pressure_s"),
          value("frame_s"),
          value("max_wait_s")};
}

// (prefill, decode, queue_s, prefill_s, stream_s, decode_s, pressure_s) or (reason, retry_after_s).
py::tuple choose(std::int64_t prompt_tokens, std::int64_t max_new_tokens, double kv_bytes_per_token,
                 const py::iterable& workers, const py::object& model) {
  std::vector<sched::WorkerLoad> loads;
  for (const py::handle w : workers) loads.push_back(load_of(w));
  const auto choice = unwrap(
      sched::choose({prompt_tokens, max_new_tokens, kv_bytes_per_token}, loads, model_of(model)));
  if (const auto* r = std::get_if<sched::Rejection>(&choice))
    return py::make_tuple(std::string(to_string(r->reason)), r->retry_after_s);
  const auto& p = std::get<sched::Placement>(choice);
  return py::make_tuple(p.prefill, p.decode, p.cost.queue_s, p.cost.prefill_s, p.cost.stream_s,
                        p.cost.decode_s, p.cost.pressure_s);
}

}  // namespace

void bind_sched(py::module_ m) {
  using sched::LoadBook;
  m.def("choose", &choose, py::arg("prompt_tokens"), py::arg("max_new_tokens"),
        py::arg("kv_bytes_per_token"), py::arg("workers"), py::arg("model"));
  py::class_<LoadBook>(m, "LoadBook", doc("sched.LoadBook"))
      .def(py::init<>())
      .def("dispatch", &LoadBook::dispatch, py::arg("worker_id"), py::arg("request_id"),
           py::arg("uncached_tokens"), py::arg("frames"), doc("sched.LoadBook.dispatch"))
      .def("prefilled", &LoadBook::prefilled, py::arg("worker_id"), py::arg("request_id"),
           doc("sched.LoadBook.prefilled"))
      .def("finished", &LoadBook::finished, py::arg("worker_id"), py::arg("request_id"),
           doc("sched.LoadBook.finished"))
      .def("forget_worker", &LoadBook::forget_worker, py::arg("worker_id"),
           doc("sched.LoadBook.forget_worker"))
      .def(
          "load",
          [](const LoadBook& b, const std::string& worker) {
            const sched::BookedLoad l = b.load(worker);
            return py::make_tuple(l.queued_tokens, l.running, l.frames);
          },
          py::arg("worker_id"), doc("sched.LoadBook.load"));
}

}  // namespace kvcore::bindings
