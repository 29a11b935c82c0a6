#include "pages/sequence.h"

#include <algorithm>
#include <array>

#include "base/text.h"

namespace kvcore::pages {

SequencePages::~SequencePages() { release(); }

Status SequencePages::check_live() const {
  if (!released_) return {};
  return invalid_argument("the sequence was released: it holds no pages and takes none");
}

std::int64_t SequencePages::capacity_tokens() const noexcept {
  return static_cast<std::int64_t>(pages_.size()) * page_size();
}

Status SequencePages::adopt(std::span<const std::int32_t> prefix, std::int64_t num_tokens) {
  KVCORE_RETURN_IF_ERROR(check_live());
  if (!pages_.empty())
    return invalid_argument(
        text("the sequence holds ", pages_.size(), " pages: adopt needs an empty one"));
  const std::int64_t capacity = static_cast<std::int64_t>(prefix.size()) * page_size();
  if (num_tokens != capacity)
    return invalid_argument(text("num_tokens=", num_tokens, " does not fill ", prefix.size(),
                                 " whole pages: allowed ", capacity));
  pages_.assign(prefix.begin(), prefix.end());
  num_tokens_ = num_tokens;
  return {};
}

Status SequencePages::grow(std::int64_t num_tokens) {
  KVCORE_RETURN_IF_ERROR(check_live());
  if (num_tokens < num_tokens_)
    return invalid_argument(text("num_tokens=", num_tokens, " is out of range: allowed ",
                                 num_tokens_, " (held now) and up"));
  const std::int64_t want = (num_tokens + page_size() - 1) / page_size();
  const std::int64_t missing = want - static_cast<std::int64_t>(pages_.size());
  if (missing > 0) {
    KVCORE_ASSIGN_OR_RETURN(const std::vector<std::int32_t> fresh, pool_->alloc(missing));
    pages_.insert(pages_.end(), fresh.begin(), fresh.end());
  }
  num_tokens_ = num_tokens;
  return {};
}

Status SequencePages::truncate(std::int64_t num_tokens) {
  KVCORE_RETURN_IF_ERROR(check_live());
  if (num_tokens < 0 || num_tokens > num_tokens_)
    return invalid_argument(
        text("num_tokens=", num_tokens, " is out of range: allowed 0 to ", num_tokens_));
  std::size_t keep = static_cast<std::size_t>((num_tokens + page_size() - 1) / page_size());
  // The rest of the last frame stays: giving back part of a frame frees nothing.
  if (keep > 0 && keep < pages_.size()) {
    std::array<PageRefs, kMaxExtentPages> refs;
    const auto extent = static_cast<std::size_t>(pool_->spec().options().extent_pages);
    KVCORE_ASSIGN_OR_RETURN(const Unit unit,
                            pool_->unit_refs(pages_[keep - 1], std::span(refs).first(extent)));
    while (keep < pages_.size() && pages_[keep] / unit.count == pages_[keep - 1] / unit.count)
      ++keep;
  }
  KVCORE_RETURN_IF_ERROR(pool_->decref(std::span(pages_).subspan(keep)));
  pages_.resize(keep);
  num_tokens_ = num_tokens;
  return {};
}

Status SequencePages::replace_prefix(std::span<const std::int32_t> pages) {
  KVCORE_RETURN_IF_ERROR(check_live());
  const auto whole = static_cast<std::size_t>(num_tokens_ / page_size());
  if (pages.size() > whole)
    return invalid_argument(
        text("pages has ", pages.size(), " entries: allowed 0 to ", whole, " (whole pages held)"));
  KVCORE_RETURN_IF_ERROR(pool_->incref(pages));
  const std::vector<std::int32_t> old(pages_.begin(),
                                      pages_.begin() + static_cast<std::ptrdiff_t>(pages.size()));
  std::copy(pages.begin(), pages.end(), pages_.begin());
  return pool_->decref(old);
}

void SequencePages::release() {
  if (released_.exchange(true)) return;
  // Cannot fail while the invariant holds; a broken count must not take the process down here, and
  // the pool has refused it without changing anything.
  (void)pool_->decref(pages_);
  pages_.clear();
  num_tokens_ = 0;
}

}  // namespace kvcore::pages
