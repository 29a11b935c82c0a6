// Errors are values: Result<T> and Status, with named codes. Exceptions exist only in
// csrc/bindings. A message names the field, the value it had and what is allowed. Thread rules:
// plain values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace kvcore {

enum class ErrorCode : std::uint8_t {
  kInvalidArgument,  // the caller passed something outside the documented range
  kOutOfPages,       // the pool has not enough free frames
  kNotFound,         // an unknown id or name
  kStale,            // an old generation or an expired grant
  kTimeout,          // a deadline passed
  kCancelled,        // cancelled by this side or the peer
  kPeerDead,         // the peer's process or connection is gone
  kTransport,        // the link refused or broke the operation
  kCorrupt,          // a checksum, MAC or format check failed
  kUnauthenticated,  // the peer did not prove the pre-shared key
  kUnsupported,      // this build or machine cannot do it; the message says why
  kIo,               // the operating system refused a call; the message carries errno
  kInternal,         // a broken invariant of kvcore itself
  kPeerHung,         // the peer may be alive, but was silent for longer than the keep-alive
};
// Codes travel as numbers: new ones are appended, and decoders refuse what lies behind the last.
inline constexpr ErrorCode kLastErrorCode = ErrorCode::kPeerHung;

std::string_view to_string(ErrorCode code) noexcept;

struct [[nodiscard]] Error {
  ErrorCode code;
  std::string message;
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : v_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : v_(std::in_place_index<1>, std::move(error)) {}
  bool ok() const noexcept { return v_.index() == 0; }
  explicit operator bool() const noexcept { return ok(); }
  T& value() & { return std::get<0>(v_); }
  const T& value() const& { return std::get<0>(v_); }
  T&& value() && { return std::get<0>(std::move(v_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  const Error& error() const { return std::get<1>(v_); }

 private:
  std::variant<T, Error> v_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)), ok_(false) {}
  bool ok() const noexcept { return ok_; }
  explicit operator bool() const noexcept { return ok(); }
  const Error& error() const { return error_; }

 private:
  Error error_{ErrorCode::kInternal, {}};
  bool ok_ = true;
};

using Status = Result<void>;

inline Error invalid_argument(std::string message) {
  return {ErrorCode::kInvalidArgument, std::move(message)};
}

// Returns from the enclosing function with the error of `expr`, if it has one.
#define KVCORE_RETURN_IF_ERROR(expr)                                                  \
  do {                                                                                \
    if (auto kvcore_status_ = (expr); !kvcore_status_) return kvcore_status_.error(); \
  } while (0)

#define KVCORE_CONCAT_INNER(a, b) a##b
#define KVCORE_CONCAT(a, b) KVCORE_CONCAT_INNER(a, b)
// KVCORE_ASSIGN_OR_RETURN(auto x, f()): declares x or returns f's error.
#define KVCORE_ASSIGN_OR_RETURN(lhs, expr) \
  KVCORE_ASSIGN_OR_RETURN_INNER(lhs, expr, KVCORE_CONCAT(kvcore_result_, __LINE__))
#define KVCORE_ASSIGN_OR_RETURN_INNER(lhs, expr, tmp) \
  auto tmp = (expr);                                  \
  if (!tmp) return tmp.error();                       \
  lhs = std::move(tmp).value()

}  // namespace kvcore
