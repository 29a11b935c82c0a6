// The body of a control message (wire/codec.h), of every type.
#include "fuzz.h"
#include "wire/codec.h"

namespace kvcore::fuzz {

using namespace wire;

void run(Input input) {
  const auto message = decode_body(input);
  if (!message.ok()) {
    require(message.error().code == ErrorCode::kCorrupt, "what is refused is Corrupt");
    return;
  }
  require(message->spec != nullptr && message->values.size() == message->spec->fields.size(),
          "a message has all fields of its schema");
  const auto body = encode_body(*message);
  require(body.ok(), "what is decoded can be encoded");
  require(body->size() <= input.size(), "the encoding is the shortest");
  const auto again = decode_body(*body);
  require(again.ok() && again->spec == message->spec, "and decodes again");
  require(encode_body(*again).value() == *body, "to the same bytes");
  for (const Value& value : message->values) {
    const auto* s = std::get_if<std::string>(&value);
    require(s == nullptr || s->size() <= input.size(), "nothing is longer than what came");
  }
}

std::vector<Seed> seeds() {
  std::vector<Seed> out;
  for (const MessageSpec& spec : all_messages()) {
    Message message{&spec, {}};
    for (const FieldSpec& field : spec.fields) {
      Value value = default_value(field);
      if (field.kind == FieldKind::kId) value = std::string(16, 'i');
      if (field.kind == FieldKind::kStr || field.kind == FieldKind::kBytes)
        value = std::string("text");
      if (field.kind == FieldKind::kListI32) value = std::vector<std::int32_t>{1, -2, 3};
      if (field.kind == FieldKind::kListU64) value = std::vector<std::uint64_t>{1, ~0ULL};
      if (field.kind == FieldKind::kListF64) value = std::vector<double>{0.5, 1e300};
      if (field.kind == FieldKind::kListStr || field.kind == FieldKind::kListBytes)
        value = std::vector<std::string>{"a", "", "longer"};
      if (field.kind == FieldKind::kU64) value = std::uint64_t{77};
      if (field.kind == FieldKind::kI64) value = std::int64_t{-77};
      message.values.push_back(std::move(value));
    }
    auto body = encode_body(message);
    require(body.ok(), "every message can be encoded");
    out.push_back(std::move(*body));
  }
  return out;
}

}  // namespace kvcore::fuzz
