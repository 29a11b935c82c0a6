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
    require(shape.num_slots > 0 && shape.num_layers > 0, "a grant has slices to fill");
    require(shape.valid_tokens(shape.num_slots - 1) > 0, "the last page has a token");
    const Placement placement = grant->placement(share);
    require(placement.offsets.size() == static_cast<std::size_t>(shape.num_slots),
            "every slot has its place");
    // The last byte that a sender would write is a number that does not overflow.
    for (std::int32_t slot = 0; slot < shape.num_slots; ++slot) {
      const std::int32_t last = shape.num_layers - 1;
      require(shape.bytes_of(last, slot) > 0, "a part of a slice has bytes");
      require(placement.at(slot, last) >= 0 &&
                  placement.at(slot, last) + shape.bytes_of(last, slot) > placement.at(slot, last),
              "a place is an offset");
    }
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
  latent.spec.num_kv_heads = 1;
  latent.spec.head_dim_k = 576;
  latent.spec.head_dim_v = 512;
  latent.spec.latent = true;
  latent.spec.layout = LayoutId::kCanonical;
  latent.layer_stride_bytes = 1 << 20;
  latent.shares[0].share.heads = {0, 1};
  StreamGrant shared = g;
  shared.shares = {{{1, 2}, {{0, 2}, {0, 1}}}, {{3, 4}, {{0, 2}, {1, 1}}}};
  StreamGrant sealed = g;
  sealed.class_number = 3;
  sealed.formats.assign(4, {Format::kK4, Format::kV4});
  sealed.pages[1].sealed = true;
  std::vector<Seed> all;
  for (const StreamGrant& seed : {g, latent, shared, sealed}) {
    require(seed.check().ok(), "the seeds are valid grants");
    all.push_back(seed.encode());
  }
  return all;
}

}  // namespace kvcore::fuzz
