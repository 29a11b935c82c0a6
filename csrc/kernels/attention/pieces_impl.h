// The pieces of one step of attention: up to 64 tokens of one KV head, from one or more pages.
#pragma once

#include "kernels/attention/tile_impl.h"

namespace kvcore::kernels::KVCORE_ISA_NS {
namespace {

constexpr int kMaxPieces = 4;  // pages of 16 tokens in one step

// How one part of a piece comes to the tiles.
enum class Way : std::uint8_t {
  kInPlace,  // the page is what they read
  kPack,     // from canonical layout
  kCodes,    // codes, multiplied as integers where they lie
  kDecode,   // codes, turned into numbers first
};

struct Piece {  // consecutive tokens of one page inside one step, for one KV head
  const char* k;
  const char* v;
  std::int64_t v_tokens;  // tokens of the block by which V's dim blocks are strided
  std::int64_t v_first;   // of those, the piece's first
  std::int64_t k_ahead;  // bytes from K's rows to what is read next; 0: no need to say, see reach()
  std::int64_t v_ahead;
  int first, count;          // in the step
  int lanes;                 // tokens of one K block row
  std::int64_t v_row_bytes;  // of V kept token after token; 0: in dim blocks, as pages are
  Format k_format, v_format;
  const HeadBlock* head;
  Way k_way, v_way;
};

struct Step {
  Piece pieces[kMaxPieces];
  std::int32_t head;
  std::int64_t start;  // absolute token
  int num_pieces;
  bool p_pairs, p_floats;  // forms of p the pieces' V formats ask for
  bool plain;              // all pieces are numbers, read where they lie
  bool in_place;           // all pieces are read where they lie
  bool k_codes, v_codes;   // some piece's K or V is multiplied as integers
  bool hot;                // one page, in place, for hot_step_impl.h
  bool small;              // whole small pages of the same formats, for small_step_impl.h
};

inline std::int64_t bytes_of(Format f) { return f == Format::kF32 ? 4 : 2; }
inline std::int64_t bits_of(Format f) {
  switch (f) {
    case Format::kF32:
      return 32;
    case Format::kInt8:
    case Format::kFp8:
      return 8;
    case Format::kK4:
    case Format::kV4:
      return 4;
    case Format::kV3:
      return 3;
    default:
      return 16;
  }
}
inline bool takes_pairs(Format f) { return kBf16Pairs && f == Format::kBf16; }
constexpr bool is_rotated(Format f) { return f == Format::kV4 || f == Format::kV3; }
inline std::int64_t at_most(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

inline Way way_of(const ClassView& cls, Format f) {
  return f == Format::kFp8                 ? Way::kDecode
         : f > Format::kBf16               ? Way::kCodes
         : cls.layout == LayoutId::kPacked ? Way::kInPlace
                                           : Way::kPack;
}
inline bool read_in_place(Way way) { return way == Way::kInPlace || way == Way::kCodes; }

// A page of 64 tokens is read strictly forward. Smaller pages are read in turn, a K block of each
// and then a V block of each; of a page of 128 tokens first one half and then the other. When few
// rows share the bytes, the jumps cost more than the arithmetic, so the next run is fetched beside
// this one.
[[gnu::noinline]] void reach(const AttendUnit& u, const LayerView& layer, std::int32_t h,
                             Piece& p) {
  const std::int64_t page = u.pages->page_size;
  if ((u.t1 - u.t0) * u.group > kMaxRows) return;
  const HeadBlock& head = layer.heads[h];
  const std::int64_t end =
      h + 1 < u.pages->num_kv_heads ? layer.heads[h + 1].k_offset_bytes : layer.slice_bytes;
  const std::int64_t k_block = head.v_offset_bytes - head.k_offset_bytes;
  const std::int64_t v_block = end - head.v_offset_bytes;
  if (page < kStepTokens) {  // K, then V, then the next head's K
    p.k_ahead = k_block;
    p.v_ahead = v_block;
  } else {  // the other half, then the next head's first half
    const std::int64_t k_half = kStepTokens * u.pages->head_dim_k * bits_of(p.k_format) / 8,
                       v_half = kStepTokens * kDimBlock * bits_of(p.v_format) / 8;
    p.k_ahead = p.v_first == 0 ? k_half : k_block + v_block - k_half;
    p.v_ahead = p.v_first == 0 ? v_half : k_block + v_block - v_half;
  }
}

// Codes of 3 and 4 bits take so much arithmetic a byte that the hardware's own reading ahead stops
// in between; numbers are slower with it (measured).
constexpr std::int64_t kCodesAhead = 8192;

// Where the step's first page begins that some row sees: those before may be free.
inline std::int64_t first_piece(const AttendUnit& u, std::int64_t start) {
  if (u.first_seen <= start) return 0;
  const std::int64_t lanes = at_most(u.pages->page_size, kStepTokens);
  return at_most((u.first_seen - start) / lanes * lanes, kStepTokens - lanes);
}

inline bool is_hot(const AttendUnit& u, const Step& step) {
  const Piece& p = step.pieces[0];
  return u.pages->page_size == kStepTokens && u.pages->head_dim_v % kDimBlock == 0 &&
         step.in_place && p.k_format >= Format::kBf16 && p.v_format >= Format::kBf16;
}

inline bool same_formats(const HeadBlock& a, const HeadBlock& b) {
  return a.k_format == b.k_format && a.v_format == b.v_format;
}

inline bool is_small(const AttendUnit& u, const Step& step) {
  const std::int64_t page = u.pages->page_size;
  const HeadBlock& head = *step.pieces[0].head;
  if (page >= kStepTokens || step.num_pieces * page != kStepTokens || !step.in_place ||
      u.pages->head_dim_v % kDimBlock != 0 || head.k_format < Format::kBf16 ||
      head.v_format < Format::kBf16)
    return false;
  for (int i = 1; i < step.num_pieces; ++i)
    if (!same_formats(*step.pieces[i].head, head)) return false;
  return true;
}

// Finds the pieces of the step of KV head h that starts at absolute token `start`.
inline void locate(const AttendUnit& u, std::int32_t h, std::int64_t start, Step& step) {
  const PagesView& pv = *u.pages;
  const std::int64_t page = pv.page_size;
  step.head = h;
  step.start = start;
  step.num_pieces = 0;
  step.p_pairs = step.k_codes = step.v_codes = false;
  step.p_floats = u.masses != nullptr && page < kStepTokens;
  step.plain = step.in_place = true;
  const std::int64_t tokens = at_most(u.first_visible + u.t1 - 1 - start, kStepTokens);
  for (std::int64_t i = first_piece(u, start); i < tokens;) {
    const std::int64_t in_page = (start + i) % page;
    const PageRecord& record = pv.records[u.block_row[(start + i) / page]];
    const ClassView& cls = pv.classes[record.class_id];
    const LayerView& layer = cls.layers[u.layer];
    const HeadBlock& head = layer.heads[h];
    const char* slice = reinterpret_cast<const char*>(pv.arena) + record.offset_bytes +
                        layer.run_bytes + record.index * layer.slice_bytes;
    Piece& p = step.pieces[step.num_pieces++];
    p.first = static_cast<int>(i);
    p.lanes = static_cast<int>(at_most(page, kTokenBlock));
    p.count = p.lanes;  // steps and pages start at multiples of it
    p.k_format = head.k_format;
    p.v_format = head.v_format;
    p.k = slice + head.k_offset_bytes;
    p.v = slice + head.v_offset_bytes;
    p.k_ahead = p.v_ahead = 0;
    p.v_tokens = page;
    p.v_first = in_page;
    p.head = &head;
    p.v_row_bytes = 0;
    p.k_way = way_of(cls, p.k_format);
    p.v_way = way_of(cls, p.v_format);
    const bool in_place = read_in_place(p.k_way) && read_in_place(p.v_way);
    if (in_place && page != kStepTokens) reach(u, layer, h, p);
    if (page == kStepTokens && (u.t1 - u.t0) * u.group <= kMaxRows) {
      if (p.k_format == Format::kK4) p.k_ahead = kCodesAhead;
      if (is_rotated(p.v_format)) p.v_ahead = kCodesAhead;
    }
    step.in_place &= in_place;
    step.plain &= p.k_way == Way::kInPlace && p.v_way == Way::kInPlace;
    if (p.k_way == Way::kInPlace) p.k += in_page * pv.head_dim_k * bytes_of(p.k_format);
    step.k_codes |= p.k_way == Way::kCodes;
    step.v_codes |= p.v_way == Way::kCodes;
    (takes_pairs(p.v_format) ? step.p_pairs : step.p_floats) = true;
    i += p.count;
  }
  step.hot = is_hot(u, step);
  step.small = is_small(u, step);
}

// `p` of the next KV head, whose formats are equal.
inline void next_head(const Piece& p, Piece& to) {
  const HeadBlock &head = p.head[0], &next = p.head[1];
  to = p;
  to.head = &next;
  to.k += next.k_offset_bytes - head.k_offset_bytes;
  to.v += next.v_offset_bytes - head.v_offset_bytes;
}

// The same tokens of the next KV head, where these are whole pages in place and the formats are
// equal.
inline bool locate_next_head(const AttendUnit& u, const Step& from, Step& to) {
  if (u.pages->page_size > kStepTokens || !from.in_place) return false;
  for (int i = 0; i < from.num_pieces; ++i)
    if (!same_formats(from.pieces[i].head[0], from.pieces[i].head[1])) return false;
  to.head = from.head + 1;
  to.start = from.start;
  to.num_pieces = from.num_pieces;
  to.p_pairs = from.p_pairs;
  to.p_floats = from.p_floats;
  to.plain = from.plain;
  to.in_place = from.in_place;
  to.k_codes = from.k_codes;
  to.v_codes = from.v_codes;
  to.hot = from.hot;
  to.small = from.small;
  next_head(from.pieces[0], to.pieces[0]);
  for (int i = 1; i < from.num_pieces; ++i) next_head(from.pieces[i], to.pieces[i]);
  return true;
}

// Decodes the piece's K and turns it around: [Dk][count] floats.
inline void decode_k(const AttendUnit& u, Piece& p, char* to) {
  const std::int32_t dk = u.pages->head_dim_k;
  float* rows = u.scratch->decoded;
  u.decode({p.k, p.k_format, Part::kK, u.pages->page_size, dk, static_cast<std::int32_t>(p.v_first),
            p.count, DType::kF32, reinterpret_cast<char*>(rows), std::int64_t{dk} * 4});
  float* out = reinterpret_cast<float*>(to);
  for (std::int64_t t = 0; t < p.count; t += kW)
    for (std::int64_t d = 0; d < dk; d += kW) {
      F v[kW];
      for (int i = 0; i < kW; ++i) v[i] = load(rows + (t + i) * dk + d);
      transpose(v);
      for (int i = 0; i < kW; ++i) store(out + (d + i) * p.count + t, v[i]);
    }
  p.k = to;
  p.k_format = Format::kF32;
}

inline void decode_v(const AttendUnit& u, Piece& p, char* to) {
  const std::int32_t dv = u.pages->head_dim_v;
  p.v_row_bytes = std::int64_t{dv} * 4;
  u.decode({p.v, p.v_format, Part::kV, u.pages->page_size, dv, static_cast<std::int32_t>(p.v_first),
            p.count, DType::kF32, to, p.v_row_bytes});
  p.v = to;
  p.v_format = Format::kF32;
}

// Brings what the tiles cannot read in place into work memory.
void gather(const AttendUnit& u, Step& step) {
  const std::int32_t dk = u.pages->head_dim_k, dv = u.pages->head_dim_v;
  for (int i = 0; i < step.num_pieces; ++i) {
    Piece& p = step.pieces[i];
    char* k_out = u.scratch->packed + std::int64_t{p.first} * (dk + dv) * 4;
    char* v_out = k_out + std::int64_t{p.count} * dk * 4;
    if (p.k_way == Way::kDecode) decode_k(u, p, k_out);
    if (p.v_way == Way::kDecode) decode_v(u, p, v_out);
    if (p.k_way != Way::kPack) continue;  // canonical layout is a whole page's
    u.pack(p.k, p.v, p.v_first, p.count, dk, dv, *p.head, k_out, v_out);
    p.k = k_out;
    p.v = v_out;
    p.v_tokens = p.count;
    p.v_first = 0;
  }
}

}  // namespace
}  // namespace kvcore::kernels::KVCORE_ISA_NS
