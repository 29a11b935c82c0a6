#include "stream/conversion.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "stream/slice_check.h"

namespace kvcore::stream {

Conversion::Conversion(const StreamGrant& grant, std::size_t share, const Side& sender,
                       const pages::PageSpec& sender_spec, SourcePages source, bool sums)
    : shape_(grant.shape(share)),
      with_headers_(grant.with_headers()),
      sums_(sums),
      class_number_(grant.class_number),
      source_layer_(grant.shares[share].share.layers.begin - sender.layer_begin),
      target_layer_(grant.shares[share].share.layers.begin - grant.layer_begin),
      source_(std::move(source)),
      map_{sender.spec.page_size, grant.spec.page_size, grant.first_token, grant.num_tokens},
      open_(pages::PageClass::open(grant.page_class().spec())),
      sealed_(grant.page_class()),
      open_layers_(open_.layers(1)),
      sealed_layers_(sealed_.layers(1)),
      converter_(sender_spec, grant.shares[share].share.heads.begin - sender.head_begin,
                 sealed_.spec(), grant.shares[share].share.heads.begin - grant.head_begin,
                 grant.shares[share].share.heads.count) {
  largest_ = shape_.slice_bytes;
  for (const std::int64_t bytes : shape_.sealed_bytes) largest_ = std::max(largest_, bytes);
}

Status Conversion::write(const SliceRun& run, std::span<std::byte> out) {
  for (std::int32_t slot = run.first; slot < run.first + run.count; ++slot) {
    const auto bytes = static_cast<std::size_t>(shape_.bytes_of(run.layer, slot));
    const Status written = write_slot(run.layer, slot, out.first(bytes));
    if (!written) {
      return Error{ErrorCode::kUnsupported,
                   text("the receiver's page ", slot, ", layer=", target_layer_ + run.layer, " ",
                        written.error().message,
                        "; this request can be handed over to open pages of the sender's format")};
    }
    out = out.subspan(bytes);
  }
  return {};
}

Status Conversion::write_slot(std::int32_t layer, std::int32_t slot, std::span<std::byte> out) {
  if (!source_.place.sealed.empty() && source_.place.sealed[static_cast<std::size_t>(slot)]) {
    copy_packed(layer, slot, out);
    return {};
  }
  const SlotSource from = map_.source_of(slot);
  std::vector<const std::byte*> slices;
  for (std::int32_t page = from.first_page; page < from.first_page + from.num_pages; ++page) {
    slices.push_back(source_.arena + source_.place.at(page, source_layer_ + layer));
  }
  const auto& views = shape_.is_sealed(slot) ? sealed_layers_ : open_layers_;
  const HeadBlock* heads = views[static_cast<std::size_t>(target_layer_ + layer)].heads;
  const std::span<std::byte> blocks = with_headers_ ? out.subspan(kSliceHeaderBytes) : out;
  KVCORE_RETURN_IF_ERROR(
      converter_.convert({slices, from.first_token, from.num_tokens}, heads, blocks));
  if (!with_headers_) return {};
  const SliceHeader header = expected_header(heads[0].k_format, sealed_.spec().options().layout,
                                             shape_.is_sealed(slot) ? class_number_ : 0,
                                             target_layer_ + layer, from.num_tokens);
  write_header(out, header, sums_ || shape_.is_sealed(slot));
  return {};
}

// The codes of an equal class, under the receiver's number of it.
void Conversion::copy_packed(std::int32_t layer, std::int32_t slot,
                             std::span<std::byte> out) const {
  std::memcpy(out.data(), source_.arena + source_.place.at(slot, source_layer_ + layer),
              out.size());
  SliceHeader header;
  std::memcpy(&header, out.data(), sizeof(header));
  header.class_id = class_number_;
  write_header(out, header, true);
}

}  // namespace kvcore::stream
