// ClassTable: the page classes of a pool as kernels see them. A class id in a PageRecord stands for
// a (class number, run length) pair; class number 0 is the open class. Compressed pages lie in runs
// of one, open ones in runs of extent_pages or of one. Invariants: ids and numbers are never
// reused; addresses handed out stay valid for the table's life. Thread rules: none, the pool locks;
// entries are immutable once added.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "base/page_layout.h"
#include "base/result.h"
#include "pages/page_class.h"

namespace kvcore::pages {

class ClassTable {
 public:
  static constexpr std::int32_t kMaxClasses = 64;

  explicit ClassTable(const PageSpec& spec);
  ClassTable(const ClassTable&) = delete;
  ClassTable& operator=(const ClassTable&) = delete;

  // The number of an equal class where there is one. Refuses classes of other pages, the open
  // class, and more of them than fit.
  Result<std::int32_t> add(const PageClass& page_class);
  bool knows(std::int32_t number) const noexcept {
    return number >= 0 && number < static_cast<std::int32_t>(entries_.size());
  }
  const PageClass& operator[](std::int32_t number) const noexcept {
    return entries_[static_cast<std::size_t>(number)].page_class;
  }
  std::int32_t size() const noexcept { return static_cast<std::int32_t>(entries_.size()); }
  // The class id of pages of this class in runs of one.
  std::int32_t single_id(std::int32_t number) const noexcept {
    return entries_[static_cast<std::size_t>(number)].single_id;
  }
  std::int32_t number_of(std::int32_t class_id) const noexcept {
    return numbers_[static_cast<std::size_t>(class_id)];
  }
  const ClassView* views() const noexcept { return views_.data(); }
  std::int32_t num_views() const noexcept { return static_cast<std::int32_t>(views_.size()); }

 private:
  struct Entry {
    PageClass page_class;
    std::vector<LayerView> single;  // in runs of one
    std::int32_t single_id;
  };
  std::int32_t add_view(const LayerView* layers, std::int32_t number);

  const PageSpec spec_;
  std::deque<Entry> entries_;
  std::vector<LayerView> extent_;      // the open class in runs of extent_pages
  std::vector<ClassView> views_;       // [<= kMaxClasses], never moves
  std::vector<std::int32_t> numbers_;  // by class id
};

}  // namespace kvcore::pages
