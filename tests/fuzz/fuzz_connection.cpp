// The receive path of a socket link behind its handshake: a whole Connection over a socketpair.
//
// Input: flags u8 (bit 0: shm; bit 1: the peer reads nothing), hello length u8, hello of the peer,
// then steps (Step u8 and its fields, see `Talk::step`). Frames of the peer carry the right MAC, so
// that their content is what is tested.
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <set>

#include "fuzz.h"
#include "transport/socket/connection.h"

namespace kvcore::fuzz {
namespace {

using namespace transport;

constexpr std::uint64_t kRegionBytes = 64UL * 1024;
constexpr Range kWritable[] = {{4096, 8192}, {16384, 4096}};
constexpr Range kReadable{32768, 4096};
constexpr Range kOwnTarget{49152, 8192};  // of our own reads
constexpr std::string_view kLabel = "kvcore-link-4";

enum class Step : std::uint8_t {
  kRaw,
  kFrame,
  kWrite,
  kRead,
  kCancel,
  kTime,
  kRevoke,
  kFd,
  kClose,
  kBorrow,
  kGiveBack
};
constexpr std::uint8_t kSteps = 11;

struct FrameFields {
  std::uint8_t type, priority, flags, grant;  // grant: which one the body is made to name
  std::uint16_t payload_bytes, body_bytes;
};

UniqueFd memfd(std::uint64_t bytes, bool sealed) {
  UniqueFd fd(::memfd_create("kvcore-fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  require(fd && ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0, "memory for a region");
  if (sealed) require(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0, "a seal");
  return fd;
}

// What lives as long as the process: memory and descriptors.
struct Ground {
  Ground() {
    base = static_cast<std::byte*>(
        ::mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, MAP_SHARED, region_fd.get(), 0));
    require(base != MAP_FAILED, "the region is mapped");
  }
  UniqueFd region_fd = memfd(kRegionBytes, true);
  UniqueFd peer_fds[4] = {memfd(16384, true), memfd(16384, false), memfd(512, true),
                          UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC))};
  std::byte* base = nullptr;
};

AuthSession make_auth(AuthSession::Side side, Input hello) {
  auto made = AuthSession::make(side, {}, kLabel, hello);
  require(made.ok(), "a session is made");
  return std::move(*made);
}

class Talk {
 public:
  Talk(Ground* ground, bool shm, bool reads, Input hello)
      : ground_(ground),
        reads_(reads),
        shared_(options()),
        peer_(make_auth(AuthSession::Side::kInitiator, hello)),
        now_(now_ns()) {
    std::memset(ground_->base, 0x5a, kRegionBytes);
    shared_.wake_fd = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
    region_ = *shared_.grants.add_region({ground_->base, kRegionBytes, ground_->region_fd.get()});
    grants_[0] = *shared_.grants.create(region_, kWritable, Rights::kWrite, 0);
    grants_[1] = *shared_.grants.create(region_, {&kReadable, 1}, Rights::kRead, 0);
    grants_[2] = *shared_.grants.create(region_, {&kReadable, 1}, Rights::kReadWrite, 1);
    grants_[3] = grants_[0];
    grants_[3].ref.generation += 1;
    int fds[2];
    require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0,
            "a socketpair");
    peer_fd_ = UniqueFd(fds[1]);
    link_->id = LinkId{1};
    if (shm) link_->process = *PeerProcess::of(fds[0], ::getpid());
    shm_ = shm;
    io_.emplace(Io{shared_, epoll_.get(), std::vector<std::byte>(65536)});
    victim_.emplace(&*io_, &sessions_, link_, UniqueFd(fds[0]), shm, false, now_);
    handshake();
  }

  void step(Choices* in) {
    switch (static_cast<Step>(in->number() % kSteps)) {
      case Step::kRaw:
        deliver(in->bytes(in->number()));
        break;
      case Step::kFrame:
        frame(in);
        break;
      case Step::kWrite:
        post(in, false);
        break;
      case Step::kRead:
        post(in, true);
        break;
      case Step::kCancel:
        victim_->give_up(in->number() % 8, Error{ErrorCode::kCancelled, "cancelled"});
        break;
      case Step::kTime:
        now_ += in->number<std::uint16_t>() * 100'000LL;
        break;
      case Step::kRevoke:
        require(shared_.grants.revoke(grants_[0].ref) == Fence::kDone, "the fence stands at once");
        if (!revoked_) after_revoke_.assign(ground_->base, ground_->base + kRegionBytes);
        revoked_ = true;
        break;
      case Step::kFd:
        next_fd_ = ground_->peer_fds[in->number() % 4].get();
        break;
      case Step::kClose:
        victim_->begin_close(now_);
        break;
      case Step::kBorrow:
        borrow(in);
        break;
      case Step::kGiveBack:
        victim_->give_back(in->number() % 8);
        break;
    }
    turn();
  }

  bool dead() const { return victim_->dead(); }

  void end() {
    victim_->fail(Error{ErrorCode::kPeerDead, "the test ends"});
    victim_->finish({});
    victim_.reset();
    shared_.leases.close();
    check_events();
    check_memory();
    require(shared_.grants.remove_region(region_).ok(), "no operation holds a region for ever");
  }

 private:
  static TransportOptions options() {
    TransportOptions o;
    o.credits.total_bytes = 1UL << 20;
    return o;
  }

  void handshake() {
    std::vector<std::byte> reply(4096), proof;
    deliver(peer_.start());
    victim_->on_event(0, EPOLLIN, now_);
    victim_->work(now_);
    const ssize_t n = ::recv(peer_fd_.get(), reply.data(), reply.size(), MSG_DONTWAIT);
    require(n > 0, "the handshake is answered");
    require(peer_.feed(Input(reply).first(static_cast<std::size_t>(n)), &proof).ok() &&
                peer_.established(),
            "the answer is right");
    deliver(proof);
    turn();
  }

  void deliver(Input bytes) {
    if (bytes.empty()) return;
    iovec iov{const_cast<std::byte*>(bytes.data()), bytes.size()};
    msghdr message{};
    message.msg_iov = &iov;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char ancillary[CMSG_SPACE(sizeof(int))] = {};
    if (next_fd_ >= 0) {
      message.msg_control = ancillary;
      message.msg_controllen = sizeof ancillary;
      cmsghdr* c = CMSG_FIRSTHDR(&message);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(c), &next_fd_, sizeof next_fd_);
    }
    next_fd_ = -1;
    // What does not fit is lost, which is one more thing a peer can do.
    (void)!::sendmsg(peer_fd_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  }

  void frame(Choices* in) {
    const auto fields = in->number<FrameFields>();
    const Input given = in->bytes(fields.body_bytes % 4096);
    std::vector<std::byte> body(given.begin(), given.end());
    const auto type = static_cast<FrameType>(fields.type);
    const bool has_grant =
        type == FrameType::kWrite || type == FrameType::kReadRequest || type == FrameType::kBorrow;
    if (has_grant && fields.grant < 4 && body.size() >= 8 + sizeof(GrantRef))
      std::memcpy(body.data() + 8, &grants_[fields.grant].ref, sizeof(GrantRef));
    FramePrefix prefix;
    prefix.type = fields.type;
    prefix.priority = fields.priority;
    prefix.flags = fields.flags;
    prefix.body_bytes = static_cast<std::uint32_t>(body.size());
    prefix.payload_bytes = fields.payload_bytes;
    std::vector<std::byte> out(sizeof prefix);
    std::memcpy(out.data(), &prefix, sizeof prefix);
    out.insert(out.end(), body.begin(), body.end());
    const Mac mac = peer_.seal({out});
    out.insert(out.end(), mac.begin(), mac.end());
    if (!shm_) out.resize(out.size() + fields.payload_bytes, std::byte{0xa5});
    deliver(out);
  }

  // One write or read of ours; its id counts from 1.
  void post(Choices* in, bool is_read) {
    const std::uint64_t n = 1 + in->number<std::uint16_t>() % kOwnTarget.bytes;
    const Segment segments[] = {{kOwnTarget.offset, in->number<std::uint16_t>(), n / 2 + 1},
                                {kOwnTarget.offset + n / 2 + 1, 0, kOwnTarget.bytes / 2}};
    const bool two = n / 2 + 1 + kOwnTarget.bytes / 2 <= kOwnTarget.bytes;
    auto op = std::make_unique<Op>();
    const std::span<const Segment> used = std::span(segments).first(two ? 2 : 1);
    const auto view = shared_.grants.pin(region_, used);
    require(view.ok(), "our own segments lie in our region");
    op->id = link_->next_op++;
    op->is_read = is_read;
    op->region = region_;
    op->base = view->base;
    op->has_memfd = true;
    op->segments.assign(used.begin(), used.end());
    op->grant = GrantRef{1, 2};
    for (const Segment& s : used) op->bytes += s.bytes;
    op->options.deadline_ns = in->number() < 64 ? now_ + 1'000'000 : 0;
    op->options.priority = static_cast<Priority>(in->number() % kNumPriorities);
    link_->outstanding += 1;
    if (!is_read) link_->queued_bytes += op->bytes;
    ++posted_;
    victim_->start(std::move(op));
  }

  void borrow(Choices* in) {
    if (!shm_) return;
    auto op = std::make_unique<Op>();
    op->id = link_->next_op++;
    op->is_read = op->borrows = true;
    op->grant = GrantRef{1, 2};
    op->segments = {
        {0, in->number<std::uint16_t>(), std::uint64_t{1} + in->number<std::uint16_t>()}};
    op->options.deadline_ns = in->number() < 64 ? now_ + 1'000'000 : 0;
    link_->outstanding += 1;
    ++posted_;
    victim_->start(std::move(op));
  }

  // What the I/O thread does in one round.
  void turn() {
    if (victim_->dead()) return;
    victim_->on_event(0, EPOLLIN, now_);
    victim_->work(now_);
    shared_.leases.work(now_);
    for (int i = 0; i < 64 && !victim_->dead() && victim_->busy(); ++i) victim_->work(now_);
    if (!victim_->dead() && !victim_->busy())
      require(victim_->next_timer_ns() > now_, "an idle link lets the thread sleep");
    if (!reads_) return;
    std::byte sink[16384];
    while (::recv(peer_fd_.get(), sink, sizeof sink, MSG_DONTWAIT) > 0) {
    }
  }

  void check_events() {
    std::vector<Event> events;
    while (shared_.events.poll(&events, 4096) != 0) {
    }
    std::set<OpId> ended;
    std::uint64_t borrowed_bytes = 0;
    bool up = false, down = false;
    for (const Event& event : events) {
      if (const auto* r = std::get_if<Returned>(&event)) {
        require(r->grant == grants_[1].ref, "only what may be read is lent");
        continue;
      }
      require(!down, "Down is the last event but for leases");
      if (const auto* c = std::get_if<Completion>(&event)) {
        require(ended.insert(c->op).second, "an operation ends once");
        require(c->status.ok() || c->bytes == 0, "a failed operation moved nothing");
      } else if (const auto* a = std::get_if<Arrival>(&event)) {
        require(a->grant == grants_[0].ref || !a->status.ok() || a->bytes == 0,
                "only the writable grant takes bytes");
      } else if (const auto* m = std::get_if<Message>(&event)) {
        require(m->bytes.size() <= kMaxMessageBytes, "a message has a limit");
      } else if (const auto* b = std::get_if<Borrowed>(&event)) {
        require(ended.insert(b->op).second, "a borrow ends once");
        for (const auto& span : b->spans)  // all of it is mapped, whatever the peer said
          for (const std::byte byte : span) borrowed_bytes += std::to_integer<std::uint64_t>(byte);
      } else if (std::holds_alternative<Up>(event)) {
        up = true;
      } else {
        down = true;
      }
    }
    require(borrowed_bytes < (1ULL << 40), "what is borrowed can be read");
    require(down == up, "a link that was up goes down, and no other");
    require(ended.size() == posted_, "every operation ends");
    require(link_->outstanding == 0 && link_->queued_bytes == 0, "the accounts are empty");
  }

  void check_memory() const {
    const auto may_change = [](std::uint64_t at) {
      const auto inside = [at](const Range& r) { return at - r.offset < r.bytes; };
      return inside(kWritable[0]) || inside(kWritable[1]) || inside(kOwnTarget);
    };
    for (std::uint64_t i = 0; i < kRegionBytes; ++i) {
      if (!may_change(i)) require(ground_->base[i] == std::byte{0x5a}, "nothing lands elsewhere");
      if (revoked_ && i < kReadable.offset)
        require(ground_->base[i] == after_revoke_[i], "nothing lands behind the fence");
    }
  }

  Ground* ground_;
  bool reads_;
  bool shm_ = false;
  Shared shared_;
  UniqueFd epoll_, peer_fd_;
  RegionId region_{};
  Grant grants_[4];
  std::shared_ptr<LinkState> link_ = std::make_shared<LinkState>();
  std::optional<Io> io_;
  Sessions sessions_;
  std::optional<Connection> victim_;
  AuthSession peer_;
  std::int64_t now_;
  int next_fd_ = -1;
  bool revoked_ = false;
  std::vector<std::byte> after_revoke_;
  std::size_t posted_ = 0;
};

std::vector<std::byte> honest_hello(std::int64_t keepalive_ns) {
  TransportOptions options;
  options.identity = "fuzz";
  options.keepalive_ns = keepalive_ns;
  return make_link_hello(options, 1, 1 << 20);
}

Builder start(bool shm, std::int64_t keepalive_ns = 2'000'000'000) {
  const auto hello = honest_hello(keepalive_ns);
  Builder b;
  b.number(static_cast<std::uint8_t>(shm)).number(static_cast<std::uint8_t>(hello.size()));
  b.raw(hello);
  return b;
}

void put(Builder* b, FrameType type, std::uint8_t flags, std::uint16_t payload,
         const std::vector<std::byte>& body, std::uint8_t grant = 0) {
  b->number(Step::kFrame);
  b->number(FrameFields{static_cast<std::uint8_t>(type), 0, flags, grant, payload,
                        static_cast<std::uint16_t>(body.size())});
  b->raw(body);
}

void post(Builder* b, Step step, std::uint16_t bytes) {
  b->number(step).number(bytes).number(std::uint16_t{0}).number(std::uint8_t{200});
  b->number(std::uint8_t{0});
}

Seed tcp_seed() {
  Builder b = start(false);
  const Piece piece{4096, 512, 0};
  put(&b, FrameType::kWrite, kFlagUnchecked, 512,
      make_body(WriteHead{1, {}, 7, 0, 1}, std::span(&piece, 1)));
  put(&b, FrameType::kWrite, kFlagUnchecked | kFlagLast, 512,
      make_body(WriteHead{1, {}, 7, 0, 1}, std::span(&piece, 1)));
  put(&b, FrameType::kWrite, kFlagLast, 512,
      make_body(WriteHead{2, {}, 7, 0, 1}, std::span(&piece, 1)));
  const Range range{32768, 4096};
  put(&b, FrameType::kReadRequest, 0, 0, make_body(ReadHead{3, {}, 1}, std::span(&range, 1)), 1);
  put(&b, FrameType::kMessage, 0, 0, std::vector<std::byte>(100, std::byte{'m'}));
  post(&b, Step::kRead, 1000);
  const DataPiece data{501, 0};
  put(&b, FrameType::kReadData, kFlagLast, 501, make_body(OpHead{1}, std::span(&data, 1)));
  put(&b, FrameType::kResult, 0, 0, make_result(1, {}));
  post(&b, Step::kWrite, 1000);
  put(&b, FrameType::kResult, 0, 0, make_result(2, {}));
  b.number(Step::kRevoke);
  put(&b, FrameType::kWrite, kFlagUnchecked | kFlagLast, 512,
      make_body(WriteHead{4, {}, 7, 0, 1}, std::span(&piece, 1)));
  put(&b, FrameType::kPing, 0, 0, {});
  b.number(Step::kTime).number(std::uint16_t{6000});
  put(&b, FrameType::kCredit, 0, 0, make_body(Credit{2 << 20, 1000}));
  put(&b, FrameType::kBye, 0, 0, make_body(ByeHead{0}));
  return b.take();
}

Seed shm_seed() {
  Builder b = start(true);
  b.number(Step::kFd).number(std::uint8_t{0});
  put(&b, FrameType::kRegion, 0, 0, make_body(RegionHead{1, 16384}));
  const Piece piece{4096, 512, 0};
  put(&b, FrameType::kWrite, kFlagLast, 0,
      make_body(WriteHead{1, {}, 7, 1, 1}, std::span(&piece, 1)));
  const Piece outside{4096, 512, 16000};
  put(&b, FrameType::kWrite, kFlagLast, 0,
      make_body(WriteHead{2, {}, 7, 1, 1}, std::span(&outside, 1)));
  const Range range{32768, 4096};
  put(&b, FrameType::kReadRequest, 0, 0, make_body(ReadHead{3, {}, 1}, std::span(&range, 1)), 1);
  put(&b, FrameType::kReadDone, 0, 0, make_body(OpHead{3}));
  post(&b, Step::kRead, 1000);
  put(&b, FrameType::kReadGo, 0, 0, make_body(GoHead{1, 1}));
  put(&b, FrameType::kResult, 0, 0, make_result(1, {}));
  post(&b, Step::kWrite, 100);
  b.number(Step::kCancel).number(std::uint8_t{2});
  put(&b, FrameType::kResult, 0, 0, make_result(2, Error{ErrorCode::kCancelled, "aborted"}));
  put(&b, FrameType::kWrite, 0, 0, make_body(WriteHead{5, {}, 7, 1, 1}, std::span(&piece, 1)));
  put(&b, FrameType::kAbort, 0, 0, make_body(OpHead{5}));
  put(&b, FrameType::kBorrow, 0, 0, make_body(ReadHead{6, {}, 1}, std::span(&range, 1)), 1);
  put(&b, FrameType::kBorrow, 0, 0, make_body(ReadHead{7, {}, 1}, std::span(&range, 1)), 1);
  put(&b, FrameType::kGiveBack, 0, 0, make_body(OpHead{6}));
  for (int i = 0; i < 2; ++i)
    b.number(Step::kBorrow)
        .number(std::uint16_t{100})
        .number(std::uint16_t{1000})
        .number(std::uint8_t{200});
  put(&b, FrameType::kLent, 0, 0, make_body(LentHead{3, 1, 0}));
  b.number(Step::kGiveBack).number(std::uint8_t{3});
  b.number(Step::kCancel).number(std::uint8_t{4});
  put(&b, FrameType::kLent, 0, 0, make_body(LentHead{4, 1, 0}));
  put(&b, FrameType::kRegionGone, 0, 0, make_body(RegionHead{1, 0}));
  b.number(Step::kClose);
  return b.take();
}

}  // namespace

void run(Input input) {
  static Ground ground;
  Choices in(input);
  const auto flags = in.number();
  const Input hello = in.bytes(in.number());
  Talk talk(&ground, (flags & 1) != 0, (flags & 2) == 0, hello);
  while (!in.empty() && !talk.dead()) talk.step(&in);
  talk.end();
}

std::vector<Seed> seeds() {
  Seed mute = tcp_seed();
  mute[0] |= std::byte{2};
  Builder hasty = start(false, 1), backward = start(true, -1);
  hasty.number(Step::kTime).number(std::uint16_t{1});
  backward.number(Step::kTime).number(std::uint16_t{1});
  return {tcp_seed(), shm_seed(), std::move(mute), hasty.take(), backward.take()};
}

}  // namespace kvcore::fuzz
