#include "fake_verbs.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace kvcore::transport::rdma {
namespace {

struct FakeMemory final : RegisteredMemory {
  FakeMemory(FakeFabric* f, std::uint32_t k) : fabric(f), key(k) {}
  ~FakeMemory() override { fabric->memory.erase(key); }
  std::uint32_t local_key() const noexcept override { return key; }
  FakeFabric* fabric;
  std::uint32_t key;
};

std::byte* at(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

FakeWindow::~FakeWindow() {
  if (bound != nullptr) bound->windows_.erase(last_key);
}

Result<std::unique_ptr<Nic>> FakeFabric::open(const NicRequest& request) {
  NicInfo info;
  info.name = request.device;
  info.gid = *gid_of_address("10.77.0.1");
  info.mtu_bytes = 4096;
  info.max_pieces = 4;
  info.windows = true;
  return std::unique_ptr<Nic>(new FakeNic(this, info, request.send_depth));
}

bool FakeFabric::step() {
  std::vector<FakePair*> able;
  for (auto& [number, pair] : pairs)
    if (!pair->queue_.empty() && !stalled.contains(pair->nic_->info().name)) able.push_back(pair);
  if (able.empty()) return false;
  execute(able[draw(able.size())]);
  return true;
}

void FakeFabric::execute(FakePair* pair) {
  const FakeWork work = std::move(pair->queue_.front());
  pair->queue_.pop_front();
  ++executions_;
  WorkStatus status = WorkStatus::kOk;
  if (executions_ == fail_at_) {
    status = fail_status_;
    if (fail_executed_) (void)carry_out(pair, work);
  } else if (dead.contains(pair->nic_->info().name)) {
    status = WorkStatus::kRetry;
  } else {
    status = carry_out(pair, work);
  }
  if (status != WorkStatus::kOk || work.work.signalled)
    pair->send_done_.push_back({work.work.id, pair->local_.number, work.work.kind, status, 0});
  if (status != WorkStatus::kOk) pair->flush();
}

WorkStatus FakeFabric::carry_out(FakePair* pair, const FakeWork& work) {
  const Work& w = work.work;
  if (w.kind == WorkKind::kBind) {
    auto* window = dynamic_cast<FakeWindow*>(w.window);
    EXPECT_EQ(window->bound, nullptr) << "bound twice";
    *window = FakeWindow(w.remote_key);
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
  const auto peer = pairs.find(static_cast<std::uint32_t>(pair->remote_.number));
  if (peer == pairs.end() || peer->second->error_ || !peer->second->ready_ ||
      peer->second->remote_.number != pair->local_.number)
    return WorkStatus::kRetry;
  FakePair* owner = peer->second;
  std::uint64_t total = 0;
  for (const LocalPiece& p : work.pieces) {
    total += p.bytes;
    const auto range = memory.find(p.key);
    if (range == memory.end() || p.address < range->second.first ||
        p.address + p.bytes > range->second.first + range->second.second)
      return WorkStatus::kLocal;
  }
  if (total == 0 && w.kind == WorkKind::kWrite) return WorkStatus::kOk;
  const auto it = owner->windows_.find(w.remote_key);
  const bool is_read = w.kind == WorkKind::kRead;
  if (it == owner->windows_.end() || w.remote_address < it->second->address ||
      w.remote_address + total > it->second->address + it->second->bytes ||
      !(is_read ? it->second->read : it->second->write)) {
    owner->error_ = true;
    return WorkStatus::kRemoteAccess;
  }
  if (w.kind == WorkKind::kWriteImmediate) {
    if (owner->nic_->receives == 0) return WorkStatus::kReceiverNotReady;
    --owner->nic_->receives;
  }
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
  EXPECT_TRUE(windows_.empty()) << "destroyed before its windows: real devices wait for them";
  for (auto& [key, window] : windows_) window->bound = nullptr;
  fabric_->pairs.erase(static_cast<std::uint32_t>(local_.number));
}

Status FakePair::connect(const Endpoint& remote, const PathSettings& settings) {
  KVCORE_RETURN_IF_ERROR(check(settings));
  if (fabric_->connecting_fails()) return Error{ErrorCode::kIo, "connect was made to fail"};
  remote_ = remote;
  ready_ = true;
  return {};
}

Status FakePair::post(std::span<const Work> work, std::size_t* posted) {
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
  const std::uint32_t key = ++fabric_->next_key;
  fabric_->memory[key] = {reinterpret_cast<std::uint64_t>(r.base), r.bytes};
  return std::unique_ptr<RegisteredMemory>(new FakeMemory(fabric_, key));
}

Result<std::unique_ptr<QueuePair>> FakeNic::make_queue_pair(std::uint32_t first_packet) {
  EXPECT_LT(first_packet, 1U << 24);
  const Endpoint local{info_.gid, QueuePairNumber{fabric_->next_pair++}, first_packet,
                       info_.mtu_bytes};
  auto pair = std::make_unique<FakePair>(fabric_, this, local);
  fabric_->pairs[static_cast<std::uint32_t>(local.number)] = pair.get();
  return std::unique_ptr<QueuePair>(std::move(pair));
}

Result<std::size_t> FakeNic::poll(std::span<WorkDone> done) {
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
