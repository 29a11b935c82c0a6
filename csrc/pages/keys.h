// Page keys: the names pages have outside their process (router index, tiers, other nodes).
//   key[i] = BLAKE2b-256(key = secret, namespace digest (32 B) | key[i-1] | tokens[i*unit ..
//   (i+1)*unit))
// with tokens as little-endian int32 and 32 zero bytes before the first key. So a key names the
// whole prefix up to its page, and two namespaces or two secrets never share one. Only whole units
// have keys. Thread rules: a KeyChain belongs to one thread. Units: tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/blake2b.h"
#include "base/result.h"

namespace kvcore::pages {

using Key = Digest32;
constexpr Key kRootKey{};

// One identity field of a namespace, e.g. {"model_id", "smollm2"}.
struct NamespaceField {
  std::string_view tag;
  std::string_view value;
};

// BLAKE2b-256 over (tag length, tag, value length, value) of each field in the order given, lengths
// as little-endian uint32: no two lists of fields have the same input bytes.
Digest32 namespace_digest(std::span<const NamespaceField> fields);

// Makes the keys of successive units from the state after the secret, hashed once.
class KeyMaker {
 public:
  // secret: 0 to 64 bytes; unit_tokens: 1 to 4096.
  static Result<KeyMaker> make(std::span<const std::byte> secret, std::int64_t unit_tokens);
  Key next(const Digest32& namespace_digest, const Key& parent,
           std::span<const std::int32_t> unit) const noexcept;
  std::int64_t unit_tokens() const noexcept { return unit_tokens_; }

 private:
  KeyMaker(Blake2b start, std::int64_t unit_tokens) : start_(start), unit_tokens_(unit_tokens) {}
  Blake2b start_;
  std::int64_t unit_tokens_;
};

// The keys of one growing sequence: extend() hashes only what is new.
class KeyChain {
 public:
  KeyChain(KeyMaker maker, const Digest32& namespace_digest)
      : maker_(maker), namespace_(namespace_digest) {}

  // Appends tokens; the keys of the units this completes are the last `returned` of keys().
  std::size_t extend(std::span<const std::int32_t> tokens);
  const std::vector<Key>& keys() const noexcept { return keys_; }
  std::int64_t num_tokens() const noexcept;

 private:
  KeyMaker maker_;
  Digest32 namespace_;
  std::vector<Key> keys_;
  std::vector<std::int32_t> rest_;  // tokens of the unit not yet whole
};

}  // namespace kvcore::pages
