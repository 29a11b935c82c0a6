#include "stream/staging.h"

#include <utility>

namespace kvcore::stream {
namespace {

constexpr std::int64_t kAlign = 64;

std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

Staging::Staging(std::shared_ptr<pages::Arena> arena, transport::RegionId region,
                 std::int64_t bytes)
    : arena_(std::move(arena)), region_(region), bytes_(bytes), space_({bytes, bytes}) {
  space_.give(0, bytes);
}

Result<std::unique_ptr<Staging>> Staging::make(transport::Transport& transport,
                                               std::int64_t bytes) {
  KVCORE_ASSIGN_OR_RETURN(auto arena, pages::Arena::make(bytes, false));
  KVCORE_ASSIGN_OR_RETURN(
      const transport::RegionId region,
      transport.register_region(arena->data(), static_cast<std::uint64_t>(arena->bytes()),
                                arena->fd()));
  return std::unique_ptr<Staging>(new Staging(std::move(arena), region, bytes));
}

std::optional<std::int64_t> Staging::take(std::int64_t bytes) {
  return space_.take(aligned(bytes), pages::End::kLow);
}

void Staging::give(std::int64_t offset, std::int64_t bytes) { space_.give(offset, aligned(bytes)); }

std::span<std::byte> Staging::at(std::int64_t offset, std::int64_t bytes) const {
  return {arena_->data() + offset, static_cast<std::size_t>(bytes)};
}

}  // namespace kvcore::stream
