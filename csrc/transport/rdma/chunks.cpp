#include "transport/rdma/chunks.h"

#include <algorithm>

#include "base/text.h"

namespace kvcore::transport::rdma {
namespace {

constexpr bool inside(std::uint64_t offset, std::uint64_t bytes, const RemoteRange& r) noexcept {
  return offset >= r.offset && offset - r.offset <= r.bytes &&
         bytes <= r.bytes - (offset - r.offset);
}

// The index of the range that holds all of [offset, offset + bytes).
Result<std::size_t> find_range(std::span<const RemoteRange> ranges, std::uint64_t offset,
                               std::uint64_t bytes) {
  const auto after = std::ranges::upper_bound(ranges, offset, {}, &RemoteRange::offset);
  if (after != ranges.begin()) {
    const auto index = static_cast<std::size_t>(after - ranges.begin()) - 1;
    if (inside(offset, bytes, ranges[index])) return index;
  }
  return invalid_argument(
      text("segment remote_offset=", offset, " bytes=", bytes, " is not inside one granted range"));
}

class Cutter {
 public:
  Cutter(std::span<const RailMap> rails, std::uint64_t most)
      : rails_(rails), most_(most), load_(rails.size(), 0) {
    max_pieces_ = std::ranges::min(rails, {}, &RailMap::max_pieces).max_pieces;
  }

  void add(const std::byte* local, std::size_t range, std::uint64_t offset, std::uint64_t bytes) {
    auto at = reinterpret_cast<std::uint64_t>(local);
    while (bytes > 0) {
      if (!continues(range, offset, at)) begin(range, offset);
      const std::uint64_t n = std::min(bytes, most_ - open_.bytes);
      append(at, n);
      at += n;
      offset += n;
      bytes -= n;
    }
  }

  ChunkPlan finish() {
    close();
    std::uint32_t seen = 0;
    for (auto it = plan_.chunks.rbegin(); it != plan_.chunks.rend(); ++it) {
      it->last_of_rail = (seen & 1U << it->rail) == 0;
      seen |= 1U << it->rail;
    }
    plan_.rails = seen;
    return std::move(plan_);
  }

 private:
  bool continues(std::size_t range, std::uint64_t offset, std::uint64_t local) const {
    if (open_.num_pieces == 0 || range != range_ || offset != end_ || open_.bytes == most_)
      return false;
    const LocalPiece& last = plan_.pieces.back();
    return last.address + last.bytes == local || open_.num_pieces < max_pieces_;
  }

  void begin(std::size_t range, std::uint64_t offset) {
    close();
    range_ = range;
    begin_ = end_ = offset;
    open_.first_piece = static_cast<std::uint32_t>(plan_.pieces.size());
  }

  void append(std::uint64_t local, std::uint64_t bytes) {
    const auto n = static_cast<std::uint32_t>(bytes);
    LocalPiece* last = open_.num_pieces == 0 ? nullptr : &plan_.pieces.back();
    if (last != nullptr && last->address + last->bytes == local) {
      last->bytes += n;
    } else {
      plan_.pieces.push_back({local, n, 0});
      ++open_.num_pieces;
    }
    open_.bytes += n;
    end_ += bytes;
  }

  // The rail with the least to do takes the open chunk.
  void close() {
    if (open_.num_pieces == 0) return;
    const auto least = static_cast<std::size_t>(std::ranges::min_element(load_) - load_.begin());
    const RailMap& rail = rails_[least];
    const RemoteRange& range = rail.ranges[range_];
    load_[least] += open_.bytes;
    open_.rail = rail.rail;
    open_.remote_address = range.address + (begin_ - range.offset);
    open_.remote_key = range.key;
    for (std::uint32_t i = 0; i < open_.num_pieces; ++i)
      plan_.pieces[open_.first_piece + i].key = rail.local_key;
    plan_.chunks.push_back(open_);
    open_ = {};
  }

  std::span<const RailMap> rails_;
  std::uint64_t most_;
  std::vector<std::uint64_t> load_;
  std::uint32_t max_pieces_ = 1;
  ChunkPlan plan_;
  Chunk open_;
  std::size_t range_ = 0;
  std::uint64_t begin_ = 0, end_ = 0;
};

}  // namespace

Result<ChunkPlan> cut(const std::byte* base, std::span<const Segment> segments,
                      std::uint64_t total_bytes, std::span<const RailMap> rails) {
  const std::uint64_t share = total_bytes / rails.size();
  Cutter cutter(rails, std::clamp(share, kLeastChunkBytes, kMostChunkBytes));
  for (const Segment& s : segments) {
    KVCORE_ASSIGN_OR_RETURN(const std::size_t range,
                            find_range(rails[0].ranges, s.remote_offset, s.bytes));
    cutter.add(base + s.local_offset, range, s.remote_offset, s.bytes);
  }
  return cutter.finish();
}

}  // namespace kvcore::transport::rdma
