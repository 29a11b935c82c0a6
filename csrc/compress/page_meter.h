// PageMeter: what each format makes of the pages that are being sealed, as running means over a
// sample, so that tables which the text of the day has outgrown are noticed
// (kvcore.compress.drift).
//
// One slice in kSampleEvery is measured: layers come in turn, one after so many pages that all of
// them together are 1/kSampleEvery of what is sealed. So no step pays for a whole page at once, and
// a round, in which every layer is measured once, takes kSampleEvery pages. Slices with numbers
// that cannot be encoded are left out. Thread rules: one thread, no kernel writes the page
// meanwhile.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/page_layout.h"
#include "pages/pool.h"

namespace kvcore::compress {

inline constexpr std::array kKeyFormats = {Format::kK4, Format::kInt8};
inline constexpr std::array kValueFormats = {Format::kV3, Format::kV4, Format::kInt8};

// Of one (layer, KV head); mean squares.
struct HeadMeans {
  double key_square = 0;           // of keys
  std::vector<double> key_energy;  // [head_dim_k] about the page's mean of the channel
  std::array<std::vector<double>, kKeyFormats.size()> key_error;  // [head_dim_k]
  double value_energy = 0;                                        // norm of a row
  std::array<double, kValueFormats.size()> value_lost{};          // norm of a row's error
};

class PageMeter {
 public:
  static constexpr std::int64_t kSampleEvery = 64;

  explicit PageMeter(const pages::PageSpec& spec);

  // `page` is full and open and is about to be sealed.
  void pass(const pages::Pool& pool, std::int32_t page);

  // Forgets what was measured.
  void restart() noexcept { layer_ = 0, rounds_ = 0; }

  std::int64_t rounds() const noexcept { return rounds_; }  // that are complete
  // Over all rounds, [num_layers * num_kv_heads]; of no use before the first is complete.
  const std::vector<HeadMeans>& means() const noexcept { return means_; }

 private:
  bool measure(const pages::Pool& pool, std::int32_t page, std::int32_t layer);
  bool measure_head(const std::byte* slice, const HeadBlock& block, HeadMeans& out);
  bool round_trip(Format format, Part part, std::int64_t dim);
  void blend(const HeadMeans& newer, HeadMeans& mean) const;

  const pages::PageSpecOptions o_;
  std::vector<HeadMeans> means_;
  std::vector<HeadMeans> fresh_;  // [num_kv_heads], of the slice being measured
  std::int64_t credit_ = 0;       // slices sealed since the last one measured
  std::int32_t layer_ = 0;        // whose turn it is
  std::int64_t rounds_ = 0;
  std::vector<std::byte> open_;  // [page_size * head_dim] as stored
  std::vector<float> rows_;      // the same
  std::vector<float> back_;      // what a format makes of them
  std::vector<std::byte> block_;
};

}  // namespace kvcore::compress
