#include "pages/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "base/page_layout.h"
#include "base/text.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvcore::pages {
namespace {

Error io_error(const char* call, int error) {
  return {ErrorCode::kIo, text(call, " failed: ", std::strerror(error), " (errno ", error, ")")};
}

std::size_t size(std::int64_t bytes) { return static_cast<std::size_t>(bytes); }

// Maps fd at a 2 MiB aligned address, which huge pages need.
Result<std::byte*> map_aligned(int fd, std::int64_t bytes, int protection) {
  const std::size_t span = size(bytes + kHugePageBytes);
  void* reserved =
      ::mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return io_error("mmap", errno);
  const auto first = reinterpret_cast<std::uintptr_t>(reserved);
  const std::uintptr_t mask = static_cast<std::uintptr_t>(kHugePageBytes) - 1;
  const std::uintptr_t aligned = (first + mask) & ~mask;
  void* at = reinterpret_cast<void*>(aligned);
  if (::mmap(at, size(bytes), protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved, span);
    return io_error("mmap", error);
  }
  if (aligned > first) ::munmap(reserved, aligned - first);
  const std::uintptr_t end = aligned + size(bytes);
  if (first + span > end) ::munmap(reinterpret_cast<void*>(end), first + span - end);
  return static_cast<std::byte*>(at);
}

// Bytes of the mapping that starts at `address` which the kernel maps by 2 MiB entries.
std::int64_t pmd_mapped_bytes(const void* address) {
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  while (std::getline(smaps, line)) {
    std::uint64_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " ", &begin, &end) == 2) {
      inside = begin == reinterpret_cast<std::uintptr_t>(address);
    } else if (inside && line.rfind("ShmemPmdMapped:", 0) == 0) {
      return std::stoll(line.substr(15)) * 1024;
    }
  }
  return 0;
}

// Touches all memory; false if the machine has too little of it (errno set).
bool populate(std::byte* data, std::int64_t bytes) {
  if (::madvise(data, size(bytes), MADV_POPULATE_WRITE) == 0) return true;
  if (errno != EINVAL) return false;  // EINVAL: a kernel before 5.14, touch by hand
  for (std::int64_t at = 0; at < bytes; at += 4096) data[at] = std::byte{0};
  return true;
}

// One touched page per 2 MiB is enough for the kernel to collapse the whole; what it did not
// collapse is touched afterwards (and costs nothing where it did).
bool populate_huge(std::byte* data, std::int64_t bytes) {
  (void)::madvise(data, size(bytes), MADV_HUGEPAGE);
  for (std::int64_t at = 0; at < bytes; at += kHugePageBytes) {
    if (!populate(data + at, 4096)) return false;
    (void)::madvise(data + at, size(kHugePageBytes), MADV_COLLAPSE);
  }
  return populate(data, bytes);
}

}  // namespace

Result<std::shared_ptr<Arena>> Arena::make(std::int64_t bytes, bool huge_pages) {
  if (bytes < 1 || bytes > kMaxArenaBytes)
    return invalid_argument(
        text("bytes=", bytes, " is out of range: allowed 1 to ", kMaxArenaBytes));
  bytes = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const int fd = ::memfd_create("kvcore-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return io_error("memfd_create", errno);
  if (::ftruncate(fd, bytes) != 0) {
    const int error = errno;
    ::close(fd);
    return io_error("ftruncate", error);
  }
  auto mapped = map_aligned(fd, bytes, PROT_READ | PROT_WRITE);
  if (!mapped) {
    ::close(fd);
    return mapped.error();
  }
  std::shared_ptr<Arena> arena(new Arena(fd, *mapped, bytes));
  if (!(huge_pages ? populate_huge(arena->data_, bytes) : populate(arena->data_, bytes)))
    return Error{
        ErrorCode::kIo,
        text("arena of ", bytes, " bytes could not be filled with memory: ", std::strerror(errno))};
  arena->huge_bytes_ = pmd_mapped_bytes(arena->data_);
  if (::fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    return io_error("fcntl(F_ADD_SEALS)", errno);
  return arena;
}

Arena::~Arena() {
  ::munmap(data_, size(bytes_));
  ::close(fd_);
}

Result<int> Arena::reopen_readonly() const {
  const std::string path = text("/proc/self/fd/", fd_);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return io_error("open(/proc/self/fd)", errno);
  return fd;
}

Result<std::int64_t> Arena::reserve(std::int64_t bytes) {
  if (bytes < 1)
    return invalid_argument(text("bytes=", bytes, " is out of range: allowed 1 and up"));
  const std::int64_t aligned = (bytes + kFrameAlignBytes - 1) / kFrameAlignBytes * kFrameAlignBytes;
  std::int64_t offset = reserved_.load();
  do {
    if (aligned > bytes_ - offset)
      return invalid_argument(text("bytes=", bytes, " does not fit: the arena of ", bytes_,
                                   " bytes has ", bytes_ - offset, " left"));
  } while (!reserved_.compare_exchange_weak(offset, offset + aligned));
  return offset;
}

Result<std::unique_ptr<ReadonlyMapping>> ReadonlyMapping::make(int fd, std::int64_t bytes) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return io_error("fstat", errno);
  if (bytes < 1 || bytes > info.st_size)
    return invalid_argument(text("bytes=", bytes, " is out of range: allowed 1 to ", info.st_size));
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    return invalid_argument(text("fd=", fd, " is not a memfd sealed against shrinking"));
  KVCORE_ASSIGN_OR_RETURN(std::byte * data, map_aligned(fd, bytes, PROT_READ));
  return std::unique_ptr<ReadonlyMapping>(new ReadonlyMapping(data, bytes));
}

ReadonlyMapping::~ReadonlyMapping() { ::munmap(const_cast<std::byte*>(data_), size(bytes_)); }

}  // namespace kvcore::pages
