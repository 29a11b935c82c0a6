#include "transport/rdma/verbs.h"

#include "base/text.h"

namespace kvcore::transport::rdma {
namespace {

Status in_range(std::string_view field, int value, int low, int high) {
  if (value >= low && value <= high) return {};
  return invalid_argument(text("rdma ", field, "=", value, " must be in [", low, ", ", high, "]"));
}

}  // namespace

std::string_view to_string(WorkStatus status) noexcept {
  switch (status) {
    case WorkStatus::kOk:
      return "ok";
    case WorkStatus::kFlushed:
      return "flushed";
    case WorkStatus::kRemoteAccess:
      return "remote access refused";
    case WorkStatus::kRetry:
      return "no acknowledgement";
    case WorkStatus::kReceiverNotReady:
      return "receiver not ready";
    case WorkStatus::kLocal:
      return "local error";
    case WorkStatus::kFatal:
      return "device failed";
  }
  return "unknown";
}

Status check(const PathSettings& s) {
  KVCORE_RETURN_IF_ERROR(in_range("retry_count", s.retry_count, 0, 6));
  KVCORE_RETURN_IF_ERROR(in_range("receiver_retry", s.receiver_retry, 0, 6));
  KVCORE_RETURN_IF_ERROR(in_range("timeout", s.timeout, 1, 31));
  KVCORE_RETURN_IF_ERROR(in_range("receiver_wait", s.receiver_wait, 1, 31));
  KVCORE_RETURN_IF_ERROR(in_range("service_level", s.service_level, 0, 15));
  KVCORE_RETURN_IF_ERROR(in_range("hop_limit", s.hop_limit, 1, 255));
  return in_range("outstanding_reads", s.outstanding_reads, 1, 255);
}

}  // namespace kvcore::transport::rdma
