// shm: copies out of the peer's memory, in posting order inside a class, with messages in their
// place.
#include <poll.h>

#include <algorithm>

#include "base/fault.h"
#include "base/text.h"
#include "transport/socket/connection.h"

namespace kvcore::transport {

// Classes first..last, at most `budget` bytes: then the socket has its turn, aborts must be heard.
void Connection::pull(std::size_t first, std::size_t last, std::uint64_t budget, std::int64_t now) {
  for (std::size_t c = first; c <= last; ++c) {
    auto& queue = pulls_[c];
    while (!queue.empty() && !dead()) {
      if (!pull_step(&queue.front(), &budget, now)) return;
      if (queue.front().kind != Pull::Kind::kMessage) credits_.give_back(queue.front().cost);
      queue.pop_front();
    }
  }
}

// Returns whether the item is over.
bool Connection::pull_step(Pull* item, std::uint64_t* budget, std::int64_t now) {
  if (item->kind == Pull::Kind::kMessage) {
    deliver(lanes_[0], item->op, std::move(item->message), item->cost);
    return true;
  }
  while (item->piece < item->pieces.size()) {
    if (*budget == 0) return false;
    const bool is_read = item->kind == Pull::Kind::kRead;
    std::uint64_t* bytes_landed = nullptr;
    if (is_read) {
      if (find_op(item->op) == nullptr) return true;  // given up meanwhile
    } else {
      const auto it = inbound_.find(item->op);
      if (it == inbound_.end()) return true;
      if (it->second.failed) break;
      bytes_landed = &it->second.bytes;
    }
    const Piece& piece = item->pieces[item->piece];
    const std::uint64_t n = std::min(*budget, piece.bytes - item->piece_done);
    const Status status = pull_piece(item, piece, n, now);
    if (!status) {
      if (is_read)
        complete(item->op, status);
      else
        fail_write(lanes_[0], item->op, status);
      break;
    }
    *budget -= n;
    if (bytes_landed != nullptr) *bytes_landed += n;
    item->piece_done += n;
    if (item->piece_done == piece.bytes) {
      ++item->piece;
      item->piece_done = 0;
    }
  }
  pull_done(*item);
  return true;
}

// kWrite: into our granted range. kRead: into the local memory of our own operation (pieces of a
// read carry the offset in our region as remote_offset).
Status Connection::pull_piece(Pull* item, const Piece& piece, std::uint64_t bytes,
                              std::int64_t now) {
  if (!range_inside(piece.source, piece.bytes, item->source->bytes()))
    return invalid_argument(text("source offset=", piece.source, " bytes=", piece.bytes,
                                 " is outside the region of ", item->source->bytes(), " bytes"));
  const std::byte* from = item->source->data() + piece.source + item->piece_done;
  const std::uint64_t offset = piece.remote_offset + item->piece_done;
  if (item->kind == Pull::Kind::kRead) {
    copy_bytes(find_op(item->op)->base + offset, from, bytes);
    return {};
  }
  const Range range{offset, bytes};
  return io_->shared.grants.with_ranges(
      item->grant, Rights::kWrite, {&range, 1}, now, peer_.identity,
      [&](std::span<std::byte* const> to) {
        copy_bytes(to[0], from, bytes);
        if (fails(io_->shared.options.faults, "transport.flip_payload"))
          to[0][bytes / 2] ^= std::byte{1};
      });
}

void Connection::pull_done(const Pull& item) {
  if (!item.last) return;
  if (item.kind == Pull::Kind::kRead) {
    if (find_op(item.op) != nullptr)
      control(lanes_[0], FrameType::kReadDone, make_body(OpHead{item.op}));
    return;
  }
  if (peer_hung_up()) return;  // it may have reused the memory already: nothing is announced
  finish_write(lanes_[0], item.op);
}

bool Connection::peer_hung_up() const {
  pollfd p{lanes_[0].fd.get(), POLLRDHUP, 0};
  return ::poll(&p, 1, 0) != 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace kvcore::transport
