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

std::vector<transport::Segment> segments_of(const SliceRun& run, std::int64_t slice_bytes,
                                            const Placement& local, const Placement& remote) {
  std::vector<transport::Segment> out;
  const auto bytes = static_cast<std::uint64_t>(slice_bytes);
  for (std::int32_t slot = run.first; slot < run.first + run.count; ++slot) {
    const auto i = static_cast<std::size_t>(slot);
    const auto from =
        static_cast<std::uint64_t>(local.offsets[i] + run.layer * local.layer_stride_bytes);
    const auto to =
        static_cast<std::uint64_t>(remote.offsets[i] + run.layer * remote.layer_stride_bytes);
    if (!out.empty() && out.back().local_offset + out.back().bytes == from &&
        out.back().remote_offset + out.back().bytes == to) {
      out.back().bytes += bytes;
    } else {
      out.push_back({from, to, bytes});
    }
  }
  return out;
}

std::vector<transport::Range> ranges_of(const Shape& shape, const Placement& place) {
  std::vector<transport::Range> all;
  all.reserve(static_cast<std::size_t>(shape.num_slices()));
  for (const std::int64_t offset : place.offsets) {
    for (std::int64_t layer = 0; layer < shape.num_layers; ++layer) {
      all.push_back({static_cast<std::uint64_t>(offset + layer * place.layer_stride_bytes),
                     static_cast<std::uint64_t>(shape.slice_bytes)});
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
