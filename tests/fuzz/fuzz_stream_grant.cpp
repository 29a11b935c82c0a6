// StreamGrant (stream/grant.h): what a router carries from the receiver to the sender.
#include "fuzz.h"
#include "stream/grant.h"

namespace kvcore::fuzz {

using namespace stream;

void run(Input input) {
  const auto grant = StreamGrant::decode(input);
  if (!grant.ok()) return;
  require(grant->check().ok(), "what is decoded is valid");
  require(grant->encode() == std::vector<std::byte>(input.begin(), input.end()),
          "there is one encoding of a grant");
  for (std::size_t share = 0; share < grant->shares.size(); ++share) {
    const Shape shape = grant->shape(share);
    require(shape.num_slots > 0 && shape.num_layers > 0 && shape.kv_bytes() > 0,
            "a share has bytes to fill");
    require(shape.valid_tokens(shape.num_slots - 1) > 0, "the last page has a token");
    const Placement placement = grant->placement(share);
    require(placement.offsets.size() == static_cast<std::size_t>(shape.num_slots),
            "every slot has its place");
    // The last byte that a sender would write is a number that does not overflow.
    for (std::int32_t slot = 0; slot < shape.num_slots; ++slot)
      require(
          placement.at(slot, shape.num_layers - 1) + shape.bytes_of(shape.num_layers - 1, slot) > 0,
          "a place is a positive offset");
  }
  for (const std::string& address : grant->addresses)
    for (const char c : address)
      require(static_cast<unsigned char>(c) < 0x80, "an address is plain text");
}

std::vector<Seed> seeds() {
  StreamGrant g;
  g.spec.num_layers = 2;
  g.spec.num_kv_heads = 2;
  g.spec.head_dim_k = 16;
  g.spec.head_dim_v = 16;
  g.spec.page_size = 16;
  g.spec.extent_pages = 2;
  g.first_token = 32;
  g.num_tokens = 41;
  g.ttl_ns = 1'000'000'000;
  g.shares = {{{0x1122334455667788U, 42}, {{0, 2}, {0, 2}}}};
  g.layer_stride_bytes = 8192;
  g.pages = {{4, 9, 64}, {5, 9, 64 + 1088}, {8, 2, 1 << 20}};
  g.addresses = {"shm:/tmp/a.sock", "tcp:127.0.0.1:4000"};
  StreamGrant latent = g;
  latent.shares[0].share.heads = {0, 1};
  latent.spec.num_kv_heads = 1;
  latent.spec.head_dim_k = 576;
  latent.spec.head_dim_v = 512;
  latent.spec.latent = true;
  latent.spec.layout = LayoutId::kCanonical;
  latent.layer_stride_bytes = 1 << 20;
  require(g.check().ok() && latent.check().ok(), "the seeds are valid grants");
  return {g.encode(), latent.encode()};
}

}  // namespace kvcore::fuzz
