// How kernels see pages: the vocabulary shared by pages (which owns it), kernels and stream.
//
// slice(page, layer)  = arena + record.offset_bytes + layer.run_bytes + record.index * layer.slice_bytes
//                     = SliceHeader (64 B), then per KV head its K block, then its V block,
// where record = records[page] and layer = classes[record.class_id].layers[layer].
// A head block's layout (LayoutId), with P = page_size tokens and D = head_dim:
//   canonical  K [P][Dk], V [P][Dv]
//   packed     tokens in blocks of TB = min(P, 64), dims of V in blocks of DB = min(Dv - first, 64):
//     bf16     K [P/TB][Dk/2][TB][2]                V per dim block: [P/2][DB][2]
//     f16,f32  K [P/TB][Dk][TB]                     V per dim block: [P][DB]
//   so QK reads tokens as lanes, PV reads dims as lanes, and both read strictly forward.
// Invariants: offsets are int64 bytes; slices are 64 B aligned; frames 4 KiB, or 64 B where the
// spec says so (private head pages).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcore {

// Elements (f32, f16, bf16) stand alone; the others are codes of a whole page of one head, with
// scales in front (base/block_arrays.h, docs/formats.md), and exist in packed layout only.
enum class Format : std::uint8_t {
  kF32 = 0,
  kF16 = 1,
  kBf16 = 2,
  kFp8 = 3,
  kInt8 = 4,
  kK4 = 5,  // keys only
  kV4 = 6,  // values only
  kV3 = 7,  // values only
};
enum class Part : std::uint8_t { kK, kV };
enum class LayoutId : std::uint8_t { kCanonical = 0, kPacked = 1 };

constexpr std::int64_t kSliceHeaderBytes = 64;
constexpr std::int64_t kFrameAlignBytes = 4096;
constexpr std::int64_t kTokenBlock = 64;  // TB: tokens of one K block row
constexpr std::int64_t kDimBlock = 64;    // DB: dims of one V block row
constexpr std::uint32_t kSliceMagic = 0x3143564bu;  // "KVC1"

// Written when a slice's first token is appended; checksum and valid_tokens when it is sealed or sent.
struct SliceHeader {
  std::uint32_t magic;
  std::uint32_t class_id;
  std::uint16_t layer;
  std::uint16_t valid_tokens;
  Format format;
  LayoutId layout;
  std::uint16_t reserved0;
  std::uint64_t checksum;  // xxh3-64 over the slice with this field as 0; 0 = not sealed
  std::uint8_t reserved1[40];
};
static_assert(sizeof(SliceHeader) == kSliceHeaderBytes);

struct PageRecord {
  std::int64_t offset_bytes;  // of the page's run, from the arena's base
  std::int32_t class_id;
  std::int32_t index;  // of the page in its run
};

// One KV head inside a slice: where its K and V lie and in which format. Kernels dispatch on this.
struct HeadBlock {
  std::int64_t k_offset_bytes;  // from the slice's start
  std::int64_t v_offset_bytes;
  Format k_format;
  Format v_format;
  // V at K's own offset: latent attention, V is the first dims of K and never written apart.
  // Bytes between tokens of a canonical block; 0: head_dim values, as in our own pages.
  std::int64_t k_row_bytes = 0;
  std::int64_t v_row_bytes = 0;
};

// One layer of a page class. Pages lie in runs of consecutive pages of one sequence, layer-major: all
// of a run's slices of layer 0, then those of layer 1, ...
struct LayerView {
  std::int64_t run_bytes;    // from the run's start to this layer's first slice
  std::int64_t slice_bytes;  // between the slices of consecutive pages
  const HeadBlock* heads;    // [num_kv_heads]
};

// A page class as kernels read it.
struct ClassView {
  const LayerView* layers;  // [num_layers]
  LayoutId layout;
  bool has_headers;  // false: blocks of another engine's tensors, which start with data
};

// Everything a kernel needs to find bytes. The pool owns the memory behind it.
struct PagesView {
  std::byte* arena;           // base address
  const PageRecord* records;  // [num_pages]
  const ClassView* classes;   // [num_classes]
  std::int64_t num_pages;
  std::int32_t num_classes;
  std::int32_t num_layers;
  std::int32_t num_kv_heads;
  std::int32_t head_dim_k;
  std::int32_t head_dim_v;
  std::int32_t page_size;
};

}  // namespace kvcore
