#include "stream/run.h"

#include <algorithm>

namespace kvcore::stream {
namespace {
constexpr int kSlotBits = 24;
constexpr std::uint64_t kSlotMask = (std::uint64_t{1} << kSlotBits) - 1;
}  // namespace

std::string to_hex(const RequestId& id) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(32);
  for (const std::byte b : id.bytes) {
    out += kDigits[std::to_integer<int>(b >> 4)];
    out += kDigits[std::to_integer<int>(b & std::byte{15})];
  }
  return out;
}

std::int32_t Shape::valid_tokens(std::int32_t slot) const noexcept {
  const std::int64_t left = num_tokens - std::int64_t{slot} * page_size;
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(left, 0, page_size));
}

std::int32_t Shape::ready_slots(std::int64_t tokens) const noexcept {
  if (tokens >= num_tokens) return num_slots;
  return tokens <= 0 ? 0 : static_cast<std::int32_t>(tokens / page_size);
}

bool Shape::contains(const SliceRun& run) const noexcept {
  return run.layer >= 0 && run.layer < num_layers && run.first >= 0 && run.count > 0 &&
         run.first < num_slots && run.count <= num_slots - run.first;
}

std::uint64_t tag_of(const SliceRun& run) noexcept {
  return static_cast<std::uint64_t>(run.layer) << (2 * kSlotBits) |
         static_cast<std::uint64_t>(run.first) << kSlotBits | static_cast<std::uint64_t>(run.count);
}

SliceRun run_of(std::uint64_t tag) noexcept {
  return {static_cast<std::int32_t>(tag >> (2 * kSlotBits)),
          static_cast<std::int32_t>((tag >> kSlotBits) & kSlotMask),
          static_cast<std::int32_t>(tag & kSlotMask)};
}

std::int64_t Shape::bytes_of(const SliceRun& run) const noexcept {
  std::int64_t bytes = 0;
  for (std::int32_t slot = run.first; slot < run.first + run.count; ++slot)
    bytes += bytes_of(run.layer, slot);
  return bytes;
}

std::int64_t Shape::kv_bytes() const noexcept {
  const auto compressed = std::count(sealed.begin(), sealed.end(), true);
  std::int64_t bytes = num_layers * (num_slots - compressed) * slice_bytes;
  for (const std::int64_t layer : sealed_bytes) bytes += compressed * layer;
  return bytes;
}

namespace {

void add_segment(std::vector<transport::Segment>& out, std::int64_t from, std::int64_t to,
                 std::int64_t bytes) {
  const transport::Segment next{static_cast<std::uint64_t>(from), static_cast<std::uint64_t>(to),
                                static_cast<std::uint64_t>(bytes)};
  if (!out.empty() && out.back().local_offset + out.back().bytes == next.local_offset &&
      out.back().remote_offset + out.back().bytes == next.remote_offset) {
    out.back().bytes += next.bytes;
  } else {
    out.push_back(next);
  }
}

}  // namespace

std::vector<transport::Segment> segments_of(const SliceRun& run, const Shape& shape,
                                            const Placement& local, const Placement& remote) {
  std::vector<transport::Segment> out;
  for (std::int32_t slot = run.first; slot < run.first + run.count; ++slot)
    add_segment(out, local.at(slot, run.layer), remote.at(slot, run.layer),
                shape.bytes_of(run.layer, slot));
  return out;
}

std::vector<transport::Segment> staged_segments(const SliceRun& run, const Shape& shape,
                                                std::int64_t local_offset,
                                                const Placement& remote) {
  std::vector<transport::Segment> out;
  for (std::int32_t slot = run.first; slot < run.first + run.count; ++slot) {
    const std::int64_t bytes = shape.bytes_of(run.layer, slot);
    add_segment(out, local_offset, remote.at(slot, run.layer), bytes);
    local_offset += bytes;
  }
  return out;
}

std::vector<transport::Range> ranges_of(const Shape& shape, const Placement& place) {
  std::vector<transport::Range> all;
  all.reserve(static_cast<std::size_t>(shape.num_slices()));
  for (std::int32_t slot = 0; slot < shape.num_slots; ++slot) {
    for (std::int32_t layer = 0; layer < shape.num_layers; ++layer) {
      all.push_back({static_cast<std::uint64_t>(place.at(slot, layer)),
                     static_cast<std::uint64_t>(shape.bytes_of(layer, slot))});
    }
  }
  std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.offset < b.offset; });
  std::vector<transport::Range> out;
  for (const auto& range : all) {
    if (!out.empty() && out.back().offset + out.back().bytes == range.offset) {
      out.back().bytes += range.bytes;
    } else {
      out.push_back(range);
    }
  }
  return out;
}

}  // namespace kvcore::stream
