// PageClass: which format the K and the V of each (layer, KV head) have, and the bytes that follow.
// All pages of a class have the same bytes, so memory for a page is known before its data exist.
//
// A run = n consecutive pages of one sequence, layer-major: its layer l starts at
// n * (bytes of the slices of layers before l). Slices are 64 B aligned, runs as the spec says.
// Invariants: immutable after make(). Thread rules: a plain value. Units: bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/blake2b.h"
#include "base/page_layout.h"
#include "base/result.h"
#include "pages/page_spec.h"

namespace kvcore::pages {

struct HeadFormats {
  Format k;
  Format v;
  friend bool operator==(const HeadFormats&, const HeadFormats&) = default;
};

class PageClass {
 public:
  // formats: [num_layers][num_kv_heads]. Allowed are the spec's own format and, in packed layout and
  // for head_dims that are multiples of 8 up to 256, the codecs of the part.
  static Result<PageClass> make(const PageSpec& spec, std::span<const HeadFormats> formats);
  // The class of open pages: the spec's own format everywhere.
  static PageClass open(const PageSpec& spec);

  const PageSpec& spec() const noexcept { return spec_; }
  std::span<const HeadFormats> formats() const noexcept { return formats_; }
  bool is_open() const noexcept;  // nothing is compressed
  std::int64_t slice_bytes(std::int32_t layer) const noexcept;
  std::int64_t page_bytes() const noexcept;                      // all slices of one page
  std::int64_t run_bytes(std::int32_t num_pages) const noexcept;  // aligned as the spec says
  // The layers as kernels see them in runs of num_pages. Points into this object.
  std::vector<LayerView> layers(std::int32_t num_pages) const;
  // Canonical text of geometry and table, and its BLAKE2b-256: what peers and caches compare.
  std::string describe() const;
  Digest32 digest() const;

 private:
  PageClass(const PageSpec& spec, std::span<const HeadFormats> formats);

  PageSpec spec_;
  std::vector<HeadFormats> formats_;      // [num_layers * num_kv_heads]
  std::vector<HeadBlock> heads_;          // [num_layers * num_kv_heads]
  std::vector<std::int64_t> slice_ends_;  // [num_layers]: bytes of the slices up to this layer
};

}  // namespace kvcore::pages
