// Cuts an operation into pieces of work: neighbours are joined, long ones split, rails share them.
//
// A chunk is one piece of work: one contiguous remote range, local memory in at most `max_pieces`
// parts. NICs need 256 KiB to 1 MiB a piece of work for their full rate, so chunks grow to
// kMostBytes; an operation on several rails is cut so that each has work, but not below
// kLeastBytes. Each rail's last chunk carries the immediate. Thread rules: pure function.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "transport/link.h"
#include "transport/rdma/verbs.h"

namespace kvcore::transport::rdma {

inline constexpr std::uint64_t kLeastChunkBytes = 256UL * 1024;
inline constexpr std::uint64_t kMostChunkBytes = 1024UL * 1024;

// One granted range as the peer reaches it through one rail.
struct RemoteRange {
  std::uint64_t offset = 0;  // in the region of the grant
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;  // of its first byte
  std::uint32_t key = 0;
  std::uint32_t reserved = 0;
};

struct Chunk {
  std::uint32_t rail = 0;
  bool last_of_rail = false;
  std::uint64_t remote_address = 0;
  std::uint32_t remote_key = 0;
  std::uint32_t bytes = 0;
  std::uint32_t first_piece = 0, num_pieces = 0;
};

struct ChunkPlan {
  std::vector<Chunk> chunks;
  std::vector<LocalPiece> pieces;
  std::uint32_t rails = 0;  // bit mask of those used
};

struct RailMap {  // one rail that may be used
  std::uint32_t rail = 0;
  std::uint32_t local_key = 0;
  std::uint32_t max_pieces = 1;
  std::span<const RemoteRange> ranges{};  // sorted by offset; equal but for keys on every rail
};

// InvalidArgument: a segment is not inside one granted range.
Result<ChunkPlan> cut(const std::byte* base, std::span<const Segment> segments,
                      std::uint64_t total_bytes, std::span<const RailMap> rails);

}  // namespace kvcore::transport::rdma
