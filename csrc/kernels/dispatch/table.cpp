#include "kernels/dispatch/table.h"

#include <atomic>
#include <cstdlib>

#include "base/cpu_features.h"
#include "base/text.h"
#include "kernels/dispatch/levels.h"

namespace kvcore::kernels {
namespace {

struct Level {
  KernelTable table;
  bool available;
};

#define KVCORE_LEVEL(level)                                                                 \
  {                                                                                         \
    #level, level::attend_unit_entry, level::fold_unit_entry, level::score_pages_entry,     \
        level::merge_rows_entry,                                                            \
        level::norm_rows_entry, level::rope_rows_entry, level::silu_mul_rows_entry,         \
        level::encode_block_entry, level::decode_block_entry,                               \
        level::widen_bounds_entry, level::score_bounds_entry                                \
  }

const std::vector<Level>& levels() {
  static const std::vector<Level> all = {
    {KVCORE_LEVEL(scalar), true},
#if defined(__x86_64__)
    {KVCORE_LEVEL(avx2), cpu_features().avx2},
    {KVCORE_LEVEL(avx512), cpu_features().avx512},
#endif
  };
  return all;
}

std::string allowed() {
  std::string names;
  for (const std::string& name : available_isas()) names += (names.empty() ? "" : ", ") + name;
  return names;
}

Result<const KernelTable*> find(const char* field, std::string_view name) {
  for (const Level& level : levels())
    if (level.available && name == level.table.name) return &level.table;
  return invalid_argument(text(
      field, "='", name, "' is not an instruction set level of this machine: allowed ", allowed()));
}

Result<const KernelTable*> initial() {
  const char* wanted = std::getenv("KVCORE_ISA");
  if (wanted != nullptr && *wanted != '\0') return find("KVCORE_ISA", wanted);
  const KernelTable* best = nullptr;
  for (const Level& level : levels())
    if (level.available) best = &level.table;
  return best;
}

std::atomic<const KernelTable*> current{nullptr};

}  // namespace

Result<const KernelTable*> kernel_table() {
  if (const KernelTable* table = current.load(std::memory_order_acquire)) return table;
  KVCORE_ASSIGN_OR_RETURN(const KernelTable* first, initial());
  const KernelTable* expected = nullptr;
  current.compare_exchange_strong(expected, first, std::memory_order_acq_rel);
  return current.load(std::memory_order_acquire);
}

Status set_isa(std::string_view name) {
  KVCORE_ASSIGN_OR_RETURN(const KernelTable* table, find("isa", name));
  current.store(table, std::memory_order_release);
  return {};
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Level& level : levels())
    if (level.available) names.emplace_back(level.table.name);
  return names;
}

}  // namespace kvcore::kernels
