// Which port and which of its addresses to use, from sysfs alone: testable on a folder of files.
//
// A RoCE port has a table of GIDs; a wrong choice gives a queue pair that connects and never
// delivers. A usable one is RoCE v2, belongs to a network device that is up, is not null, loopback
// or link-local, and is of the family of the peer's. Among several: the one closest to the peer
// (longest common prefix), then the lowest index. 10.0.0.0/8 is an address like any other.
//
// Thread rules: reads files; no state.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "transport/rdma/gid.h"

namespace kvcore::transport::rdma {

struct GidEntry {
  int index;
  Gid gid;
  std::string type;    // "RoCE v2", "IB/RoCE v1"
  std::string netdev;  // may be empty
  bool netdev_up;
};

struct Port {
  std::string device;  // "mlx5_0"
  std::uint8_t number;
  bool active;
  bool ethernet;               // RoCE; else InfiniBand, where GID 0 of an active port does
  std::vector<GidEntry> gids;  // of the table's filled entries
  double rate_gbps = 0;        // of the line; 0 = it does not say
};

// Every port below <root>/class/infiniband, sorted by name; none when there is no such folder.
std::vector<Port> list_ports(const std::filesystem::path& root = "/sys");

// Cheap: without the tables of GIDs.
bool any_active_port(const std::filesystem::path& root = "/sys");

// Why an entry cannot be used to reach `peer`; empty = it can.
std::string unusable(const GidEntry& entry, const Gid& peer);

// NotFound names every entry looked at and what is wrong with each.
Result<GidEntry> choose_gid(const Port& port, const Gid& peer);

// The ports to use, at most one entry each: those named in `devices` (all must work), else every
// active port with a usable entry. `gid_index` >= 0 overrides the choice on each.
struct Choice {
  Port port;
  GidEntry entry;
};
Result<std::vector<Choice>> choose_ports(const std::vector<Port>& ports,
                                         const std::vector<std::string>& devices, int gid_index,
                                         const Gid& peer);

}  // namespace kvcore::transport::rdma
