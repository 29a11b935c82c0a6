// The part of Core that receives: granting pages, checking what arrives, finishing the pages.
#include <algorithm>
#include <array>
#include <utility>

#include "base/text.h"
#include "base/xxh3.h"
#include "stream/core.h"

namespace kvcore::stream {
namespace {

std::uint64_t sum_of(std::span<const std::byte> bytes) {
  return xxh3_64(bytes.data(), bytes.size());
}

}  // namespace

Result<Core::PageSet> Core::page_set(std::span<const std::int32_t> pages) const {
  PageSet out;
  std::vector<bool> sealed;
  for (const std::int32_t page : pages) {
    KVCORE_ASSIGN_OR_RETURN(const pages::PagePlace place, pool_->place(page));
    out.offsets.push_back(place.offset_bytes);
    sealed.push_back(place.class_number != 0);
    if (place.class_number != 0) {
      if (out.class_number == 0) out.class_number = place.class_number;
      if (place.class_number == out.class_number) continue;
      return Error{
          ErrorCode::kUnsupported,
          text("pages: page ", page, " is of class ", place.class_number, ", others of class ",
               out.class_number, "; allowed: open pages and those of one class")};
    }
    if (out.layer_stride_bytes == 0) out.layer_stride_bytes = place.layer_stride_bytes;
    if (place.layer_stride_bytes != out.layer_stride_bytes) {
      return Error{ErrorCode::kUnsupported,
                   text("pages: page ", page, " has layers ", place.layer_stride_bytes,
                        " bytes apart, others ", out.layer_stride_bytes,
                        ": pages of one hand-over lie in runs of one length")};
    }
  }
  if (out.class_number != 0) out.sealed = std::move(sealed);
  if (out.layer_stride_bytes == 0) out.layer_stride_bytes = pool_->spec().slice_bytes();
  return out;
}

// Everything of a grant but the transport's grants, the tokens and the time.
Result<StreamGrant> Core::describe(const RequestId& id, std::span<const std::int32_t> pages,
                                   std::span<const Share> shares) const {
  StreamGrant g;
  g.request_id = id;
  g.spec = pool_->spec().options();
  g.layer_begin = options_.layer_begin;
  g.head_begin = options_.head_begin;
  g.host = local_host_id();
  g.addresses = addresses_;
  KVCORE_ASSIGN_OR_RETURN(const PageSet set, page_set(pages));
  g.layer_stride_bytes = set.layer_stride_bytes;
  if (set.class_number != 0) {
    KVCORE_ASSIGN_OR_RETURN(const pages::PageClass sealed, pool_->page_class(set.class_number));
    g.class_number = static_cast<std::uint32_t>(set.class_number);
    g.formats.assign(sealed.formats().begin(), sealed.formats().end());
  }
  for (std::size_t slot = 0; slot < pages.size(); ++slot) {
    KVCORE_ASSIGN_OR_RETURN(const std::uint64_t generation, pool_->generation(pages[slot]));
    KVCORE_ASSIGN_OR_RETURN(const bool filled, pool_->is_sealed(pages[slot]));
    if (filled) {
      return invalid_argument(
          text("pages: page ", pages[slot], " is sealed: sealed pages are immutable"));
    }
    g.pages.push_back(
        {pages[slot], generation, set.offsets[slot], !set.sealed.empty() && set.sealed[slot]});
  }
  if (shares.empty()) g.shares.push_back({{}, {side().layers(), side().heads()}});
  for (const Share& share : shares) g.shares.push_back({{}, share});
  return g;
}

Result<std::vector<std::byte>> Core::grant(const RequestId& id, std::span<const std::int32_t> pages,
                                           std::int64_t first_token, std::int64_t num_tokens,
                                           std::int64_t now_ns, std::int64_t deadline_ns,
                                           std::span<const Share> shares, bool tell_layers) {
  if (closed_) return Error{ErrorCode::kCancelled, "the endpoint is closed"};
  KVCORE_RETURN_IF_ERROR(check_pages(pages));
  if (incoming_.contains(id)) {
    return invalid_argument(text("request_id=", to_hex(id), " holds a grant already"));
  }
  if (deadline_ns <= now_ns) return invalid_argument("deadline must lie in the future");
  if (addresses_.empty())
    return invalid_argument("this endpoint listens nowhere: no address to grant");
  KVCORE_ASSIGN_OR_RETURN(StreamGrant g, describe(id, pages, shares));
  g.first_token = first_token;
  g.num_tokens = num_tokens;
  g.ttl_ns = deadline_ns - now_ns;
  if (const Status fits = g.check(); !fits) return invalid_argument(fits.error().message);
  KVCORE_RETURN_IF_ERROR(claim(pages));
  if (const Status made = make_grants(g, deadline_ns); !made) {
    unclaim(pages);
    return made.error();
  }
  for (std::size_t share = 0; share < g.shares.size(); ++share)
    by_grant_.emplace(g.shares[share].grant.id, std::pair(id, share));
  incoming_.emplace(id, incoming(g, pages, deadline_ns, tell_layers));
  return g.encode();
}

// All or none: io refs, and that no other hand-over fills the same pages.
Status Core::claim(std::span<const std::int32_t> pages) {
  KVCORE_RETURN_IF_ERROR(pool_->io_acquire(pages));
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const auto page = static_cast<std::size_t>(pages[i]);
    if (!claimed_[page]) {
      claimed_[page] = true;
      continue;
    }
    for (const std::int32_t taken : pages.first(i))
      claimed_[static_cast<std::size_t>(taken)] = false;
    io_release(pages);
    return invalid_argument(
        text("pages[", i, "]=", pages[i], " is granted already: one page, one hand-over"));
  }
  return {};
}

void Core::unclaim(std::span<const std::int32_t> pages) {
  for (const std::int32_t page : pages) claimed_[static_cast<std::size_t>(page)] = false;
  io_release(pages);
}

// One transport grant for each share, or none at all.
Status Core::make_grants(StreamGrant& g, std::int64_t deadline_ns) {
  for (std::size_t share = 0; share < g.shares.size(); ++share) {
    auto made = transport_->create_grant(region_, ranges_of(g.shape(share), g.placement(share)),
                                         transport::Rights::kWrite, deadline_ns);
    if (!made) {
      // Nobody was told of them: a fence that is late keeps nobody from anything.
      for (std::size_t i = 0; i < share; ++i) (void)transport_->revoke_grant(g.shares[i].grant);
      return made.error();
    }
    g.shares[share].grant = made->ref;
  }
  return {};
}

Core::Incoming Core::incoming(const StreamGrant& g, std::span<const std::int32_t> pages,
                              std::int64_t deadline_ns, bool tell_layers) const {
  std::vector<Receiver::ShareOf> machines;
  std::vector<IncomingShare> shares;
  for (std::size_t share = 0; share < g.shares.size(); ++share) {
    IncomingShare in;
    in.place = g.placement(share);
    in.layer_begin = g.shares[share].share.layers.begin - g.layer_begin;
    machines.push_back({g.shape(share), g.shares[share].grant, in.layer_begin});
    shares.push_back(std::move(in));
  }
  return Incoming{Receiver(g.request_id, std::move(machines), g.host, deadline_ns, tell_layers),
                  {pages.begin(), pages.end()},
                  g.with_headers(),
                  g.class_number,
                  g.page_class(),
                  std::move(shares)};
}

// ---- what arrives

void Core::on_open(const RequestId& id, const transport::Message& from, const StreamMessage& open,
                   std::int64_t now_ns) {
  const auto it = incoming_.find(id);
  if (it == incoming_.end()) {
    ++stats_.dropped;
    StreamMessage refusal{
        .kind = MessageKind::kReceiverAbort, .request_id = id, .grant = open.grant};
    refusal.code = ErrorCode::kStale;
    refusal.reason = "the receiver holds no such grant (any more)";
    return send(from.link, refusal);
  }
  Incoming& in = it->second;
  const std::size_t share = in.machine.share_of(open.grant);
  const std::string scheme = scheme_of(from.link);
  in.machine.on_open(from.link, open, scheme);
  if (in.machine.bound_to(share, from.link)) {
    in.shares[share].scheme = scheme;
    if (!open.makes_sums && options_.checksums != Checksums::kOff) {
      const Status unsummed =
          Error{ErrorCode::kCorrupt,
                "the sender made no checksum, but this side's checksums setting asks for one"};
      in.machine.on_arrival(from.link, share, {}, 0, now_ns, unsummed, now_ns);
    }
  }
  settle_receiver(id);
}

void Core::on_arrival(const transport::Arrival& arrival, std::int64_t now_ns) {
  const auto grant = by_grant_.find(arrival.grant.id);
  if (grant == by_grant_.end()) {
    ++stats_.dropped;  // of a hand-over that is over
    return;
  }
  const auto [id, share] = grant->second;
  Incoming& in = incoming_.at(id);
  const SliceRun run = run_of(arrival.tag);
  const bool wants_sums = !in.with_headers && options_.checksums != Checksums::kOff;
  const bool fits = in.machine.shape(share).contains(run);
  if (wants_sums && arrival.status && fits && in.machine.bound_to(share, arrival.link) &&
      !in.shares[share].sums.has(run)) {
    auto& waiting = in.shares[share].waiting;
    if (static_cast<std::int64_t>(waiting.size()) < in.machine.shape(share).num_slices()) {
      waiting.push_back({arrival, run});
      return;
    }
  }
  take_arrival(id, share, arrival, now_ns);
}

void Core::take_arrival(const RequestId& id, std::size_t share, const transport::Arrival& arrival,
                        std::int64_t now_ns) {
  Incoming& in = incoming_.at(id);
  const SliceRun run = run_of(arrival.tag);
  Status status = arrival.status;
  flip_if_asked(in, share, run);
  if (status) status = check_run(in, share, run);
  in.machine.on_arrival(arrival.link, share, run, static_cast<std::int64_t>(arrival.bytes),
                        arrival.at_ns, status, now_ns);
  settle_receiver(id);
}

void Core::on_sums(const RequestId& id, std::size_t share, const StreamMessage& message,
                   std::int64_t now_ns) {
  Incoming& in = incoming_.at(id);
  if (in.with_headers || !in.machine.shape(share).contains(message.run)) {
    ++stats_.dropped;
    return;
  }
  in.shares[share].sums.put(message.run, message.sums);
  for (Arrived& arrived : std::exchange(in.shares[share].waiting, {})) {
    const auto it = incoming_.find(id);
    if (it == incoming_.end()) return;  // one of them ended it
    IncomingShare& mine = it->second.shares[share];
    if (mine.sums.has(arrived.run))
      take_arrival(id, share, arrived.arrival, now_ns);
    else
      mine.waiting.push_back(std::move(arrived));
  }
}

std::span<std::byte> Core::piece(const Incoming& in, std::size_t share, std::int32_t layer,
                                 std::int32_t slot) const {
  const std::int64_t offset = in.shares[share].place.at(slot, layer);
  return {pool_->view().arena + offset,
          static_cast<std::size_t>(in.machine.shape(share).bytes_of(layer, slot))};
}

SliceHeader Core::header_of(const Incoming& in, std::int32_t layer, std::int32_t slot) const {
  const pages::PageSpecOptions& o = pool_->spec().options();
  const Shape& shape = in.machine.shape();
  if (!shape.is_sealed(slot))
    return expected_header(o.format, o.layout, 0, layer, shape.valid_tokens(slot));
  const auto first = static_cast<std::size_t>(layer) * static_cast<std::size_t>(o.num_kv_heads);
  return expected_header(in.page_class.formats()[first].k, o.layout, in.class_number, layer,
                         shape.valid_tokens(slot));
}

Status Core::check_run(const Incoming& in, std::size_t share, const SliceRun& run) const {
  const IncomingShare& from = in.shares[share];
  if (!in.machine.shape(share).contains(run)) return {};  // the receiver's own check names it
  const bool every = options_.checksums == Checksums::kAll ||
                     (options_.checksums == Checksums::kSampled && from.scheme == "tcp");
  for (std::int32_t slot = run.first; slot < run.first + run.count; ++slot) {
    const bool verify = every || (options_.checksums == Checksums::kSampled &&
                                  (run.layer + slot) % kSampleEvery == 0);
    const auto bytes = piece(in, share, run.layer, slot);
    if (in.with_headers) {
      KVCORE_RETURN_IF_ERROR(check_slice(bytes, header_of(in, run.layer, slot), verify));
    } else if (verify && (!from.sums.has({run.layer, slot, 1}) ||
                          from.sums.at(run.layer, slot) != sum_of(bytes))) {
      return Error{ErrorCode::kCorrupt, text("share ", share, ", layer ", run.layer, ", page ",
                                             slot, ": its checksum differs")};
    }
  }
  return {};
}

void Core::flip_if_asked(const Incoming& in, std::size_t share, const SliceRun& run) {
  if (!fails(options_.faults, "stream.flip_slice") || !in.machine.shape(share).contains(run))
    return;
  const std::size_t skip = in.with_headers ? kSliceHeaderBytes : 0;
  piece(in, share, run.layer, run.first)[skip + 1] ^= std::byte{0x40};  // an exponent bit of K
}

// What the transfer leaves open: a partly filled page goes on being written, so its checksum would
// not hold; slices that came without headers get theirs, the very ones that sealing writes.
void Core::finish_pages(const Incoming& in) {
  const std::int32_t slots = in.machine.shape().num_slots;
  for (std::int32_t slot = 0; slot < slots; ++slot) {
    // Refused for pages without an owner: those are free as soon as the hand-over lets go.
    if (in.machine.shape().is_sealed(slot))
      (void)pool_->seal(std::array{in.pages[static_cast<std::size_t>(slot)]});
  }
  for (std::size_t share = 0; share < in.shares.size(); ++share) {
    const Shape& shape = in.machine.shape(share);
    for (std::int32_t layer = 0; layer < shape.num_layers; ++layer) {
      if (in.with_headers) {
        if (shape.valid_tokens(slots - 1) != shape.page_size)
          clear_checksum(piece(in, share, layer, slots - 1).data());
        continue;
      }
      const std::int32_t own = in.shares[share].layer_begin + layer;
      for (std::int32_t slot = 0; slot < slots; ++slot) {
        const std::int64_t bytes =
            shape.is_sealed(slot) ? in.page_class.slice_bytes(own) : pool_->spec().slice_bytes();
        std::byte* slice = pool_->slice(in.pages[static_cast<std::size_t>(slot)], own);
        write_header({slice, static_cast<std::size_t>(bytes)}, header_of(in, own, slot),
                     shape.is_sealed(slot));
      }
    }
  }
}

}  // namespace kvcore::stream
