#include "pages/class_table.h"

#include "base/text.h"

namespace kvcore::pages {

ClassTable::ClassTable(const PageSpec& spec) : spec_(spec) {
  views_.reserve(kMaxClasses);
  const std::int32_t extent = spec.options().extent_pages;
  entries_.push_back({PageClass::open(spec), {}, 0});
  Entry& open = entries_.front();
  extent_ = open.page_class.layers(extent);
  add_view(extent_.data(), 0);
  if (extent == 1) return;
  open.single = open.page_class.layers(1);
  open.single_id = add_view(open.single.data(), 0);
}

std::int32_t ClassTable::add_view(const LayerView* layers, std::int32_t number) {
  views_.push_back({layers, spec_.options().layout, true});
  numbers_.push_back(number);
  return num_views() - 1;
}

Result<std::int32_t> ClassTable::add(const PageClass& page_class) {
  if (page_class.spec().describe() != spec_.describe())
    return invalid_argument(text("page class of other pages: ", page_class.spec().describe(),
                                 "; allowed ", spec_.describe()));
  if (page_class.is_open())
    return invalid_argument("page class compresses nothing: that is class 0 already");
  for (std::int32_t number = 1; number < size(); ++number) {
    if ((*this)[number].describe() == page_class.describe()) return number;
  }
  if (num_views() == kMaxClasses)
    return invalid_argument(text("page class: the pool has ", size(), " already, which is all"));
  entries_.push_back({page_class, {}, 0});
  Entry& entry = entries_.back();
  entry.single = entry.page_class.layers(1);
  entry.single_id = add_view(entry.single.data(), size() - 1);
  return size() - 1;
}

}  // namespace kvcore::pages
