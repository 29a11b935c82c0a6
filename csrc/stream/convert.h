// Conversion of a part of one slice on its way: KV heads cut out, other page size, layout and
// element format, and, where the receiver keeps the page compressed, its codes. What is written are
// the very bytes that lie in the receiver's page: those of a compressed page equal what
// compress::seal_pages makes of the same open page.
// Values between element formats are rounded to nearest even; a finite value that the receiver's
// format cannot hold, or a number that cannot be encoded, is InvalidArgument, never something else.
// Thread rules: one thread per Converter (it owns scratch). Units: tokens, bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/page_layout.h"
#include "base/result.h"
#include "pages/page_class.h"
#include "stream/plan.h"

namespace kvcore::stream {

// The sender's slices of one layer that hold the receiver's page (plan.h: SlotSource).
struct SourceSlices {
  std::span<const std::byte* const> slices;  // whole slices, in token order
  std::int64_t first_token = 0;              // in the first of them
  std::int64_t num_tokens = 0;
};

class Converter {
 public:
  // heads of the part: from from_head of the sender's pages, to to_head of the receiver's.
  Converter(const pages::PageSpec& from, std::int32_t from_head, const pages::PageSpec& to,
            std::int32_t to_head, std::int32_t num_heads);
  // target: the receiver's heads of this layer (open or compressed). Writes the K and V blocks of
  // the part's heads to out, which begins where the first of them does; tokens beyond the valid
  // ones are 0.
  Status convert(const SourceSlices& source, const HeadBlock* target, std::span<std::byte> out);

 private:
  // K or V of one head: where its blocks lie on both sides.
  struct Blocks {
    Part part;
    std::int64_t from_offset;  // in the sender's slices
    Format to_format;
    std::byte* to;
  };
  Status convert_blocks(const SourceSlices& source, const Blocks& blocks);
  void read_rows(const SourceSlices& source, const Blocks& blocks, std::byte* rows) const;
  Status write_block(const Blocks& blocks, const std::byte* rows) const;
  std::int64_t dim_of(Part part) const noexcept;

  const pages::PageSpec from_;
  const pages::PageSpec to_;
  const std::int32_t from_head_;
  const std::int32_t to_head_;
  const std::int32_t num_heads_;
  std::vector<std::byte> from_rows_, to_rows_;  // [to.page_size][dim] and room to align
};

}  // namespace kvcore::stream
