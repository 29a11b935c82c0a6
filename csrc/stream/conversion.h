// Conversion: how one sender's share is made from its pages where they cannot be sent as they lie:
// for each of the receiver's (layer, slot) the bytes that belong there, whole slices with their
// header or the blocks of the share's KV heads.
// Thread rules: one thread. The pages' bytes must stay in place (io refs). Units: bytes, layers and
// slots of the share.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "pages/page_class.h"
#include "stream/convert.h"
#include "stream/grant.h"
#include "stream/plan.h"
#include "stream/run.h"

namespace kvcore::stream {

// Where the sender's pages lie; those that are sealed are compressed as the receiver wants them.
struct SourcePages {
  const std::byte* arena = nullptr;
  Placement place;
};

class Conversion {
 public:
  // The grant has been checked against `sender`. sums: headers get their checksum.
  Conversion(const StreamGrant& grant, std::size_t share, const Side& sender,
             const pages::PageSpec& sender_spec, SourcePages source, bool sums);
  Conversion(const Conversion&) = delete;
  Conversion& operator=(const Conversion&) = delete;
  // out: shape.bytes_of(run), the slots one after the other. Unsupported: a value that the format
  // of the receiver's page cannot hold; into open pages of the values' own format all can be sent.
  Status write(const SliceRun& run, std::span<std::byte> out);
  std::int64_t largest_slice_bytes() const noexcept { return largest_; }

 private:
  Status write_slot(std::int32_t layer, std::int32_t slot, std::span<std::byte> out);
  void copy_packed(std::int32_t layer, std::int32_t slot, std::span<std::byte> out) const;

  const Shape shape_;
  const bool with_headers_;
  const bool sums_;
  const std::uint32_t class_number_;
  const std::int32_t source_layer_;  // of the sender's pages: the share's layer 0
  const std::int32_t target_layer_;  // of the receiver's
  const SourcePages source_;
  const PageMap map_;
  const pages::PageClass open_, sealed_;  // the receiver's
  const std::vector<LayerView> open_layers_, sealed_layers_;
  Converter converter_;
  std::int64_t largest_ = 0;
};

}  // namespace kvcore::stream
