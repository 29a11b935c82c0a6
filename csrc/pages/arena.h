// Arena: one memfd mapped once; the memory behind all pages of a pool.
// Peers on the same host get a read-only descriptor (reopen_readonly) and map it with
// ReadonlyMapping: after creation the memfd is sealed against new writable mappings, shrinking and
// growing, so a peer can neither write into it nor make us fault.
// Huge pages on shared memory need touch + MADV_COLLAPSE; MADV_HUGEPAGE alone succeeds and may do
// nothing, so what was really mapped is read back (ShmemPmdMapped) and reported by huge_bytes().
// Units: bytes. Thread rules: reserve() is thread-safe; everything else is immutable after make().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/result.h"

namespace kvcore::pages {

constexpr std::int64_t kHugePageBytes = std::int64_t{2} << 20;
constexpr std::int64_t kMaxArenaBytes = std::int64_t{1} << 46;

class Arena {
 public:
  // bytes: 1 to 2^46, rounded up to 2 MiB. Every page is touched here, so a lack of memory is an
  // error now and not a fault later.
  static Result<std::shared_ptr<Arena>> make(std::int64_t bytes, bool huge_pages);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::int64_t bytes() const noexcept { return bytes_; }
  std::int64_t huge_bytes() const noexcept { return huge_bytes_; }
  int fd() const noexcept { return fd_; }

  // A new descriptor of the same memory that cannot be mapped for writing; the caller closes it.
  Result<int> reopen_readonly() const;
  // Hands out [offset, offset + bytes) once, 4 KiB aligned: pools of one arena never overlap.
  Result<std::int64_t> reserve(std::int64_t bytes);

 private:
  Arena(int fd, std::byte* data, std::int64_t bytes) : fd_(fd), data_(data), bytes_(bytes) {}
  int fd_;
  std::byte* data_;
  std::int64_t bytes_;
  std::int64_t huge_bytes_ = 0;
  std::atomic<std::int64_t> reserved_{0};
};

// A peer's view of an arena. Refuses a descriptor whose file can shrink (reading it could fault).
class ReadonlyMapping {
 public:
  static Result<std::unique_ptr<ReadonlyMapping>> make(int fd, std::int64_t bytes);
  ~ReadonlyMapping();
  ReadonlyMapping(const ReadonlyMapping&) = delete;
  ReadonlyMapping& operator=(const ReadonlyMapping&) = delete;

  const std::byte* data() const noexcept { return data_; }
  std::int64_t bytes() const noexcept { return bytes_; }

 private:
  ReadonlyMapping(const std::byte* data, std::int64_t bytes) : data_(data), bytes_(bytes) {}
  const std::byte* data_;
  std::int64_t bytes_;
};

}  // namespace kvcore::pages
