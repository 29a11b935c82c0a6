#include "base/auth_session.h"

#include <algorithm>
#include <cstring>

#include "base/blake2b.h"
#include "base/random.h"
#include "base/text.h"

namespace kvcore {
namespace {

// frame = magic 4 | version 1 | step 1 | body bytes u16 LE | body
constexpr char kMagic[4] = {'K', 'V', 'C', 'A'};
constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kHeader = 8;
constexpr std::size_t kNonce = 32, kProof = 32;
constexpr std::size_t kMaxBody = kNonce + 1 + 255 + 2 + AuthSession::kMaxHelloBytes + kProof;

Bytes bytes_of(std::string_view s) { return std::as_bytes(std::span(s.data(), s.size())); }

void append(std::vector<std::byte>* out, Bytes data) {
  out->insert(out->end(), data.begin(), data.end());
}

void append_u16(std::vector<std::byte>* out, std::size_t value) {
  out->push_back(static_cast<std::byte>(value & 0xff));
  out->push_back(static_cast<std::byte>(value >> 8));
}

std::size_t read_u16(Bytes data) {
  return static_cast<std::size_t>(data[0]) | (static_cast<std::size_t>(data[1]) << 8);
}

bool equal_constant_time(Bytes a, Bytes b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

Error unauthenticated(std::string message) {
  return {ErrorCode::kUnauthenticated, std::move(message)};
}

// Keys here have 32 bytes, which BLAKE2b always takes.
Digest32 digest_of(Bytes data, Bytes key) { return *blake2b_256(data, key); }

Mac mac_of(Bytes key, std::uint64_t sequence, std::initializer_list<Bytes> parts) {
  std::array<std::byte, 8> number;
  for (std::size_t i = 0; i < 8; ++i) number[i] = static_cast<std::byte>(sequence >> (8 * i));
  Blake2b hash = *Blake2b::make(16, key);
  hash.update(number);
  for (const Bytes part : parts) hash.update(part);
  Mac mac;
  hash.finish(mac);
  return mac;
}

}  // namespace

Result<AuthSession> AuthSession::make(Side side, Bytes key, std::string_view label, Bytes hello) {
  if (!key.empty() && key.size() != kKeyBytes)
    return invalid_argument(text("key has ", key.size(), " bytes, must have 0 or ", kKeyBytes));
  if (label.empty() || label.size() > 255)
    return invalid_argument(text("label has ", label.size(), " bytes, must have 1..255"));
  if (hello.size() > kMaxHelloBytes)
    return invalid_argument(text("hello has ", hello.size(), " bytes, at most ", kMaxHelloBytes));
  AuthSession s;
  s.side_ = side;
  std::ranges::copy(key, s.key_.begin());
  s.label_ = label;
  s.hello_.assign(hello.begin(), hello.end());
  s.state_ = side == Side::kInitiator ? State::kStart : State::kWaitHello;
  KVCORE_RETURN_IF_ERROR(secure_random(s.nonce_));
  return s;
}

std::vector<std::byte> AuthSession::frame(std::uint8_t step, Bytes body) const {
  std::vector<std::byte> out;
  out.reserve(kHeader + body.size());
  for (const char c : kMagic) out.push_back(static_cast<std::byte>(c));
  out.push_back(std::byte{kVersion});
  out.push_back(std::byte{step});
  append_u16(&out, body.size());
  append(&out, body);
  return out;
}

std::vector<std::byte> AuthSession::start() {
  if (state_ != State::kStart) return {};
  std::vector<std::byte> body(nonce_.begin(), nonce_.end());
  body.push_back(static_cast<std::byte>(label_.size()));
  append(&body, bytes_of(label_));
  append_u16(&body, hello_.size());
  append(&body, hello_);
  transcript_ = frame(1, body);
  state_ = State::kWaitReply;
  return transcript_;
}

Result<std::size_t> AuthSession::feed(Bytes in, std::vector<std::byte>* out) {
  std::size_t used = 0;
  while (used < in.size() && !established()) {
    if (state_ == State::kDead || state_ == State::kStart)
      return unauthenticated("handshake data in a state that expects none");
    std::size_t want = kHeader;
    if (received_.size() >= kHeader) want += read_u16(Bytes(received_).subspan(6));
    const std::size_t n = std::min(want - received_.size(), in.size() - used);
    append(&received_, in.subspan(used, n));
    used += n;
    if (received_.size() < kHeader) break;
    Status status;
    if (std::memcmp(received_.data(), kMagic, 4) != 0)
      status = unauthenticated("the peer does not speak the kvcore handshake");
    else if (received_[4] != std::byte{kVersion})
      status = unauthenticated(text("handshake version ", static_cast<int>(received_[4]),
                                    " is not ", static_cast<int>(kVersion)));
    else if (read_u16(Bytes(received_).subspan(6)) > kMaxBody)
      status = unauthenticated("handshake frame too long");
    else if (received_.size() < kHeader + read_u16(Bytes(received_).subspan(6)))
      continue;
    else {
      const std::vector<std::byte> whole = std::move(received_);
      received_.clear();
      status =
          on_frame(static_cast<std::uint8_t>(whole[5]), whole, Bytes(whole).subspan(kHeader), out);
    }
    if (!status) {
      state_ = State::kDead;
      return status.error();
    }
  }
  return used;
}

Status AuthSession::on_frame(std::uint8_t step, Bytes whole, Bytes body,
                             std::vector<std::byte>* out) {
  if (state_ == State::kWaitHello && step == 1) return on_hello(whole, body, out);
  if (state_ == State::kWaitReply && step == 2) return on_reply(whole, body, out);
  if (state_ == State::kWaitProof && step == 3) {
    if (!equal_constant_time(body, proof_peer_))
      return unauthenticated("the peer did not prove the pre-shared key");
    state_ = State::kEstablished;
    return {};
  }
  return unauthenticated(text("handshake step ", static_cast<int>(step), " is out of turn"));
}

Status AuthSession::on_hello(Bytes whole, Bytes body, std::vector<std::byte>* out) {
  const Error malformed = unauthenticated("handshake step 1 is malformed");
  if (body.size() < kNonce + 1) return malformed;
  const std::size_t label_bytes = static_cast<std::size_t>(body[kNonce]);
  if (body.size() < kNonce + 1 + label_bytes + 2) return malformed;
  if (!std::ranges::equal(body.subspan(kNonce + 1, label_bytes), bytes_of(label_)))
    return unauthenticated(text("the peer speaks another protocol or version than ", label_));
  const Bytes rest = body.subspan(kNonce + 1 + label_bytes);
  if (read_u16(rest) != rest.size() - 2 || rest.size() - 2 > kMaxHelloBytes) return malformed;
  peer_hello_.assign(rest.begin() + 2, rest.end());
  transcript_.assign(whole.begin(), whole.end());

  std::vector<std::byte> reply(nonce_.begin(), nonce_.end());
  append_u16(&reply, hello_.size());
  append(&reply, hello_);
  append(&transcript_, reply);
  derive();
  append(&reply, proof_own_);
  append(out, frame(2, reply));
  state_ = State::kWaitProof;
  return {};
}

Status AuthSession::on_reply(Bytes, Bytes body, std::vector<std::byte>* out) {
  const Error malformed = unauthenticated("handshake step 2 is malformed");
  if (body.size() < kNonce + 2 + kProof) return malformed;
  const std::size_t hello_bytes = read_u16(body.subspan(kNonce));
  if (body.size() != kNonce + 2 + hello_bytes + kProof || hello_bytes > kMaxHelloBytes)
    return malformed;
  append(&transcript_, body.first(body.size() - kProof));
  derive();
  if (!equal_constant_time(body.last(kProof), proof_peer_))
    return unauthenticated("the peer did not prove the pre-shared key (the keys differ)");
  const Bytes hello = body.subspan(kNonce + 2, hello_bytes);
  peer_hello_.assign(hello.begin(), hello.end());
  append(out, frame(3, proof_own_));
  state_ = State::kEstablished;
  return {};
}

void AuthSession::derive() {
  const auto prk = digest_of(transcript_, key_);
  const auto part = [&](std::string_view role) { return digest_of(bytes_of(role), prk); };
  const bool initiator = side_ == Side::kInitiator;
  proof_own_ = part(initiator ? "proof of the initiator" : "proof of the responder");
  proof_peer_ = part(initiator ? "proof of the responder" : "proof of the initiator");
  send_key_ = part(initiator ? "frames to the responder" : "frames to the initiator");
  receive_key_ = part(initiator ? "frames to the initiator" : "frames to the responder");
  token_key_ = part("tokens");
  const auto id = part("session id");
  std::memcpy(&session_id_, id.data(), sizeof session_id_);
  transcript_.clear();
}

Mac AuthSession::token(std::uint64_t number) const { return mac_of(token_key_, number, {}); }

Mac AuthSession::seal(std::initializer_list<Bytes> parts) {
  return mac_of(send_key_, send_sequence_++, parts);
}

Status AuthSession::open(std::initializer_list<Bytes> parts, Bytes mac) {
  const Mac expected = mac_of(receive_key_, receive_sequence_, parts);
  if (!equal_constant_time(expected, mac))
    return Error{ErrorCode::kCorrupt, text("frame ", receive_sequence_,
                                           " fails its MAC: changed, repeated or out of order")};
  ++receive_sequence_;
  return {};
}

}  // namespace kvcore
