// Two workers in one thread: pools, inboxes and cores over one loopback hub in manual mode.
#pragma once

#include "fixture.h"
#include "transport/loopback.h"

namespace kvcore::stream::testing {

struct Worker {
  std::shared_ptr<pages::Pool> pool;
  std::unique_ptr<transport::Transport> transport;
  std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>();
  std::unique_ptr<Core> core;
  std::vector<StreamEvent> events;
  std::vector<std::string> addresses;

  Worker(transport::LoopbackHub& hub, std::shared_ptr<pages::Pool> p, const std::string& name,
         StreamOptions options)
      : pool(std::move(p)) {
    transport = std::move(hub.make_transport()).value();
    core = std::move(Core::make(pool, transport.get(), inbox, options)).value();
    addresses.push_back(std::move(transport->listen("loopback:" + name)).value());
    core->set_addresses(addresses);
  }
  ~Worker() {
    core.reset();
    inbox->close();
  }
  void step(std::int64_t now_ns, std::size_t max_events = 64) {
    for (auto& command : inbox->drain()) command(*core);
    core->step(now_ns, max_events);
    for (auto& event : core->take_events()) events.push_back(std::move(event));
  }
  std::vector<StreamEvent> take() { return std::exchange(events, {}); }
};

struct World {
  std::shared_ptr<transport::LoopbackHub> hub = transport::make_loopback_hub();
  std::int64_t offset_ns = 0;
  std::unique_ptr<Worker> prefill, decode;

  explicit World(StreamOptions options = {}, StreamOptions decode_options = {},
                 std::shared_ptr<pages::Pool> prefill_pool = make_pool(small_spec()),
                 std::shared_ptr<pages::Pool> decode_pool = make_pool(small_spec())) {
    hub->set_manual(true);
    prefill = std::make_unique<Worker>(*hub, std::move(prefill_pool), "prefill", options);
    decode = std::make_unique<Worker>(*hub, std::move(decode_pool), "decode", decode_options);
  }
  std::int64_t now() const { return transport::now_ns() + offset_ns; }
  void advance(std::int64_t ns) {
    offset_ns += ns;
    hub->advance(ns);
  }
  // Until nothing moves any more.
  void settle() {
    for (int i = 0; i < 20; ++i) {
      prefill->step(now());
      decode->step(now());
      while (hub->step()) {
        prefill->step(now());
        decode->step(now());
      }
    }
  }
};

}  // namespace kvcore::stream::testing
