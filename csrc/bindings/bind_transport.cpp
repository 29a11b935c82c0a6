// kvcore._core.transport: the Transport and Link of csrc/transport with events as tuples.
// kvcore.transport gives them their shape. Addresses of memory are ints; Python keeps owners alive.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "base/text.h"
#include "bindings/dlpack.h"
#include "bindings/errors.h"
#include "transport/link.h"
#include "transport/rdma/rdma_scheme.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

using namespace transport;

std::uint64_t raw_id(LinkId id) { return static_cast<std::uint64_t>(id); }

py::bytes to_bytes(const GrantRef& ref) {
  return {reinterpret_cast<const char*>(&ref), sizeof ref};
}

GrantRef to_grant(const std::string& token) {
  GrantRef ref;
  if (token.size() != sizeof ref)
    throw ErrorException{invalid_argument("grant token must have 16 bytes")};
  std::memcpy(&ref, token.data(), sizeof ref);
  return ref;
}

// (code, message) of an error, or (None, "").
py::tuple outcome(const Status& status) {
  if (status.ok()) return py::make_tuple(py::none(), "");
  return py::make_tuple(py::str(std::string(to_string(status.error().code))),
                        status.error().message);
}

// One borrowed span: a read-only buffer that keeps the mapping.
struct LentSpan {
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> keep;
};

py::list spans_of(const Borrowed& borrowed) {
  py::list out;
  for (const auto& span : borrowed.spans) out.append(py::cast(LentSpan{span, borrowed.keep}));
  return out;
}

struct ToTuple {
  py::tuple operator()(const Up& e) const {
    return py::make_tuple("up", raw_id(e.link), e.accepted);
  }
  py::tuple operator()(const Completion& e) const {
    return py::make_tuple("completion", raw_id(e.link), static_cast<std::uint64_t>(e.op),
                          outcome(e.status), e.bytes);
  }
  py::tuple operator()(const Arrival& e) const {
    return py::make_tuple("arrival", raw_id(e.link), to_bytes(e.grant), e.tag, e.bytes, e.at_ns,
                          outcome(e.status));
  }
  py::tuple operator()(const Message& e) const {
    return py::make_tuple("message", raw_id(e.link),
                          py::bytes(reinterpret_cast<const char*>(e.bytes.data()), e.bytes.size()),
                          e.at_ns);
  }
  py::tuple operator()(const Fenced& e) const {
    return py::make_tuple("fenced", 0, to_bytes(e.grant));
  }
  py::tuple operator()(const Borrowed& e) const {
    return py::make_tuple("borrowed", raw_id(e.link), static_cast<std::uint64_t>(e.op),
                          outcome(e.status), static_cast<std::uint64_t>(e.lease), e.expires_ns,
                          spans_of(e));
  }
  py::tuple operator()(const Returned& e) const {
    return py::make_tuple("returned", raw_id(e.link), to_bytes(e.grant),
                          static_cast<std::uint64_t>(e.lease), outcome(e.status));
  }
  py::tuple operator()(const Down& e) const {
    return py::make_tuple("down", raw_id(e.link), outcome(e.status));
  }
};

template <class T>
std::vector<T> triples(const py::sequence& list) {
  std::vector<T> out;
  for (const py::handle item : list) {
    const auto t = item.cast<py::tuple>();
    constexpr std::size_t kColumns = std::is_same_v<T, Segment> ? 3 : 2;
    if (t.size() != kColumns) throw py::value_error("a row has another number of columns");
    if constexpr (std::is_same_v<T, Segment>)
      out.push_back(
          {t[0].cast<std::uint64_t>(), t[1].cast<std::uint64_t>(), t[2].cast<std::uint64_t>()});
    else
      out.push_back({t[0].cast<std::uint64_t>(), t[1].cast<std::uint64_t>()});
  }
  return out;
}

Priority to_priority(int priority) {
  if (priority < 0 || priority >= kNumPriorities)
    throw ErrorException{invalid_argument("priority must be 0 (stream), 1 (prefetch) or 2")};
  return static_cast<Priority>(priority);
}

py::bytes to_bytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

Digest to_digest(const char* field, const std::string& bytes) {
  Digest digest{};
  if (!bytes.empty() && bytes.size() != digest.size())
    throw ErrorException{invalid_argument(
        std::string(field) + " has " + std::to_string(bytes.size()) + " bytes, must have 0 or 32")};
  std::memcpy(digest.data(), bytes.data(), bytes.size());
  return digest;
}

// int64 [n, 3] (local offset, remote offset, bytes), any strides; or a sequence of such tuples.
std::vector<Segment> segments_of(const py::object& given) {
  if (!PyObject_CheckBuffer(given.ptr())) return triples<Segment>(given.cast<py::sequence>());
  const py::buffer_info b = py::reinterpret_borrow<py::buffer>(given).request();
  if (b.ndim != 2 || b.shape[1] != 3 || b.itemsize != 8 || (b.format != "l" && b.format != "q"))
    throw ErrorException{
        invalid_argument(text("segments: an array must be int64 [n, 3], this one has ", b.ndim,
                              " dimensions of format '", b.format, "'"))};
  const auto at = [&](py::ssize_t row, py::ssize_t column) {
    std::int64_t value = 0;
    std::memcpy(&value,
                static_cast<const char*>(b.ptr) + row * b.strides[0] + column * b.strides[1],
                sizeof value);
    if (value < 0)
      throw ErrorException{invalid_argument(
          text("segments[", row, "][", column, "]=", value, " must not be negative"))};
    return static_cast<std::uint64_t>(value);
  };
  std::vector<Segment> out;
  out.reserve(static_cast<std::size_t>(b.shape[0]));
  for (py::ssize_t i = 0; i < b.shape[0]; ++i) out.push_back({at(i, 0), at(i, 1), at(i, 2)});
  return out;
}

py::dict to_dict(const LinkInfo& info) {
  py::dict d;
  d["scheme"] = info.scheme;
  d["peer_address"] = info.peer_address;
  d["peer_identity"] = py::bytes(info.peer_identity);
  d["peer_role"] = info.peer_role;
  d["peer_model"] = to_bytes(info.peer_model);
  d["peer_layout"] = to_bytes(info.peer_layout);
  d["peer_pid"] = info.peer_pid;
  d["up"] = info.up;
  d["bytes_out"] = info.bytes_out;
  d["bytes_in"] = info.bytes_in;
  d["messages_out"] = info.messages_out;
  d["messages_in"] = info.messages_in;
  d["outstanding_ops"] = info.outstanding_ops;
  d["queued_bytes"] = info.queued_bytes;
  d["credit_bytes"] = info.credit_bytes;
  d["credit_stall_ns"] = info.credit_stall_ns;
  py::list rails;
  for (const RailInfo& r : info.rails)
    rails.append(py::dict(py::arg("device") = r.device, py::arg("ready") = r.ready,
                          py::arg("bytes_posted") = r.bytes_posted, py::arg("errors") = r.errors,
                          py::arg("rate_bytes_per_s") = r.rate_bytes_per_s,
                          py::arg("rate_cuts") = r.rate_cuts, py::arg("congestion") = r.congestion,
                          py::arg("marked") = r.marked, py::arg("lost") = r.lost));
  d["rails"] = rails;
  return d;
}

void bind_link(py::module_& m) {
  py::class_<Link, std::shared_ptr<Link>>(m, "Link")
      .def_property_readonly("id", [](const Link& l) { return raw_id(l.id()); })
      .def("send",
           [](Link& l, const py::buffer& message, int priority, std::int64_t deadline_ns,
              bool completion) {
             const py::buffer_info b = message.request();
             const auto* p = static_cast<const std::byte*>(b.ptr);
             return static_cast<std::uint64_t>(
                 unwrap(l.send({p, static_cast<std::size_t>(b.size * b.itemsize)},
                               {to_priority(priority), deadline_ns, completion})));
           })
      .def("write",
           [](Link& l, std::uint32_t region, const py::object& segments, const std::string& grant,
              std::uint64_t tag, std::int64_t deadline_ns, int priority, bool checksum,
              bool notify) {
             return static_cast<std::uint64_t>(
                 unwrap(l.write(RegionId{region}, segments_of(segments), to_grant(grant), tag,
                                {deadline_ns, to_priority(priority), checksum, notify})));
           })
      .def("read",
           [](Link& l, std::uint32_t region, const py::object& segments, const std::string& grant,
              std::int64_t deadline_ns, int priority) {
             return static_cast<std::uint64_t>(
                 unwrap(l.read(RegionId{region}, segments_of(segments), to_grant(grant),
                               {deadline_ns, to_priority(priority)})));
           })
      .def("borrow",
           [](Link& l, const std::string& grant, const py::sequence& ranges,
              std::int64_t deadline_ns) {
             return static_cast<std::uint64_t>(
                 unwrap(l.borrow(to_grant(grant), triples<Range>(ranges), deadline_ns)));
           })
      .def("give_back", [](Link& l, std::uint64_t lease) { l.give_back(LeaseId{lease}); })
      .def("cancel", [](Link& l, std::uint64_t op) { l.cancel(OpId{op}); })
      .def("set_pacing", &Link::set_pacing)
      .def("info", [](const Link& l) { return to_dict(l.info()); })
      .def("close", &Link::close);
}

std::unique_ptr<Transport> make(const std::string& key, const std::string& identity,
                                const std::string& role, const std::string& model_digest,
                                const std::string& layout_digest, double handshake_s,
                                double keepalive_s, std::uint64_t pacing,
                                std::uint64_t credit_bytes_per_link, std::uint64_t credit_bytes) {
  TransportOptions options;
  options.key = key;
  options.identity = identity;
  options.role = role;
  options.model_digest = to_digest("model_digest", model_digest);
  options.layout_digest = to_digest("layout_digest", layout_digest);
  options.handshake_ns = static_cast<std::int64_t>(handshake_s * 1e9);
  options.keepalive_ns = static_cast<std::int64_t>(keepalive_s * 1e9);
  options.pacing_bytes_per_s = pacing;
  options.credits = {credit_bytes_per_link, credit_bytes};
  return unwrap(make_transport(std::move(options)));
}

// (address, bytes) of a C-contiguous buffer.
py::tuple address_of(const py::buffer& buffer) {
  const py::buffer_info b = buffer.request();
  return py::make_tuple(reinterpret_cast<std::uintptr_t>(b.ptr), b.size * b.itemsize);
}

// (address, bytes) of a dense CPU tensor.
py::tuple address_of_dlpack(const py::object& capsule) {
  const py::tuple t = describe_dlpack(capsule);
  const auto shape = t[1].cast<std::vector<std::int64_t>>();
  const auto strides = t[2].cast<std::vector<std::int64_t>>();
  std::int64_t dense = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != dense)
      throw ErrorException{invalid_argument("tensor is strided: a dense C order is needed")};
    dense *= shape[i];
  }
  const auto* raw = static_cast<const DlTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  return py::make_tuple(t[0], dense * raw->bits * raw->lanes / 8);
}

}  // namespace

void bind_transport(py::module_ m) {
  m.def("address_of", &address_of, py::arg("buffer"));
  m.def("address_of_dlpack", &address_of_dlpack, py::arg("capsule"));
  m.def("now_ns", &now_ns);
  m.def("rdma_missing", [] {  // why there can be no rdma link here; empty = there can
    const Status status = rdma::available();
    return status.ok() ? std::string() : status.error().message;
  });
  py::class_<LentSpan>(m, "LentSpan", py::buffer_protocol()).def_buffer([](LentSpan& s) {
    return py::buffer_info(const_cast<std::byte*>(s.bytes.data()), 1, "B", 1, {s.bytes.size()}, {1},
                           true);
  });
  bind_link(m);
  py::class_<Transport>(m, "Transport")
      .def(py::init(&make), py::arg("key"), py::arg("identity"), py::arg("role"),
           py::arg("model_digest"), py::arg("layout_digest"), py::arg("handshake_s"),
           py::arg("keepalive_s"), py::arg("pacing_bytes_per_s"), py::arg("credit_bytes_per_link"),
           py::arg("credit_bytes"))
      .def("register_region",
           [](Transport& t, std::uintptr_t address, std::uint64_t bytes, int memfd) {
             return static_cast<std::uint32_t>(
                 unwrap(t.register_region(reinterpret_cast<std::byte*>(address), bytes, memfd)));
           })
      .def("unregister_region",
           [](Transport& t, std::uint32_t region) {
             Status status;
             {
               const py::gil_scoped_release release;
               status = t.unregister_region(RegionId{region});
             }
             unwrap(status);
           })
      .def("create_grant",
           [](Transport& t, std::uint32_t region, const py::sequence& ranges, int rights,
              std::int64_t expires_ns, const std::string& peer) {
             const Grant grant =
                 unwrap(t.create_grant(RegionId{region}, triples<Range>(ranges),
                                       static_cast<Rights>(rights), expires_ns, peer));
             return to_bytes(grant.ref);
           })
      .def("revoke_grant",
           [](Transport& t, const std::string& grant) {
             const GrantRef ref = to_grant(grant);
             const py::gil_scoped_release release;
             return t.revoke_grant(ref) == Fence::kPending;
           })
      .def("listen", [](Transport& t, const std::string& a) { return unwrap(t.listen(a)); })
      .def("connect", [](Transport& t, const std::string& a) { return unwrap(t.connect(a)); })
      .def("link", [](const Transport& t, std::uint64_t id) { return t.link(LinkId{id}); })
      .def("poll",
           [](Transport& t, std::size_t max_events) {
             std::vector<Event> events;
             t.poll(&events, max_events);
             py::list out;
             for (const Event& e : events) out.append(std::visit(ToTuple(), e));
             return out;
           })
      .def_property_readonly("event_fd", &Transport::event_fd)
      .def("close", &Transport::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace kvcore::bindings
