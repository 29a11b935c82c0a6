#include "compress/unpack.h"

#include <algorithm>
#include <cstring>

namespace kvcore::compress {
namespace {

using Quad = std::uint32_t __attribute__((vector_size(16)));
using Octet = std::uint16_t __attribute__((vector_size(16)));

template <class V, class T>
V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V, class T>
void store(T* to, const V& v) {
  std::memcpy(to, &v, sizeof v);
}

// to[j * width + i] = from[i * pitch + j] for i < width, j < lanes; both multiples of 4.
void transpose(const std::uint32_t* from, std::int64_t lanes, std::int64_t width,
               std::uint32_t* to) {
  for (std::int64_t j = 0; j < lanes; j += 4) {
    for (std::int64_t i = 0; i < width; i += 4) {
      const std::uint32_t* at = from + i * lanes + j;
      const Quad a = load<Quad>(at), b = load<Quad>(at + lanes), c = load<Quad>(at + 2 * lanes),
                 d = load<Quad>(at + 3 * lanes);
      const Quad ab_low = __builtin_shuffle(a, b, Quad{0, 4, 1, 5});
      const Quad ab_high = __builtin_shuffle(a, b, Quad{2, 6, 3, 7});
      const Quad cd_low = __builtin_shuffle(c, d, Quad{0, 4, 1, 5});
      const Quad cd_high = __builtin_shuffle(c, d, Quad{2, 6, 3, 7});
      std::uint32_t* out = to + j * width + i;
      store(out, __builtin_shuffle(ab_low, cd_low, Quad{0, 1, 4, 5}));
      store(out + width, __builtin_shuffle(ab_low, cd_low, Quad{2, 3, 6, 7}));
      store(out + 2 * width, __builtin_shuffle(ab_high, cd_high, Quad{0, 1, 4, 5}));
      store(out + 3 * width, __builtin_shuffle(ab_high, cd_high, Quad{2, 3, 6, 7}));
    }
  }
}

void transpose(const std::uint16_t* from, std::int64_t lanes, std::int64_t width,
               std::uint16_t* to) {
  for (std::int64_t i = 0; i < width; ++i)
    for (std::int64_t j = 0; j < lanes; ++j) to[j * width + i] = from[i * lanes + j];
}

// Pairs of tokens: pairs[x] = {even token, odd token} of dim x.
void split_pairs(const std::uint16_t* pairs, std::int64_t dims, std::uint16_t* even,
                 std::uint16_t* odd) {
  for (std::int64_t x = 0; x < dims; x += 8) {  // head_dim is a multiple of 16
    const Octet low = load<Octet>(pairs + 2 * x), high = load<Octet>(pairs + 2 * x + 8);
    store(even + x, __builtin_shuffle(low, high, Octet{0, 2, 4, 6, 8, 10, 12, 14}));
    store(odd + x, __builtin_shuffle(low, high, Octet{1, 3, 5, 7, 9, 11, 13, 15}));
  }
}

}  // namespace

void unpack_k(const OpenBlock& b, std::byte* rows) {
  const std::int64_t lanes = std::min(b.tokens, kTokenBlock);
  const std::int64_t row_bytes = b.dim * (b.format == Format::kF32 ? 4 : 2);
  for (std::int64_t first = 0; first < b.tokens; first += lanes) {
    const std::byte* from = b.data + first * row_bytes;
    std::byte* to = rows + first * row_bytes;
    if (b.format == Format::kF16)
      transpose(reinterpret_cast<const std::uint16_t*>(from), lanes, b.dim,
                reinterpret_cast<std::uint16_t*>(to));
    else  // values of 4 bytes, or pairs of dims
      transpose(reinterpret_cast<const std::uint32_t*>(from), lanes,
                b.format == Format::kBf16 ? b.dim / 2 : b.dim,
                reinterpret_cast<std::uint32_t*>(to));
  }
}

void unpack_v(const OpenBlock& b, std::byte* rows) {
  const std::int64_t element = b.format == Format::kF32 ? 4 : 2;
  for (std::int64_t first = 0; first < b.dim; first += kDimBlock) {
    const std::int64_t dims = std::min(b.dim - first, kDimBlock);
    const std::byte* from = b.data + first * b.tokens * element;
    for (std::int64_t token = 0; token < b.tokens; token += 2) {
      std::byte* even = rows + (token * b.dim + first) * element;
      std::byte* odd = even + b.dim * element;
      const std::byte* pair = from + token * dims * element;
      if (b.format == Format::kBf16) {
        split_pairs(reinterpret_cast<const std::uint16_t*>(pair), dims,
                    reinterpret_cast<std::uint16_t*>(even), reinterpret_cast<std::uint16_t*>(odd));
      } else {
        const auto bytes = static_cast<std::size_t>(dims * element);
        std::memcpy(even, pair, bytes);
        std::memcpy(odd, pair + bytes, bytes);
      }
    }
  }
}

}  // namespace kvcore::compress
