#include "pages/page_ids.h"

#include <bit>

namespace kvcore::pages {

PageIds::PageIds(std::int32_t extent, std::int64_t first_group, std::int64_t num_groups)
    : extent_(extent),
      all_((1u << extent) - 1),
      split_(at(num_groups), 0),
      mask_(at(num_groups), 0),
      before_(at(num_groups), -1),
      after_(at(num_groups), -1) {
  whole_.reserve(at(num_groups));
  for (std::int64_t group = num_groups; group-- > first_group;)
    whole_.push_back(static_cast<std::int32_t>(group));
}

bool PageIds::is_loose(std::int32_t id) const noexcept {
  return (mask_[at(id / extent_)] >> (id % extent_) & 1u) != 0;
}

void PageIds::link(std::int32_t group) {
  before_[at(group)] = -1;
  after_[at(group)] = head_;
  if (head_ >= 0) before_[at(head_)] = group;
  head_ = group;
}

void PageIds::unlink(std::int32_t group) {
  const std::int32_t before = before_[at(group)], after = after_[at(group)];
  (before >= 0 ? after_[at(before)] : head_) = after;
  if (after >= 0) before_[at(after)] = before;
}

std::int32_t PageIds::take_group() {
  const std::int32_t group = whole_.back();
  whole_.pop_back();
  return group;
}

void PageIds::give_group(std::int32_t group) { whole_.push_back(group); }

std::int32_t PageIds::take_id() {
  if (head_ < 0) {
    const std::int32_t group = take_group();
    split_[at(group)] = 1;
    mask_[at(group)] = all_;
    loose_ += extent_;
    link(group);
  }
  std::uint32_t& mask = mask_[at(head_)];
  const std::int32_t id = head_ * extent_ + std::countr_zero(mask);
  mask &= mask - 1;
  --loose_;
  if (mask == 0) unlink(head_);
  return id;
}

void PageIds::give_id(std::int32_t id) {
  const std::int32_t group = id / extent_;
  std::uint32_t& mask = mask_[at(group)];
  if (mask == 0) link(group);
  mask |= 1u << (id % extent_);
  ++loose_;
  if (mask != all_) return;
  unlink(group);
  loose_ -= extent_;
  mask = 0;
  split_[at(group)] = 0;
  give_group(group);
}

}  // namespace kvcore::pages
