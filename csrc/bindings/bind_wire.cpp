// kvcore._core.wire: dicts <-> messages, and the sans-I/O Session.
#include <pybind11/pybind11.h>

#include <cstring>
#include <optional>

#include "base/text.h"
#include "bindings/doc.h"
#include "bindings/errors.h"
#include "wire/session.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

using wire::FieldKind;
using wire::FieldSpec;
using wire::MessageSpec;
using wire::Value;

[[noreturn]] void refuse(const MessageSpec& spec, const FieldSpec& field, const std::string& what) {
  throw ErrorException{
      invalid_argument(text("message '", spec.name, "' field '", field.name, "' ", what))};
}

std::string shown(py::handle value) {
  std::string s = py::repr(value);
  return s.size() > 60 ? s.substr(0, 57) + "..." : s;
}

// Python ints and whatever has __index__ (numpy scalars), but no float and no silent wrap.
template <class T>
std::optional<T> to_integer(py::handle value) {
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!index) {
    PyErr_Clear();
    return std::nullopt;
  }
  py::detail::make_caster<T> caster;
  if (!caster.load(index, true)) {
    PyErr_Clear();
    return std::nullopt;
  }
  return py::detail::cast_op<T>(caster);
}

std::optional<double> to_double(py::handle value) {
  if (PyUnicode_Check(value.ptr())) return std::nullopt;
  const double d = PyFloat_AsDouble(value.ptr());
  if (d == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    return std::nullopt;
  }
  return d;
}

std::optional<std::string> to_text(py::handle value) {
  if (!PyUnicode_Check(value.ptr())) return std::nullopt;
  Py_ssize_t n = 0;
  const char* s = PyUnicode_AsUTF8AndSize(value.ptr(), &n);
  if (s == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return std::string(s, static_cast<std::size_t>(n));
}

std::optional<std::string> to_raw(py::handle value) {
  if (PyUnicode_Check(value.ptr()) || !PyObject_CheckBuffer(value.ptr())) return std::nullopt;
  Py_buffer view;
  if (PyObject_GetBuffer(value.ptr(), &view, PyBUF_SIMPLE) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  std::string out(static_cast<const char*>(view.buf), static_cast<std::size_t>(view.len));
  PyBuffer_Release(&view);
  return out;
}

template <class T, class Convert>
Value to_list(const MessageSpec& spec, const FieldSpec& field, py::handle value, Convert convert) {
  if (PyUnicode_Check(value.ptr()) || PyBytes_Check(value.ptr()) ||
      !py::isinstance<py::iterable>(value))
    refuse(spec, field, text("= ", shown(value), " must be a ", to_string(field.kind)));
  std::vector<T> out;
  for (const py::handle item : py::reinterpret_borrow<py::iterable>(value)) {
    auto converted = convert(item);
    if (!converted)
      refuse(
          spec, field,
          text("item ", out.size(), " = ", shown(item), " does not fit ", to_string(field.kind)));
    out.push_back(std::move(*converted));
  }
  return out;
}

Value to_value(const MessageSpec& spec, const FieldSpec& field, py::handle value) {
  const auto one = [&](auto converted) -> Value {
    if (!converted)
      refuse(spec, field, text("= ", shown(value), " does not fit ", to_string(field.kind)));
    return Value(std::move(*converted));
  };
  switch (field.kind) {
    case FieldKind::kU64:
      return one(to_integer<std::uint64_t>(value));
    case FieldKind::kI64:
      return one(to_integer<std::int64_t>(value));
    case FieldKind::kF64:
      return one(to_double(value));
    case FieldKind::kStr:
      return one(to_text(value));
    case FieldKind::kBytes:
    case FieldKind::kId:
      return one(to_raw(value));
    case FieldKind::kListI32:
      return to_list<std::int32_t>(spec, field, value, to_integer<std::int32_t>);
    case FieldKind::kListU64:
      return to_list<std::uint64_t>(spec, field, value, to_integer<std::uint64_t>);
    case FieldKind::kListF64:
      return to_list<double>(spec, field, value, to_double);
    case FieldKind::kListBytes:
      return to_list<std::string>(spec, field, value, to_raw);
    case FieldKind::kListStr:
      return to_list<std::string>(spec, field, value, to_text);
  }
  refuse(spec, field, "has an unknown kind");
}

wire::Message to_message(const std::string& type, const py::dict& fields) {
  const MessageSpec* spec = wire::find_message(std::string_view(type));
  if (spec == nullptr)
    throw ErrorException{invalid_argument(text("message type '", type, "' is unknown"))};
  wire::Message message{spec, {}};
  std::vector<bool> given(spec->fields.size(), false);
  for (const FieldSpec& field : spec->fields) message.values.push_back(default_value(field));
  for (const auto& [key, value] : fields) {
    const std::string name = py::str(key);
    const auto i = find_field(*spec, name);
    if (!i)
      throw ErrorException{
          invalid_argument(text("message '", spec->name, "' has no field '", name, "'"))};
    message.values[*i] = to_value(*spec, spec->fields[*i], value);
    given[*i] = true;
  }
  for (std::size_t i = 0; i < given.size(); ++i)
    if (!given[i] && spec->fields[i].required) refuse(*spec, spec->fields[i], "is required");
  return message;
}

py::object to_python(FieldKind kind, const Value& value) {
  const bool raw =
      kind == FieldKind::kBytes || kind == FieldKind::kId || kind == FieldKind::kListBytes;
  const auto text_or_bytes = [&](const std::string& s) -> py::object {
    if (raw) return py::bytes(s);
    return py::str(s);
  };
  return std::visit(
      [&](const auto& v) -> py::object {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_arithmetic_v<T>) {
          return py::cast(v);
        } else if constexpr (std::is_same_v<T, std::string>) {
          return text_or_bytes(v);
        } else {
          py::list list(v.size());
          for (std::size_t i = 0; i < v.size(); ++i) {
            if constexpr (std::is_same_v<T, std::vector<std::string>>)
              list[i] = text_or_bytes(v[i]);
            else
              list[i] = py::cast(v[i]);
          }
          return list;
        }
      },
      value);
}

py::tuple to_tuple(const wire::Message& message) {
  py::dict fields;
  for (std::size_t i = 0; i < message.values.size(); ++i) {
    const FieldSpec& field = message.spec->fields[i];
    fields[py::str(std::string(field.name))] = to_python(field.kind, message.values[i]);
  }
  return py::make_tuple(py::str(std::string(message.spec->name)), fields);
}

// Borrowed view of a bytes-like argument, held for the duration of a call.
class BytesArg {
 public:
  explicit BytesArg(const py::buffer& buffer) : info_(buffer.request()) {}
  wire::Bytes bytes() const {
    return {static_cast<const std::byte*>(info_.ptr),
            static_cast<std::size_t>(info_.size * info_.itemsize)};
  }

 private:
  py::buffer_info info_;
};

py::bytes to_bytes(const std::vector<std::byte>& data) {
  return {reinterpret_cast<const char*>(data.data()), data.size()};
}

// feed() hands out handshake bytes through take_output, so that Python sees messages only.
class PySession {
 public:
  PySession(const std::string& side, const py::bytes& key, const std::string& role,
            std::size_t max_frame_bytes)
      : session_(make(side, key, role, max_frame_bytes)) {
    output_ = session_.start();
  }
  py::list feed(const py::buffer& data) {
    std::vector<wire::Message> messages;
    unwrap(session_.feed(BytesArg(data).bytes(), &output_, &messages));
    py::list out;
    for (const auto& message : messages) out.append(to_tuple(message));
    return out;
  }
  py::bytes take_output() {
    py::bytes out = to_bytes(output_);
    output_.clear();
    return out;
  }
  py::bytes encode(const std::string& type, const py::dict& fields) {
    return to_bytes(unwrap(session_.encode(to_message(type, fields))));
  }
  const wire::Session& get() const { return session_; }

 private:
  static wire::Session make(const std::string& side, const py::bytes& key, const std::string& role,
                            std::size_t max_frame_bytes) {
    if (side != "initiator" && side != "responder")
      throw ErrorException{
          invalid_argument(text("side='", side, "' must be 'initiator' or 'responder'"))};
    const std::string raw = key;
    return unwrap(wire::Session::make(
        side == "initiator" ? AuthSession::Side::kInitiator : AuthSession::Side::kResponder,
        std::as_bytes(std::span(raw.data(), raw.size())), role, max_frame_bytes));
  }
  wire::Session session_;
  std::vector<std::byte> output_;
};

py::dict schema() {
  py::dict out;
  for (const MessageSpec& spec : wire::all_messages()) {
    py::dict fields;
    for (const FieldSpec& field : spec.fields)
      fields[py::str(std::string(field.name))] =
          py::make_tuple(py::str(std::string(to_string(field.kind))), field.required,
                         to_python(field.kind, default_value(field)));
    out[py::str(std::string(spec.name))] = fields;
  }
  return out;
}

}  // namespace

void bind_wire(py::module_ m) {
  m.attr("DEFAULT_MAX_FRAME_BYTES") = wire::kDefaultMaxFrameBytes;
  m.def("schema", &schema);
  m.def(
      "encode",
      [](const std::string& type, const py::dict& fields) {
        return to_bytes(unwrap(wire::encode_body(to_message(type, fields))));
      },
      py::arg("type"), py::arg("fields"));
  m.def(
      "decode",
      [](const py::buffer& body) {
        return to_tuple(unwrap(wire::decode_body(BytesArg(body).bytes())));
      },
      py::arg("body"));
  py::class_<PySession>(m, "Session", doc("wire.Session"))
      .def(py::init<const std::string&, const py::bytes&, const std::string&, std::size_t>(),
           py::arg("side"), py::arg("key") = py::bytes(), py::arg("role") = "",
           py::arg("max_frame_bytes") = wire::kDefaultMaxFrameBytes)
      .def("feed", &PySession::feed, py::arg("data"), doc("wire.Session.feed"))
      .def("take_output", &PySession::take_output, doc("wire.Session.take_output"))
      .def("encode", &PySession::encode, py::arg("type"), py::arg("fields"),
           doc("wire.Session.encode"))
      .def_property_readonly(
          "established", [](const PySession& s) { return s.get().established(); },
          doc("wire.Session.established"))
      .def_property_readonly(
          "peer_role", [](const PySession& s) { return s.get().peer_role(); },
          doc("wire.Session.peer_role"))
      .def_property_readonly(
          "mid_frame", [](const PySession& s) { return s.get().mid_frame(); },
          doc("wire.Session.mid_frame"));
}

}  // namespace kvcore::bindings
