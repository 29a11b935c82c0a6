#include "transport/rdma/device.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "base/text.h"
#include "transport/core/unique_fd.h"

namespace kvcore::transport::rdma {
namespace {

namespace fs = std::filesystem;

// First line of a small file; empty when it is absent or, as sysfs does for empty table entries,
// refuses to be read. Without a stream: a table of GIDs is a thousand files.
std::string first_line(const fs::path& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 256> line;
  const ssize_t n = file ? ::read(file.get(), line.data(), line.size()) : -1;
  if (n <= 0) return {};
  const std::string_view read(line.data(), static_cast<std::size_t>(n));
  return std::string(read.substr(0, read.find('\n')));
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename().string());
  std::ranges::sort(names);
  return names;
}

std::optional<int> number_in(const std::string& name) {
  int value = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), value);
  if (error != std::errc{} || end != name.data() + name.size() || value < 0) return std::nullopt;
  return value;
}

// "100 Gb/sec (4X EDR)" -> 100.
double leading_number(const std::string& line) {
  double value = 0;
  std::from_chars(line.data(), line.data() + line.size(), value);
  return value;
}

// A dummy or tunnel device has operstate "unknown"; the flag IFF_UP decides for those.
bool is_up(const fs::path& root, const std::string& netdev) {
  const fs::path folder = root / "class/net" / netdev;
  const std::string state = first_line(folder / "operstate");
  if (state == "up") return true;
  if (state != "unknown") return false;
  const std::string flags = first_line(folder / "flags");  // "0x1003"
  return !flags.empty() && (std::stoul(flags, nullptr, 16) & 1UL) != 0;
}

std::vector<GidEntry> read_gids(const fs::path& root, const fs::path& port) {
  std::vector<GidEntry> entries;
  for (const std::string& name : names_in(port / "gids")) {
    const auto index = number_in(name);
    const auto gid = parse_gid(first_line(port / "gids" / name));
    if (!index || !gid || gid->null()) continue;
    const std::string netdev = first_line(port / "gid_attrs/ndevs" / name);
    entries.push_back({*index, *gid, first_line(port / "gid_attrs/types" / name), netdev,
                       !netdev.empty() && is_up(root, netdev)});
  }
  std::ranges::sort(entries, {}, &GidEntry::index);
  return entries;
}

Status named_ports_exist(const std::vector<Port>& ports, const std::vector<std::string>& devices) {
  for (const std::string& name : devices) {
    if (std::ranges::any_of(ports, [&](const Port& p) { return p.device == name; })) continue;
    std::string seen;
    for (const Port& p : ports) seen += (seen.empty() ? "" : ", ") + p.device;
    return invalid_argument(
        text("rdma device '", name, "' does not exist; there is ", seen.empty() ? "none" : seen));
  }
  return {};
}

Result<GidEntry> entry_of(const Port& port, int gid_index, const Gid& peer) {
  if (gid_index < 0) return choose_gid(port, peer);
  const auto it = std::ranges::find(port.gids, gid_index, &GidEntry::index);
  if (it == port.gids.end())
    return invalid_argument(text("rdma gid_index=", gid_index, " is empty on ", port.device));
  return *it;
}

}  // namespace

bool any_active_port(const fs::path& root) {
  const fs::path devices = root / "class/infiniband";
  for (const std::string& device : names_in(devices))
    for (const std::string& name : names_in(devices / device / "ports"))
      if (first_line(devices / device / "ports" / name / "state").starts_with("4:")) return true;
  return false;
}

std::vector<Port> list_ports(const fs::path& root) {
  std::vector<Port> ports;
  const fs::path devices = root / "class/infiniband";
  for (const std::string& device : names_in(devices)) {
    for (const std::string& name : names_in(devices / device / "ports")) {
      const auto number = number_in(name);
      if (!number || *number == 0 || *number > 255) continue;
      const fs::path folder = devices / device / "ports" / name;
      ports.push_back({device, static_cast<std::uint8_t>(*number),
                       first_line(folder / "state").starts_with("4:"),
                       first_line(folder / "link_layer") == "Ethernet", read_gids(root, folder),
                       leading_number(first_line(folder / "rate"))});
    }
  }
  return ports;
}

std::string unusable(const GidEntry& entry, const Gid& peer) {
  if (entry.gid.null()) return "is null";
  if (entry.type != "RoCE v2") return text("is of type '", entry.type, "', not RoCE v2");
  if (entry.netdev.empty()) return "belongs to no network device";
  if (!entry.netdev_up) return text("belongs to ", entry.netdev, ", which is down");
  if (!entry.gid.routable()) return "is not routable";
  if (entry.gid.ipv4() != peer.ipv4())
    return text("is ", entry.gid.ipv4() ? "IPv4" : "IPv6", ", the peer is ",
                peer.ipv4() ? "IPv4" : "IPv6");
  return {};
}

Result<GidEntry> choose_gid(const Port& port, const Gid& peer) {
  if (!port.active)
    return Error{ErrorCode::kNotFound,
                 text("port ", int{port.number}, " of ", port.device, " is not active")};
  if (!port.ethernet) {
    if (!port.gids.empty()) return port.gids.front();
    return Error{ErrorCode::kNotFound, text(port.device, " has no GID")};
  }
  const GidEntry* best = nullptr;
  std::string reasons;
  for (const GidEntry& entry : port.gids) {
    if (const std::string why = unusable(entry, peer); !why.empty()) {
      reasons += text("; ", entry.index, " ", to_string(entry.gid), " ", why);
      continue;
    }
    if (best == nullptr || common_prefix(entry.gid, peer) > common_prefix(best->gid, peer))
      best = &entry;
  }
  if (best != nullptr) return *best;
  return Error{ErrorCode::kNotFound,
               text("no GID of ", port.device, " reaches ", to_string(peer), reasons)};
}

Result<std::vector<Choice>> choose_ports(const std::vector<Port>& ports,
                                         const std::vector<std::string>& devices, int gid_index,
                                         const Gid& peer) {
  KVCORE_RETURN_IF_ERROR(named_ports_exist(ports, devices));
  std::vector<Choice> chosen;
  std::string reasons;
  for (const Port& port : ports) {
    const bool named = std::ranges::find(devices, port.device) != devices.end();
    if (!devices.empty() && !named) continue;
    auto entry = entry_of(port, gid_index, peer);
    if (entry) {
      chosen.push_back({port, std::move(entry).value()});
      continue;
    }
    if (named) return entry.error();
    reasons += text("; ", entry.error().message);
  }
  if (!chosen.empty()) return chosen;
  return Error{ErrorCode::kNotFound,
               text("no RDMA port reaches ", to_string(peer),
                    ports.empty() ? "; this machine has no RDMA device" : reasons)};
}

}  // namespace kvcore::transport::rdma
