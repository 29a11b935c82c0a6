// HeadPages: the KV of a pruned sequence. Every (layer, KV head) keeps tokens of its own, so each
// has its own pages and its own length. The pages are *head pages*: those of a pool whose spec has
// one layer and one KV head (and align_bytes 64, so that a page takes no more than its own bytes).
//
//   compact()  copies kept tokens of a sequence's pages into head pages, closed up in order
//   grow(n)    makes room for n new tokens in every head; HeadAttention writes and reads them
//   seal()     full pages into compressed classes, not a head's first and not its open one
//
// Heads are numbered layer * num_kv_heads + head. Keys stay as they were turned by their positions:
// attention needs the order of tokens only.
//
// Invariants: holds exactly one owner ref of each page of each table; a head of n tokens has
// ceil(n / page_size) pages; a call that fails changes nothing. Thread rules: one thread, except
// release(), of which the first of any threads wins. Units: tokens, pages.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "pages/pool.h"

namespace kvcore::compress {

// Positions that each head keeps, ascending; head i's are positions[offsets[i], offsets[i + 1]).
struct KeptTokens {
  std::span<const std::int32_t> positions;
  std::span<const std::int64_t> offsets;  // [num_layers * num_kv_heads + 1], from 0
};

class HeadPages {
 public:
  // Without a token. Refuses a pool whose pages are not of one layer and one KV head.
  static Result<std::shared_ptr<HeadPages>> make(std::shared_ptr<pages::Pool> pool,
                                                 std::int32_t num_layers,
                                                 std::int32_t num_kv_heads);
  ~HeadPages() { release(); }
  HeadPages(const HeadPages&) = delete;
  HeadPages& operator=(const HeadPages&) = delete;

  // All or nothing: OutOfPages leaves every head as it was.
  Status grow(std::int64_t num_tokens);
  // The same with a number of tokens for each head.
  Status grow(std::span<const std::int64_t> num_tokens);
  // Seals what has become full into class class_numbers[head]; 0: that head stays open. Pages that
  // hold a number which cannot be encoded stay open for good. Returns how many were sealed; where
  // bytes run out, fewer than there are. All tokens are in place, and no kernel reads meanwhile.
  Result<std::int64_t> seal(std::span<const std::int32_t> class_numbers);
  void release();

  const std::shared_ptr<pages::Pool>& pool() const noexcept { return pool_; }
  std::int32_t num_layers() const noexcept { return num_layers_; }
  std::int32_t num_kv_heads() const noexcept { return num_kv_heads_; }
  std::size_t num_heads() const noexcept { return heads_.size(); }
  std::int64_t num_tokens(std::size_t head) const { return heads_[head].num_tokens; }
  const std::vector<std::int32_t>& pages(std::size_t head) const { return heads_[head].pages; }
  std::int64_t num_pages() const noexcept;  // of all heads
  bool released() const noexcept { return released_; }

 private:
  struct Head {
    std::int64_t num_tokens = 0;
    std::size_t seen = 1;  // pages that seal() has dealt with; the first is never sealed
    std::vector<std::int32_t> pages;
  };
  HeadPages(std::shared_ptr<pages::Pool> pool, std::int32_t num_layers, std::int32_t num_kv_heads);
  Status check_live() const;

  const std::shared_ptr<pages::Pool> pool_;
  const std::int32_t num_layers_;
  const std::int32_t num_kv_heads_;
  std::vector<Head> heads_;
  std::atomic<bool> released_ = false;
};

// Head pages with the kept ones of the `num_tokens` tokens in `pages`, which stay as they are. The
// pages may be open or compressed; compressed ones give the numbers they stand for, rounded to the
// format of the head pages, which must be that of the open ones. A head may keep nothing. All or
// nothing: InvalidArgument names the head whose positions do not ascend or are out of range;
// OutOfPages. The caller owns the pages, and nobody writes or seals them meanwhile.
Result<std::shared_ptr<HeadPages>> compact(const pages::Pool& source,
                                           std::span<const std::int32_t> pages,
                                           std::int64_t num_tokens, const KeptTokens& kept,
                                           std::shared_ptr<pages::Pool> head_pool);

}  // namespace kvcore::compress
