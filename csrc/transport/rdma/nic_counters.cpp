#include "transport/rdma/nic_counters.h"

#include <fstream>

#include "base/text.h"

namespace kvcore::transport::rdma {
namespace {

constexpr std::uint64_t kWordBytes = 4;  // port_*_data counts 32-bit words

std::uint64_t number(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  return file >> value ? value : 0;
}

}  // namespace

SysfsNicCounters::SysfsNicCounters(const std::string& device, int port,
                                   const std::filesystem::path& root)
    : folder_(root / "class/infiniband" / device / "ports" / std::to_string(port)) {}

Result<NicCounts> SysfsNicCounters::read() {
  const auto hw = folder_ / "hw_counters";
  const auto plain = folder_ / "counters";
  std::error_code ignored;  // a folder that cannot be looked at is one that is not there
  if (!std::filesystem::is_directory(hw, ignored) && !std::filesystem::is_directory(plain, ignored))
    return Error{ErrorCode::kNotFound, text("no counters below ", folder_.string())};
  NicCounts counts;
  counts.tells_congestion = std::filesystem::exists(hw / "rp_cnp_handled", ignored);
  counts.congestion = number(hw / "rp_cnp_handled");
  counts.marked = number(hw / "np_ecn_marked_roce_packets");
  for (const char* name : {"out_of_sequence", "packet_seq_err", "local_ack_timeout_err",
                           "out_of_seq_request", "completer_retry_err", "rcvd_seq_err"})
    counts.lost += number(hw / name);
  counts.packets_out = number(hw / "sent_pkts") + number(plain / "port_xmit_packets");
  counts.packets_in = number(hw / "rcvd_pkts") + number(plain / "port_rcv_packets");
  counts.bytes_out = number(plain / "port_xmit_data") * kWordBytes;
  counts.bytes_in = number(plain / "port_rcv_data") * kWordBytes;
  return counts;
}

}  // namespace kvcore::transport::rdma
