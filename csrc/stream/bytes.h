// Little-endian reader and writer for the stream's grant and messages. The reader never reads past
// its input: the first short read makes it fail, and everything after returns zeros.
// Thread rules: plain values. Units: bytes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace kvcore::stream {

static_assert(std::endian::native == std::endian::little, "the encoding copies host integers");

class ByteWriter {
 public:
  template <class T>
  requires std::is_integral_v<T>
  void put(T value) { append(&value, sizeof(value)); }
  void put_raw(std::span<const std::byte> bytes) { append(bytes.data(), bytes.size()); }
  void put_bytes(std::span<const std::byte> bytes) {
    put(static_cast<std::uint32_t>(bytes.size()));
    put_raw(bytes);
  }
  void put_string(std::string_view s) { put_bytes(std::as_bytes(std::span(s.data(), s.size()))); }
  std::vector<std::byte> take() { return std::move(out_); }

 private:
  void append(const void* data, std::size_t n) {
    const auto* p = static_cast<const std::byte*>(data);
    for (std::size_t i = 0; i < n; ++i) out_.push_back(p[i]);
  }
  std::vector<std::byte> out_;
};

class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> in) : in_(in) {}
  template <class T>
  requires std::is_integral_v<T> T get() {
    T value{};
    const auto part = get_raw(sizeof(T));
    if (ok_) std::memcpy(&value, part.data(), sizeof(T));
    return value;
  }
  std::span<const std::byte> get_raw(std::size_t n) {
    if (n > in_.size()) ok_ = false;
    if (!ok_) return {};
    const auto part = in_.first(n);
    in_ = in_.subspan(n);
    return part;
  }
  std::vector<std::byte> get_bytes(std::size_t max_bytes) {
    const auto part = get_raw(checked(get<std::uint32_t>(), max_bytes));
    return {part.begin(), part.end()};
  }
  std::string get_string(std::size_t max_bytes) {
    const auto part = get_raw(checked(get<std::uint32_t>(), max_bytes));
    return {reinterpret_cast<const char*>(part.data()), part.size()};
  }
  bool ok() const noexcept { return ok_; }
  bool at_end() const noexcept { return in_.empty(); }
  std::size_t left() const noexcept { return in_.size(); }

 private:
  std::size_t checked(std::size_t n, std::size_t max) {
    if (n > max) ok_ = false;
    return ok_ ? n : 0;
  }
  std::span<const std::byte> in_;
  bool ok_ = true;
};

}  // namespace kvcore::stream
