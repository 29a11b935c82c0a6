// Runs a target without libFuzzer: its seeds, the files of its corpus, and seeded mutations of all.
//
//   replay_<decoder> CORPUS_FOLDER [mutations of each input, default 200]
//   replay_<decoder> --write-seeds FOLDER
//
// An input that crashes is left behind as replay_<decoder>.crash.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "fuzz.h"

namespace kvcore::fuzz {
namespace {

namespace fs = std::filesystem;
constexpr std::size_t kMaxInputBytes = 64UL * 1024;

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
  if (!out.flush()) {
    std::fprintf(stderr, "cannot write %s\n", path.c_str());
    std::exit(2);
  }
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

int replay(const std::string& program, const fs::path& corpus, std::uint64_t mutations) {
  std::vector<Seed> all = seeds();
  if (!fs::is_directory(corpus)) {
    std::fprintf(stderr, "%s is not a folder\n", corpus.c_str());
    return 2;
  }
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(corpus))
    if (!entry.path().filename().string().starts_with('.')) files.push_back(entry.path());
  std::ranges::sort(files);
  for (const fs::path& file : files) all.push_back(read_file(file));
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
              static_cast<unsigned long long>(runs), all.size() - files.size(), files.size());
  return all.empty() ? 2 : 0;
}

int write_seeds(const fs::path& folder) {
  fs::create_directories(folder);
  std::size_t number = 0;
  for (const Seed& seed : seeds()) write_file(folder / ("seed-" + std::to_string(number++)), seed);
  return number == 0 ? 2 : 0;
}

}  // namespace
}  // namespace kvcore::fuzz

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv, argv + argc);
  if (args.size() == 3 && args[1] == "--write-seeds") return kvcore::fuzz::write_seeds(args[2]);
  if (args.size() < 2 || args.size() > 3) {
    std::fprintf(stderr, "usage: %s CORPUS [MUTATIONS] | --write-seeds FOLDER\n", argv[0]);
    return 2;
  }
  const std::uint64_t mutations = args.size() == 3 ? std::stoull(args[2]) : 200;
  return kvcore::fuzz::replay(args[0], args[1], mutations);
}
