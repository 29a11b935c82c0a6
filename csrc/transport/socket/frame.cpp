#include "transport/socket/frame.h"

#include <bit>
#include <string_view>

#include "base/printable.h"
#include "base/text.h"

namespace kvcore::transport {
namespace {

static_assert(std::endian::native == std::endian::little,
              "frames are copied as they lie in memory");

Error corrupt(std::string message) { return {ErrorCode::kCorrupt, std::move(message)}; }

// Splits head and table; the table must hold exactly `count(head)` items, at least one.
template <class Head, class Item, class Count>
Result<std::pair<Head, std::vector<Item>>> parse_table(Bytes body, std::size_t max_items,
                                                       Count count) {
  if (body.size() < sizeof(Head)) return corrupt("frame body too short");
  std::pair<Head, std::vector<Item>> out;
  std::memcpy(&out.first, body.data(), sizeof(Head));
  const Bytes table = body.subspan(sizeof(Head));
  const std::size_t n = table.size() / sizeof(Item);
  if (table.size() % sizeof(Item) != 0 || n == 0 || n > max_items || count(out.first) != n)
    return corrupt(text("frame table of ", table.size(), " bytes does not fit its head"));
  out.second.resize(n);
  std::memcpy(out.second.data(), table.data(), table.size());
  return out;
}

// Sum of piece sizes, or Corrupt when one is empty or the sum passes `max`.
template <class Item>
Result<std::uint64_t> total_bytes(const std::vector<Item>& items, std::uint64_t max) {
  std::uint64_t total = 0;
  for (const Item& item : items) {
    if (item.bytes == 0 || item.bytes > max - total) return corrupt("frame piece of a wrong size");
    total += item.bytes;
  }
  return total;
}

std::size_t most_body_bytes(const FramePrefix& p, std::size_t message_head) {
  switch (static_cast<FrameType>(p.type)) {
    case FrameType::kPing:
      return 0;
    case FrameType::kBye:
      return sizeof(ByeHead);
    case FrameType::kCredit:
      return sizeof(Credit);
    case FrameType::kMessage:
      return kMaxMessageBytes + message_head + ((p.flags & kFlagAnswer) != 0 ? sizeof(OpHead) : 0);
    default:
      return kMaxBodyBytes;
  }
}

}  // namespace

Status check_prefix(const FramePrefix& p, bool shm, std::size_t message_head) {
  if (p.magic != FramePrefix{}.magic) return corrupt("frame without the magic number");
  if (p.type == 0 || p.type > kLastFrameType)
    return corrupt(text("frame type ", static_cast<int>(p.type), " is unknown"));
  if (p.priority >= kNumPriorities)
    return corrupt(text("frame priority ", static_cast<int>(p.priority), " is unknown"));
  if ((p.flags & ~kAllFlags) != 0) return corrupt(text("frame flags ", p.flags, " are unknown"));
  const auto type = static_cast<FrameType>(p.type);
  if (p.body_bytes > most_body_bytes(p, message_head))
    return corrupt(
        text("frame type ", static_cast<int>(p.type), " with a body of ", p.body_bytes, " bytes"));
  const bool only_shm =
      (type >= FrameType::kReadGo && type <= FrameType::kRegionGone) || type >= FrameType::kBorrow;
  if (shm ? type == FrameType::kReadData : only_shm)
    return corrupt(text("frame type ", static_cast<int>(p.type), " does not belong to this link"));
  const bool payload = !shm && (type == FrameType::kWrite || type == FrameType::kReadData);
  if (payload ? p.payload_bytes == 0 || p.payload_bytes > kMaxPayloadBytes : p.payload_bytes != 0)
    return corrupt(text("frame payload of ", p.payload_bytes, " bytes is not allowed here"));
  return {};
}

Result<WriteFrame> parse_write(const FramePrefix& prefix, Bytes body, bool shm) {
  auto table = parse_table<WriteHead, Piece>(body, kMaxPieces,
                                             [](const WriteHead& h) { return h.num_pieces; });
  if (!table) return table.error();
  KVCORE_ASSIGN_OR_RETURN(const std::uint64_t total,
                          total_bytes(table->second, shm ? kMaxOpBytes : kMaxPayloadBytes));
  if (!shm && total != prefix.payload_bytes)
    return corrupt("write payload differs from its pieces");
  return WriteFrame{table->first, std::move(table->second)};
}

Result<DataFrame> parse_data(const FramePrefix& prefix, Bytes body) {
  auto table = parse_table<OpHead, DataPiece>(body, kMaxPieces, [&](const OpHead&) {
    return (body.size() - sizeof(OpHead)) / sizeof(DataPiece);
  });
  if (!table) return table.error();
  KVCORE_ASSIGN_OR_RETURN(const std::uint64_t total, total_bytes(table->second, kMaxPayloadBytes));
  if (total != prefix.payload_bytes) return corrupt("read payload differs from its pieces");
  return DataFrame{table->first, std::move(table->second)};
}

Result<ReadFrame> parse_read(Bytes body) {
  auto table = parse_table<ReadHead, Range>(body, kMaxSegments,
                                            [](const ReadHead& h) { return h.num_ranges; });
  if (!table) return table.error();
  KVCORE_ASSIGN_OR_RETURN([[maybe_unused]] const std::uint64_t total,
                          total_bytes(table->second, kMaxOpBytes));
  return ReadFrame{table->first, std::move(table->second)};
}

std::vector<std::byte> make_result(std::uint64_t op, const Status& status) {
  if (status.ok()) return make_body(ResultHead{op, 0});
  const std::string_view message =
      std::string_view(status.error().message).substr(0, kMaxResultText);
  return make_body(ResultHead{op, static_cast<std::uint64_t>(status.error().code) + 1},
                   std::span<const char>(message));
}

Result<ResultFrame> parse_result(Bytes body) {
  if (body.size() < sizeof(ResultHead)) return corrupt("result frame too short");
  ResultFrame out{};
  std::memcpy(&out.head, body.data(), sizeof out.head);
  if (out.head.code == 0) {
    if (body.size() != sizeof(ResultHead)) return corrupt("result frame too long");
    return out;
  }
  if (out.head.code - 1 > static_cast<std::uint64_t>(kLastErrorCode))
    return corrupt(text("result code ", out.head.code, " is unknown"));
  const Bytes rest = body.subspan(sizeof(ResultHead));
  if (rest.size() > kMaxResultText)
    return corrupt(text("result text of ", rest.size(), " bytes exceeds ", kMaxResultText));
  const std::string_view words(reinterpret_cast<const char*>(rest.data()), rest.size());
  out.status = Error{static_cast<ErrorCode>(out.head.code - 1), "by the peer: " + printable(words)};
  return out;
}

}  // namespace kvcore::transport
