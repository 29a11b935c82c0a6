// A peer's memfd mapped read-only into this process, and the copy out of it.
// Thread rules: immutable after make; copy_bytes is pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/result.h"
#include "transport/core/unique_fd.h"

namespace kvcore::transport {

class RemoteRegion {
 public:
  // The file must be a memfd sealed against shrinking, so that no access can fault.
  static Result<std::shared_ptr<RemoteRegion>> make(UniqueFd fd, std::uint64_t bytes);
  ~RemoteRegion();
  RemoteRegion(const RemoteRegion&) = delete;
  RemoteRegion& operator=(const RemoteRegion&) = delete;
  const std::byte* data() const noexcept { return data_; }
  std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  RemoteRegion(void* mapping, std::size_t span, std::byte* data, std::uint64_t bytes)
      : mapping_(mapping), span_(span), data_(data), bytes_(bytes) {}
  void* mapping_;
  std::size_t span_;
  std::byte* data_;
  std::uint64_t bytes_;
};

// memcpy that goes past the caches from kStreamingBytes on: the copy of a frame is read again much
// later, if at all by this core.
inline constexpr std::size_t kStreamingBytes = 32 * 1024;
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

}  // namespace kvcore::transport
