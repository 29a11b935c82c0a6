#include "transport/rdma/control.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "base/text.h"

namespace kvcore::transport::rdma {
namespace {

static_assert(std::endian::native == std::endian::little, "fields are copied as they lie");
constexpr std::size_t kMaxReason = 512;
constexpr std::uint8_t kLastCode = static_cast<std::uint8_t>(kLastErrorCode);

class Writer {
 public:
  template <class T>
  Writer& put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && std::has_unique_object_representations_v<T>);
    return raw(std::as_bytes(std::span(&value, 1)));
  }
  Writer& raw(Bytes bytes) {
    if (bytes.empty()) return *this;
    const std::size_t at = out_.size();
    out_.resize(at + bytes.size());
    std::memcpy(out_.data() + at, bytes.data(), bytes.size());
    return *this;
  }
  Writer& status(const Status& s) {
    put(static_cast<std::uint8_t>(s.ok() ? 0 : static_cast<int>(s.error().code) + 1));
    const std::string reason = s.ok() ? "" : s.error().message.substr(0, kMaxReason);
    put(static_cast<std::uint16_t>(reason.size()));
    return raw(std::as_bytes(std::span(reason)));
  }
  Writer& endpoint(const Endpoint& e) {
    return put(e.gid.bytes)
        .put(static_cast<std::uint32_t>(e.number))
        .put(e.first_packet)
        .put(e.mtu_bytes);
  }
  Writer& grant(const GrantRef& g) { return put(g.id).put(g.generation); }
  std::vector<std::byte> take() { return std::move(out_); }

 private:
  std::vector<std::byte> out_;
};

// Reads on past the end give zeros and fail the whole at finish().
class Reader {
 public:
  explicit Reader(Bytes in) : in_(in) {}
  template <class T>
  T get() {
    T value{};
    if (in_.size() < sizeof value) {
      failed_ = true;
      in_ = {};
      return value;
    }
    std::memcpy(&value, in_.data(), sizeof value);
    in_ = in_.subspan(sizeof value);
    return value;
  }
  Bytes raw(std::size_t bytes) {
    if (in_.size() < bytes) {
      failed_ = true;
      return {};
    }
    const Bytes out = in_.first(bytes);
    in_ = in_.subspan(bytes);
    return out;
  }
  Status status() {
    const auto code = get<std::uint8_t>();
    const Bytes reason = raw(get<std::uint16_t>());
    require(code <= kLastCode + 1 && reason.size() <= kMaxReason && (code != 0 || reason.empty()));
    if (code == 0 || failed_) return {};
    return Error{static_cast<ErrorCode>(code - 1),
                 std::string(reinterpret_cast<const char*>(reason.data()), reason.size())};
  }
  Endpoint endpoint() {
    Endpoint e;
    e.gid.bytes = get<std::array<std::uint8_t, 16>>();
    e.number = QueuePairNumber{get<std::uint32_t>()};
    e.first_packet = get<std::uint32_t>();
    e.mtu_bytes = get<std::uint32_t>();
    require(static_cast<std::uint32_t>(e.number) < 1U << 24 && e.first_packet < 1U << 24);
    require(std::has_single_bit(e.mtu_bytes) && e.mtu_bytes >= 256 && e.mtu_bytes <= 4096);
    require(!e.gid.null());
    return e;
  }
  GrantRef grant() {
    const auto id = get<std::uint64_t>();
    return {id, get<std::uint64_t>()};
  }
  std::uint32_t rail() {
    const auto rail = get<std::uint32_t>();
    require(rail < kMaxRails);
    return rail;
  }
  Priority priority() {
    const auto p = get<std::uint8_t>();
    require(p < kNumPriorities);
    return static_cast<Priority>(p);
  }
  Bytes rest() { return raw(in_.size()); }
  void require(bool true_of_good) { failed_ = failed_ || !true_of_good; }
  bool good() const { return !failed_ && in_.empty(); }

 private:
  Bytes in_;
  bool failed_ = false;
};

struct Encoder {
  Writer& w;
  void operator()(const Offer& m) { w.put(m.rail).put(m.epoch).endpoint(m.sender); }
  void operator()(const Accept& m) { w.put(m.rail).put(m.epoch).endpoint(m.owner); }
  void operator()(const Refuse& m) { w.put(m.rail).put(m.epoch); }
  void operator()(const Broken& m) {
    w.put(m.rail).put(m.epoch).put(static_cast<std::uint8_t>(m.by_owner));
  }
  void operator()(const Map& m) { w.grant(m.grant).put(m.rail).put(m.epoch).put(m.question); }
  void operator()(const Mapped& m) {
    w.grant(m.grant).put(m.rail).put(m.question).status(m.status);
    w.put(static_cast<std::uint8_t>(m.rights));
    w.raw(std::as_bytes(std::span(m.ranges)));
  }
  void operator()(const Unmapped& m) { w.grant(m.grant); }
  void operator()(const Drained& m) { w.grant(m.grant); }
  void operator()(const Begin& m) {
    w.put(m.op).put(m.slot).put(static_cast<std::uint8_t>(m.priority));
    w.grant(m.grant).put(m.tag).put(m.bytes).put(static_cast<std::uint8_t>(m.notify));
  }
  void operator()(const Posted& m) { w.put(m.op).put(m.attempt).put(m.rails); }
  void operator()(const Verdict& m) { w.put(m.op).status(m.status); }
  void operator()(const Abort& m) { w.put(m.op); }
  void operator()(const Text& m) {
    w.put(static_cast<std::uint8_t>(m.priority)).put(m.op).raw(m.bytes);
  }
};

Mapped read_mapped(Reader* r) {
  Mapped m{r->grant(), r->rail(), r->get<std::uint32_t>(), r->status(), Rights::kRead, {}};
  const auto rights = r->get<std::uint8_t>();
  r->require(rights >= 1 && rights <= 3);
  m.rights = static_cast<Rights>(rights);
  const Bytes table = r->rest();
  r->require(table.size() % sizeof(RemoteRange) == 0);
  const std::size_t count = table.size() / sizeof(RemoteRange);
  r->require(count <= kMaxWindows && (count != 0) == m.status.ok());
  if (!r->good()) return m;
  m.ranges.resize(count);
  if (count != 0) std::memcpy(m.ranges.data(), table.data(), table.size());
  std::uint64_t end = 0;
  for (const RemoteRange& range : m.ranges) {  // sorted, apart, and no sum overflows
    r->require(range.bytes > 0 && range.offset >= end && range.offset <= kMaxOpBytes << 22 &&
               range.bytes <= kMaxOpBytes << 22 && range.address <= ~range.bytes);
    end = range.offset + range.bytes;
  }
  return m;
}

Begin read_begin(Reader* r) {
  Begin m{};
  m.op = r->get<std::uint64_t>();
  m.slot = r->get<std::uint32_t>();
  m.priority = r->priority();
  m.grant = r->grant();
  m.tag = r->get<std::uint64_t>();
  m.bytes = r->get<std::uint64_t>();
  const auto notify = r->get<std::uint8_t>();
  m.notify = notify == 1;
  r->require(notify <= 1 && m.slot < kMaxSlots && m.bytes > 0 && m.bytes <= kMaxOpBytes);
  return m;
}

Posted read_posted(Reader* r) {
  Posted m{r->get<std::uint64_t>(), r->get<std::uint32_t>(), r->get<std::uint32_t>()};
  r->require(m.attempt < kAttempts && m.rails != 0 && m.rails < 1U << kMaxRails);
  return m;
}

// Braces fix the order of evaluation: fields are read as they are written.
Control read(std::uint8_t kind, Reader* r) {
  switch (kind) {
    case 0:
      return Offer{r->rail(), r->get<std::uint32_t>(), r->endpoint()};
    case 1:
      return Accept{r->rail(), r->get<std::uint32_t>(), r->endpoint()};
    case 2:
      return Refuse{r->rail(), r->get<std::uint32_t>()};
    case 3: {
      Broken m{r->rail(), r->get<std::uint32_t>(), false};
      const auto by = r->get<std::uint8_t>();
      r->require(by <= 1);
      m.by_owner = by == 1;
      return m;
    }
    case 4:
      return Map{r->grant(), r->rail(), r->get<std::uint32_t>(), r->get<std::uint32_t>()};
    case 5:
      return read_mapped(r);
    case 6:
      return Unmapped{r->grant()};
    case 7:
      return read_begin(r);
    case 8:
      return read_posted(r);
    case 9:
      return Verdict{r->get<std::uint64_t>(), r->status()};
    case 10:
      return Abort{r->get<std::uint64_t>()};
    case 11: {
      Text m{r->priority(), {}, 0};
      m.op = r->get<std::uint64_t>();
      const Bytes body = r->rest();
      r->require(body.size() <= kMaxMessageBytes);
      if (r->good()) m.bytes.assign(body.begin(), body.end());
      return m;
    }
    case 12:
      return Drained{r->grant()};
    default:
      r->require(false);
      return Abort{};
  }
}

}  // namespace

std::vector<std::byte> encode(const Control& control) {
  Writer w;
  w.put(static_cast<std::uint8_t>(control.index()));
  std::visit(Encoder{w}, control);
  return w.take();
}

Result<Control> decode(Bytes bytes) {
  Reader r(bytes);
  const auto kind = r.get<std::uint8_t>();
  Control control = read(kind, &r);
  if (!r.good())
    return Error{ErrorCode::kCorrupt,
                 text("rdma control message of kind ", int{kind}, " and ", bytes.size(), " bytes")};
  return control;
}

}  // namespace kvcore::transport::rdma
