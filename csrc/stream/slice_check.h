// The header of every slice on its way: the sender stamps it, the receiver checks it before it
// counts the arrival. Structure (magic, class, layer, valid tokens, format, layout) is always
// checked; the xxh3-64 over the slice (with the checksum field as 0) by policy.
//
// A page that several streams send at once is stamped once: what was written for a full page of one
// generation is remembered, and stamped headers are not written again, so a peer that is just
// copying the slice never sees the checksum change under it. A page that is filled anew without
// being freed in between starts with its first token, which clears the header, and is stamped anew.
// Thread rules: one thread stamps (the endpoint's). Units: bytes, tokens.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/page_layout.h"
#include "base/result.h"
#include "pages/pool.h"
#include "stream/run.h"

namespace kvcore::stream {

enum class Checksums : std::uint8_t {
  kOff,      // headers say "not summed"; bytes are not verified
  kSampled,  // every slice is summed; verified one in 16, over tcp each
  kAll,      // every slice is summed and verified
};
inline constexpr std::int64_t kSampleEvery = 16;

// xxh3-64 over the slice with its checksum field as 0; never 0, which means "not summed".
std::uint64_t slice_checksum(std::span<const std::byte> slice);

// What the header of (layer, slot) must say. format: of the page's first K block.
SliceHeader expected_header(Format format, LayoutId layout, std::uint32_t class_id,
                            std::int32_t layer, std::int32_t valid_tokens);
// Puts a header on a slice whose body is in place; sum: with its checksum.
void write_header(std::span<std::byte> slice, SliceHeader header, bool sum);

// The sums of slices that come without headers: told by a message before or after the bytes.
class SliceSums {
 public:
  void put(const SliceRun& run, std::span<const std::uint64_t> sums);
  bool has(const SliceRun& run) const;
  std::uint64_t at(std::int32_t layer, std::int32_t slot) const;  // of a slice it has

 private:
  std::map<std::pair<std::int32_t, std::int32_t>, std::uint64_t> sums_;  // (layer, slot)
};

class SliceStamper {
 public:
  SliceStamper(std::shared_ptr<pages::Pool> pool, bool checksums);
  // pages, place: [shape.num_slots]; stamps the slices of the run, where they lay when the
  // hand-over began. Tokens of the run must all be in place.
  void stamp(std::span<const std::int32_t> pages, const Placement& place, const Shape& shape,
             const SliceRun& run);

 private:
  std::shared_ptr<pages::Pool> pool_;
  bool checksums_;
  std::vector<std::uint64_t> stamped_;  // [num_pages * num_layers]: generation + 1; 0 = never
};

// Corrupt, with the field and both values, unless the slice is what (layer, valid_tokens) asks for.
Status check_slice(std::span<const std::byte> slice, const SliceHeader& expected, bool verify_sum);

// A partly filled page goes on being written by its new owner: its checksum no longer holds.
void clear_checksum(std::byte* slice);

}  // namespace kvcore::stream
