#include "compress/chooser.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>

#include "base/block_arrays.h"
#include "base/text.h"

namespace kvcore::compress {
namespace {

using pages::HeadFormats;
using pages::PageClass;
using pages::PageSpec;

std::int64_t bytes_of(const PageSpec& spec, Part part, Format f) {
  const auto& o = spec.options();
  return block_arrays(f, part, o.page_size, part == Part::kK ? o.head_dim_k : o.head_dim_v).bytes;
}

bool usable(double x) { return std::isfinite(x) && x >= 0; }
bool usable(const std::vector<double>& all) {
  return std::all_of(all.begin(), all.end(), [](double x) { return usable(x); });
}

Status check_head(const PageSpec& spec, const HeadStatistics& s, std::size_t i) {
  const auto heads = static_cast<std::size_t>(spec.options().num_kv_heads);
  const auto dims = static_cast<std::size_t>(spec.options().head_dim_k);
  const auto refuse = [&](auto... why) {
    return invalid_argument(
        text("statistics of layer ", i / heads, ", KV head ", i % heads, ": ", why...));
  };
  const auto channels = [&](const char* name, const std::vector<double>& v) -> Status {
    if (v.size() != dims)
      return refuse(name, " has ", v.size(), " entries: allowed ", dims, " (head_dim_k)");
    if (!usable(v)) return refuse(name, " holds a number below 0 or not finite");
    return {};
  };
  KVCORE_RETURN_IF_ERROR(channels("key_weight", s.key_weight));
  KVCORE_RETURN_IF_ERROR(channels("key_energy", s.key_energy));
  for (const auto& [format, error] : s.key_error)
    KVCORE_RETURN_IF_ERROR(channels(text("key_error of ", pages::name_of(format)).c_str(), error));
  for (const auto& [format, error] : s.value_error)
    if (!usable(error))
      return refuse("value_error of ", pages::name_of(format), "=", error, ": allowed 0 and up");
  if (!usable(s.value_weight)) return refuse("value_weight=", s.value_weight, ": allowed 0 and up");
  return {};
}

Status check(const PageSpec& spec, std::span<const HeadStatistics> statistics) {
  const auto& o = spec.options();
  const auto want =
      static_cast<std::size_t>(o.num_layers) * static_cast<std::size_t>(o.num_kv_heads);
  if (statistics.size() != want)
    return invalid_argument(text("statistics has ", statistics.size(), " entries: allowed ", want,
                                 " (layers x KV heads)"));
  for (std::size_t i = 0; i < want; ++i) KVCORE_RETURN_IF_ERROR(check_head(spec, statistics[i], i));
  return {};
}

double weighted(const std::vector<double>& error, const std::vector<double>& weight) {
  double sum = 0;
  for (std::size_t d = 0; d < error.size(); ++d) sum += error[d] * weight[d];
  return sum;
}

template <class T>
const T* find(const std::vector<std::pair<Format, T>>& all, Format format) {
  const auto at =
      std::find_if(all.begin(), all.end(), [&](const auto& e) { return e.first == format; });
  return at == all.end() ? nullptr : &at->second;
}

// Nothing where the statistics do not know the format.
std::optional<double> error_of(const HeadStatistics& s, Part part, Format format) {
  if (part == Part::kK) {
    const auto* error = find(s.key_error, format);
    if (error == nullptr) return std::nullopt;
    return weighted(*error, s.key_weight);
  }
  const double* error = find(s.value_error, format);
  if (error == nullptr) return std::nullopt;
  return s.value_weight * *error;
}

bool carries(const HeadStatistics& s, Format format, double max_key_error) {
  const auto* error = find(s.key_error, format);
  const double variation = weighted(s.key_energy, s.key_weight);
  return error != nullptr && weighted(*error, s.key_weight) <= max_key_error * variation;
}

struct Choice {
  Format format;
  std::int64_t bytes;
  double error;
};

struct Upgrade {
  std::size_t item;  // 2 * head + (0 K, 1 V)
  Choice to;
  std::int64_t bytes;  // more than before
  double per_byte;     // error removed
};

// The formats of one item that the statistics know, by bytes, from the least one on.
std::vector<Choice> ladder(const PageSpec& spec, const HeadStatistics& s, Part part, Format least) {
  std::vector<Choice> all;
  const auto add = [&](Format f) {
    all.push_back({f, bytes_of(spec, part, f), *error_of(s, part, f)});
  };
  if (part == Part::kK)
    for (const auto& entry : s.key_error) add(entry.first);
  else
    for (const auto& entry : s.value_error) add(entry.first);
  const std::int64_t from = bytes_of(spec, part, least);
  std::erase_if(all, [&](const Choice& c) { return c.bytes < from; });
  std::stable_sort(all.begin(), all.end(),
                   [](const Choice& a, const Choice& b) { return a.bytes < b.bytes; });
  return all;
}

// The upgrades from all[at] on that a greedy buyer needs: each step is the one that removes most
// error per byte (the lower convex hull), so later steps never look better than earlier ones.
void add_upgrades(std::size_t item, const std::vector<Choice>& all, std::size_t at,
                  std::vector<Upgrade>& out) {
  while (at + 1 < all.size()) {
    std::size_t best = at;
    double best_rate = 0;
    for (std::size_t to = at + 1; to < all.size(); ++to) {
      const auto bytes = static_cast<double>(all[to].bytes - all[at].bytes);
      const double rate = bytes > 0 ? (all[at].error - all[to].error) / bytes : 0;
      if (rate > best_rate) best = to, best_rate = rate;
    }
    if (best == at) return;
    out.push_back({item, all[best], all[best].bytes - all[at].bytes, best_rate});
    at = best;
  }
}

struct Plan {
  std::vector<HeadFormats> table;
  std::vector<Upgrade> upgrades;
};

Result<Plan> least_plan(const PageSpec& spec, std::span<const HeadStatistics> statistics,
                        const Profile& profile) {
  Plan plan;
  for (std::size_t i = 0; i < statistics.size(); ++i) {
    const HeadStatistics& s = statistics[i];
    if (!error_of(s, Part::kK, profile.least.k) || !error_of(s, Part::kV, profile.least.v))
      return invalid_argument(text("statistics of entry ", i, " do not know the profile's formats ",
                                   pages::name_of(profile.least.k), "/",
                                   pages::name_of(profile.least.v)));
    const auto keys = ladder(spec, s, Part::kK, profile.least.k);
    std::size_t k = 0;
    while (k + 1 < keys.size() && !carries(s, keys[k].format, profile.max_key_error)) ++k;
    plan.table.push_back({keys[k].format, profile.least.v});
    add_upgrades(2 * i, keys, k, plan.upgrades);
    add_upgrades(2 * i + 1, ladder(spec, s, Part::kV, profile.least.v), 0, plan.upgrades);
  }
  std::stable_sort(plan.upgrades.begin(), plan.upgrades.end(),
                   [](const Upgrade& a, const Upgrade& b) { return a.per_byte > b.per_byte; });
  return plan;
}

}  // namespace

Result<Profile> profile_of(const PageSpec& spec, std::string_view name) {
  const bool balanced = name == "balanced";
  if (!balanced && name != "small")
    return invalid_argument(text("profile='", name, "' has no table: allowed balanced, small"));
  const auto& o = spec.options();
  const auto heads =
      static_cast<std::size_t>(o.num_layers) * static_cast<std::size_t>(o.num_kv_heads);
  const HeadFormats base{Format::kK4, balanced ? Format::kV4 : Format::kV3};
  KVCORE_ASSIGN_OR_RETURN(const PageClass table,
                          PageClass::make(spec, std::vector<HeadFormats>(heads, base)));
  const std::int64_t numbers =
      static_cast<std::int64_t>(heads) * o.page_size * (o.head_dim_k + o.head_dim_v);
  Profile profile;
  // In hundredths of a bit a number; balanced too may pay for better keys with v3 elsewhere.
  profile.budget_bytes = table.page_bytes() + numbers * (balanced ? 17 : 19) / 800;
  return profile;
}

Result<PageClass> choose(const PageSpec& spec, std::span<const HeadStatistics> statistics,
                         const Profile& profile) {
  KVCORE_RETURN_IF_ERROR(check(spec, statistics));
  if (!usable(profile.max_key_error))
    return invalid_argument(
        text("max_key_error=", profile.max_key_error, ": allowed finite numbers from 0 up"));
  KVCORE_ASSIGN_OR_RETURN(Plan plan, least_plan(spec, statistics, profile));
  KVCORE_ASSIGN_OR_RETURN(const PageClass least, PageClass::make(spec, plan.table));
  std::int64_t left = profile.budget_bytes - least.page_bytes();
  if (left < 0)
    return Error{ErrorCode::kUnsupported,
                 text("budget_bytes=", profile.budget_bytes, " of a page: this model needs ",
                      least.page_bytes(), " with keys that keep their variation")};
  // One that does not fit blocks its item's later steps, which are larger; others still may fit.
  std::vector<bool> closed(2 * statistics.size(), false);
  for (const Upgrade& u : plan.upgrades) {
    if (u.bytes > left) closed[u.item] = true;
    if (closed[u.item]) continue;
    left -= u.bytes;
    HeadFormats& f = plan.table[u.item / 2];
    (u.item % 2 == 0 ? f.k : f.v) = u.to.format;
  }
  return PageClass::make(spec, plan.table);
}

Result<std::vector<double>> predicted_error(const PageClass& table,
                                            std::span<const HeadStatistics> statistics) {
  KVCORE_RETURN_IF_ERROR(check(table.spec(), statistics));
  const Format own = table.spec().options().format;
  std::vector<double> out;
  for (std::size_t i = 0; i < statistics.size(); ++i) {
    const HeadFormats f = table.formats()[i];
    for (const auto& [part, format] : {std::pair{Part::kK, f.k}, std::pair{Part::kV, f.v}}) {
      const auto error = format == own ? 0.0 : error_of(statistics[i], part, format);
      if (!error)
        return invalid_argument(
            text("statistics of entry ", i, " do not know format ", pages::name_of(format)));
      out.push_back(*error);
    }
  }
  return out;
}

}  // namespace kvcore::compress
