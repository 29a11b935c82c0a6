#include "wire/codec.h"

#include <bit>
#include <cstring>

#include "base/text.h"

namespace kvcore::wire {
namespace {

using enum FieldKind;

static_assert(std::endian::native == std::endian::little, "the codec copies little-endian numbers");

template <class T>
void put(std::vector<std::byte>* out, T value) {
  const auto* p = reinterpret_cast<const std::byte*>(&value);
  out->insert(out->end(), p, p + sizeof value);
}

void put_raw(std::vector<std::byte>* out, const void* data, std::size_t bytes) {
  const auto* p = static_cast<const std::byte*>(data);
  out->insert(out->end(), p, p + bytes);
}

template <class T>
T get(Bytes in) {
  T value;
  std::memcpy(&value, in.data(), sizeof value);
  return value;
}

std::string field_name(const MessageSpec& spec, const FieldSpec& field) {
  return text("message '", spec.name, "' field '", field.name, "'");
}

// Does the variant hold what the kind needs, and does the content fit?
Status check_value(const MessageSpec& spec, const FieldSpec& field, const Value& value) {
  const auto wrong = [&] {
    return invalid_argument(text(field_name(spec, field), " must be a ", to_string(field.kind)));
  };
  if (value.index() != default_value(field).index()) return wrong();
  if (const auto* s = std::get_if<std::string>(&value)) {
    if (field.kind == kId && s->size() != 16)
      return invalid_argument(
          text(field_name(spec, field), " has ", s->size(), " bytes, must have 16"));
    if (field.kind == kStr && !is_utf8(*s))
      return invalid_argument(text(field_name(spec, field), " is not valid UTF-8"));
  }
  if (const auto* list = std::get_if<std::vector<std::string>>(&value);
      list && field.kind == kListStr)
    for (const auto& s : *list)
      if (!is_utf8(s))
        return invalid_argument(text(field_name(spec, field), " holds invalid UTF-8"));
  return {};
}

void put_data(std::vector<std::byte>* out, const Value& value) {
  std::visit(
      [&](const auto& v) {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_arithmetic_v<T>) {
          put(out, v);
        } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
          for (const auto& s : v) {
            put(out, static_cast<std::uint32_t>(s.size()));
            put_raw(out, s.data(), s.size());
          }
        } else {
          put_raw(out, v.data(), v.size() * sizeof(*v.data()));
        }
      },
      value);
}

template <class T>
Result<Value> number(Bytes data) {
  if (data.size() != sizeof(T)) return Error{ErrorCode::kCorrupt, "a number of a wrong size"};
  return Value(get<T>(data));
}

template <class T>
Result<Value> number_list(Bytes data) {
  if (data.size() % sizeof(T) != 0) return Error{ErrorCode::kCorrupt, "a list of broken items"};
  std::vector<T> list(data.size() / sizeof(T));
  if (!list.empty()) std::memcpy(list.data(), data.data(), data.size());
  return Value(std::move(list));
}

Result<Value> string_list(Bytes data) {
  std::vector<std::string> list;
  while (!data.empty()) {
    if (data.size() < 4) return Error{ErrorCode::kCorrupt, "a list item without its length"};
    const std::size_t n = get<std::uint32_t>(data);
    data = data.subspan(4);
    if (n > data.size()) return Error{ErrorCode::kCorrupt, "a list item longer than its field"};
    list.emplace_back(reinterpret_cast<const char*>(data.data()), n);
    data = data.subspan(n);
  }
  return Value(std::move(list));
}

Result<Value> get_data(FieldKind kind, Bytes data) {
  switch (kind) {
    case kU64:
      return number<std::uint64_t>(data);
    case kI64:
      return number<std::int64_t>(data);
    case kF64:
      return number<double>(data);
    case kStr:
    case kBytes:
    case kId:
      return Value(std::string(reinterpret_cast<const char*>(data.data()), data.size()));
    case kListI32:
      return number_list<std::int32_t>(data);
    case kListU64:
      return number_list<std::uint64_t>(data);
    case kListF64:
      return number_list<double>(data);
    case kListBytes:
    case kListStr:
      return string_list(data);
  }
  return Error{ErrorCode::kCorrupt, "an unknown kind of field"};
}

Result<Value> decode_field(const MessageSpec& spec, const FieldSpec& field, std::uint8_t kind,
                           Bytes data) {
  const auto corrupt = [&](std::string_view what) {
    return Error{ErrorCode::kCorrupt, text(field_name(spec, field), ": ", what)};
  };
  if (kind != static_cast<std::uint8_t>(field.kind))
    return corrupt(text("kind ", static_cast<int>(kind), " is not ", to_string(field.kind)));
  auto value = get_data(field.kind, data);
  if (!value) return corrupt(value.error().message);
  if (auto status = check_value(spec, field, *value); !status)
    return Error{ErrorCode::kCorrupt, status.error().message};
  return value;
}

}  // namespace

bool is_utf8(std::string_view s) noexcept {
  for (std::size_t i = 0; i < s.size();) {
    const auto c = static_cast<unsigned char>(s[i]);
    const std::size_t more = c < 0x80 ? 0 : c >= 0xf0 ? 3 : c >= 0xe0 ? 2 : 1;
    if (c >= 0x80 && (c < 0xc2 || c > 0xf4)) return false;
    if (more > s.size() - i - 1) return false;
    std::uint32_t code = more == 0 ? c : c & (0x3fU >> more);
    for (std::size_t k = 1; k <= more; ++k) {
      const auto d = static_cast<unsigned char>(s[i + k]);
      if ((d & 0xc0U) != 0x80) return false;
      code = (code << 6) | (d & 0x3fU);
    }
    if ((more == 2 && (code < 0x800 || (code >= 0xd800 && code < 0xe000))) ||
        (more == 3 && (code < 0x10000 || code > 0x10ffff)))
      return false;
    i += more + 1;
  }
  return true;
}

Result<std::vector<std::byte>> encode_body(const Message& message) {
  if (message.spec == nullptr) return invalid_argument("message without a type");
  const MessageSpec& spec = *message.spec;
  if (message.values.size() != spec.fields.size())
    return invalid_argument(text("message '", spec.name, "' has ", message.values.size(),
                                 " values, its schema has ", spec.fields.size()));
  std::vector<std::byte> out;
  put(&out, spec.type);
  for (std::size_t i = 0; i < spec.fields.size(); ++i) {
    const FieldSpec& field = spec.fields[i];
    KVCORE_RETURN_IF_ERROR(check_value(spec, field, message.values[i]));
    if (!field.required && message.values[i] == default_value(field)) continue;
    put(&out, field.tag);
    put(&out, static_cast<std::uint8_t>(field.kind));
    const std::size_t at = out.size();
    put(&out, std::uint32_t{0});
    put_data(&out, message.values[i]);
    const std::size_t bytes = out.size() - at - 4;
    if (bytes > UINT32_MAX)
      return invalid_argument(text(field_name(spec, field), " has more than 2^32 bytes"));
    const auto length = static_cast<std::uint32_t>(bytes);
    std::memcpy(out.data() + at, &length, sizeof length);
  }
  return out;
}

Result<Message> decode_body(Bytes body) {
  if (body.size() < 2) return Error{ErrorCode::kCorrupt, "a body without a message type"};
  const auto type = get<std::uint16_t>(body);
  const MessageSpec* spec = find_message(type);
  if (spec == nullptr)
    return Error{ErrorCode::kCorrupt, text("message type ", type, " is unknown")};
  const auto corrupt = [&](std::string_view what) {
    return Error{ErrorCode::kCorrupt, text("message '", spec->name, "': ", what)};
  };
  Message message{spec, {}};
  body = body.subspan(2);
  for (const FieldSpec& field : spec->fields) {
    const bool here = !body.empty() && std::to_integer<std::uint8_t>(body[0]) == field.tag;
    if (!here) {
      if (field.required) return corrupt(text("required field '", field.name, "' is missing"));
      message.values.push_back(default_value(field));
      continue;
    }
    if (body.size() < 6) return corrupt(text("field '", field.name, "' is cut off"));
    const std::size_t bytes = get<std::uint32_t>(body.subspan(2));
    if (bytes > body.size() - 6) return corrupt(text("field '", field.name, "' is cut off"));
    KVCORE_ASSIGN_OR_RETURN(
        auto value,
        decode_field(*spec, field, std::to_integer<std::uint8_t>(body[1]), body.subspan(6, bytes)));
    message.values.push_back(std::move(value));
    body = body.subspan(6 + bytes);
  }
  if (!body.empty()) return corrupt("unknown, repeated or trailing data after the last field");
  return message;
}

}  // namespace kvcore::wire
