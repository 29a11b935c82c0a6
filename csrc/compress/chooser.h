// Chooser: which format each (layer, KV head, K/V) gets, from statistics of the model's own keys,
// values and queries, so that the predicted error is least within a budget of bytes.
//
// Predicted error of a head, in units of "divergence of the next token" (nats, first order):
//   K  sum over channels d of key_weight[d] * key_error[format][d]
//   V  value_weight * value_error[format]
// Everything starts at the least format; then upgrades are bought in the order of error removed per
// byte until the budget is spent. Heads whose keys the least format cannot carry (max_key_error of
// their variation) are upgraded first, whatever their weight.
// Thread rules: pure functions of their arguments; equal arguments give equal tables (ties: the
// smaller layer, then head, K before V). Units: bytes, nats, mean square of numbers.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "pages/page_class.h"

namespace kvcore::compress {

// What a calibration knows of one (layer, KV head).
struct HeadStatistics {
  std::vector<double> key_weight;  // [head_dim_k] nats per mean square error of the channel
  std::vector<double> key_energy;  // [head_dim_k] mean square about the page's channel mean
  std::vector<std::pair<Format, std::vector<double>>> key_error;  // [head_dim_k] mean square error
  double value_weight = 0;  // nats per square error over square of the values
  std::vector<std::pair<Format, double>> value_error;  // square error over square of the values
};

struct Profile {
  pages::HeadFormats least{Format::kK4, Format::kV3};
  std::int64_t budget_bytes = 0;  // of one page, all metadata counted
  // A key format is refused for a head whose error is more than this part of the keys' variation
  // about their page means, in the channels that queries look at.
  double max_key_error = 0.05;
};

// "balanced": the bytes of k4 + v4 everywhere and 0.17 bit a number more; "small": those of k4 + v3
// and 0.19 bit more. At head_dim 128 that is <= 27.5 % and <= 24.5 % of bf16.
Result<Profile> profile_of(const pages::PageSpec& spec, std::string_view name);

// statistics: [num_layers * num_kv_heads]. InvalidArgument: wrong counts, numbers that are negative
// or not finite, a format without an error; Unsupported: the budget is below what the profile's
// least table and the refusals need.
Result<pages::PageClass> choose(const pages::PageSpec& spec,
                                std::span<const HeadStatistics> statistics, const Profile& profile);

// Predicted error of a table: K and V of each (layer, KV head), [num_layers * num_kv_heads * 2].
Result<std::vector<double>> predicted_error(const pages::PageClass& table,
                                            std::span<const HeadStatistics> statistics);

}  // namespace kvcore::compress
