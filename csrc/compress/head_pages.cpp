#include "compress/head_pages.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/text.h"
#include "compress/seal.h"

namespace kvcore::compress {

using pages::PageSpecOptions;
using pages::Pool;

Result<std::shared_ptr<HeadPages>> HeadPages::make(std::shared_ptr<Pool> pool,
                                                   std::int32_t num_layers,
                                                   std::int32_t num_kv_heads) {
  const PageSpecOptions& o = pool->spec().options();
  if (o.num_layers != 1 || o.num_kv_heads != 1 || o.extent_pages != 1)
    return invalid_argument(
        text("head pages have num_layers=1, num_kv_heads=1, extent_pages=1; "
             "the pool's are ",
             pool->spec().describe()));
  if (num_layers < 1 || num_layers > 65535 || num_kv_heads < 1 || num_kv_heads > 4096)
    return invalid_argument(text("num_layers=", num_layers, " or num_kv_heads=", num_kv_heads,
                                 " is out of range: allowed 1 to 65535 and 1 to 4096"));
  return std::shared_ptr<HeadPages>(new HeadPages(std::move(pool), num_layers, num_kv_heads));
}

HeadPages::HeadPages(std::shared_ptr<Pool> pool, std::int32_t num_layers, std::int32_t num_kv_heads)
    : pool_(std::move(pool)),
      num_layers_(num_layers),
      num_kv_heads_(num_kv_heads),
      heads_(static_cast<std::size_t>(num_layers) * static_cast<std::size_t>(num_kv_heads)) {}

Status HeadPages::check_live() const {
  if (!released_) return {};
  return invalid_argument("the head pages were released: they hold nothing and take nothing");
}

std::int64_t HeadPages::num_pages() const noexcept {
  std::int64_t count = 0;
  for (const Head& head : heads_) count += static_cast<std::int64_t>(head.pages.size());
  return count;
}

Status HeadPages::grow(std::int64_t num_tokens) {
  return grow(std::vector<std::int64_t>(heads_.size(), num_tokens));
}

Status HeadPages::grow(std::span<const std::int64_t> num_tokens) {
  KVCORE_RETURN_IF_ERROR(check_live());
  if (num_tokens.size() != heads_.size())
    return invalid_argument(
        text("num_tokens has ", num_tokens.size(), " entries: allowed ", heads_.size()));
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  const std::int64_t page = pool_->spec().options().page_size;
  std::vector<std::int64_t> missing(heads_.size());
  std::int64_t total = 0;
  for (std::size_t i = 0; i < heads_.size(); ++i) {
    const std::int64_t most = kMost - heads_[i].num_tokens;
    if (num_tokens[i] < 0 || num_tokens[i] > most)
      return invalid_argument(text("num_tokens=", num_tokens[i], " of head ", i,
                                   " is out of range: allowed 0 to ", most));
    const std::int64_t want = (heads_[i].num_tokens + num_tokens[i] + page - 1) / page;
    total += missing[i] = want - static_cast<std::int64_t>(heads_[i].pages.size());
  }
  KVCORE_ASSIGN_OR_RETURN(const std::vector<std::int32_t> fresh, pool_->alloc(total));
  auto next = fresh.begin();
  for (std::size_t i = 0; i < heads_.size(); ++i) {
    heads_[i].pages.insert(heads_[i].pages.end(), next, next + missing[i]);
    heads_[i].num_tokens += num_tokens[i];
    next += missing[i];
  }
  return {};
}

Result<std::int64_t> HeadPages::seal(std::span<const std::int32_t> class_numbers) {
  KVCORE_RETURN_IF_ERROR(check_live());
  if (class_numbers.size() != heads_.size())
    return invalid_argument(
        text("class_numbers has ", class_numbers.size(), " entries: allowed ", heads_.size()));
  for (const std::int32_t number : class_numbers) KVCORE_RETURN_IF_ERROR(pool_->page_class(number));
  const std::int64_t page = pool_->spec().options().page_size;
  std::int64_t sealed = 0;
  for (std::size_t i = 0; i < heads_.size(); ++i) {
    Head& head = heads_[i];
    const auto full = static_cast<std::size_t>(head.num_tokens / page);
    if (class_numbers[i] == 0) continue;
    // The last one first: compressed runs are taken from high addresses down, and each joins the
    // bytes that the page before leaves, so that a head's codes lie in order and without holes.
    for (std::size_t j = full; j-- > head.seen;) {
      KVCORE_ASSIGN_OR_RETURN(const pages::PagePlace place, pool_->place(head.pages[j]));
      if (place.class_number != 0) continue;  // before bytes ran out
      const Status done = seal_pages(*pool_, std::array{head.pages[j]}, class_numbers[i]);
      if (!done && done.error().code == ErrorCode::kOutOfPages) return sealed;
      if (done) ++sealed;
    }
    head.seen = std::max(head.seen, full);
  }
  return sealed;
}

void HeadPages::release() {
  if (released_.exchange(true)) return;
  std::vector<std::int32_t> all;
  all.reserve(static_cast<std::size_t>(num_pages()));
  for (Head& head : heads_) {
    all.insert(all.end(), head.pages.begin(), head.pages.end());
    head = {};
  }
  // Cannot fail while the invariant holds; see SequencePages::release.
  (void)pool_->decref(all);
}

}  // namespace kvcore::compress
