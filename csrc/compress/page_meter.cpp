#include "compress/page_meter.h"

#include <algorithm>
#include <span>

#include "compress/unpack.h"
#include "kernels/formats/formats.h"
#include "kernels/layout/convert.h"

namespace kvcore::compress {
namespace {

// out[d] = mean over rows of (a[row][d] - (b ? b[row][d] : mean of a[.][d]))^2.
void mean_square(const float* a, const float* b, std::int64_t rows, std::int64_t dim,
                 std::vector<double>& out) {
  out.assign(static_cast<std::size_t>(dim), 0);
  std::vector<double> mean(static_cast<std::size_t>(dim), 0);
  const auto n = static_cast<double>(rows);
  for (std::int64_t i = 0; b == nullptr && i < rows; ++i)
    for (std::int64_t d = 0; d < dim; ++d)
      mean[static_cast<std::size_t>(d)] += double{a[i * dim + d]} / n;
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t d = 0; d < dim; ++d) {
      const auto x = static_cast<std::size_t>(d);
      const double off = double{a[i * dim + d]} - (b ? double{b[i * dim + d]} : mean[x]);
      out[x] += off * off / n;
    }
}

// Sum over all numbers of (a - b)^2, without b of a^2, over rows.
double row_square(const float* a, const float* b, std::int64_t rows, std::int64_t dim) {
  double sum = 0;
  for (std::int64_t i = 0; i < rows * dim; ++i) {
    const double off = double{a[i]} - (b ? double{b[i]} : 0);
    sum += off * off;
  }
  return sum / static_cast<double>(rows);
}

void mix(double& mean, double newer, double share) { mean += share * (newer - mean); }

void mix(std::vector<double>& mean, const std::vector<double>& newer, double share) {
  mean.resize(newer.size());
  for (std::size_t i = 0; i < newer.size(); ++i) mix(mean[i], newer[i], share);
}

}  // namespace

PageMeter::PageMeter(const pages::PageSpec& spec) : o_(spec.options()) {
  const auto heads = static_cast<std::size_t>(o_.num_kv_heads);
  means_.resize(static_cast<std::size_t>(o_.num_layers) * heads);
  fresh_.resize(heads);
  const auto numbers =
      static_cast<std::size_t>(o_.page_size * std::max(o_.head_dim_k, o_.head_dim_v));
  open_.resize(numbers * 4);
  rows_.resize(numbers);
  back_.resize(numbers);
}

void PageMeter::pass(const pages::Pool& pool, std::int32_t page) {
  for (credit_ += o_.num_layers; credit_ >= kSampleEvery; credit_ -= kSampleEvery) {
    if (!measure(pool, page, layer_)) continue;
    const auto heads = static_cast<std::size_t>(o_.num_kv_heads);
    const auto first = static_cast<std::size_t>(layer_) * heads;
    for (std::size_t head = 0; head < heads; ++head) blend(fresh_[head], means_[first + head]);
    if (++layer_ == o_.num_layers) layer_ = 0, ++rounds_;
  }
}

bool PageMeter::measure(const pages::Pool& pool, std::int32_t page, std::int32_t layer) {
  const PagesView& view = pool.view();
  const HeadBlock* blocks = view.classes[view.records[page].class_id].layers[layer].heads;
  for (std::size_t head = 0; head < fresh_.size(); ++head)
    if (!measure_head(pool.slice(page, layer), blocks[head], fresh_[head])) return false;
  return true;
}

bool PageMeter::measure_head(const std::byte* slice, const HeadBlock& block, HeadMeans& out) {
  const DType stored = kernels::dtype_of(o_.format);
  const auto load = [&](std::int64_t dim) {
    kernels::convert_row(reinterpret_cast<const char*>(open_.data()), stored,
                         reinterpret_cast<char*>(rows_.data()), DType::kF32, o_.page_size * dim);
  };
  const std::int64_t n = o_.page_size, k = o_.head_dim_k, v = o_.head_dim_v;
  unpack_k({slice + block.k_offset_bytes, o_.format, n, k}, open_.data());
  load(k);
  mean_square(rows_.data(), nullptr, n, k, out.key_energy);
  out.key_square = row_square(rows_.data(), nullptr, n, k) / static_cast<double>(k);
  for (std::size_t i = 0; i < kKeyFormats.size(); ++i) {
    if (!round_trip(kKeyFormats[i], Part::kK, k)) return false;
    mean_square(rows_.data(), back_.data(), n, k, out.key_error[i]);
  }
  unpack_v({slice + block.v_offset_bytes, o_.format, n, v}, open_.data());
  load(v);
  out.value_energy = row_square(rows_.data(), nullptr, n, v);
  for (std::size_t i = 0; i < kValueFormats.size(); ++i) {
    if (!round_trip(kValueFormats[i], Part::kV, v)) return false;
    out.value_lost[i] = row_square(rows_.data(), back_.data(), n, v);
  }
  return true;
}

bool PageMeter::round_trip(Format format, Part part, std::int64_t dim) {
  const kernels::BlockSpec spec{format, part, o_.page_size, dim};
  const Result<std::int64_t> bytes = kernels::block_bytes(spec);
  if (!bytes) return false;
  block_.resize(static_cast<std::size_t>(*bytes));
  return kernels::encode_page_block(spec, rows_.data(), dim, DType::kF32, block_).ok() &&
         kernels::decode_page_block(spec, block_, back_.data(), dim, DType::kF32).ok();
}

void PageMeter::blend(const HeadMeans& newer, HeadMeans& mean) const {
  const double share = 1 / static_cast<double>(rounds_ + 1);
  mix(mean.key_square, newer.key_square, share);
  mix(mean.key_energy, newer.key_energy, share);
  for (std::size_t i = 0; i < kKeyFormats.size(); ++i)
    mix(mean.key_error[i], newer.key_error[i], share);
  mix(mean.value_energy, newer.value_energy, share);
  for (std::size_t i = 0; i < kValueFormats.size(); ++i)
    mix(mean.value_lost[i], newer.value_lost[i], share);
}

}  // namespace kvcore::compress
