#include "fake_verbs.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace kvcore::transport::rdma {
namespace {

struct FakeMemory final : RegisteredMemory {
  FakeMemory(FakeFabric* f, std::uint32_t k) : fabric(f), key(k) {}
  ~FakeMemory() override {
    const std::lock_guard lock(fabric->mu);
    fabric->memory.erase(key);
  }
  std::uint32_t local_key() const noexcept override { return key; }
  FakeFabric* fabric;
  std::uint32_t key;
};

std::byte* at(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

FakeWindow::~FakeWindow() {
  const std::lock_guard lock(fabric->mu);
  if (bound != nullptr) bound->windows_.erase(last_key);
}

Result<std::unique_ptr<Nic>> FakeFabric::open(const NicRequest& request) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(open_ns));
  NicInfo info;
  info.name = request.device;
  info.gid = *gid_of_address("10.77.0.1");
  info.mtu_bytes = 4096;
  info.max_pieces = 4;
  info.windows = true;
  auto nic = std::make_unique<FakeNic>(this, info, request.send_depth);
  if (runs_by_itself) KVCORE_RETURN_IF_ERROR(nic->post_receives(request.receives));
  return std::unique_ptr<Nic>(std::move(nic));
}

bool FakeFabric::step() {
  std::vector<std::pair<FakePair*, bool>> able;  // true: a packet that was let in is placed
  for (auto& [number, pair] : pairs) {
    if (pair->placing_ && draw(16) == 0) able.emplace_back(pair, true);  // late
    if (!pair->queue_.empty() && !pair->waits_ && !stalled.contains(pair->nic_->info().name))
      able.emplace_back(pair, false);
  }
  if (able.empty())
    return std::ranges::any_of(pairs, [](const auto& p) { return p.second->placing_.has_value(); });
  const auto [pair, placing] = able[draw(able.size())];
  if (!placing) {
    execute(pair);
    return true;
  }
  const FakePair::Packet packet = *std::exchange(pair->placing_, std::nullopt);
  end(packet.sender, packet.work, place(pair, packet.work));
  return true;
}

void FakeFabric::execute(FakePair* pair) {
  const FakeWork work = std::move(pair->queue_.front());
  pair->queue_.pop_front();
  ++executions_;
  const auto sender = static_cast<std::uint32_t>(pair->local_.number);
  if (executions_ == fail_at_) {
    if (fail_executed_) (void)carry_out(pair, work);
    return end(sender, work, fail_status_);
  }
  if (dead.contains(pair->nic_->info().name)) return end(sender, work, WorkStatus::kRetry);
  const bool write = !work.pieces.empty() && work.work.kind != WorkKind::kRead;
  FakePair* owner = nullptr;
  if (!places_late || !write) return end(sender, work, carry_out(pair, work));
  const WorkStatus status = admit(pair, work, &owner);
  if (status != WorkStatus::kOk) return end(sender, work, status);
  owner->placing_ = {sender, work};
  pair->waits_ = true;
}

void FakeFabric::end(std::uint32_t sender, const FakeWork& work, WorkStatus status) {
  const auto it = pairs.find(sender);
  if (it == pairs.end()) return;  // destroyed while its packet was under way
  FakePair* pair = it->second;
  pair->waits_ = false;
  if (status != WorkStatus::kOk || work.work.signalled)
    pair->send_done_.push_back({work.work.id, pair->local_.number, work.work.kind, status, 0});
  if (status != WorkStatus::kOk) pair->flush();
}

WorkStatus FakeFabric::carry_out(FakePair* pair, const FakeWork& work) {
  const Work& w = work.work;
  if (w.kind == WorkKind::kBind) {
    auto* window = dynamic_cast<FakeWindow*>(w.window);
    EXPECT_EQ(window->bound, nullptr) << "bound twice";
    window->last_key = w.remote_key;
    window->bound = pair;
    window->address = w.remote_address;
    window->bytes = w.window_bytes;
    window->read = w.remote_read;
    window->write = w.remote_write;
    pair->windows_[w.remote_key] = window;
    return WorkStatus::kOk;
  }
  if (w.kind == WorkKind::kInvalidate) {
    const auto it = pair->windows_.find(w.remote_key);
    if (it == pair->windows_.end()) return WorkStatus::kLocal;
    it->second->bound = nullptr;
    pair->windows_.erase(it);
    return WorkStatus::kOk;
  }
  FakePair* owner = nullptr;
  const WorkStatus status = admit(pair, work, &owner);
  return status == WorkStatus::kOk ? place(owner, work) : status;
}

// May these bytes move? What the sender's and the owner's device look at before they do.
WorkStatus FakeFabric::admit(FakePair* pair, const FakeWork& work, FakePair** owner) {
  const Work& w = work.work;
  const auto peer = pairs.find(static_cast<std::uint32_t>(pair->remote_.number));
  if (peer == pairs.end() || peer->second->error_ || !peer->second->ready_ ||
      peer->second->remote_.number != pair->local_.number)
    return WorkStatus::kRetry;
  *owner = peer->second;
  std::uint64_t total = 0;
  for (const LocalPiece& p : work.pieces) {
    total += p.bytes;
    const auto range = memory.find(p.key);
    if (range == memory.end() || p.address < range->second.first ||
        p.address + p.bytes > range->second.first + range->second.second)
      return WorkStatus::kLocal;
  }
  if (total == 0 && w.kind == WorkKind::kWrite) return WorkStatus::kOk;
  const auto it = (*owner)->windows_.find(w.remote_key);
  const bool is_read = w.kind == WorkKind::kRead;
  if (it == (*owner)->windows_.end() || w.remote_address < it->second->address ||
      w.remote_address + total > it->second->address + it->second->bytes ||
      !(is_read ? it->second->read : it->second->write)) {
    (*owner)->error_ = true;
    return WorkStatus::kRemoteAccess;
  }
  return WorkStatus::kOk;
}

WorkStatus FakeFabric::place(FakePair* owner, const FakeWork& work) {
  const Work& w = work.work;
  if (w.kind == WorkKind::kWriteImmediate) {
    if (owner->nic_->receives == 0) return WorkStatus::kReceiverNotReady;
    --owner->nic_->receives;
  }
  const bool is_read = w.kind == WorkKind::kRead;
  std::byte* remote = at(w.remote_address);
  for (const LocalPiece& p : work.pieces) {
    std::byte* local = at(p.address);
    if (on_touch) {
      on_touch(local, p.bytes, is_read);
      on_touch(remote, p.bytes, !is_read);
    }
    std::memcpy(is_read ? local : remote, is_read ? remote : local, p.bytes);
    remote += p.bytes;
  }
  if (w.kind == WorkKind::kWriteImmediate)
    owner->receive_done_.push_back(
        {0, owner->local_.number, WorkKind::kReceive, WorkStatus::kOk, w.immediate});
  return WorkStatus::kOk;
}

FakePair::~FakePair() {
  const std::lock_guard lock(fabric_->mu);
  EXPECT_TRUE(windows_.empty()) << "destroyed before its windows: real devices wait for them";
  for (auto& [key, window] : windows_) window->bound = nullptr;
  fabric_->pairs.erase(static_cast<std::uint32_t>(local_.number));
}

Status FakePair::connect(const Endpoint& remote, const PathSettings& settings) {
  const std::lock_guard lock(fabric_->mu);
  KVCORE_RETURN_IF_ERROR(check(settings));
  if (fabric_->connecting_fails()) return Error{ErrorCode::kIo, "connect was made to fail"};
  remote_ = remote;
  ready_ = true;
  return {};
}

Status FakePair::post(std::span<const Work> work, std::size_t* posted) {
  const std::lock_guard lock(fabric_->mu);
  *posted = 0;
  for (const Work& w : work) {
    if (fabric_->posting_fails()) return Error{ErrorCode::kIo, "post was made to fail"};
    EXPECT_TRUE(ready_) << "posted before it was connected";
    EXPECT_LE(w.pieces.size(), nic_->info().max_pieces);
    queue_.push_back({w, {w.pieces.begin(), w.pieces.end()}});
    queue_.back().work.pieces = {};
    EXPECT_LE(queue_.size(), nic_->info().send_depth) << "the queue overflowed";
    ++*posted;
    if (error_) flush();
  }
  return {};
}

void FakePair::flush() {
  error_ = true;
  for (const FakeWork& w : queue_)
    send_done_.push_back({w.work.id, local_.number, w.work.kind, WorkStatus::kFlushed, 0});
  queue_.clear();
}

Result<std::unique_ptr<RegisteredMemory>> FakeNic::register_memory(const MemoryRequest& r) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(fabric_->register_ns));
  const std::lock_guard lock(fabric_->mu);
  const std::uint32_t key = ++fabric_->next_key;
  fabric_->memory[key] = {reinterpret_cast<std::uint64_t>(r.base), r.bytes};
  return std::unique_ptr<RegisteredMemory>(new FakeMemory(fabric_, key));
}

Result<std::unique_ptr<QueuePair>> FakeNic::make_queue_pair(std::uint32_t first_packet) {
  const std::lock_guard lock(fabric_->mu);
  EXPECT_LT(first_packet, 1U << 24);
  const Endpoint local{info_.gid, QueuePairNumber{fabric_->next_pair++}, first_packet,
                       info_.mtu_bytes};
  auto pair = std::make_unique<FakePair>(fabric_, this, local);
  fabric_->pairs[static_cast<std::uint32_t>(local.number)] = pair.get();
  return std::unique_ptr<QueuePair>(std::move(pair));
}

FakeNic::FakeNic(FakeFabric* fabric, NicInfo info, std::uint32_t depth)
    : fabric_(fabric), info_(std::move(info)) {
  info_.send_depth = depth;
  if (!fabric->runs_by_itself) return;
  timer_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  no_event_ = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  const itimerspec often{{0, 100'000}, {0, 100'000}};
  EXPECT_EQ(::timerfd_settime(timer_.get(), 0, &often, nullptr), 0);
}

Status FakeNic::arm() {
  std::uint64_t ticks = 0;
  if (timer_) [[maybe_unused]]
    const auto n = ::read(timer_.get(), &ticks, sizeof ticks);
  return {};
}

Result<std::size_t> FakeNic::poll(std::span<WorkDone> done) {
  const std::lock_guard lock(fabric_->mu);
  for (int i = 0; fabric_->runs_by_itself && i < 16 && fabric_->step(); ++i) {
  }
  std::vector<std::deque<WorkDone>*> able;
  for (auto& [number, pair] : fabric_->pairs) {
    if (pair->nic_ != this) continue;
    if (!pair->send_done_.empty()) able.push_back(&pair->send_done_);
    if (!pair->receive_done_.empty()) able.push_back(&pair->receive_done_);
  }
  if (able.empty() || done.empty()) return std::size_t{0};
  auto* queue = able[fabric_->draw(able.size())];
  done[0] = queue->front();
  queue->pop_front();
  return std::size_t{1};
}

}  // namespace kvcore::transport::rdma
