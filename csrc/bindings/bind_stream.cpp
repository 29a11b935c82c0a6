// kvcore._core.stream: Endpoint, Sender and LayerStep; python/kvcore/stream.py is the public face.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/fault.h"
#include "base/text.h"
#include "bindings/address.h"
#include "bindings/doc.h"
#include "bindings/errors.h"
#include "stream/endpoint.h"
#include "stream/layer_step.h"
#include "stream/plan.h"
#include "transport/link.h"
#include "transport/loopback.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

using stream::Endpoint;
using stream::LayerStep;
using stream::RequestId;
using stream::SendPort;
using transport::LoopbackHub;

constexpr double kNsPerSecond = 1e9;

RequestId request_id_of(const py::bytes& bytes) {
  const std::string_view view = bytes;
  RequestId id;
  if (view.size() != id.bytes.size()) {
    throw ErrorException{
        invalid_argument(text("request_id has ", view.size(), " bytes, must have 16"))};
  }
  std::memcpy(id.bytes.data(), view.data(), id.bytes.size());
  return id;
}

py::bytes to_bytes(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::byte> from_bytes(const py::bytes& bytes) {
  const std::string_view view = bytes;
  const auto part = std::as_bytes(std::span(view.data(), view.size()));
  return {part.begin(), part.end()};
}

std::string name_of(ErrorCode code) { return std::string(to_string(code)); }

std::int64_t deadline_after(double seconds) {
  if (!(seconds > 0) || seconds > 1e6) {
    throw ErrorException{
        invalid_argument(text("deadline_s=", seconds, " must be in (0, 1e6] seconds from now"))};
  }
  return transport::now_ns() + static_cast<std::int64_t>(seconds * kNsPerSecond);
}

// ---- shares: (layer_begin, num_layers, head_begin, num_heads)

using ShareTuple = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>;
using SideTuple = std::tuple<pages::PageSpec, std::int32_t, std::int32_t>;  // layer, head begin

stream::Share share_of(const ShareTuple& s) {
  return {{std::get<0>(s), std::get<1>(s)}, {std::get<2>(s), std::get<3>(s)}};
}

ShareTuple tuple_of(const stream::Share& s) {
  return {s.layers.begin, s.layers.count, s.heads.begin, s.heads.count};
}

stream::Side side_of(const SideTuple& s) {
  return {std::get<0>(s).options(), std::get<1>(s), std::get<2>(s)};
}

std::vector<std::pair<std::int32_t, ShareTuple>> plan_shares(const std::vector<SideTuple>& senders,
                                                             const SideTuple& receiver,
                                                             std::uint32_t spread) {
  std::vector<stream::Side> from;
  for (const SideTuple& s : senders) from.push_back(side_of(s));
  std::vector<std::pair<std::int32_t, ShareTuple>> out;
  for (const auto& p : unwrap(stream::plan_shares(from, side_of(receiver), spread)))
    out.emplace_back(p.sender, tuple_of(p.share));
  return out;
}

void bind_plan(py::module_& m) {
  m.def(
      "heads_of_rank",
      [](std::int32_t num_kv_heads, std::int32_t degree, std::int32_t rank) {
        const auto r = unwrap(stream::heads_of_rank(num_kv_heads, degree, rank));
        return std::pair(r.begin, r.count);
      },
      py::arg("num_kv_heads"), py::arg("tp_degree"), py::arg("tp_rank"));
  m.def("plan_shares", &plan_shares, py::arg("senders"), py::arg("receiver"),
        py::arg("spread") = 0);
}

// ---- Endpoint

std::unique_ptr<transport::Transport> make_transport(const std::shared_ptr<LoopbackHub>& hub,
                                                     transport::TransportOptions options) {
  if (hub) return unwrap(hub->make_transport(std::move(options)));
  return unwrap(transport::make_transport(std::move(options)));
}

std::unique_ptr<Endpoint> make_endpoint(
    std::shared_ptr<pages::Pool> pool, const std::vector<std::string>& listen, const py::bytes& key,
    const std::string& identity, int checksums, std::uint64_t pacing_bytes_per_s,
    std::int64_t max_inflight_bytes, std::int64_t max_write_bytes, bool allow_fallback,
    double keepalive_s, std::shared_ptr<LoopbackHub> hub, std::int64_t flip_slice,
    std::int32_t layer_begin, std::int32_t head_begin, std::int64_t staging_bytes) {
  transport::TransportOptions t;
  t.key = std::string(key);
  t.identity = identity;
  t.pacing_bytes_per_s = pacing_bytes_per_s;
  t.keepalive_ns = static_cast<std::int64_t>(keepalive_s * kNsPerSecond);
  stream::StreamOptions options;
  options.checksums = static_cast<stream::Checksums>(checksums);
  options.limits = {max_inflight_bytes, max_write_bytes};
  options.allow_fallback = allow_fallback;
  options.layer_begin = layer_begin;
  options.head_begin = head_begin;
  options.staging_bytes = staging_bytes;
  std::unique_ptr<FaultPlan> faults;
  if (flip_slice > 0) {
    faults = std::make_unique<FaultPlan>(1);
    unwrap(faults->fail_nth("stream.flip_slice", flip_slice));
  }
  const py::gil_scoped_release release;
  return unwrap(Endpoint::make(std::move(pool), make_transport(hub, std::move(t)), listen, options,
                               std::move(faults)));
}

py::bytes grant(Endpoint& ep, const py::bytes& request_id, std::vector<std::int32_t> pages,
                std::int64_t num_tokens, std::int64_t first_token, double deadline_s,
                const std::vector<ShareTuple>& shares, bool tell_layers) {
  const RequestId id = request_id_of(request_id);
  const std::int64_t deadline = deadline_after(deadline_s);
  std::vector<stream::Share> given;
  for (const ShareTuple& s : shares) given.push_back(share_of(s));
  std::vector<std::byte> out;
  {
    const py::gil_scoped_release release;
    out = unwrap(ep.grant(id, std::move(pages), first_token, num_tokens, deadline, std::move(given),
                          tell_layers));
  }
  return to_bytes(out);
}

std::shared_ptr<SendPort> open(Endpoint& ep, const py::bytes& grant,
                               std::vector<std::int32_t> pages, std::size_t share) {
  auto bytes = from_bytes(grant);
  const py::gil_scoped_release release;
  return unwrap(ep.open(std::move(bytes), std::move(pages), share));
}

py::dict stats_dict(const stream::StreamStats& s) {
  py::dict d;
  d["bytes"] = s.bytes;
  d["kv_bytes"] = s.kv_bytes;
  d["num_layers"] = s.num_layers;
  d["first_ns"] = s.first_ns;
  d["last_ns"] = s.last_ns;
  d["mark_ns"] = s.mark_ns;
  d["commit_ns"] = s.commit_ns;
  d["end_ns"] = s.end_ns;
  d["same_clock"] = s.same_clock;
  d["arrived_fraction"] = s.arrived_fraction;
  d["tail_s"] = s.tail_s;
  d["exposed_s"] = s.exposed_s;
  d["duplicates"] = s.duplicates;
  d["dropped"] = s.dropped;
  d["transport"] = s.transport;
  return d;
}

// (kind, request_id, payload, code or layer, message, stats)
py::list poll(Endpoint& ep) {
  using Kind = stream::StreamEvent::Kind;
  py::list out;
  for (const stream::StreamEvent& e : ep.poll()) {
    const py::bytes id = to_bytes(e.request_id.bytes);
    if (e.kind == Kind::kLayerArrived) {
      out.append(py::make_tuple("layer", id, e.layer, "", py::none()));
      continue;
    }
    const py::dict stats = stats_dict(e.stats);
    if (e.kind == Kind::kComplete) {
      out.append(py::make_tuple("complete", id, to_bytes(e.payload), "", stats));
    } else if (e.kind == Kind::kSent) {
      out.append(py::make_tuple("sent", id, py::none(), "", stats));
    } else {
      out.append(py::make_tuple("failed", id, name_of(e.error.code), e.error.message, stats));
    }
  }
  return out;
}

py::dict endpoint_stats(Endpoint& ep) {
  stream::CoreStats s;
  {
    const py::gil_scoped_release release;
    s = unwrap(ep.stats());
  }
  py::dict d;
  d["receiving"] = s.receiving;
  d["sending"] = s.sending;
  d["completed"] = s.completed;
  d["receive_failed"] = s.receive_failed;
  d["released"] = s.released;
  d["sent"] = s.sent;
  d["send_failed"] = s.send_failed;
  d["bytes_received"] = s.bytes_received;
  d["bytes_sent"] = s.bytes_sent;
  d["dropped"] = s.dropped;
  d["fallbacks"] = s.fallbacks;
  d["refs_lost"] = s.refs_lost;
  d["staged_bytes"] = s.staged_bytes;
  d["links"] = py::tuple(py::cast(s.links));
  return d;
}

void bind_endpoint(py::module_& m) {
  py::class_<LoopbackHub, std::shared_ptr<LoopbackHub>>(m, "LoopbackHub", doc("stream.LoopbackHub"))
      .def(py::init([] { return transport::make_loopback_hub(); }));
  py::class_<Endpoint>(m, "Endpoint")
      .def(py::init(&make_endpoint), py::arg("pool"), py::arg("listen"), py::arg("key"),
           py::arg("identity"), py::arg("checksums"), py::arg("pacing_bytes_per_s"),
           py::arg("max_inflight_bytes"), py::arg("max_write_bytes"), py::arg("allow_fallback"),
           py::arg("keepalive_s"), py::arg("hub"), py::arg("flip_slice"), py::arg("layer_begin"),
           py::arg("head_begin"), py::arg("staging_bytes"))
      .def("grant", &grant, py::arg("request_id"), py::arg("pages"), py::arg("num_tokens"),
           py::arg("first_token") = 0, py::arg("deadline_s") = 60.0,
           py::arg("shares") = std::vector<ShareTuple>(), py::arg("tell_layers") = false)
      .def("open", &open, py::arg("grant"), py::arg("pages"), py::arg("share") = 0)
      .def(
          "release",
          [](Endpoint& ep, const py::bytes& request_id) {
            const RequestId id = request_id_of(request_id);
            const py::gil_scoped_release release;
            return unwrap(ep.release(id));
          },
          py::arg("request_id"))
      .def("_poll", &poll)
      .def("_stats", &endpoint_stats)
      .def(
          "close",
          [](Endpoint& ep) {
            const py::gil_scoped_release release;
            ep.close();
          },
          doc("stream.Endpoint.close"))
      .def_property_readonly("event_fd", &Endpoint::event_fd, doc("stream.Endpoint.event_fd"))
      .def_property_readonly("addresses", &Endpoint::addresses, doc("stream.Endpoint.addresses"));
}

// ---- Sender

const char* state_name(stream::Sender::State state) {
  constexpr const char* kNames[] = {"connecting", "streaming", "committed", "done", "failed"};
  return kNames[static_cast<int>(state)];
}

ErrorCode abort_code(const std::string& name) {
  for (int c = 0; c <= static_cast<int>(kLastErrorCode); ++c) {
    if (to_string(static_cast<ErrorCode>(c)) == name) return static_cast<ErrorCode>(c);
  }
  throw ErrorException{invalid_argument(text("code='", name, "' names no class of kvcore.errors"))};
}

void bind_sender(py::module_& m) {
  py::class_<SendPort, std::shared_ptr<SendPort>>(m, "Sender", doc("stream.Sender"))
      .def(
          "publish",
          [](SendPort& s, std::int32_t layer, std::int32_t first, std::int32_t count,
             std::int32_t valid) { unwrap(s.publish(layer, first, count, valid)); },
          py::arg("layer"), py::arg("first_page"), py::arg("num_pages"),
          py::arg("valid_tokens_in_last"), doc("stream.Sender.publish"))
      .def(
          "publish_upto",
          [](SendPort& s, std::int32_t layer, std::int64_t end) {
            unwrap(s.publish_upto(layer, end));
          },
          py::arg("layer"), py::arg("end_token"), doc("stream.Sender.publish_upto"))
      .def(
          "push_cached",
          [](SendPort& s, std::int32_t first, std::int32_t count) {
            unwrap(s.push_cached(first, count));
          },
          py::arg("first_page"), py::arg("num_pages"), doc("stream.Sender.push_cached"))
      .def(
          "push_cached_upto",
          [](SendPort& s, std::int64_t end) { unwrap(s.push_cached_upto(end)); },
          py::arg("end_token"), doc("stream.Sender.push_cached_upto"))
      .def(
          "mark", [](SendPort& s) { s.mark(transport::now_ns()); }, doc("stream.Sender.mark"))
      .def(
          "commit",
          [](SendPort& s, const py::bytes& payload) {
            unwrap(s.commit(from_bytes(payload), transport::now_ns()));
          },
          py::arg("payload") = py::bytes(), doc("stream.Sender.commit"))
      .def(
          "abort",
          [](SendPort& s, std::string reason, const std::string& code) {
            s.abort(abort_code(code), std::move(reason));
          },
          py::arg("reason") = "cancelled", py::arg("code") = "Cancelled",
          doc("stream.Sender.abort"))
      .def_property_readonly(
          "request_id", [](const SendPort& s) { return to_bytes(s.id().bytes); },
          doc("stream.Sender.request_id"))
      .def_property_readonly(
          "state", [](const SendPort& s) { return state_name(s.progress().state); },
          doc("stream.Sender.state"))
      .def_property_readonly(
          "error",
          [](const SendPort& s) -> std::optional<std::pair<std::string, std::string>> {
            const auto p = s.progress();
            if (p.status) return std::nullopt;
            return std::pair(name_of(p.status.error().code), p.status.error().message);
          },
          doc("stream.Sender.error"))
      .def_property_readonly(
          "bytes_sent", [](const SendPort& s) { return s.progress().acked_bytes; },
          doc("stream.Sender.bytes_sent"))
      .def_property_readonly(
          "transport", [](const SendPort& s) { return s.progress().transport; },
          doc("stream.Sender.transport"))
      .def_property_readonly("all_published", &SendPort::all_published,
                             doc("stream.Sender.all_published"))
      .def_property_readonly("first_token", &SendPort::first_token,
                             doc("stream.Sender.first_token"))
      .def_property_readonly(
          "num_tokens", [](const SendPort& s) { return s.shape().num_tokens; },
          doc("stream.Sender.num_tokens"))
      .def_property_readonly(
          "num_pages", [](const SendPort& s) { return s.shape().num_slots; },
          doc("stream.Sender.num_pages"))
      .def_property_readonly(
          "kv_bytes", [](const SendPort& s) { return s.shape().kv_bytes(); },
          doc("stream.Sender.kv_bytes"));
}

// ---- LayerStep

void run(LayerStep& step, std::int64_t layer, Address q, std::int64_t q_stride, Address k,
         std::int64_t k_stride, Address v, std::int64_t v_stride, Address out, Address lse,
         int dtype) {
  const auto& plan = step.plan();
  const std::int64_t n = plan.num_tokens();
  const kernels::AttendArgs args{
      pointer<const void>("q", q, n), q_stride,
      pointer<void>("out", out, n),   std::int64_t{plan.num_q_heads()} * plan.pages().head_dim_v,
      reinterpret_cast<float*>(lse),  dtype_of(dtype)};
  const kernels::TokenRows k_rows{pointer<const char>("k", k, n), k_stride};
  const kernels::TokenRows v_rows{pointer<const char>("v", v, n), v_stride};
  const py::gil_scoped_release release;
  unwrap(step.run(layer, k_rows, v_rows, args));
}

void bind_layer_step(py::module_& m) {
  py::class_<LayerStep, std::shared_ptr<LayerStep>>(m, "LayerStep")
      .def(py::init([](std::shared_ptr<kernels::AttentionPlan> plan,
                       std::vector<std::pair<std::shared_ptr<SendPort>, std::int64_t>> senders) {
             std::vector<LayerStep::Attached> attached;
             for (auto& [port, sequence] : senders) {
               if (!port) throw ErrorException{invalid_argument("senders: a sender is None")};
               attached.push_back({std::move(port), sequence});
             }
             return unwrap(LayerStep::make(std::move(plan), std::move(attached)));
           }),
           py::arg("plan").none(false), py::arg("senders"))
      .def("run_ptr", &run, py::arg("layer"), py::arg("q_ptr"), py::arg("q_stride"),
           py::arg("k_ptr"), py::arg("k_stride"), py::arg("v_ptr"), py::arg("v_stride"),
           py::arg("out_ptr"), py::arg("lse_ptr"), py::arg("dtype"),
           doc("stream.LayerStep.run_ptr"))
      .def_property_readonly(
          "num_seqs", [](const LayerStep& s) { return s.plan().num_seqs(); },
          doc("stream.LayerStep.num_seqs"))
      .def_property_readonly(
          "num_tokens", [](const LayerStep& s) { return s.plan().num_tokens(); },
          doc("stream.LayerStep.num_tokens"))
      .def_property_readonly(
          "num_q_heads", [](const LayerStep& s) { return s.plan().num_q_heads(); },
          doc("stream.LayerStep.num_q_heads"));
}

}  // namespace

void bind_stream(py::module_ m) {
  bind_plan(m);
  bind_endpoint(m);
  bind_sender(m);
  bind_layer_step(m);
  m.def(
      "describe_grant",
      [](const py::bytes& bytes) {
        const auto g = unwrap(stream::StreamGrant::decode(from_bytes(bytes)));
        py::dict d;
        d["request_id"] = to_bytes(g.request_id.bytes);
        d["first_token"] = g.first_token;
        d["num_tokens"] = g.num_tokens;
        d["num_pages"] = g.pages.size();
        std::int64_t kv_bytes = 0;
        std::vector<ShareTuple> shares;
        for (std::size_t i = 0; i < g.shares.size(); ++i) {
          kv_bytes += g.shape(i).kv_bytes();
          shares.push_back(tuple_of(g.shares[i].share));
        }
        d["kv_bytes"] = kv_bytes;
        d["sealed_pages"] = std::count_if(g.pages.begin(), g.pages.end(),
                                          [](const stream::GrantPage& p) { return p.sealed; });
        d["shares"] = shares;
        d["ttl_s"] = static_cast<double>(g.ttl_ns) / kNsPerSecond;
        d["addresses"] = g.addresses;
        return d;
      },
      py::arg("grant"));
}

}  // namespace kvcore::bindings
