// The raw limit of scattered blocks over one TCP connection of this host: two processes,
// sendmsg and recvmsg of the same lists of places, no checksum, no protocol, one answer a batch.
//
//   raw_tcp BUFFER_BYTES PINNED SEND_BUFFER < places   (0 = not, 0 = the system's)
//                                        one line "local remote bytes" each, then an empty line
//   then a line "N" each                 -> "SECONDS CPU_SECONDS" of N batches, both processes
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kMostIov = 1024;

[[noreturn]] void die(const char* what) {
  std::perror(what);
  std::exit(1);
}

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu % std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)), &set);
  if (::sched_setaffinity(0, sizeof set, &set) != 0) die("sched_setaffinity");
}

double cpu_seconds() {
  rusage u{};
  ::getrusage(RUSAGE_SELF, &u);
  return static_cast<double>(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

char* memory(std::size_t bytes) {
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) die("mmap");
  std::memset(p, 1, bytes);
  return static_cast<char*>(p);
}

// All of `iov`, at most 1024 places a call.
template <class Call>
void transfer(std::vector<iovec> iov, const Call& call) {
  std::size_t at = 0;
  while (at < iov.size()) {
    msghdr message{};
    message.msg_iov = &iov[at];
    message.msg_iovlen = std::min(kMostIov, iov.size() - at);
    ssize_t n = call(&message);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) die("transfer");
    for (; n > 0 && static_cast<std::size_t>(n) >= iov[at].iov_len; ++at)
      n -= static_cast<ssize_t>(iov[at].iov_len);
    if (n > 0) {
      iov[at].iov_base = static_cast<char*>(iov[at].iov_base) + n;
      iov[at].iov_len -= static_cast<std::size_t>(n);
    }
  }
}

struct Answer {
  double cpu_seconds;
};

void receive_for_ever(int listener, const std::vector<iovec>& places) {
  const int fd = ::accept(listener, nullptr, nullptr);
  if (fd < 0) die("accept");
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  for (char go = 0; ::recv(fd, &go, 1, 0) == 1;) {
    transfer(places, [&](msghdr* m) { return ::recvmsg(fd, m, 0); });
    const Answer answer{cpu_seconds()};
    if (::send(fd, &answer, sizeof answer, MSG_NOSIGNAL) != sizeof answer) die("send");
  }
}

double batch(int fd, const std::vector<iovec>& places) {
  const char go = 'g';
  if (::send(fd, &go, 1, MSG_NOSIGNAL | MSG_MORE) != 1) die("send");
  transfer(places, [&](msghdr* m) { return ::sendmsg(fd, m, MSG_NOSIGNAL); });
  Answer answer{};
  if (::recv(fd, &answer, sizeof answer, MSG_WAITALL) != sizeof answer) die("recv");
  return answer.cpu_seconds;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: raw_tcp BUFFER_BYTES PINNED SEND_BUFFER < places\n");
    return 2;
  }
  const std::size_t bytes = std::strtoull(argv[1], nullptr, 10);
  std::vector<std::array<std::size_t, 3>> rows;
  std::string line;
  while (std::getline(std::cin, line) && !line.empty()) {
    std::array<std::size_t, 3> row{};
    std::istringstream(line) >> row[0] >> row[1] >> row[2];
    rows.push_back(row);
  }
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener, raw, size) != 0 || ::listen(listener, 1) != 0 ||
      ::getsockname(listener, raw, &size) != 0)
    die("listen");
  const bool child = ::fork() == 0;
  if (std::atoi(argv[2]) != 0) pin(child ? 1 : 0);
  char* base = memory(bytes);
  std::vector<iovec> places;
  for (const auto& row : rows) places.push_back({base + row[child ? 1 : 0], row[2]});
  if (child) {
    receive_for_ever(listener, places);
    ::_exit(0);
  }
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  if (::connect(fd, raw, size) != 0) die("connect");
  if (const int buffer = std::atoi(argv[3]); buffer != 0)
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  double theirs = batch(fd, places);
  std::puts("ready");
  std::fflush(stdout);
  while (std::getline(std::cin, line)) {
    const double own = cpu_seconds(), before = theirs;
    const auto start = std::chrono::steady_clock::now();
    for (int i = std::atoi(line.c_str()); i > 0; --i) theirs = batch(fd, places);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    std::printf("%.9f %.6f\n", taken.count(), cpu_seconds() - own + theirs - before);
    std::fflush(stdout);
  }
  return 0;
}
