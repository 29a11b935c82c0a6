// Strong ids. A page id is also its position in the block table (int32 there, int64 in arithmetic).
#pragma once

#include <cstdint>

namespace kvcore {

enum class PageId : std::int64_t {};
enum class FrameId : std::int64_t {};

constexpr std::int64_t raw(PageId id) noexcept { return static_cast<std::int64_t>(id); }
constexpr std::int64_t raw(FrameId id) noexcept { return static_cast<std::int64_t>(id); }

}  // namespace kvcore
