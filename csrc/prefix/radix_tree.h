// RadixTree: which pages of this node hold which token prefix. Edges are compressed runs of whole
// pages, compared as memory; every namespace has its own root, so no prefix crosses namespaces.
//
// Invariants (checked by the stateful tests):
//   - a node's tokens are page_size * pages, at least one page; siblings differ in their first
//   page;
//   - the tree holds exactly one owner ref of each page in it, and no page is in it twice;
//   - evictable_pages + protected_pages = pages; protected = nodes with a lock in their subtree;
//   - a match never covers the whole prompt: at least one token is left to compute.
// Costs: match O(tokens + nodes on the path); insert the same plus new pages; evict O(log leaves)
// per page, plus once per leaf that is in use and has come to the front. Nothing is recursive.
// Thread rules: one thread (Python: under the GIL); the pool underneath is thread-safe. No clock:
// "least recently used" counts calls.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/result.h"
#include "pages/keys.h"
#include "pages/pool.h"
#include "prefix/event_log.h"

namespace kvcore::prefix {

using NodeId = std::int64_t;

struct Match {
  std::vector<std::int32_t> pages;  // one owner ref each now belongs to the caller
  std::int64_t num_tokens = 0;      // pages.size() * page_size
  std::optional<NodeId> node;       // where the match ended, for lock(); none on a miss
};

struct RadixStats {
  std::int64_t nodes;
  std::int64_t pages;
  std::int64_t evictable_pages;
  std::int64_t protected_pages;
  std::int64_t hits;  // matches of at least one page
  std::int64_t misses;
  std::int64_t hit_tokens;
  std::int64_t evicted_pages;
};

class RadixTree {
 public:
  // secret: present = the tree names its pages (pages/keys.h), logs what appears and disappears,
  // and takes 32-byte namespace digests only; absent = no keys, namespaces are any bytes.
  static Result<std::unique_ptr<RadixTree>> make(std::shared_ptr<pages::Pool> pool,
                                                 std::optional<std::span<const std::byte>> secret);
  ~RadixTree();
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  // Longest cached prefix of whole pages, at most usable_prefix(n) tokens; looks up and pins at
  // once.
  Result<Match> match(std::string_view ns, std::span<const std::int32_t> tokens);
  // The same length without pins, statistics or effect on the eviction order.
  std::int64_t peek(std::string_view ns, std::span<const std::int32_t> tokens) const;
  // Adds the whole pages of `tokens` that are not there yet; `pages[i]` holds tokens of page i and
  // must be held by the caller, whose refs stay untouched. Where the prefix is there already, the
  // pages in the tree stay. Adopted pages are sealed. Returns how many pages were adopted.
  Result<std::int64_t> insert(std::string_view ns, std::span<const std::int32_t> tokens,
                              std::span<const std::int32_t> pages);
  // A locked node and its ancestors are not evicted. Each lock needs one unlock.
  Status lock(NodeId node);
  Status unlock(NodeId node);
  // Drops the tree's refs of at least num_pages pages (or all it may), least recently used leaves
  // first, from their ends and by whole units of a leaf. Leaves whose last unit someone else
  // holds are skipped, and count as used now: dropping them would free nothing.
  std::vector<std::int32_t> evict(std::int64_t num_pages);
  // Drops everything that is not locked, held elsewhere or not; returns the number of pages.
  std::int64_t clear();

  // What evict() could free at most, were nothing locked.
  std::int64_t freeable_bytes() const;

  RadixStats stats() const;
  // Net change of keys since the last call; empty without a secret.
  PrefixEvents drain_events() { return events_.drain(); }
  // Keys of all pages now in the tree, for a snapshot; empty without a secret.
  std::vector<pages::Key> keys() const;

 private:
  struct Node {
    NodeId id = 0;
    Node* parent = nullptr;  // null for a root
    std::uint64_t edge_hash = 0;
    std::string ns;                    // roots only
    std::vector<std::int32_t> tokens;  // page_size * pages.size()
    std::vector<std::int32_t> pages;
    std::vector<pages::Key> keys;  // per page, with a secret
    std::int64_t num_children = 0;
    std::int64_t own_locks = 0;
    std::int64_t locks = 0;  // in the whole subtree
    std::int64_t used = 0;   // tick of the last match or insert through this node
  };
  struct Walk {
    Node* node = nullptr;           // deepest node reached
    std::size_t pages_of_node = 0;  // its pages that match
    std::size_t num_pages = 0;      // in all
  };

  RadixTree(std::shared_ptr<pages::Pool> pool, std::optional<pages::KeyMaker> keys);
  std::uint64_t edge_hash(const Node* parent, const std::int32_t* first_page) const;
  Node* find_root(std::string_view ns) const;
  Node* find_child(const Node* parent, const std::int32_t* first_page) const;
  // visit(node, matching pages) for each node on the path below the root.
  template <class Visit>
  Walk walk(Node* root, std::span<const std::int32_t> tokens, Visit visit) const;
  Node* new_node(Node* parent);
  void link(Node* node);
  void unlink(Node* node);
  void remove(Node* node);
  void split(Node* node, std::size_t first_pages);
  void touch(Node* node);
  bool is_evictable(const Node& n) const { return n.parent && n.num_children == 0 && n.locks == 0; }
  void enqueue(Node* node);
  void dequeue(Node* node);
  void add_locks(Node* node, std::int64_t by);
  Status check_insert(std::string_view ns, std::span<const std::int32_t> fresh) const;
  void append_leaf(Node* parent, std::string_view ns, std::span<const std::int32_t> tokens,
                   std::span<const std::int32_t> fresh);
  void evict_tail(Node& leaf, std::size_t wanted, std::vector<std::int32_t>& evicted);
  std::optional<pages::Unit> our_unit(std::int32_t page) const;
  void drop_last_pages(Node& node, std::size_t count);

  const std::shared_ptr<pages::Pool> pool_;
  const std::size_t page_size_;
  const std::optional<pages::KeyMaker> key_maker_;
  std::unordered_map<NodeId, std::unique_ptr<Node>> nodes_;
  std::unordered_map<std::string, Node*> roots_;
  std::unordered_multimap<std::uint64_t, Node*> edges_;  // by edge_hash; compared fully on look-up
  std::set<std::pair<std::int64_t, NodeId>> leaves_;     // evictable leaves by (used, id)
  std::vector<std::uint8_t> in_tree_;                    // [num_pages of the pool]
  EventLog events_;
  NodeId next_id_ = 1;
  std::int64_t tick_ = 0;
  std::int64_t num_pages_ = 0;
  std::int64_t protected_pages_ = 0;
  std::int64_t hits_ = 0;
  std::int64_t misses_ = 0;
  std::int64_t hit_tokens_ = 0;
  std::int64_t evicted_pages_ = 0;
};

}  // namespace kvcore::prefix
