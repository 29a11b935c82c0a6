// PageIds: free page ids. Ids stand in groups of extent_pages; they are taken as whole groups or
// one by one, which splits a group until all of its ids are back.
//
// Invariants: an id is free in at most one way (in a whole group, or alone). All calls O(1).
// Thread rules: none, the pool locks.
#pragma once

#include <cstdint>
#include <vector>

namespace kvcore::pages {

class PageIds {
 public:
  // Groups [first_group, num_groups) are free.
  PageIds(std::int32_t extent, std::int64_t first_group, std::int64_t num_groups);

  std::int64_t free_groups() const noexcept { return static_cast<std::int64_t>(whole_.size()); }
  // Ids that could be taken one by one.
  std::int64_t free_ids() const noexcept { return free_groups() * extent_ + loose_; }
  // Whether the ids of a group live and end one by one.
  bool is_split(std::int64_t group) const noexcept { return split_[at(group)] != 0; }
  bool is_loose(std::int32_t id) const noexcept;

  std::int32_t take_group();  // the caller has looked at free_groups()
  void give_group(std::int32_t group);
  std::int32_t take_id();  // the caller has looked at free_ids()
  void give_id(std::int32_t id);

 private:
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  void link(std::int32_t group);
  void unlink(std::int32_t group);

  const std::int32_t extent_;
  const std::uint32_t all_;
  std::vector<std::int32_t> whole_;   // groups without a taken id, last given on top
  std::vector<std::uint8_t> split_;   // [num_groups]
  std::vector<std::uint32_t> mask_;   // [num_groups]: free ids of a split group
  std::vector<std::int32_t> before_;  // [num_groups]: list of split groups with a free id
  std::vector<std::int32_t> after_;
  std::int32_t head_ = -1;
  std::int64_t loose_ = 0;
};

}  // namespace kvcore::pages
