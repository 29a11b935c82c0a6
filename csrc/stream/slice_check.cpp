#include "stream/slice_check.h"

#include <cstddef>
#include <cstring>

#include "base/text.h"
#include "base/xxh3.h"

namespace kvcore::stream {
namespace {

SliceHeader load_header(const std::byte* slice) {
  SliceHeader h;
  std::memcpy(&h, slice, sizeof(h));
  return h;
}

std::uint64_t checksum_of(SliceHeader header, std::span<const std::byte> body) {
  header.checksum = 0;
  Xxh3 hash;
  hash.update(std::as_bytes(std::span(&header, 1)));
  hash.update(body);
  const std::uint64_t sum = hash.digest();
  return sum == 0 ? 1 : sum;
}

// Written again since (an append at the first token clears the header), a page must be summed anew.
bool is_stamped(const std::byte* slice, SliceHeader expected, bool checksums) {
  const SliceHeader h = load_header(slice);
  expected.checksum = h.checksum;
  return std::memcmp(&h, &expected, sizeof(h)) == 0 && (h.checksum != 0) == checksums;
}

}  // namespace

std::uint64_t slice_checksum(std::span<const std::byte> slice) {
  return checksum_of(load_header(slice.data()), slice.subspan(sizeof(SliceHeader)));
}

SliceHeader expected_header(Format format, LayoutId layout, std::uint32_t class_id,
                            std::int32_t layer, std::int32_t valid_tokens) {
  SliceHeader h{};
  h.magic = kSliceMagic;
  h.class_id = class_id;
  h.layer = static_cast<std::uint16_t>(layer);
  h.valid_tokens = static_cast<std::uint16_t>(valid_tokens);
  h.format = format;
  h.layout = layout;
  return h;
}

void write_header(std::span<std::byte> slice, SliceHeader header, bool sum) {
  header.checksum = sum ? checksum_of(header, slice.subspan(sizeof(header))) : 0;
  std::memcpy(slice.data(), &header, sizeof(header));
}

void SliceSums::put(const SliceRun& run, std::span<const std::uint64_t> sums) {
  for (std::int32_t i = 0; i < run.count; ++i)
    sums_.emplace(std::pair(run.layer, run.first + i), sums[static_cast<std::size_t>(i)]);
}

bool SliceSums::has(const SliceRun& run) const {
  for (std::int32_t slot = run.first; slot < run.first + run.count; ++slot) {
    if (!sums_.contains({run.layer, slot})) return false;
  }
  return true;
}

std::uint64_t SliceSums::at(std::int32_t layer, std::int32_t slot) const {
  return sums_.at({layer, slot});
}

SliceStamper::SliceStamper(std::shared_ptr<pages::Pool> pool, bool checksums)
    : pool_(std::move(pool)), checksums_(checksums) {
  const auto layers = static_cast<std::size_t>(pool_->spec().options().num_layers);
  stamped_.resize(static_cast<std::size_t>(pool_->num_pages()) * layers);
}

void SliceStamper::stamp(std::span<const std::int32_t> pages, const Placement& place,
                         const Shape& shape, const SliceRun& run) {
  const auto& spec = pool_->spec().options();
  const auto bytes = static_cast<std::size_t>(shape.slice_bytes);
  for (std::int32_t slot = run.first; slot < run.first + run.count; ++slot) {
    const std::int32_t page = pages[static_cast<std::size_t>(slot)];
    const std::int32_t valid = shape.valid_tokens(slot);
    auto& memo =
        stamped_[static_cast<std::size_t>(page) * static_cast<std::size_t>(spec.num_layers) +
                 static_cast<std::size_t>(run.layer)];
    const auto generation = pool_->generation(page);
    const std::uint64_t key = generation ? *generation + 1 : 0;
    const bool full = valid == shape.page_size;
    std::byte* slice = pool_->view().arena + place.offsets[static_cast<std::size_t>(slot)] +
                       run.layer * place.layer_stride_bytes;
    SliceHeader h =
        expected_header(spec.format, spec.layout, 0, run.layer, valid);  // open pages, in any run
    if (full && memo == key && key != 0 && is_stamped(slice, h, checksums_)) continue;
    if (checksums_) h.checksum = checksum_of(h, std::span(slice, bytes).subspan(sizeof(h)));
    if (std::memcmp(slice, &h, sizeof(h)) != 0) std::memcpy(slice, &h, sizeof(h));
    memo = full ? key : 0;
  }
}

Status check_slice(std::span<const std::byte> slice, const SliceHeader& expected, bool verify_sum) {
  const SliceHeader h = load_header(slice.data());
  const struct {
    const char* name;
    std::int64_t have, want;
  } fields[] = {
      {"magic", h.magic, expected.magic},
      {"class_id", h.class_id, expected.class_id},
      {"layer", h.layer, expected.layer},
      {"valid_tokens", h.valid_tokens, expected.valid_tokens},
      {"format", static_cast<int>(h.format), static_cast<int>(expected.format)},
      {"layout", static_cast<int>(h.layout), static_cast<int>(expected.layout)},
  };
  for (const auto& f : fields) {
    if (f.have != f.want) {
      return Error{ErrorCode::kCorrupt, text("slice header: ", f.name, "=", f.have, ", expected ",
                                             f.want, " (layer ", expected.layer, ")")};
    }
  }
  if (!verify_sum) return {};
  if (h.checksum == 0) {
    return Error{ErrorCode::kCorrupt,
                 text("slice of layer ", h.layer, ": the sender made no checksum, but this side's ",
                      "checksums setting asks for one")};
  }
  if (h.checksum != slice_checksum(slice)) {
    return Error{ErrorCode::kCorrupt, text("slice of layer ", h.layer, ": its checksum differs")};
  }
  return {};
}

void clear_checksum(std::byte* slice) {
  std::memset(slice + offsetof(SliceHeader, checksum), 0, sizeof(SliceHeader::checksum));
}

}  // namespace kvcore::stream
