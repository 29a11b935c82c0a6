// Staging: memory in which slices are converted before they are sent. Of a fixed size, so that what
// converts waits for what has arrived (back-pressure); made when first needed. Its memfd is shared
// with peers on this host like the pages are. Thread rules: one thread (the endpoint's). Units:
// bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/result.h"
#include "pages/arena.h"
#include "pages/space.h"
#include "transport/link.h"

namespace kvcore::stream {

class Staging {
 public:
  static Result<std::unique_ptr<Staging>> make(transport::Transport& transport, std::int64_t bytes);
  // The offset of a piece, or nothing until others have been given back.
  std::optional<std::int64_t> take(std::int64_t bytes);
  void give(std::int64_t offset, std::int64_t bytes);
  std::span<std::byte> at(std::int64_t offset, std::int64_t bytes) const;
  transport::RegionId region() const noexcept { return region_; }
  std::int64_t used_bytes() const noexcept { return bytes_ - space_.free_bytes(); }
  std::int64_t bytes() const noexcept { return bytes_; }

 private:
  Staging(std::shared_ptr<pages::Arena> arena, transport::RegionId region, std::int64_t bytes);

  const std::shared_ptr<pages::Arena> arena_;
  const transport::RegionId region_;
  const std::int64_t bytes_;
  pages::Space space_;
};

}  // namespace kvcore::stream
