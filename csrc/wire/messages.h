// What routers and workers say to each other: the types of message and the schema of each.
// Adding a message or field = one line in messages.cpp. Numbers and tags are never reused or
// changed. Thread rules: constant tables and plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace kvcore::wire {

enum class FieldKind : std::uint8_t {
  kU64 = 1,
  kI64 = 2,
  kF64 = 3,
  kStr = 4,  // UTF-8
  kBytes = 5,
  kId = 6,  // exactly 16 bytes
  kListI32 = 7,
  kListU64 = 8,
  kListF64 = 9,
  kListBytes = 10,
  kListStr = 11,
};
std::string_view to_string(FieldKind kind) noexcept;

// kStr, kBytes, kId are std::string; kListBytes and kListStr are vectors of it.
using Value =
    std::variant<std::uint64_t, std::int64_t, double, std::string, std::vector<std::int32_t>,
                 std::vector<std::uint64_t>, std::vector<double>, std::vector<std::string>>;

struct FieldSpec {
  std::uint8_t tag;
  std::string_view name;
  FieldKind kind;
  bool required;
  double default_number = 0;  // of a number that is not required; the rest defaults to empty
};

struct MessageSpec {
  std::uint16_t type;
  std::string_view name;
  std::span<const FieldSpec> fields;  // tags ascending from 1
};

// values[i] belongs to spec->fields[i].
struct Message {
  const MessageSpec* spec = nullptr;
  std::vector<Value> values;
};

std::span<const MessageSpec> all_messages() noexcept;
const MessageSpec* find_message(std::uint16_t type) noexcept;     // null: unknown
const MessageSpec* find_message(std::string_view name) noexcept;  // null: unknown
std::optional<std::size_t> find_field(const MessageSpec& spec, std::string_view name) noexcept;
Value default_value(const FieldSpec& field);

}  // namespace kvcore::wire
