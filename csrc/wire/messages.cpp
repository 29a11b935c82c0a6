#include "wire/messages.h"

#include <algorithm>
#include <array>

namespace kvcore::wire {
namespace {

using enum FieldKind;
constexpr bool kRequired = true;
constexpr bool kOptional = false;

// A request as the router hands it to a worker. Sampling is keyed by (seed, position), so every
// worker that gets the same fields draws the same tokens.
#define KVCORE_REQUEST_FIELDS                                                          \
  {1, "request_id", kId, kRequired}, {2, "tokens", kListI32, kRequired},               \
      {3, "keys", kListBytes, kOptional}, {4, "namespace", kBytes, kOptional},         \
      {5, "max_tokens", kU64, kRequired}, {6, "temperature", kF64, kOptional, 0},      \
      {7, "top_p", kF64, kOptional, 1}, {8, "seed", kU64, kOptional},                  \
      {9, "stop_token_ids", kListI32, kOptional}, {10, "ignore_eos", kU64, kOptional}, \
      {11, "num_logprobs", kI64, kOptional, -1}, {                                     \
    12, "deadline_s", kF64, kOptional                                                  \
  }

constexpr FieldSpec kHello[] = {
    {1, "worker_id", kId, kRequired},
    {2, "incarnation", kU64, kRequired},
    {3, "role", kStr, kRequired},
    {4, "model", kStr, kRequired},
    {5, "model_epoch", kStr, kOptional},
    {6, "page_spec", kStr, kOptional},
    {7, "max_context", kU64, kOptional},
    {8, "num_frames", kU64, kOptional},
    {9, "stream_addresses", kListStr, kOptional},
    {10, "pid", kU64, kOptional},
    {11, "kv_profile", kStr, kOptional},  // how it keeps KV, and the digest of its table
    {12, "kv_table", kStr, kOptional},
};
constexpr FieldSpec kHelloAck[] = {
    {1, "router_id", kId, kRequired},
    {2, "heartbeat_ms", kU64, kRequired},
};
constexpr FieldSpec kHeartbeat[] = {
    {1, "running", kU64, kOptional},          {2, "waiting", kU64, kOptional},
    {3, "free_frames", kU64, kOptional},      {4, "num_frames", kU64, kOptional},
    {5, "waiting_tokens", kU64, kOptional},   {6, "stats_names", kListStr, kOptional},
    {7, "stats_values", kListF64, kOptional}, {8, "kv_table", kStr, kOptional},
};
// Which formats the KV of a sequence that decodes may take; "" = the worker's own choice.
#define KVCORE_KV_PROFILE \
  { 15, "kv_profile", kStr, kOptional }
constexpr FieldSpec kGenerate[] = {KVCORE_REQUEST_FIELDS, KVCORE_KV_PROFILE};
constexpr FieldSpec kReserve[] = {KVCORE_REQUEST_FIELDS, KVCORE_KV_PROFILE};
constexpr FieldSpec kReserved[] = {
    {1, "request_id", kId, kRequired},
    {2, "grant", kBytes, kRequired},
    {3, "cached_tokens", kU64, kOptional},
};
constexpr FieldSpec kPrefill[] = {
    KVCORE_REQUEST_FIELDS,
    {13, "grant", kBytes, kRequired},
    {14, "start_token", kU64, kOptional},
    KVCORE_KV_PROFILE,
};
constexpr FieldSpec kPrefilled[] = {
    {1, "request_id", kId, kRequired},       {2, "cached_tokens", kU64, kOptional},
    {3, "computed_tokens", kU64, kOptional}, {4, "kv_bytes", kU64, kOptional},
    {5, "transport", kStr, kOptional},       {6, "prefill_s", kF64, kOptional},
    {7, "queue_s", kF64, kOptional},
};
constexpr FieldSpec kTokens[] = {
    {1, "request_id", kId, kRequired},     {2, "first_index", kU64, kOptional},
    {3, "token_ids", kListI32, kRequired}, {4, "logprobs", kListF64, kOptional},
    {5, "top_ids", kListI32, kOptional},   {6, "top_logprobs", kListF64, kOptional},
};
constexpr FieldSpec kFinished[] = {
    {1, "request_id", kId, kRequired},     {2, "reason", kStr, kRequired},
    {3, "prompt_tokens", kU64, kOptional}, {4, "completion_tokens", kU64, kOptional},
    {5, "cached_tokens", kU64, kOptional}, {6, "computed_prompt_tokens", kU64, kOptional},
    {7, "kv_bytes", kU64, kOptional},      {8, "arrived_fraction", kF64, kOptional},
    {9, "exposed_s", kF64, kOptional},     {10, "transport", kStr, kOptional},
};
constexpr FieldSpec kFailed[] = {
    {1, "request_id", kId, kRequired},
    {2, "code", kStr, kRequired},
    {3, "message", kStr, kOptional},
    {4, "retryable", kU64, kOptional},
};
constexpr FieldSpec kCancel[] = {{1, "request_id", kId, kRequired}};
constexpr FieldSpec kPrefixEvents[] = {
    {1, "incarnation", kU64, kRequired},  {2, "seq", kU64, kRequired},
    {3, "stored", kListBytes, kOptional}, {4, "removed", kListBytes, kOptional},
    {5, "snapshot", kU64, kOptional},
};
constexpr FieldSpec kGoodbye[] = {{1, "reason", kStr, kOptional}};

constexpr MessageSpec kMessages[] = {
    {1, "hello", kHello},
    {2, "hello_ack", kHelloAck},
    {3, "heartbeat", kHeartbeat},
    {4, "generate", kGenerate},            // router -> mono worker
    {5, "reserve", kReserve},              // router -> decode worker
    {6, "reserved", kReserved},            // decode worker -> router
    {7, "prefill", kPrefill},              // router -> prefill worker
    {8, "prefilled", kPrefilled},          // prefill worker -> router
    {9, "tokens", kTokens},                // worker -> router
    {10, "finished", kFinished},           // worker -> router
    {11, "failed", kFailed},               // worker -> router
    {12, "cancel", kCancel},               // router -> worker
    {13, "prefix_events", kPrefixEvents},  // worker -> router
    {14, "prefix_resync", {}},             // router -> worker: send a snapshot
    {15, "drain", {}},
    {16, "drained", {}},
    {19, "goodbye", kGoodbye},  // last frame of a connection that is closed in order
};

}  // namespace

std::string_view to_string(FieldKind kind) noexcept {
  switch (kind) {
    case kU64:
      return "u64";
    case kI64:
      return "i64";
    case kF64:
      return "f64";
    case kStr:
      return "str";
    case kBytes:
      return "bytes";
    case kId:
      return "bytes16";
    case kListI32:
      return "list[i32]";
    case kListU64:
      return "list[u64]";
    case kListF64:
      return "list[f64]";
    case kListBytes:
      return "list[bytes]";
    case kListStr:
      return "list[str]";
  }
  return "?";
}

std::span<const MessageSpec> all_messages() noexcept { return kMessages; }

const MessageSpec* find_message(std::uint16_t type) noexcept {
  const auto it = std::ranges::find(kMessages, type, &MessageSpec::type);
  return it == std::end(kMessages) ? nullptr : it;
}

const MessageSpec* find_message(std::string_view name) noexcept {
  const auto it = std::ranges::find(kMessages, name, &MessageSpec::name);
  return it == std::end(kMessages) ? nullptr : it;
}

std::optional<std::size_t> find_field(const MessageSpec& spec, std::string_view name) noexcept {
  for (std::size_t i = 0; i < spec.fields.size(); ++i)
    if (spec.fields[i].name == name) return i;
  return std::nullopt;
}

Value default_value(const FieldSpec& field) {
  switch (field.kind) {
    case kU64:
      return static_cast<std::uint64_t>(field.default_number);
    case kI64:
      return static_cast<std::int64_t>(field.default_number);
    case kF64:
      return field.default_number;
    case kStr:
    case kBytes:
      return std::string();
    case kId:
      return std::string(16, '\0');
    case kListI32:
      return std::vector<std::int32_t>();
    case kListU64:
      return std::vector<std::uint64_t>();
    case kListF64:
      return std::vector<double>();
    case kListBytes:
    case kListStr:
      return std::vector<std::string>();
  }
  return std::uint64_t{0};
}

}  // namespace kvcore::wire
