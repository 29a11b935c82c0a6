// What a hand-over moves. A slot is a page's position inside one hand-over (0 = the first page of
// the range); a run is consecutive slots of one layer; the unit below is always the whole slice.
// A run travels as one tagged write; the tag names the run, so arrivals may come in any order.
// Thread rules: plain values. Units: tokens, bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/page_layout.h"
#include "transport/link.h"

namespace kvcore::stream {

struct RequestId {
  std::array<std::byte, 16> bytes{};
  friend bool operator==(const RequestId&, const RequestId&) = default;
  friend auto operator<=>(const RequestId&, const RequestId&) = default;
};
std::string to_hex(const RequestId& id);

struct SliceRun {
  std::int32_t layer = 0;
  std::int32_t first = 0;  // slot
  std::int32_t count = 0;
  friend bool operator==(const SliceRun&, const SliceRun&) = default;
};

// What one sender moves, counted in the receiver's pages: its part of each slice (run.h's unit) is
// the whole slice with its header, or the blocks of some KV heads where several senders share it.
struct Shape {
  std::int32_t num_layers = 0;
  std::int32_t num_slots = 0;
  std::int32_t page_size = 0;   // tokens
  std::int64_t num_tokens = 0;  // (num_slots - 1) * page_size < num_tokens <= num_slots * page_size
  std::int64_t slice_bytes = 0;  // of open pages: of the part of a slice that moves
  // Pages the receiver keeps compressed: which slots, and the bytes of each layer. Empty: none.
  std::vector<bool> sealed{};                // [num_slots]
  std::vector<std::int64_t> sealed_bytes{};  // [num_layers]

  std::int32_t valid_tokens(std::int32_t slot) const noexcept;
  // Slots that are ready once the first `tokens` tokens are there: the last, partly filled page
  // counts only when the range is complete, so a page is never rewritten after it was published.
  std::int32_t ready_slots(std::int64_t tokens) const noexcept;
  std::int64_t num_slices() const noexcept { return std::int64_t{num_layers} * num_slots; }
  std::int64_t kv_bytes() const noexcept;
  bool is_sealed(std::int32_t slot) const noexcept {
    return !sealed.empty() && sealed[static_cast<std::size_t>(slot)];
  }
  std::int64_t bytes_of(std::int32_t layer, std::int32_t slot) const noexcept {
    return is_sealed(slot) ? sealed_bytes[static_cast<std::size_t>(layer)] : slice_bytes;
  }
  std::int64_t bytes_of(const SliceRun& run) const noexcept;  // of a run inside the shape
  bool contains(const SliceRun& run) const noexcept;
};

inline constexpr std::int32_t kMaxSlots = 1 << 15;  // 2 M tokens of 64-token pages
inline constexpr std::int32_t kMaxLayers = 1 << 12;

std::uint64_t tag_of(const SliceRun& run) noexcept;
SliceRun run_of(std::uint64_t tag) noexcept;  // any tag gives some run: check Shape::contains

// Where one side's parts of slices lie: offset of (slot, layer) = offsets[slot] + layer *
// layer_stride of open pages, offsets[slot] + sealed_layers[layer] of compressed ones.
struct Placement {
  std::vector<std::int64_t> offsets;  // [num_slots], bytes from the region's start, of layer 0
  std::int64_t layer_stride_bytes = 0;
  std::vector<bool> sealed{};                 // [num_slots]; empty: none
  std::vector<std::int64_t> sealed_layers{};  // [num_layers]

  std::int64_t at(std::int32_t slot, std::int32_t layer) const noexcept {
    const auto i = static_cast<std::size_t>(slot);
    const bool compressed = !sealed.empty() && sealed[i];
    return offsets[i] + (compressed ? sealed_layers[static_cast<std::size_t>(layer)]
                                    : layer * layer_stride_bytes);
  }
};

// The write of one run: slots adjacent on both sides become one segment.
std::vector<transport::Segment> segments_of(const SliceRun& run, const Shape& shape,
                                            const Placement& local, const Placement& remote);
// The same from one piece of memory that holds the run's parts one after the other.
std::vector<transport::Segment> staged_segments(const SliceRun& run, const Shape& shape,
                                                std::int64_t local_offset, const Placement& remote);
// The ranges of all slices of a placement, merged: one per whole frame.
std::vector<transport::Range> ranges_of(const Shape& shape, const Placement& place);

}  // namespace kvcore::stream
