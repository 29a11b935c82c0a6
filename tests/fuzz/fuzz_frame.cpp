// The prefix and every body of a socket link's frame (transport/frame.h).
// Input: shm u8, type u8 of the parser, prefix, body.
#include "fuzz.h"
#include "transport/socket/frame.h"

namespace kvcore::fuzz {
namespace {

using namespace transport;

template <class Items>
std::uint64_t total_of(const Items& items) {
  std::uint64_t total = 0;
  for (const auto& item : items) {
    require(item.bytes > 0, "no piece is empty");
    require(item.bytes <= kMaxOpBytes, "no piece is beyond an operation");
    total += item.bytes;
  }
  return total;
}

void parse_body(const FramePrefix& prefix, Input body, bool shm) {
  if (auto frame = parse_write(prefix, body, shm); frame.ok()) {
    require(frame->pieces.size() == frame->head.num_pieces, "a write has its number of pieces");
    require(frame->pieces.size() <= kMaxPieces, "a write has at most kMaxPieces");
    const std::uint64_t total = total_of(frame->pieces);
    require(shm ? total <= kMaxOpBytes : total == prefix.payload_bytes, "pieces fill the payload");
    require(make_body(frame->head, std::span<const Piece>(frame->pieces)) ==
                std::vector<std::byte>(body.begin(), body.end()),
            "a write that was parsed is made again byte for byte");
  }
  if (auto frame = parse_data(prefix, body); frame.ok())
    require(total_of(frame->pieces) == prefix.payload_bytes, "data pieces fill the payload");
  if (auto frame = parse_read(body); frame.ok()) {
    require(frame->ranges.size() <= kMaxSegments, "a read has at most kMaxSegments");
    require(total_of(frame->ranges) <= kMaxOpBytes, "a read has at most kMaxOpBytes");
  }
  if (auto frame = parse_result(body); frame.ok()) {
    require(frame->status.ok() == (frame->head.code == 0), "a result's code is its status");
    if (!frame->status.ok()) {
      for (const char c : frame->status.error().message)
        require(static_cast<unsigned char>(c) < 0x80, "a peer's words are plain text");
      require(!to_string(frame->status.error().code).empty(), "a result's code has a name");
    }
  }
  (void)parse_head<OpHead>(body).ok();
  (void)parse_head<GoHead>(body).ok();
  (void)parse_head<RegionHead>(body).ok();
}

Seed seed(bool shm, FrameType type, std::vector<std::byte> body, std::uint32_t payload,
          std::uint16_t flags = 0) {
  FramePrefix prefix;
  prefix.type = static_cast<std::uint8_t>(type);
  prefix.flags = flags;
  prefix.body_bytes = static_cast<std::uint32_t>(body.size());
  prefix.payload_bytes = payload;
  return Builder().number(shm).number(prefix).raw(body).take();
}

}  // namespace

void run(Input input) {
  Choices in(input);
  const bool shm = (in.number() & 1) != 0;
  const auto prefix = in.number<FramePrefix>();
  if (check_prefix(prefix, shm).ok()) {
    require(prefix.type >= 1 && prefix.type <= kLastFrameType, "a frame has a known type");
    require(prefix.priority < kNumPriorities, "a frame has a known class");
    require(prefix.body_bytes <= kMaxBodyBytes, "a body has a limit");
    require(prefix.payload_bytes <= kMaxPayloadBytes, "a payload has a limit");
    require(!shm || prefix.payload_bytes == 0, "shm frames have no payload");
  }
  parse_body(prefix, in.rest(), shm);
}

std::vector<Seed> seeds() {
  const GrantRef grant{0x1122334455667788U, 9};
  const Piece pieces[] = {{0, 100, 7}, {4096, 28, 9}};
  const DataPiece data[] = {{64, 1}, {64, 2}};
  const Range ranges[] = {{0, 10}, {1 << 20, 4096}};
  const auto write = make_body(WriteHead{1, grant, 77, 3, 2}, std::span<const Piece>(pieces));
  return {
      seed(false, FrameType::kPing, {}, 0),
      seed(false, FrameType::kMessage, std::vector<std::byte>(20, std::byte{'m'}), 0),
      seed(false, FrameType::kWrite, write, 128, kFlagLast),
      seed(true, FrameType::kWrite, write, 0, kFlagLast | kFlagUnchecked),
      seed(false, FrameType::kResult, make_result(1, {}), 0),
      seed(false, FrameType::kResult, make_result(1, invalid_argument("no such \xff range")), 0),
      seed(false, FrameType::kReadRequest,
           make_body(ReadHead{2, grant, 2}, std::span<const Range>(ranges)), 0),
      seed(false, FrameType::kReadData, make_body(OpHead{2}, std::span<const DataPiece>(data)),
           128),
      seed(true, FrameType::kReadGo, make_body(GoHead{2, 1}), 0),
      seed(true, FrameType::kRegion, make_body(RegionHead{1, 4096}), 0),
      seed(true, FrameType::kBye, {}, 0),
  };
}

}  // namespace kvcore::fuzz
