// What python/kvcore/ops.py needs beyond the kernels: the same pages seen in another copy of their arena.
// Compilers of tensor programs may hand an operator a clone of a tensor that it declares to change;
// the operator must then work in the clone's bytes, not in the pool's.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/text.h"
#include "bindings/errors.h"
#include "kernels/attention/attention.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

using Address = std::uintptr_t;

PagesView moved(Address view, Address arena) {
  if (view == 0 || arena == 0)
    throw ErrorException{invalid_argument("view_address and arena_address must not be null")};
  PagesView pages = *reinterpret_cast<const PagesView*>(view);
  pages.arena = reinterpret_cast<std::byte*>(arena);
  return pages;
}

// A pool's pages with their bytes elsewhere. The pool must outlive it: records and classes are its own.
class MovedPages {
 public:
  MovedPages(Address view, Address arena) : view_(std::make_unique<PagesView>(moved(view, arena))) {}
  const PagesView* view() const { return view_.get(); }

 private:
  std::unique_ptr<PagesView> view_;
};

// A plan over `pages` with the batch and the scale of another plan, run by the calling thread.
std::shared_ptr<kernels::AttentionPlan> plan_like(const kernels::AttentionPlan& plan,
                                                  const MovedPages& pages) {
  std::vector<std::int32_t> cu{0}, context, table;
  std::int64_t max_pages = 0;
  const std::int64_t page = plan.pages().page_size;
  for (std::int64_t s = 0; s < plan.num_seqs(); ++s) {
    cu.push_back(static_cast<std::int32_t>(cu.back() + plan.q_len(s)));
    context.push_back(static_cast<std::int32_t>(plan.context_len(s)));
    max_pages = std::max(max_pages, (plan.context_len(s) + page - 1) / page);
  }
  table.assign(static_cast<std::size_t>(plan.num_seqs() * max_pages), -1);
  for (std::int64_t s = 0; s < plan.num_seqs(); ++s)
    std::copy_n(plan.page_ids(s), (plan.context_len(s) + page - 1) / page,
                table.begin() + s * max_pages);
  std::shared_ptr<kernels::AttentionPlan> copy =
      unwrap(kernels::AttentionPlan::make(pages.view(), plan.num_q_heads(), plan.scale()));
  unwrap(copy->prepare({plan.num_seqs(), cu.data(), context.data(), table.data(), max_pages, max_pages}));
  return copy;
}

}  // namespace

void bind_ops(py::module_ m) {
  py::class_<MovedPages>(m, "MovedPages")
      .def(py::init<Address, Address>(), py::arg("view_address"), py::arg("arena_address"))
      .def_property_readonly("view_address", [](const MovedPages& p) {
        return reinterpret_cast<Address>(p.view());
      });
  m.def("plan_like", &plan_like, py::arg("plan"), py::arg("pages"), py::keep_alive<0, 2>());
}

}  // namespace kvcore::bindings
