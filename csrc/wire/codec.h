// The one binary encoding of messages. A body is
//     type u16 | field*          field = tag u8 | kind u8 | bytes u32 | data
// little endian, tags strictly ascending; numbers are 8 bytes; a list of numbers is its items; a
// list of bytes or strings is (bytes u32 | data)*. A field that is not required may be absent (=
// default). The decoder is total: any input gives a Message that fits its schema, or Corrupt with a
// message that names the message and field. It never reads past its input and never allocates more
// than that. Thread rules: pure functions.
#pragma once

#include <cstddef>
#include <span>

#include "base/result.h"
#include "wire/messages.h"

namespace kvcore::wire {

using Bytes = std::span<const std::byte>;

// InvalidArgument: the values do not fit the schema.
Result<std::vector<std::byte>> encode_body(const Message& message);
Result<Message> decode_body(Bytes body);

bool is_utf8(std::string_view s) noexcept;

}  // namespace kvcore::wire
