#include "stream/layer_step.h"

#include "base/text.h"
#include "transport/link.h"

namespace kvcore::stream {

Result<std::unique_ptr<LayerStep>> LayerStep::make(std::shared_ptr<kernels::AttentionPlan> plan,
                                                   std::vector<Attached> attached) {
  for (const Attached& a : attached) {
    if (a.sequence < 0 || a.sequence >= plan->num_seqs()) {
      return invalid_argument(text("senders: sequence ", a.sequence, " must be in [0, ",
                                   plan->num_seqs(), "), the prepared batch"));
    }
    if (a.port->pages() != &plan->pages()) {
      return invalid_argument("senders: the hand-over sends pages of another pool than the plan's");
    }
  }
  return std::unique_ptr<LayerStep>(new LayerStep(std::move(plan), std::move(attached)));
}

Status LayerStep::run(std::int64_t layer, kernels::TokenRows k, kernels::TokenRows v,
                      const kernels::AttendArgs& args) {
  KVCORE_RETURN_IF_ERROR(plan_->append(layer, k, v, args.dtype));
  for (const Attached& a : attached_) {
    KVCORE_RETURN_IF_ERROR(
        a.port->publish_upto(static_cast<std::int32_t>(layer), plan_->context_len(a.sequence)));
  }
  KVCORE_RETURN_IF_ERROR(plan_->attend(layer, args));
  if (layer + 1 != plan_->pages().num_layers) return {};
  const std::int64_t now = transport::now_ns();
  for (const Attached& a : attached_) {
    if (a.port->all_published()) a.port->mark(now);
  }
  return {};
}

}  // namespace kvcore::stream
