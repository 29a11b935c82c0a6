// LayerStep: what a prefill worker runs per layer. It appends the batch's new K and V, publishes
// the slices that became whole to the attached hand-overs, and only then attends, so that the
// transfer of a layer overlaps its own attention and everything after. Of hand-overs whose last
// slice left in this step it marks the end of attention (see StreamStats). Thread rules: as its
// plan's; one thread at a time. The plan is prepared before by its owner.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/result.h"
#include "kernels/attention/attention.h"
#include "stream/port.h"

namespace kvcore::stream {

class LayerStep {
 public:
  struct Attached {
    std::shared_ptr<SendPort> port;
    std::int64_t sequence;  // row of the plan's batch whose pages the port sends
  };

  // InvalidArgument: a sequence outside the prepared batch, or a port of another pool's pages.
  static Result<std::unique_ptr<LayerStep>> make(std::shared_ptr<kernels::AttentionPlan> plan,
                                                 std::vector<Attached> attached);
  // Append, publish, attend. K and V have args.dtype.
  Status run(std::int64_t layer, kernels::TokenRows k, kernels::TokenRows v,
             const kernels::AttendArgs& args);

  kernels::AttentionPlan& plan() const noexcept { return *plan_; }

 private:
  LayerStep(std::shared_ptr<kernels::AttentionPlan> plan, std::vector<Attached> attached)
      : plan_(std::move(plan)), attached_(std::move(attached)) {}
  std::shared_ptr<kernels::AttentionPlan> plan_;
  std::vector<Attached> attached_;
};

}  // namespace kvcore::stream
