// The plan of a hand-over between unlike workers: which sender gives which layers and KV heads of
// what a receiver holds, and how its bytes get there. Pure: it looks at what the sides say of
// themselves, never at a page.
//
// Layers and KV heads are counted in the model: a rank of tensor parallelism holds some of the
// heads, a pipeline stage some of the layers. With more ranks than KV heads the ranks hold
// replicas, and so do all ranks of a latent (MLA) cache; then one replica gives each receiver what
// it needs, not always the same one. Thread rules: plain values and pure functions. Units: layers,
// KV heads, tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "pages/page_spec.h"

namespace kvcore::stream {

struct Range32 {
  std::int32_t begin = 0;
  std::int32_t count = 0;
  std::int32_t end() const noexcept { return begin + count; }
  bool contains(const Range32& r) const noexcept { return r.begin >= begin && r.end() <= end(); }
  friend bool operator==(const Range32&, const Range32&) = default;
};

// What the pages of one worker hold. spec's num_layers and num_kv_heads are the worker's own.
struct Side {
  pages::PageSpecOptions spec;
  std::int32_t layer_begin = 0;  // the model's layer that is the worker's layer 0
  std::int32_t head_begin = 0;   // the model's KV head that is the worker's head 0
  Range32 layers() const noexcept { return {layer_begin, spec.num_layers}; }
  Range32 heads() const noexcept { return {head_begin, spec.num_kv_heads}; }
};

// What one sender gives of a receiver's pages, in the model's counting.
struct Share {
  Range32 layers;
  Range32 heads;
  friend bool operator==(const Share&, const Share&) = default;
};

struct PlannedShare {
  std::int32_t sender = 0;  // index
  Share share;
  friend bool operator==(const PlannedShare&, const PlannedShare&) = default;
};

// The KV heads of `rank` of `degree` where a model has num_kv_heads: an equal share, or one replica
// where there are more ranks than heads. Unsupported unless one number divides the other.
Result<Range32> heads_of_rank(std::int32_t num_kv_heads, std::int32_t degree, std::int32_t rank);

// The shares that together are all of what `receiver` holds, each (layer, KV head) exactly once.
// spread: any number, such as the receiver's rank; of several senders that hold the same it chooses
// one, so that not all receivers read the first. Unsupported, with the field, both values and what
// is allowed, where the sides' KV differs in more than place, or nobody holds a layer or head.
Result<std::vector<PlannedShare>> plan_shares(std::span<const Side> senders, const Side& receiver,
                                              std::uint32_t spread = 0);

// Whether KV of one side can become KV of the other: head_dims and latency equal, page size, layout
// and element format free.
Status check_convertible(const pages::PageSpecOptions& sender,
                         const pages::PageSpecOptions& receiver);

// Ok where `shares` (in any order) are exactly what `receiver` holds; else InvalidArgument names a
// layer and head that is missing or there twice.
Status check_cover(std::span<const Share> shares, const Side& receiver);

// How a part travels.
enum class Way : std::uint8_t {
  kWhole,    // slices as they lie in the sender's pages, headers included
  kHeads,    // blocks of KV heads as they lie there; the receiver makes the headers
  kConvert,  // through the sender's staging memory: another page size, layout or element format
};
// with_header: the part is all the receiver gets, so its slices come with their headers. Where
// pages are to arrive compressed, those are converted whatever the way of the others.
Way way_of(const Side& sender, const Side& receiver, const Share& share, bool with_header);

// Where the tokens of one of the receiver's pages lie in the sender's.
struct SlotSource {
  std::int32_t first_page = 0;  // position in the sender's list of pages
  std::int32_t num_pages = 0;
  std::int32_t first_token = 0;  // in the first of them
  std::int32_t num_tokens = 0;   // of the receiver's page
  friend bool operator==(const SlotSource&, const SlotSource&) = default;
};

// A range of tokens in pages of two sizes. The receiver's begins on one of its pages; the sender
// lists its pages from the one that holds first_token.
struct PageMap {
  std::int32_t from_page_size = 0;
  std::int32_t to_page_size = 0;
  std::int64_t first_token = 0;  // of the sequence
  std::int64_t num_tokens = 0;
  std::int64_t num_source_pages() const noexcept;
  SlotSource source_of(std::int32_t slot) const noexcept;
};

}  // namespace kvcore::stream
