// A transport that does to events what networks and schedulers do: drops, repeats, holds back and
// so reorders them, by a seeded choice; and the two ways to be wrong that the simulation must
// notice. Completions, fences and the end of a link are held back at most: each comes exactly once,
// and the end last.
#pragma once

#include <random>
#include <utility>
#include <vector>

#include "transport/loopback.h"

namespace kvcore::stream::testing {

enum class Mutant { kNone, kNoFence, kNoCheck };

class ChaosTransport final : public transport::Transport {
 public:
  ChaosTransport(std::unique_ptr<transport::Transport> inner, std::uint64_t seed, Mutant mutant)
      : inner_(std::move(inner)), rng_(seed), mutant_(mutant) {}

  void set_calm(bool calm) { calm_ = calm; }

  std::size_t poll(std::vector<transport::Event>* events, std::size_t max_events) override {
    std::vector<transport::Event> fresh;
    inner_->poll(&fresh, max_events);
    const std::size_t before = events->size();
    release_due(events);
    for (transport::Event& event : fresh) pass(std::move(event), events);
    return events->size() - before;
  }
  transport::Fence revoke_grant(transport::GrantRef grant) override {
    return mutant_ == Mutant::kNoFence ? transport::Fence::kDone : inner_->revoke_grant(grant);
  }

  using Transport::register_region;
  Result<transport::RegionId> register_region(const transport::RegionSpec& spec) override {
    return inner_->register_region(spec);
  }
  Status unregister_region(transport::RegionId region) override {
    return inner_->unregister_region(region);
  }
  Result<transport::Grant> create_grant(transport::RegionId region,
                                        std::span<const transport::Range> ranges,
                                        transport::Rights rights, std::int64_t expires_ns,
                                        std::string_view peer) override {
    return inner_->create_grant(region, ranges, rights, expires_ns, peer);
  }
  Result<std::string> listen(std::string_view address) override { return inner_->listen(address); }
  Result<std::shared_ptr<transport::Link>> connect(std::string_view address) override {
    return inner_->connect(address);
  }
  std::shared_ptr<transport::Link> link(transport::LinkId id) const override {
    return inner_->link(id);
  }
  int event_fd() const noexcept override { return inner_->event_fd(); }
  void close() override { inner_->close(); }

 private:
  struct Held {
    int polls;
    transport::Event event;
  };
  static transport::LinkId link_of(const transport::Event& event) {
    return std::visit(
        [](const auto& e) {
          if constexpr (requires { e.link; })
            return e.link;
          else
            return transport::LinkId{};
        },
        event);
  }
  void release_due(std::vector<transport::Event>* events) {
    for (Held& held : std::exchange(held_, {})) {
      if (calm_ || --held.polls <= 0)
        events->push_back(std::move(held.event));
      else
        held_.push_back(std::move(held));
    }
  }
  void pass(transport::Event event, std::vector<transport::Event>* events) {
    if (auto* arrival = std::get_if<transport::Arrival>(&event)) {
      if (mutant_ == Mutant::kNoCheck) arrival->status = {};
    }
    if (std::holds_alternative<transport::Down>(event)) {
      for (Held& held : std::exchange(held_, {})) {
        if (link_of(held.event) == link_of(event))
          events->push_back(std::move(held.event));
        else
          held_.push_back(std::move(held));
      }
    } else if (!calm_ && !std::holds_alternative<transport::Up>(event)) {
      const bool loose = std::holds_alternative<transport::Arrival>(event) ||
                         std::holds_alternative<transport::Message>(event);
      const auto fate = rng_() % 256;
      if (loose && fate < 1) return;
      if (loose && fate < 8) held_.push_back({static_cast<int>(rng_() % 6), event});
      if (fate >= 8 && fate < 40) {
        held_.push_back({static_cast<int>(rng_() % 6), std::move(event)});
        return;
      }
    }
    events->push_back(std::move(event));
  }

  const std::unique_ptr<transport::Transport> inner_;
  std::mt19937_64 rng_;
  const Mutant mutant_;
  bool calm_ = false;
  std::vector<Held> held_;
};

}  // namespace kvcore::stream::testing
