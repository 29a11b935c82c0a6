// Mutual proof of a pre-shared key, then a MAC for every frame of the session. No sockets, no
// clock.
//
//   initiator -> responder  1: nonce_i, label, hello_i
//   responder -> initiator  2: nonce_r, hello_r, proof_r      proof_* = BLAKE2b(prk, role)
//   initiator -> responder  3: proof_i                        prk = BLAKE2b(key, all bytes above)
//
// Both nonces and both hellos are under the proofs, so nothing of an old session can be replayed
// and no hello can be changed. Afterwards each direction has its own MAC key and its own sequence
// number, which is part of every MAC: a frame that is repeated, dropped, reordered or reflected
// fails. Payload is authenticated where the caller puts it under the MAC; nothing is encrypted. An
// empty key is the key of 32 zero bytes: that proves nothing and only detects accidents.
//
// Thread rules: a plain value, one thread at a time. After an error the object is dead: close.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kvcore {

using Bytes = std::span<const std::byte>;
using Mac = std::array<std::byte, 16>;

class AuthSession {
 public:
  enum class Side : std::uint8_t { kInitiator, kResponder };
  static constexpr std::size_t kKeyBytes = 32;
  static constexpr std::size_t kMaxHelloBytes = 1024;

  // key: 0 or 32 bytes. label: what is spoken, with its version ("kvcore-wire-1"); both sides must
  // agree. hello: told to the peer, <= kMaxHelloBytes. The nonce comes from secure_random.
  static Result<AuthSession> make(Side side, Bytes key, std::string_view label, Bytes hello);

  // What the initiator sends first; empty for the responder.
  std::vector<std::byte> start();
  // Takes what was received; appends what must be sent to *out. Returns how many bytes of `in` were
  // used: the handshake takes no byte beyond its own end. Unauthenticated or Corrupt: close.
  Result<std::size_t> feed(Bytes in, std::vector<std::byte>* out);
  bool established() const noexcept { return state_ == State::kEstablished; }

  // Valid once established.
  const std::vector<std::byte>& peer_hello() const noexcept { return peer_hello_; }
  std::uint64_t session_id() const noexcept { return session_id_; }
  std::uint64_t send_sequence() const noexcept { return send_sequence_; }        // of the next seal
  std::uint64_t receive_sequence() const noexcept { return receive_sequence_; }  // of the next open
  // A secret that only both ends of this session can compute, to tie something else to it.
  Mac token(std::uint64_t number) const;
  Mac seal(std::initializer_list<Bytes> parts);
  Status open(std::initializer_list<Bytes> parts, Bytes mac);

 private:
  enum class State : std::uint8_t {
    kStart,
    kWaitHello,
    kWaitReply,
    kWaitProof,
    kEstablished,
    kDead
  };
  using Key = std::array<std::byte, 32>;

  AuthSession() = default;
  std::vector<std::byte> frame(std::uint8_t step, Bytes body) const;
  Status on_frame(std::uint8_t step, Bytes whole, Bytes body, std::vector<std::byte>* out);
  Status on_hello(Bytes whole, Bytes body, std::vector<std::byte>* out);
  Status on_reply(Bytes whole, Bytes body, std::vector<std::byte>* out);
  void derive();

  Side side_ = Side::kInitiator;
  State state_ = State::kStart;
  Key key_{};
  std::string label_;
  std::vector<std::byte> hello_, peer_hello_, transcript_, received_;
  std::array<std::byte, 32> nonce_{};
  Key send_key_{}, receive_key_{}, proof_own_{}, proof_peer_{}, token_key_{};
  std::uint64_t session_id_ = 0, send_sequence_ = 0, receive_sequence_ = 0;
};

}  // namespace kvcore
