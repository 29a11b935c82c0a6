// Non-owning strided view; strides in elements. Trivially copyable, usable as a kernel argument.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__
#define KVCORE_HD __host__ __device__
#else
#define KVCORE_HD
#endif

namespace kvcore {

template <class T, int Rank>
struct TensorView {
  T* data = nullptr;
  std::int64_t shape[Rank]{};
  std::int64_t stride[Rank]{};

  template <std::integral... I>
    requires(sizeof...(I) == Rank)
  KVCORE_HD T& operator()(I... index) const {
    std::int64_t offset = 0;
    int dim = 0;
    ((offset += static_cast<std::int64_t>(index) * stride[dim++]), ...);
    return data[offset];
  }
  KVCORE_HD std::int64_t dim(int i) const { return shape[i]; }
};
static_assert(std::is_trivially_copyable_v<TensorView<float, 4>>);

// A view whose element type is known at run time (see base/dtype.h); strides in elements.
template <int Rank>
struct RawView {
  void* data = nullptr;
  std::int64_t shape[Rank]{};
  std::int64_t stride[Rank]{};
};

}  // namespace kvcore
