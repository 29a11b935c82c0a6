// Bytes in: handshake, frames, and payload straight into its place.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/text.h"
#include "transport/socket/connection.h"

namespace kvcore::transport {
namespace {

constexpr std::size_t kReadBytes = 16UL * 1024;  // read ahead while frames are parsed
constexpr std::size_t kLeastTailBytes = 64;      // read ahead behind payload: the next frame's head
constexpr std::size_t kRoundBytes = 4096UL * 1024;     // then other links have their turn
constexpr std::size_t kBulkRoundBytes = 256UL * 1024;  // of a lower class
constexpr std::size_t kMaxLandings = 1023;             // places filled by one system call
constexpr std::size_t kMaxFds = 64;
constexpr std::size_t kMaxInbound = 65536;           // operations of the peer at a time
constexpr std::size_t kMaxServedRanges = 1UL << 20;  // of the peer's reads at a time: 16 MiB

Error corrupt(std::string message) { return {ErrorCode::kCorrupt, std::move(message)}; }

}  // namespace

void Connection::receive(Lane& lane, std::int64_t now) {
  const std::uint64_t before = lane.received;
  const std::size_t budget = lane.number == 0 ? kRoundBytes : kBulkRoundBytes;
  for (std::size_t rounds = 0; !dead() && receive_some(lane, now); ++rounds) {
    if (rounds >= 64 || lane.received - before >= budget) break;
    if (lane.drained && !lane.hung_up) break;  // epoll tells when there is more
  }
}

// One read of the socket; false when it had nothing (or the link died).
bool Connection::receive_some(Lane& lane, std::int64_t now) {
  ssize_t n = 0;
  if (lane.sink.kind != Sink::Kind::kNone) {
    n = land(lane, [this, &lane](std::vector<iovec>* iov) { return read_socket(lane, iov); });
  } else {
    std::vector<iovec> none;
    n = read_socket(lane, &none);
  }
  if (n <= 0) return false;
  last_rx_ns_ = now;
  parse(lane);
  return !dead();
}

// Fills the places given, then the parse buffer. Returns the bytes that went into the places, or 1
// if only the buffer got some; 0 = nothing there, -1 = the link is dead.
ssize_t Connection::read_socket(Lane& lane, std::vector<iovec>* iov) {
  std::size_t wanted = 0;
  for (const iovec& v : *iov) wanted += v.iov_len;
  const std::size_t ahead = iov->empty() ? kReadBytes : lane.tail_bytes;
  if (lane.rx_begin == lane.rx_end) lane.rx_begin = lane.rx_end = 0;
  if (lane.rx.size() < lane.rx_end + ahead) lane.rx.resize(lane.rx_end + ahead);
  iov->push_back({lane.rx.data() + lane.rx_end, ahead});
  msghdr message{};
  message.msg_iov = iov->data();
  message.msg_iovlen = iov->size();
  alignas(cmsghdr) char ancillary[CMSG_SPACE(sizeof(int) * 8)];
  if (shm()) {
    message.msg_control = ancillary;
    message.msg_controllen = sizeof ancillary;
  }
  ssize_t n = 0;
  do {
    n = ::recvmsg(lane.fd.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
  if (n <= 0) {
    if (lane.bye_received) {
      end_lane(lane);
      return 0;
    }
    if (dial_again(lane, now_ns())) return 0;
    const int error = n == 0 ? 0 : errno;
    if (state_ == State::kClosing) {  // it closed as well
      fail(Error{ErrorCode::kCancelled, "closed by this side"});
      return -1;
    }
    fail(connection_ended(state_ == State::kUp, error));
    return -1;
  }
  for (cmsghdr* c = shm() ? CMSG_FIRSTHDR(&message) : nullptr; c != nullptr;
       c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
      lane.rx_fds.emplace_back(fd);
    }
  }
  if (lane.rx_fds.size() > kMaxFds) {
    fail(corrupt("the peer sent descriptors without frames"));
    return -1;
  }
  const auto got = static_cast<std::size_t>(n);
  lane.received += got;
  lane.drained = got < wanted + ahead;
  lane.rx_end += got - std::min(got, wanted);
  return static_cast<ssize_t>(std::max<std::size_t>(1, std::min(got, wanted)));
}

void Connection::parse(Lane& lane) {
  while (!dead() && lane.rx_begin < lane.rx_end) {
    if (lane.state == Lane::State::kHandshake) {
      parse_handshake(lane, now_ns());
    } else if (lane.sink.kind != Sink::Kind::kNone) {
      take_buffered_payload(lane);
    } else if (!parse_frame(lane)) {
      break;
    }
  }
  if (lane.rx_begin > 0 && !dead()) {  // what is left is the start of a frame: to the front
    std::memmove(lane.rx.data(), lane.rx.data() + lane.rx_begin, lane.rx_end - lane.rx_begin);
    lane.rx_end -= lane.rx_begin;
    lane.rx_begin = 0;
    if (lane.rx_end == 0 && lane.rx.size() > 4 * kReadBytes) lane.rx = std::vector<std::byte>();
  }
}

void Connection::parse_handshake(Lane& lane, std::int64_t now) {
  std::vector<std::byte> out;
  const auto used =
      lane.auth->feed(Bytes(lane.rx.data() + lane.rx_begin, lane.rx_end - lane.rx_begin), &out);
  lane.outbox.push_raw(std::move(out));
  if (!used) return fail(used.error());
  lane.rx_begin += *used;
  if (!lane.auth->established()) return;
  lane.state = lane.number > 0 ? Lane::State::kJoining : Lane::State::kUp;
  if (lane.number > 0) return;
  if (initiator_)
    on_established(now);
  else
    on_accepted(now);
}

// One whole frame out of the buffer; false when it is not there yet.
bool Connection::parse_frame(Lane& lane) {
  const std::size_t have = lane.rx_end - lane.rx_begin;
  if (have < sizeof(FramePrefix)) return false;
  FramePrefix prefix;
  std::memcpy(&prefix, lane.rx.data() + lane.rx_begin, sizeof prefix);
  if (auto status = check_prefix(prefix, shm()); !status) {
    fail(status);
    return false;
  }
  const std::size_t signed_bytes = sizeof prefix + prefix.body_bytes;
  if (have < signed_bytes + kMacBytes) return false;
  const Bytes frame(lane.rx.data() + lane.rx_begin, signed_bytes + kMacBytes);
  if (auto status = lane.auth->open({frame.first(signed_bytes)}, frame.last(kMacBytes)); !status) {
    fail(status);
    return false;
  }
  if (lane.state == Lane::State::kJoining) on_lane_up(lane, now_ns());
  if (costs(static_cast<FrameType>(prefix.type)) &&
      !credits_.take(cost_of(prefix.body_bytes, prefix.payload_bytes), kMaxFrameCost)) {
    fail(corrupt("the peer sends more than its credits allow"));
    return false;
  }
  // The next one's head is most often as long: what comes behind it need not be copied then.
  if (prefix.payload_bytes > 0)
    lane.tail_bytes = std::clamp(frame.size(), kLeastTailBytes, kReadBytes);
  dispatch(lane, prefix, frame.subspan(sizeof prefix, prefix.body_bytes));
  lane.rx_begin += frame.size();
  return true;
}

void Connection::take_buffered_payload(Lane& lane) {
  (void)land(lane, [&lane](std::vector<iovec>* iov) -> ssize_t {
    std::size_t total = 0;
    for (const iovec& v : *iov) {
      const std::size_t n = std::min(v.iov_len, lane.rx_end - lane.rx_begin);
      std::memcpy(v.iov_base, lane.rx.data() + lane.rx_begin, n);
      lane.rx_begin += n;
      total += n;
    }
    return static_cast<ssize_t>(total);
  });
}

void Connection::dispatch(Lane& lane, const FramePrefix& prefix, Bytes body) {
  switch (static_cast<FrameType>(prefix.type)) {
    case FrameType::kPing:
      return;
    case FrameType::kMessage:
      return on_message(lane, prefix, body);
    case FrameType::kWrite:
      return on_write(lane, prefix, body);
    case FrameType::kResult:
      return on_result(body);
    case FrameType::kAbort:
      return on_abort(lane, body);
    case FrameType::kReadRequest:
      return on_read_request(lane, prefix, body);
    case FrameType::kReadData:
      return on_read_data(lane, prefix, body);
    case FrameType::kReadGo:
      return on_read_go(prefix, body);
    case FrameType::kReadDone:
      return on_read_done(lane, body);
    case FrameType::kRegion:
      return on_region(lane, body);
    case FrameType::kRegionGone:
      return on_region_gone(body);
    case FrameType::kCredit:
      return on_credit(body);
    case FrameType::kBye:
      return on_bye(lane, body);
    case FrameType::kBorrow:
      return on_borrow(lane, prefix, body);
    case FrameType::kLent:
      return on_lent(body);
    case FrameType::kGiveBack:
      return on_give_back(body);
  }
}

void Connection::on_message(Lane& lane, const FramePrefix& prefix, Bytes body) {
  std::uint64_t op = 0;
  if ((prefix.flags & kFlagAnswer) != 0) {
    if (body.size() < sizeof op)
      return fail(corrupt("a message to be answered without its number"));
    std::memcpy(&op, body.data(), sizeof op);
    if (op == 0) return fail(corrupt("a message to be answered with number 0"));
    body = body.subspan(sizeof op);
  }
  if (body.size() > kMaxMessageBytes)
    return fail(corrupt(text("a message of ", body.size(), " bytes")));
  std::vector<std::byte> message(body.begin(), body.end());
  const std::uint64_t cost = cost_of(prefix.body_bytes, 0);
  auto& queue = pulls_[prefix.priority];
  if (queue.empty()) return deliver(lane, op, std::move(message), cost);
  Pull waiting{Pull::Kind::kMessage, op};
  waiting.message = std::move(message);
  waiting.cost = cost;
  queue.push_back(std::move(waiting));
}

void Connection::on_write(Lane& lane, const FramePrefix& prefix, Bytes body) {
  auto frame = parse_write(prefix, body, shm());
  if (!frame) return fail(frame.error());
  const WriteHead& head = frame->head;
  auto [it, fresh] = inbound_.try_emplace(head.op, InWrite{head.grant, head.tag});
  it->second.notify = (prefix.flags & kFlagQuiet) == 0;
  if (inbound_.size() > kMaxInbound) return fail(corrupt("the peer has too many writes at a time"));
  if (it->second.grant != head.grant || it->second.tag != head.tag)
    return fail(corrupt("a chunk names another grant or tag than its write"));
  const bool last = (prefix.flags & kFlagLast) != 0;
  // What its arrival will cost is held from the first chunk on.
  const std::uint64_t cost =
      cost_of(prefix.body_bytes, prefix.payload_bytes) - (fresh ? kFrameCost : 0);
  if (!shm()) {
    lane.sink = Sink{Sink::Kind::kWrite, head.op, head.grant, std::move(frame->pieces)};
    lane.sink.left = prefix.payload_bytes;
    lane.sink.checked = (prefix.flags & kFlagUnchecked) == 0;
    lane.sink.last = last;
    lane.sink.cost = cost;
    return;
  }
  const auto region = peer_regions_.find(head.region);
  if (region == peer_regions_.end()) {
    fail_write(lane, head.op,
               invalid_argument(text("region ", head.region, " is not shared with the peer")));
    credits_.give_back(cost);
    if (last) finish_write(lane, head.op);
    return;
  }
  Pull item{Pull::Kind::kWrite, head.op, head.grant, region->second, std::move(frame->pieces)};
  item.last = last;
  item.cost = cost;
  pulls_[prefix.priority].push_back(std::move(item));
}

void Connection::on_result(Bytes body) {
  auto frame = parse_result(body);
  if (!frame) return fail(frame.error());
  const std::uint64_t id = frame->head.op;
  if (sends_.contains(id)) return complete_send(id, std::move(frame->status));
  Op* op = find_op(id);
  if (op == nullptr) return;  // given up before
  Status status = std::move(frame->status);
  if (op->borrows && status.ok()) return fail(corrupt("the peer ended a borrow without lending"));
  if (op->is_read) {
    if (status.ok() && op->corrupt)
      status = corrupt("a segment's checksum differs from what the peer sent");
    else if (status.ok() && !shm() && op->done != op->bytes)
      status = corrupt("the peer ended the read too early");
  } else if (status.ok() && op->done != op->bytes) {
    return fail(corrupt("the peer acknowledged a write that was not sent"));
  } else if (!status.ok() && op->done != op->bytes && !op->giving_up) {
    control(lane_of(op->options.priority), FrameType::kAbort,
            make_body(OpHead{id}));  // it forgets what it has seen of the write
  }
  if (op->giving_up && !status.ok() && status.error().code == ErrorCode::kCancelled)
    status = op->give_up_status;
  complete(id, std::move(status));
}

void Connection::on_abort(Lane& lane, Bytes body) {
  const auto head = parse_head<OpHead>(body);
  if (!head) return fail(head.error());
  if (serving_.contains(head->op)) {
    for (auto& queue : tx_)
      std::erase_if(queue, [&](const TxItem& item) {
        return item.kind == TxItem::Kind::kServe && item.op == head->op;
      });
    end_serve(head->op);
  }
  const auto it = inbound_.find(head->op);
  if (it == inbound_.end()) return;
  if (it->second.charged) credits_.give_back(kFrameCost);
  const bool answer = shm() && !it->second.failed;
  inbound_.erase(it);  // waiting pulls of it are skipped
  if (answer)
    control(lane, FrameType::kResult,
            make_result(head->op, Error{ErrorCode::kCancelled, "aborted by the sender"}));
}

void Connection::on_read_request(Lane& lane, const FramePrefix& prefix, Bytes body) {
  auto frame = parse_read(body);
  if (!frame) return fail(frame.error());
  const std::uint64_t op = frame->head.op;
  const std::uint64_t cost = cost_of(prefix.body_bytes, 0);
  const auto refuse = [&](const Status& why) {
    credits_.give_back(cost);
    control(lane, FrameType::kResult, make_result(op, why));
  };
  const GrantRef grant = frame->head.grant;
  if (auto ok =
          io_->shared.grants.check(grant, Rights::kRead, frame->ranges, now_ns(), peer_.identity);
      !ok)
    return refuse(ok);
  if (serving_.contains(op)) return fail(corrupt(text("the peer asks twice for read ", op)));
  if (serving_.size() >= kMaxInbound) return fail(corrupt("the peer has too many reads at a time"));
  if (served_ranges_ + frame->ranges.size() > kMaxServedRanges)
    return refuse(Error{ErrorCode::kTransport,
                        text("reads of more than ", kMaxServedRanges, " ranges at a time")});
  if (!shm()) {
    serve(op, Serve{grant, std::move(frame->ranges), 0, 0, cost});
    tx_[prefix.priority].push_back({TxItem::Kind::kServe, op, {}});
    return;
  }
  const auto region = io_->shared.grants.shared_region(grant);
  if (!region) return refuse(region.error());
  // The command that tells of a fresh region may still be on its way.
  if (const auto view = io_->shared.grants.region(*region)) announce_region(*region, *view);
  serve(op, Serve{grant, std::move(frame->ranges), 0, 0, cost});
  control(lane, FrameType::kReadGo, make_body(GoHead{op, static_cast<std::uint32_t>(*region)}),
          static_cast<Priority>(prefix.priority));
}

void Connection::serve(std::uint64_t op, Serve serve) {
  served_ranges_ += serve.ranges.size();
  serving_.emplace(op, std::move(serve));
}

void Connection::end_serve(std::uint64_t op) {
  const auto it = serving_.find(op);
  if (it == serving_.end()) return;
  credits_.give_back(it->second.cost);
  served_ranges_ -= it->second.ranges.size();
  serving_.erase(it);
}

void Connection::on_read_data(Lane& lane, const FramePrefix& prefix, Bytes body) {
  auto frame = parse_data(prefix, body);
  if (!frame) return fail(frame.error());
  lane.sink = Sink{Sink::Kind::kRead, frame->head.op};
  for (const DataPiece& p : frame->pieces) lane.sink.pieces.push_back({0, p.bytes, p.checksum});
  lane.sink.left = prefix.payload_bytes;
}

void Connection::on_read_go(const FramePrefix& prefix, Bytes body) {
  const auto head = parse_head<GoHead>(body);
  if (!head) return fail(head.error());
  Op* op = find_op(head->op);
  if (op == nullptr || !op->is_read || op->borrows) return;
  const auto region = peer_regions_.find(head->region);
  if (region == peer_regions_.end())
    return complete(head->op, Error{ErrorCode::kTransport, "the peer's region is not shared"});
  Pull item{Pull::Kind::kRead, head->op, {}, region->second};
  for (const Segment& s : op->segments)
    item.pieces.push_back({s.local_offset, s.bytes, s.remote_offset});
  item.last = true;
  pulls_[prefix.priority].push_back(std::move(item));
}

// The reader has copied: it may use the bytes only if the grant held until now.
void Connection::on_read_done(Lane& lane, Bytes body) {
  const auto head = parse_head<OpHead>(body);
  if (!head) return fail(head.error());
  const auto it = serving_.find(head->op);
  if (it == serving_.end()) return;
  const Status held = io_->shared.grants.check(it->second.grant, Rights::kRead, it->second.ranges,
                                               now_ns(), peer_.identity);
  if (held.ok())
    for (const Range& r : it->second.ranges) link_->bytes_out += r.bytes;
  end_serve(head->op);
  control(lane, FrameType::kResult, make_result(head->op, held));
}

void Connection::on_region(Lane& lane, Bytes body) {
  const auto head = parse_head<RegionHead>(body);
  if (!head) return fail(head.error());
  if (!shm() || lane.rx_fds.empty()) return fail(corrupt("a region without a descriptor"));
  UniqueFd fd = std::move(lane.rx_fds.front());
  lane.rx_fds.pop_front();
  if (peer_regions_.size() >= kMaxFds) return fail(corrupt("the peer shares too many regions"));
  auto region = RemoteRegion::make(std::move(fd), head->bytes);
  if (!region) return fail(region.error());
  peer_regions_.insert_or_assign(head->region, std::move(*region));
}

void Connection::on_region_gone(Bytes body) {
  const auto head = parse_head<RegionHead>(body);
  if (!head) return fail(head.error());
  peer_regions_.erase(head->region);
}

// ---- payload (tcp)

// One filling of the current payload's places. Returns what the filling returned.
ssize_t Connection::land(Lane& lane, const Fill& fill) {
  if (lane.sink.kind == Sink::Kind::kWrite) {
    const auto it = inbound_.find(lane.sink.op);
    if (it == inbound_.end() || it->second.failed) lane.sink.kind = Sink::Kind::kDiscard;
  } else if (lane.sink.kind == Sink::Kind::kRead) {
    const Op* op = find_op(lane.sink.op);
    if (op == nullptr || !op->is_read) lane.sink.kind = Sink::Kind::kDiscard;
  }
  ssize_t n = 0;
  if (lane.sink.kind == Sink::Kind::kWrite) {
    n = land_write(lane, fill);
  } else if (lane.sink.kind == Sink::Kind::kRead) {
    n = land_read(lane, fill);
  }
  if (lane.sink.kind == Sink::Kind::kDiscard && n == 0) {
    std::vector<iovec> iov{{io_->scratch.data(), std::min(io_->scratch.size(), lane.sink.left)}};
    n = fill(&iov);
    if (n > 0) lane.sink.left -= static_cast<std::uint64_t>(n);
  }
  if (n > 0 && lane.sink.left == 0) chunk_landed(lane);
  return n;
}

ssize_t Connection::land_write(Lane& lane, const Fill& fill) {
  std::vector<Range> ranges;
  std::uint64_t skip = lane.sink.piece_done;
  for (std::size_t i = lane.sink.piece; i < lane.sink.pieces.size() && ranges.size() < kMaxLandings;
       ++i) {
    ranges.push_back({lane.sink.pieces[i].remote_offset + skip, lane.sink.pieces[i].bytes - skip});
    skip = 0;
  }
  ssize_t n = 0;
  bool intact = true;
  const Status status = io_->shared.grants.with_ranges(
      lane.sink.grant, Rights::kWrite, ranges, now_ns(), peer_.identity,
      [&](std::span<std::byte* const> places) {
        std::vector<iovec> iov;
        for (std::size_t i = 0; i < places.size(); ++i) iov.push_back({places[i], ranges[i].bytes});
        n = fill(&iov);
        if (n > 0) intact = settle(lane, static_cast<std::uint64_t>(n), places);
      });
  if (!status.ok() || !intact) {
    fail_write(lane, lane.sink.op,
               status.ok() ? corrupt("a segment's checksum differs from what was sent") : status);
    lane.sink.kind = Sink::Kind::kDiscard;
  }
  return n;
}

ssize_t Connection::land_read(Lane& lane, const Fill& fill) {
  Op& op = *find_op(lane.sink.op);
  const std::uint64_t piece_left = lane.sink.pieces[lane.sink.piece].bytes - lane.sink.piece_done;
  if (op.segment >= op.segments.size() ||
      piece_left > op.segments[op.segment].bytes - op.segment_done) {
    fail(corrupt("the peer sends other bytes than the read asked for"));
    return -1;
  }
  const Segment& s = op.segments[op.segment];
  std::byte* place = op.base + s.local_offset + op.segment_done;
  std::vector<iovec> iov{{place, piece_left}};
  const ssize_t n = fill(&iov);
  if (n <= 0) return n;
  const auto landed = static_cast<std::uint64_t>(n);
  std::byte* const places[1] = {place};
  if (!settle(lane, landed, places)) op.corrupt = true;
  op.done += landed;
  op.segment_done += landed;
  if (op.segment_done == s.bytes) {
    ++op.segment;
    op.segment_done = 0;
  }
  return n;
}

// Moves the sink on by what has landed at the places and checks each piece that is complete.
bool Connection::settle(Lane& lane, std::uint64_t landed, std::span<std::byte* const> places) {
  lane.sink.left -= landed;
  bool intact = true;
  for (std::size_t i = 0; landed > 0; ++i) {
    const Piece& piece = lane.sink.pieces[lane.sink.piece];
    const std::uint64_t n = std::min(landed, piece.bytes - lane.sink.piece_done);
    const Bytes bytes(places[i], n);
    const bool whole = lane.sink.piece_done == 0 && n == piece.bytes;
    const bool complete = lane.sink.piece_done + n == piece.bytes;
    if (lane.sink.checked && whole) {
      intact &= xxh3_64(bytes) == piece.source;
    } else if (lane.sink.checked) {
      lane.sink.hash.update(bytes);
      if (complete) {
        intact &= lane.sink.hash.digest() == piece.source;
        lane.sink.hash = Xxh3();
      }
    }
    lane.sink.piece_done = complete ? 0 : lane.sink.piece_done + n;
    if (complete) ++lane.sink.piece;
    landed -= n;
  }
  return intact;
}

void Connection::chunk_landed(Lane& lane) {
  const Sink done = std::move(lane.sink);
  lane.sink = Sink();
  credits_.give_back(done.cost);
  const auto it = inbound_.find(done.op);
  if (done.kind == Sink::Kind::kWrite && it != inbound_.end()) {
    for (const Piece& piece : done.pieces) it->second.bytes += piece.bytes;
  }
  if (done.last) finish_write(lane, done.op);
}

// ---- the end of a peer's write (tcp and shm)

void Connection::finish_write(Lane& lane, std::uint64_t op) {
  const auto it = inbound_.find(op);
  if (it == inbound_.end()) return;
  const InWrite write = it->second;
  inbound_.erase(it);
  if (write.charged && (write.failed || !write.notify)) credits_.give_back(kFrameCost);
  if (write.failed) return;
  link_->bytes_in += write.bytes;
  if (write.notify)
    io_->shared.events.push(
        Arrival{link_->id, write.grant, write.tag, write.bytes, now_ns(), Status()},
        link_->poll_credit, kFrameCost);
  control(lane, FrameType::kResult, make_result(op, {}));
}

void Connection::fail_write(Lane& lane, std::uint64_t op, const Status& why) {
  const auto it = inbound_.find(op);
  if (it == inbound_.end() || it->second.failed) return;
  it->second.failed = true;
  if (why.error().code == ErrorCode::kCorrupt)
    io_->shared.events.push(Arrival{link_->id, it->second.grant, it->second.tag, 0, now_ns(), why},
                            link_->poll_credit,
                            std::exchange(it->second.charged, false) ? kFrameCost : 0);
  control(lane, FrameType::kResult, make_result(op, why));
}

}  // namespace kvcore::transport
