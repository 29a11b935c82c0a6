#include "prefix/radix_tree.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_set>

#include "base/check.h"
#include "base/text.h"
#include "base/xxh3.h"

namespace kvcore::prefix {
namespace {

constexpr std::size_t kEventLimit = std::size_t{1} << 18;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

Result<std::unique_ptr<RadixTree>> RadixTree::make(
    std::shared_ptr<pages::Pool> pool, std::optional<std::span<const std::byte>> secret) {
  if (pool == nullptr) return invalid_argument("pool is missing");
  std::optional<pages::KeyMaker> maker;
  if (secret.has_value()) {
    KVCORE_ASSIGN_OR_RETURN(maker,
                            pages::KeyMaker::make(*secret, pool->spec().options().page_size));
  }
  return std::unique_ptr<RadixTree>(new RadixTree(std::move(pool), maker));
}

RadixTree::RadixTree(std::shared_ptr<pages::Pool> pool, std::optional<pages::KeyMaker> keys)
    : pool_(std::move(pool)),
      page_size_(at(pool_->spec().options().page_size)),
      key_maker_(keys),
      in_tree_(at(pool_->num_pages()), 0),
      events_(kEventLimit) {}

RadixTree::~RadixTree() {
  for (const auto& [id, node] : nodes_) (void)pool_->decref(node->pages);
}

// ---- look-up ----

std::uint64_t RadixTree::edge_hash(const Node* parent, const std::int32_t* first_page) const {
  const std::uint64_t h = xxh3_64(first_page, page_size_ * sizeof(std::int32_t));
  return h ^ (static_cast<std::uint64_t>(parent->id) * 0x9E3779B97F4A7C15u);
}

RadixTree::Node* RadixTree::find_root(std::string_view ns) const {
  const auto found = roots_.find(std::string(ns));
  return found == roots_.end() ? nullptr : found->second;
}

RadixTree::Node* RadixTree::find_child(const Node* parent, const std::int32_t* first_page) const {
  const auto [begin, end] = edges_.equal_range(edge_hash(parent, first_page));
  for (auto it = begin; it != end; ++it) {
    Node* child = it->second;
    if (child->parent == parent &&
        std::memcmp(child->tokens.data(), first_page, page_size_ * sizeof(std::int32_t)) == 0)
      return child;
  }
  return nullptr;
}

template <class Visit>
RadixTree::Walk RadixTree::walk(Node* root, std::span<const std::int32_t> tokens,
                                Visit visit) const {
  Walk w{root, root == nullptr ? 0 : root->pages.size(), 0};
  const std::size_t page_bytes = page_size_ * sizeof(std::int32_t);
  std::size_t left = tokens.size() / page_size_;
  const std::int32_t* next = tokens.data();
  while (w.node != nullptr && w.pages_of_node == w.node->pages.size() && left > 0) {
    Node* child = find_child(w.node, next);
    if (child == nullptr) break;
    const std::size_t most = std::min(left, child->pages.size());
    std::size_t same = 1;  // find_child compared the first page
    while (same < most && std::memcmp(child->tokens.data() + same * page_size_,
                                      next + same * page_size_, page_bytes) == 0)
      ++same;
    visit(child, same);
    w = {child, same, w.num_pages + same};
    next += same * page_size_;
    left -= same;
  }
  return w;
}

Result<Match> RadixTree::match(std::string_view ns, std::span<const std::int32_t> tokens) {
  const auto usable = pages::usable_prefix(static_cast<std::int64_t>(tokens.size()),
                                           static_cast<std::int64_t>(page_size_));
  Match m;
  std::vector<Node*> path;
  (void)walk(find_root(ns), tokens.first(at(usable)), [&](Node* node, std::size_t same) {
    m.pages.insert(m.pages.end(), node->pages.begin(),
                   node->pages.begin() + static_cast<std::ptrdiff_t>(same));
    path.push_back(node);
  });
  if (m.pages.empty()) {
    ++misses_;
    return m;
  }
  KVCORE_RETURN_IF_ERROR(pool_->incref(m.pages));
  ++tick_;
  for (Node* node : path) touch(node);
  m.node = path.back()->id;
  m.num_tokens = static_cast<std::int64_t>(m.pages.size() * page_size_);
  ++hits_;
  hit_tokens_ += m.num_tokens;
  return m;
}

std::int64_t RadixTree::peek(std::string_view ns, std::span<const std::int32_t> tokens) const {
  const auto usable = pages::usable_prefix(static_cast<std::int64_t>(tokens.size()),
                                           static_cast<std::int64_t>(page_size_));
  const Walk w = walk(find_root(ns), tokens.first(at(usable)), [](Node*, std::size_t) {});
  return static_cast<std::int64_t>(w.num_pages * page_size_);
}

// ---- insertion ----

Status RadixTree::check_insert(std::string_view ns, std::span<const std::int32_t> fresh) const {
  if (key_maker_ && ns.size() != pages::Key{}.size())
    return invalid_argument(
        text("namespace has ", ns.size(), " bytes: a tree with a secret takes 32"));
  std::unordered_set<std::int32_t> seen;
  for (const std::int32_t page : fresh) {
    KVCORE_RETURN_IF_ERROR(check_range("page", page, 0, pool_->num_pages() - 1));
    if (in_tree_[at(page)] != 0 || !seen.insert(page).second)
      return invalid_argument(
          text("page=", page, " already holds another prefix: one page, one prefix"));
  }
  return {};
}

Result<std::int64_t> RadixTree::insert(std::string_view ns, std::span<const std::int32_t> tokens,
                                       std::span<const std::int32_t> pages) {
  const std::size_t whole = tokens.size() / page_size_;
  if (pages.size() < whole)
    return invalid_argument(text("pages has ", pages.size(), " entries: ", tokens.size(),
                                 " tokens fill ", whole, " pages"));
  std::vector<Node*> path;
  const Walk w = walk(find_root(ns), tokens.first(whole * page_size_),
                      [&](Node* node, std::size_t) { path.push_back(node); });
  const auto fresh = pages.subspan(w.num_pages, whole - w.num_pages);
  KVCORE_RETURN_IF_ERROR(check_insert(ns, fresh));
  KVCORE_RETURN_IF_ERROR(pool_->incref(fresh));  // the last step that may fail
  (void)pool_->seal(fresh);                      // they are held, so it holds too
  ++tick_;
  for (Node* node : path) touch(node);
  if (fresh.empty()) return 0;

  Node* parent = w.node;
  if (parent == nullptr) {
    parent = new_node(nullptr);
    parent->ns = ns;
    roots_.emplace(parent->ns, parent);
  } else if (w.pages_of_node < parent->pages.size()) {
    split(parent, w.pages_of_node);
    parent = parent->parent;
  }
  append_leaf(parent, ns, tokens.subspan(w.num_pages * page_size_, fresh.size() * page_size_),
              fresh);
  return static_cast<std::int64_t>(fresh.size());
}

void RadixTree::append_leaf(Node* parent, std::string_view ns, std::span<const std::int32_t> tokens,
                            std::span<const std::int32_t> fresh) {
  Node* leaf = new_node(parent);
  leaf->tokens.assign(tokens.begin(), tokens.end());
  leaf->pages.assign(fresh.begin(), fresh.end());
  leaf->used = tick_;
  if (key_maker_) {
    Digest32 digest;
    std::memcpy(digest.data(), ns.data(), digest.size());
    pages::Key key = parent->keys.empty() ? pages::kRootKey : parent->keys.back();
    for (std::size_t i = 0; i < fresh.size(); ++i) {
      key = key_maker_->next(digest, key, tokens.subspan(i * page_size_, page_size_));
      leaf->keys.push_back(key);
      events_.stored(key);
    }
  }
  for (const std::int32_t page : fresh) in_tree_[at(page)] = 1;
  num_pages_ += static_cast<std::int64_t>(fresh.size());
  link(leaf);
  enqueue(leaf);
}

// The lower part keeps its identity (and its locks and children); the upper part is new.
void RadixTree::split(Node* lower, std::size_t first_pages) {
  unlink(lower);
  Node* upper = new_node(lower->parent);
  const auto pages = static_cast<std::ptrdiff_t>(first_pages);
  const auto tokens = static_cast<std::ptrdiff_t>(first_pages * page_size_);
  const auto move_front = [](auto& from, auto& to, std::ptrdiff_t n) {
    to.assign(from.begin(), from.begin() + n);
    from.erase(from.begin(), from.begin() + n);
  };
  move_front(lower->tokens, upper->tokens, tokens);
  move_front(lower->pages, upper->pages, pages);
  if (key_maker_) move_front(lower->keys, upper->keys, pages);
  upper->used = lower->used;
  upper->locks = lower->locks;
  lower->parent = upper;
  link(upper);
  link(lower);
}

RadixTree::Node* RadixTree::new_node(Node* parent) {
  auto node = std::make_unique<Node>();
  node->id = next_id_++;
  node->parent = parent;
  Node* raw = node.get();
  nodes_.emplace(raw->id, std::move(node));
  return raw;
}

void RadixTree::link(Node* node) {
  node->edge_hash = edge_hash(node->parent, node->tokens.data());
  edges_.emplace(node->edge_hash, node);
  if (++node->parent->num_children == 1) dequeue(node->parent);
}

void RadixTree::unlink(Node* node) {
  const auto [begin, end] = edges_.equal_range(node->edge_hash);
  edges_.erase(std::find_if(begin, end, [&](const auto& entry) { return entry.second == node; }));
  --node->parent->num_children;
}

// ---- recency and locks ----

void RadixTree::enqueue(Node* node) {
  if (is_evictable(*node)) leaves_.emplace(node->used, node->id);
}
void RadixTree::dequeue(Node* node) { leaves_.erase({node->used, node->id}); }

void RadixTree::touch(Node* node) {
  dequeue(node);
  node->used = tick_;
  enqueue(node);
}

void RadixTree::add_locks(Node* node, std::int64_t by) {
  for (; node->parent != nullptr; node = node->parent) {
    const bool was_protected = node->locks > 0;
    dequeue(node);
    node->locks += by;
    enqueue(node);
    if (was_protected != (node->locks > 0))
      protected_pages_ += (was_protected ? -1 : 1) * static_cast<std::int64_t>(node->pages.size());
  }
}

Status RadixTree::lock(NodeId id) {
  const auto found = nodes_.find(id);
  if (found == nodes_.end() || found->second->parent == nullptr)
    return Error{ErrorCode::kNotFound, text("node=", id, " is not in the tree")};
  ++found->second->own_locks;
  add_locks(found->second.get(), 1);
  return {};
}

Status RadixTree::unlock(NodeId id) {
  const auto found = nodes_.find(id);
  if (found == nodes_.end() || found->second->parent == nullptr)
    return Error{ErrorCode::kNotFound, text("node=", id, " is not in the tree")};
  if (found->second->own_locks == 0) return invalid_argument(text("node=", id, " is not locked"));
  --found->second->own_locks;
  add_locks(found->second.get(), -1);
  return {};
}

// ---- eviction ----

std::optional<pages::Unit> RadixTree::our_unit(std::int32_t page) const {
  const std::int32_t extent = pool_->spec().options().extent_pages;
  std::array<pages::PageRefs, pages::kMaxExtentPages> refs;
  const auto unit = pool_->unit_refs(page, std::span(refs).first(at(extent)));
  if (!unit) return std::nullopt;
  for (std::int32_t i = 0; i < unit->count; ++i) {
    const pages::PageRefs& r = refs[at(i)];
    if (r.io != 0 || r.owner != in_tree_[at(unit->first + i)]) return std::nullopt;
  }
  return *unit;
}

std::int64_t RadixTree::freeable_bytes() const {
  return pool_->bytes_held_only_by(in_tree_).value();  // as many entries as the pool has pages
}

void RadixTree::drop_last_pages(Node& node, std::size_t count) {
  const std::size_t keep = node.pages.size() - count;
  const std::span dropped = std::span(node.pages).subspan(keep);
  for (const std::int32_t page : dropped) in_tree_[at(page)] = 0;
  (void)pool_->decref(dropped);  // ours by the invariant
  for (std::size_t i = keep; i < node.keys.size(); ++i) events_.removed(node.keys[i]);
  node.pages.resize(keep);
  node.tokens.resize(keep * page_size_);
  if (key_maker_) node.keys.resize(keep);
  num_pages_ -= static_cast<std::int64_t>(count);
}

void RadixTree::evict_tail(Node& leaf, std::size_t wanted, std::vector<std::int32_t>& evicted) {
  std::size_t count = 0;
  pages::Unit unit{0, 0};
  while (count < leaf.pages.size()) {
    const std::int32_t page = leaf.pages[leaf.pages.size() - 1 - count];
    if (page < unit.first || page >= unit.first + unit.count) {
      // A new unit: only if still wanted, and if it can become free.
      if (count >= wanted) break;
      const auto ours = our_unit(page);
      if (!ours) break;
      unit = *ours;
    }
    evicted.push_back(page);
    ++count;
  }
  drop_last_pages(leaf, count);
}

std::vector<std::int32_t> RadixTree::evict(std::int64_t num_pages) {
  std::vector<std::int32_t> evicted;
  const std::int64_t begun = tick_++;
  auto next = leaves_.begin();
  while (static_cast<std::int64_t>(evicted.size()) < num_pages && next != leaves_.end() &&
         next->first <= begun) {
    Node* leaf = nodes_.at(next->second).get();
    evict_tail(*leaf, at(num_pages) - evicted.size(), evicted);
    if (static_cast<std::int64_t>(evicted.size()) >= num_pages && !leaf->pages.empty()) break;
    if (!leaf->pages.empty()) {
      // Someone holds it: it is in use now, and the next call need not look at it first again.
      ++next;
      for (Node* node = leaf; node->parent != nullptr; node = node->parent) touch(node);
      continue;
    }
    // The parent may become a leaf now. It was used no earlier than its child, so nothing that was
    // looked at and kept comes again.
    auto resume = *next;
    if (leaf->parent->parent != nullptr)
      resume = std::min(resume, std::pair(leaf->parent->used, leaf->parent->id));
    remove(leaf);
    next = leaves_.lower_bound(resume);
  }
  evicted_pages_ += static_cast<std::int64_t>(evicted.size());
  return evicted;
}

// Takes an empty node out; roots without children go with it.
void RadixTree::remove(Node* node) {
  Node* parent = node->parent;
  dequeue(node);
  // edge_hash was kept from when the node still had its first page.
  unlink(node);
  nodes_.erase(node->id);
  if (parent->num_children > 0) return;
  if (parent->parent == nullptr) {
    roots_.erase(parent->ns);
    nodes_.erase(parent->id);
  } else {
    enqueue(parent);
  }
}

std::int64_t RadixTree::clear() {
  std::int64_t dropped = 0;
  while (!leaves_.empty()) {  // each removal may turn the parent into a leaf
    Node* leaf = nodes_.at(leaves_.begin()->second).get();
    dropped += static_cast<std::int64_t>(leaf->pages.size());
    drop_last_pages(*leaf, leaf->pages.size());
    remove(leaf);
  }
  evicted_pages_ += dropped;
  return dropped;
}

// ---- reports ----

RadixStats RadixTree::stats() const {
  return {static_cast<std::int64_t>(nodes_.size() - roots_.size()),
          num_pages_,
          num_pages_ - protected_pages_,
          protected_pages_,
          hits_,
          misses_,
          hit_tokens_,
          evicted_pages_};
}

std::vector<pages::Key> RadixTree::keys() const {
  std::vector<pages::Key> out;
  for (const auto& [id, node] : nodes_) out.insert(out.end(), node->keys.begin(), node->keys.end());
  return out;
}

}  // namespace kvcore::prefix
