#include "pages/arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

namespace kvcore::pages {
namespace {

TEST(Arena, IsZeroedAlignedAndRoundedUp) {
  const auto arena = Arena::make(kHugePageBytes + 1, true).value();
  EXPECT_EQ(arena->bytes(), 2 * kHugePageBytes);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(arena->data()) % kHugePageBytes, 0u);
  for (std::int64_t i = 0; i < arena->bytes(); i += 512) ASSERT_EQ(arena->data()[i], std::byte{0});
  EXPECT_EQ(arena->huge_bytes() % kHugePageBytes, 0);
}

TEST(Arena, PeersReadAndCannotWrite) {
  const auto arena = Arena::make(kHugePageBytes, false).value();
  const int fd = arena->reopen_readonly().value();
  const auto peer = ReadonlyMapping::make(fd, arena->bytes()).value();
  arena->data()[77] = std::byte{5};
  EXPECT_EQ(peer->data()[77], std::byte{5});
  for (const int any : {fd, arena->fd()})
    EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, any, 0), MAP_FAILED);
  ::close(fd);
}

TEST(Arena, ReservationsNeverOverlap) {
  const auto arena = Arena::make(kHugePageBytes, false).value();
  const std::int64_t a = arena->reserve(5000).value();
  const std::int64_t b = arena->reserve(4096).value();
  EXPECT_EQ(a, 0);
  EXPECT_EQ(b, 8192);
  EXPECT_EQ(arena->reserve(kHugePageBytes).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(arena->reserve(kHugePageBytes - 8192 - 4096).value(), 12288);
}

TEST(ReadonlyMapping, RefusesFilesThatCouldShrink) {
  const int fd = ::memfd_create("plain", 0);
  ASSERT_EQ(::ftruncate(fd, 4096), 0);
  EXPECT_FALSE(ReadonlyMapping::make(fd, 4096).ok());
  ::close(fd);
}

}  // namespace
}  // namespace kvcore::pages
