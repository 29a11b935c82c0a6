// The part of Core that sends: opening a grant, posting writes from the pages or from staging.
#include <algorithm>
#include <utility>

#include "base/text.h"
#include "base/xxh3.h"
#include "stream/core.h"

namespace kvcore::stream {

Status Core::check_open(const StreamGrant& g, std::span<const std::int32_t> pages,
                        std::size_t share) const {
  KVCORE_RETURN_IF_ERROR(check_convertible(pool_->spec().options(), g.spec));
  KVCORE_RETURN_IF_ERROR(check_pages(pages));
  if (share >= g.shares.size()) {
    return invalid_argument(
        text("share=", share, " is out of range: the grant has ", g.shares.size(), " of them"));
  }
  const Share& wanted = g.shares[share].share;
  const struct {
    const char* name;
    Range32 wanted, have;
  } ranges[] = {{"layers", wanted.layers, side().layers()},
                {"KV heads", wanted.heads, side().heads()}};
  for (const auto& r : ranges) {
    if (r.have.contains(r.wanted)) continue;
    return Error{ErrorCode::kUnsupported,
                 text("grant: the receiver's share ", share, " is of ", r.name, " [",
                      r.wanted.begin, ", ", r.wanted.end(), "), the sender's pages hold [",
                      r.have.begin, ", ", r.have.end(), "); allowed: shares inside those")};
  }
  const PageMap map{pool_->spec().options().page_size, g.spec.page_size, g.first_token,
                    g.num_tokens};
  if (static_cast<std::int64_t>(pages.size()) != map.num_source_pages()) {
    return invalid_argument(text("pages: ", pages.size(), " given, but the grant's tokens lie in ",
                                 map.num_source_pages(), " of this side's"));
  }
  if (sender_of_.contains({g.request_id, g.shares[share].grant.id})) {
    return invalid_argument(text("request_id=", to_hex(g.request_id), " is being sent already"));
  }
  if (closed_) return Error{ErrorCode::kCancelled, "the endpoint is closed"};
  return {};
}

// Compressed pages travel as they lie, into compressed pages of an equal class.
Status Core::check_packed(const StreamGrant& g, const PageSet& set, Way way) const {
  if (set.class_number == 0) return {};
  KVCORE_ASSIGN_OR_RETURN(const pages::PageClass mine, pool_->page_class(set.class_number));
  const auto formats = mine.formats();
  if (!g.formats.empty() &&
      (way != Way::kWhole ||
       !std::equal(formats.begin(), formats.end(), g.formats.begin(), g.formats.end()))) {
    return Error{
        ErrorCode::kUnsupported,
        text("pages: those of class ", set.class_number, " are compressed, and the ",
             "receiver's are not alike; allowed: equal page size, layout, layers, KV heads ",
             "and formats of both sides, or open pages")};
  }
  for (std::size_t slot = 0; slot < set.sealed.size(); ++slot) {
    if (!set.sealed[slot] || (slot < g.pages.size() && g.pages[slot].sealed)) continue;
    return Error{ErrorCode::kUnsupported,
                 text("pages: page ", slot, " of the list is compressed (class ", set.class_number,
                      "), the receiver's is open; allowed: compressed into compressed, or open")};
  }
  return {};
}

Result<Core::Outgoing> Core::outgoing(const StreamGrant& g, std::span<const std::int32_t> pages,
                                      std::size_t share, std::int64_t now_ns) {
  KVCORE_ASSIGN_OR_RETURN(PageSet set, page_set(pages));
  const Share& wanted = g.shares[share].share;
  const bool sums = options_.checksums != Checksums::kOff;
  Outgoing out{Sender(g.request_id, g.shape(share), g.shares[share].grant, local_host_id(),
                      now_ns + g.ttl_ns, options_.limits, sums),
               {pages.begin(), pages.end()},
               {},
               g.placement(share),
               nullptr,
               g.with_headers(),
               way_of(side(), g.side(), wanted, g.with_headers())};
  KVCORE_RETURN_IF_ERROR(check_packed(g, set, out.way));
  Placement source{.offsets = set.offsets, .layer_stride_bytes = set.layer_stride_bytes};
  if (set.class_number != 0) {
    source.sealed = set.sealed;
    source.sealed_layers = out.remote.sealed_layers;
  }
  out.local = source;
  if (out.way == Way::kHeads) {
    const std::int64_t skip =
        (wanted.layers.begin - options_.layer_begin) * set.layer_stride_bytes +
        pool_->spec().head_block(wanted.heads.begin - options_.head_begin).k_offset_bytes;
    for (std::int64_t& offset : out.local.offsets) offset += skip;
  }
  if (out.way != Way::kConvert && g.formats.empty()) return out;
  // Under one number at both sides even the headers are alike.
  out.packed = set.class_number != 0 && set.sealed == out.machine.shape().sealed &&
               static_cast<std::uint32_t>(set.class_number) == g.class_number;
  if (out.packed) return out;
  out.conversion = std::make_unique<Conversion>(
      g, share, side(), pool_->spec(), SourcePages{pool_->view().arena, std::move(source)}, sums);
  if (out.conversion->largest_slice_bytes() > options_.staging_bytes) {
    return Error{ErrorCode::kUnsupported,
                 text("grant: slices of ", out.conversion->largest_slice_bytes(),
                      " bytes do not fit staging_bytes=", options_.staging_bytes)};
  }
  if (!staging_) {
    KVCORE_ASSIGN_OR_RETURN(staging_, Staging::make(*transport_, options_.staging_bytes));
  }
  return out;
}

Result<std::shared_ptr<SendPort>> Core::open(std::span<const std::byte> bytes,
                                             std::span<const std::int32_t> pages,
                                             std::int64_t now_ns, std::size_t share) {
  KVCORE_ASSIGN_OR_RETURN(const StreamGrant g, StreamGrant::decode(bytes));
  KVCORE_RETURN_IF_ERROR(check_open(g, pages, share));
  KVCORE_RETURN_IF_ERROR(pool_->io_acquire(pages));
  auto out = outgoing(g, pages, share, now_ns);  // held by now: the bytes stay where they are
  if (!out) {
    io_release(pages);
    return out.error();
  }
  auto peer = peer_for(g);
  if (!peer) {
    io_release(pages);
    return peer.error();
  }
  const std::uint64_t id = next_sender_++;
  out->port = std::make_shared<SendPort>(id, g.request_id, g.shape(share), g.first_token,
                                         g.shares[share].share.layers.begin - options_.layer_begin,
                                         &pool_->view(), inbox_);
  auto port = out->port;
  auto [it, fresh] = outgoing_.emplace(id, std::move(*out));
  sender_of_.emplace(std::pair(g.request_id, g.shares[share].grant.id), id);
  attach(id, it->second, *peer);
  settle_sender(id);
  return port;
}

// ---- writes

bool Core::post_one(std::uint64_t id, Peer& peer) {
  Outgoing& out = outgoing_.at(id);
  Posted posted{id};
  if (out.conversion) {  // is there room for any write? What the machine gives must be posted
    const bool room = stage(
        posted, std::max(options_.limits.max_write_bytes, out.conversion->largest_slice_bytes()));
    if (!room) return false;
  }
  const auto run = out.machine.next_write();
  unstage(posted);
  if (run) post(id, peer, *run);
  return run.has_value();
}

void Core::post(std::uint64_t id, Peer& peer, const SliceRun& run) {
  Outgoing& out = outgoing_.at(id);
  const Shape& shape = out.machine.shape();
  const bool sealed = shape.is_sealed(run.first);
  const bool staged = out.way == Way::kConvert || (sealed && !out.packed);
  Posted posted{id};
  std::vector<transport::Segment> segments;
  Status ready;
  if (staged) {
    const std::int64_t bytes = shape.bytes_of(run);
    ready = stage(posted, bytes) ? out.conversion->write(run, staging_->at(posted.staged_at, bytes))
                                 : Error{ErrorCode::kInternal, "staging memory was there before"};
    segments = staged_segments(run, shape, posted.staged_at, out.remote);
  } else {
    if (out.way == Way::kWhole && !sealed) stamper_.stamp(out.pages, out.local, shape, run);
    segments = segments_of(run, shape, out.local, out.remote);
  }
  const transport::RegionId region = staged ? staging_->region() : region_;
  const std::byte* base = staged ? staging_->at(0, 0).data() : pool_->view().arena;
  transport::OpOptions options;
  options.deadline_ns = out.machine.deadline_ns();
  options.checksum = false;  // slices carry their own, verified by the receiver
  Result<transport::OpId> op = ready ? Result<transport::OpId>(transport::OpId{}) : ready.error();
  if (ready) {
    if (!out.with_headers && options_.checksums != Checksums::kOff)
      send_sums(peer, out, run, segments, base);
    op = peer.link->write(region, segments, out.machine.grant(), tag_of(run), options);
  }
  if (op) {
    ops_.emplace(std::pair(peer.link->id(), *op), posted);
    out.machine.on_posted(*op, run);
  } else {
    unstage(posted);
    out.machine.on_refused(op.error());
  }
  settle_sender(id);
}

void Core::send_sums(Peer& peer, const Outgoing& out, const SliceRun& run,
                     std::span<const transport::Segment> segments, const std::byte* base) {
  StreamMessage m{
      .kind = MessageKind::kSums, .request_id = out.machine.id(), .grant = out.machine.grant()};
  m.run = run;
  auto segment = segments.begin();
  std::uint64_t used = 0;  // of the segment
  for (std::int32_t slot = run.first; slot < run.first + run.count; ++slot) {
    const auto bytes = static_cast<std::size_t>(out.machine.shape().bytes_of(run.layer, slot));
    m.sums.push_back(xxh3_64(base + segment->local_offset + used, bytes));
    used += bytes;
    if (used == segment->bytes) {
      ++segment;
      used = 0;
    }
  }
  send(peer.link->id(), m);
}

bool Core::stage(Posted& posted, std::int64_t bytes) {
  const auto at = staging_->take(std::min(bytes, options_.staging_bytes));
  if (!at) return false;
  posted.staged_at = *at;
  posted.staged_bytes = std::min(bytes, options_.staging_bytes);
  return true;
}

void Core::unstage(const Posted& posted) {
  if (posted.staged_bytes > 0) staging_->give(posted.staged_at, posted.staged_bytes);
}

}  // namespace kvcore::stream
