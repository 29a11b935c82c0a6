#include "pages/keys.h"

#include <algorithm>
#include <array>
#include <bit>

#include "base/text.h"

namespace kvcore::pages {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tokens are hashed as they lie in memory");
constexpr std::int64_t kMaxUnitTokens = 4096;

void update_with_length(Blake2b& hash, std::string_view bytes) {
  const auto length = static_cast<std::uint32_t>(bytes.size());
  hash.update(std::as_bytes(std::span(&length, 1)));
  hash.update(std::as_bytes(std::span(bytes)));
}

}  // namespace

Digest32 namespace_digest(std::span<const NamespaceField> fields) {
  Blake2b hash = Blake2b::make(32).value();
  for (const NamespaceField& field : fields) {
    update_with_length(hash, field.tag);
    update_with_length(hash, field.value);
  }
  Digest32 digest;
  hash.finish(digest);
  return digest;
}

Result<KeyMaker> KeyMaker::make(std::span<const std::byte> secret, std::int64_t unit_tokens) {
  if (secret.size() > kBlake2bMaxBytes)
    return invalid_argument(text("secret has ", secret.size(), " bytes: allowed 0 to 64"));
  if (unit_tokens < 1 || unit_tokens > kMaxUnitTokens)
    return invalid_argument(
        text("unit=", unit_tokens, " is out of range: allowed 1 to ", kMaxUnitTokens, " tokens"));
  KVCORE_ASSIGN_OR_RETURN(Blake2b start, Blake2b::make(32, secret));
  return KeyMaker(start, unit_tokens);
}

Key KeyMaker::next(const Digest32& namespace_digest, const Key& parent,
                   std::span<const std::int32_t> unit) const noexcept {
  Blake2b hash = start_;
  hash.update(namespace_digest);
  hash.update(parent);
  hash.update(std::as_bytes(unit));
  Key key;
  hash.finish(key);
  return key;
}

std::size_t KeyChain::extend(std::span<const std::int32_t> tokens) {
  const auto unit = static_cast<std::size_t>(maker_.unit_tokens());
  const std::size_t before = keys_.size();
  const auto add = [&](std::span<const std::int32_t> whole) {
    keys_.push_back(maker_.next(namespace_, keys_.empty() ? kRootKey : keys_.back(), whole));
  };
  if (!rest_.empty()) {
    const std::size_t take = std::min(unit - rest_.size(), tokens.size());
    rest_.insert(rest_.end(), tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(take));
    tokens = tokens.subspan(take);
    if (rest_.size() < unit) return 0;
    add(rest_);
    rest_.clear();
  }
  for (; tokens.size() >= unit; tokens = tokens.subspan(unit)) add(tokens.first(unit));
  rest_.assign(tokens.begin(), tokens.end());
  return keys_.size() - before;
}

std::int64_t KeyChain::num_tokens() const noexcept {
  return static_cast<std::int64_t>(keys_.size()) * maker_.unit_tokens() +
         static_cast<std::int64_t>(rest_.size());
}

}  // namespace kvcore::pages
