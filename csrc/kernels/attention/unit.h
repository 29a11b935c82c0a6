// The argument structs between the plan (any instruction set) and the per-ISA kernels.
// Plain data only: these headers are compiled with wide instructions, where no std type may appear.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/page_layout.h"
#include "kernels/formats/block.h"

namespace kvcore::kernels {

constexpr std::int64_t kStepTokens = 64;  // tokens of one online softmax step
constexpr std::int64_t kSegmentTokens =
    1024;  // tokens of one independent softmax, at absolute positions
constexpr int kMaxLanes = 16;

// An online softmax that has seen some tokens: out = o / l, lse = m ln 2 + ln l.
struct RowSums {
  float* o;  // [R][Dv]
  float* m;  // [R] maximum, base 2; -inf: nothing seen
  float* l;  // [R] sum of 2^(score - m)
};

// Work memory of one thread; every pointer 64 B aligned. R = rows of the largest unit.
struct Scratch {
  float* q_floats;         // [R][Dk]
  std::uint32_t* q_pairs;  // [R][Dk / 2], bf16 pairs
  RowSums segment;         // l is set at its end, from l_lanes
  float* l_lanes;          // [R][kMaxLanes] running sums, one per lane
  float* out;              // [R][Dv] of the segments so far, normalised
  float* lse;              // [R]
  // [64][Dk + Dv] floats: what the tiles cannot read in place, packed on the fly, and [64][Dk]
  // floats on the way there.
  char* packed;
  float* decoded;
  // Queries as 16-bit integers, for int8's codes: their factor, and -128 times their sum.
  std::int16_t* q_words;       // [R][Dk]
  float* q_factor;             // [R]
  std::int32_t* q_bias;        // [R]
  float* rotated;              // [R][Dv] sums over v4 and v3, turned back when a segment ends
  std::int64_t* rotated_from;  // [KV heads] absolute token from which there are some
};

// Packs `count` tokens (16, 32 or 64) of a canonical head block, from token `first`, into blocks
// that read like a page of `count` tokens: K [Dk/..][count].., V per dim block.
using PackTokens = void (*)(const char* k, const char* v, std::int64_t first, std::int64_t count,
                            std::int32_t head_dim_k, std::int32_t head_dim_v, const HeadBlock& head,
                            char* k_out, char* v_out);

// Turns codes of a page into rows of numbers; of the level in use, like the kernel itself.
using DecodeTokens = void (*)(const DecodeBlock&);

// Where a fold finds the rows of one segment: rows [head][tokens][group] from `row` on, of which
// this unit's tokens are those from `token` on.
struct PartialRef {
  std::int64_t row;
  std::int32_t tokens;
  std::int32_t token;
};

// Query tokens [t0, t1) of one sequence times the q heads of KV heads [h0, h1), over segments
// [segment0, segment1). Rows are ordered [KV head][token][q head of the group].
struct AttendUnit {
  const PagesView* pages;
  const std::int32_t* block_row;  // [pages of the sequence]
  const std::int32_t* tokens;     // [t1] where token t lies in q; null: at t
  std::int32_t layer;
  DType dtype;              // of q and out
  const char* q;            // the sequence's token 0: [q_len][Hq][Dk]
  std::int64_t q_stride;    // elements between tokens
  char* out;                // [q_len][Hq][Dv]
  std::int64_t out_stride;  // elements between tokens
  float* lse;               // [q_len][Hq], or null
  std::int32_t num_q_heads;
  std::int32_t group;  // q heads per KV head
  std::int64_t t0, t1;
  std::int32_t h0, h1;
  std::int64_t first_visible;  // tokens that token 0 of the sequence sees; may be <= 0
  std::int64_t segment0, segment1;
  std::int64_t window;      // tokens that a row sees, its own the last; 0: all up to its own
  std::int64_t first_seen;  // the first token that some row sees; pages before it may be gone
  // Scores times scale_log2 are in base 2. With a soft cap c: tanh of the score is, which
  // cap_log2 = 2 scale log2(e) / c brings about, and scale_log2 is c log2(e).
  float scale_log2, cap_log2;
  bool k_pairs, k_floats, k_words;  // which forms of q the pages' K formats may ask for
  // o null: fold the segments and write out. Otherwise attend_unit leaves one RowSums a segment
  // from partial_row on, each partial_rows apart, and fold_unit reads those of refs [segments].
  RowSums partials;
  std::int64_t partial_row, partial_rows;
  const PartialRef* refs;
  // Attention mass for page scores; null: not wanted. From masses + mass_at[token of q] on lie, of
  // each step from the sequence's first, rows of mass_stride q heads: the running maximum of each
  // head, then the sums of 2^(score - maximum) of each of the step's pages.
  float* masses;
  const std::int64_t* mass_at;
  std::int64_t mass_stride;
  const Scratch* scratch;
  PackTokens pack;
  DecodeTokens decode;
};

// out[i] = the probability mass of page page0 + i, of all q heads together.
struct ScorePages {
  const float* masses;  // of one token, as attend_unit leaves them
  std::int64_t mass_stride;
  const float* lse;  // [num_q_heads]
  float* work;       // [mass_stride]
  float* out;        // [page1 - page0]
  std::int32_t num_q_heads;
  std::int32_t page_size;
  std::int64_t page0, page1;
  std::int64_t steps;  // that there are
};

// out = merge of a and b, row by row; an empty part (lse -inf) leaves the other bit for bit.
struct MergeRows {
  const float* out_a;  // [rows][dim]
  const float* lse_a;  // [rows], natural log
  const float* out_b;
  const float* lse_b;
  float* out;  // may be out_a
  float* lse;  // may be lse_a
  std::int64_t rows;
  std::int32_t dim;  // a multiple of 16
};

}  // namespace kvcore::kernels
