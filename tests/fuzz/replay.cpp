// Runs a target without libFuzzer: its seeds, its kept inputs, and seeded mutations of all.
//
//   replay_<decoder> KEPT [mutations of each input, default 200]
//   replay_<decoder> --unpack KEPT FOLDER      seeds and kept inputs as files, for libFuzzer
//   replay_<decoder> --keep KEPT FOLDER        adds the files of the folder to what is kept
//
// KEPT is a text file: an input a line, its name and its bytes in hex, sorted by name.
// An input that crashes is left behind as replay_<decoder>.crash.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <map>
#include <random>
#include <string>

#include "fuzz.h"

namespace kvcore::fuzz {
namespace {

namespace fs = std::filesystem;
constexpr std::size_t kMaxInputBytes = 64UL * 1024;

using Kept = std::map<std::string, Seed>;

[[noreturn]] void refuse(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(2);
}

Kept read_kept(const fs::path& path) {
  std::ifstream in(path);
  if (!in) refuse("cannot read " + path.string());
  Kept out;
  std::string line;
  while (std::getline(in, line)) {
    const auto space = line.find(' ');
    if (space == std::string::npos || (line.size() - space - 1) % 2 != 0)
      refuse(path.string() + ": not a name and bytes in hex: " + line.substr(0, 80));
    Seed bytes;
    for (std::size_t at = space + 1; at < line.size(); at += 2) {
      std::uint8_t value = 0;
      const char* const begin = line.data() + at;
      if (std::from_chars(begin, begin + 2, value, 16).ptr != begin + 2)
        refuse(path.string() + ": not hex: " + line.substr(0, 80));
      bytes.push_back(static_cast<std::byte>(value));
    }
    if (!out.emplace(line.substr(0, space), std::move(bytes)).second)
      refuse(path.string() + ": twice: " + line.substr(0, space));
  }
  return out;
}

void write_kept(const fs::path& path, const Kept& kept) {
  std::ofstream out(path);
  for (const auto& [name, bytes] : kept) {
    out << name << ' ' << std::hex << std::setfill('0');
    for (const std::byte b : bytes) out << std::setw(2) << static_cast<int>(b);
    out << '\n';
  }
  if (!out.flush()) refuse("cannot write " + path.string());
}

Seed read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> chars{std::istreambuf_iterator<char>(in), {}};
  const auto* p = reinterpret_cast<const std::byte*>(chars.data());
  return {p, p + chars.size()};
}

void write_file(const fs::path& path, Input bytes) {
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
  if (!out.flush()) refuse("cannot write " + path.string());
}

std::string crash_path;
Input running;

void keep_crash(int signal) {
  const int fd = ::open(crash_path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  if (fd >= 0) (void)!::write(fd, running.data(), running.size());
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

void run_one(const Seed& input) {
  running = input;
  run(input);
}

// One to four changes: a byte, a number at its limits, a cut, a repetition, a splice.
Seed mutated(Seed input, const std::vector<Seed>& all, std::mt19937_64& rng) {
  constexpr std::uint64_t kNumbers[] = {0,          1,           0x7f,       0xff,
                                        0x7fffffff, 0x80000000,  0xffffffff, 1ULL << 32,
                                        1ULL << 62, ~0ULL >> 1U, 1ULL << 63, ~0ULL};
  for (std::uint64_t changes = 1 + rng() % 4; changes > 0 && !input.empty(); --changes) {
    const std::size_t at = rng() % input.size();
    const std::size_t n = 1 + rng() % std::min<std::size_t>(64, input.size() - at);
    const auto begin = input.begin() + static_cast<std::ptrdiff_t>(at);
    const auto end = begin + static_cast<std::ptrdiff_t>(n);
    switch (rng() % 6) {
      case 0:
        *begin ^= static_cast<std::byte>(1U << (rng() % 8));
        break;
      case 1:
        *begin = static_cast<std::byte>(rng());
        break;
      case 2: {
        const std::uint64_t number = kNumbers[rng() % std::size(kNumbers)];
        std::memcpy(input.data() + at, &number, std::min<std::size_t>(8, input.size() - at));
        break;
      }
      case 3:
        input.erase(begin, end);
        break;
      case 4: {
        const Seed part(begin, end);
        input.insert(end, part.begin(), part.end());
        break;
      }
      default: {
        const Seed& other = all[rng() % all.size()];
        if (other.empty()) break;
        const std::size_t from = rng() % other.size();
        input.insert(begin, other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
      }
    }
  }
  if (input.size() > kMaxInputBytes) input.resize(kMaxInputBytes);
  return input;
}

int replay(const std::string& program, const fs::path& path, std::uint64_t mutations) {
  std::vector<Seed> all = seeds();
  const Kept kept = read_kept(path);
  for (const auto& [name, bytes] : kept) all.push_back(bytes);
  crash_path = program + ".crash";
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) ::signal(signal, keep_crash);
  std::mt19937_64 rng(1);
  std::uint64_t runs = 0;
  for (const Seed& input : all) {
    run_one(input);
    ++runs;
    for (std::uint64_t i = 0; i < mutations; ++i, ++runs) {
      const Seed changed = mutated(input, all, rng);
      run_one(changed);
    }
  }
  std::printf("%llu runs over %zu seeds and %zu kept inputs\n",
              static_cast<unsigned long long>(runs), all.size() - kept.size(), kept.size());
  return all.empty() ? 2 : 0;
}

int unpack(const fs::path& path, const fs::path& folder) {
  fs::create_directories(folder);
  for (const auto& [name, bytes] : read_kept(path)) write_file(folder / name, bytes);
  std::size_t number = 0;
  for (const Seed& seed : seeds()) write_file(folder / ("seed-" + std::to_string(number++)), seed);
  return number == 0 ? 2 : 0;
}

int keep(const fs::path& path, const fs::path& folder) {
  constexpr std::size_t kNameChars = 12;  // of the digests that libFuzzer gives as names
  Kept kept = read_kept(path);
  for (const auto& entry : fs::directory_iterator(folder))
    kept.emplace(entry.path().filename().string().substr(0, kNameChars), read_file(entry.path()));
  write_kept(path, kept);
  return 0;
}

}  // namespace
}  // namespace kvcore::fuzz

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv, argv + argc);
  if (args.size() == 4 && args[1] == "--unpack") return kvcore::fuzz::unpack(args[2], args[3]);
  if (args.size() == 4 && args[1] == "--keep") return kvcore::fuzz::keep(args[2], args[3]);
  if (args.size() < 2 || args.size() > 3) {
    std::fprintf(stderr, "usage: %s KEPT [MUTATIONS] | --unpack|--keep KEPT FOLDER\n", argv[0]);
    return 2;
  }
  const std::uint64_t mutations = args.size() == 3 ? std::stoull(args[2]) : 200;
  return kvcore::fuzz::replay(args[0], args[1], mutations);
}
