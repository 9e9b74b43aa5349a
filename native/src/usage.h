// Who uses how much of a place: bytes by root, and by *account*, which is a tenant or what a trust group shares.
//
// A root is nobody's (account 0, without a limit) until somebody claims it: a place that was taken up from an
// earlier process knows roots long before it knows whose they are. Accounts with a limit get a *lane* of their
// own, for good: a pool that must make room within one account finds its oldest there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "types.h"

namespace kv {

using Account = std::uint32_t;

inline constexpr Account kAccountsMax = 1u << 20;
inline constexpr std::size_t kLanesMax = 256;  // lane 0 included
inline constexpr std::size_t kUnlimited = ~std::size_t{0};

class Usage {
 public:
  // Bytes came to a block under this root, or left it.
  void add(NodeId root, std::size_t bytes) {
    Root& r = roots_[root];
    r.bytes += bytes;
    accounts_[r.account].bytes += bytes;
  }
  void take(NodeId root, std::size_t bytes) {
    const auto found = roots_.find(root);
    if (found == roots_.end() || found->second.bytes < bytes || accounts_[found->second.account].bytes < bytes)
      throw Broken("usage: root " + std::to_string(root) + " gives back more than it has");
    found->second.bytes -= bytes;
    accounts_[found->second.account].bytes -= bytes;
  }

  // From now on the root is this account's, with what it has. True if its bytes are in another lane now.
  bool claim(NodeId root, Account account) {
    require(account);
    Root& r = roots_[root];
    if (r.account == account) return false;
    const bool moved = r.bytes > 0 && accounts_[r.account].lane != accounts_[account].lane;
    accounts_[r.account].bytes -= r.bytes;
    accounts_[account].bytes += r.bytes;
    r.account = account;
    return moved;
  }

  // At most so many bytes; kUnlimited = as many as there are. True if what the account has is in another lane now.
  bool set_limit(Account account, std::size_t bytes) {
    require(account);
    Use& use = accounts_[account];
    const bool first = bytes != kUnlimited && use.lane == 0;
    if (first && lanes_ == kLanesMax)
      throw Invalid("limit: " + std::to_string(kLanesMax - 1) + " accounts have one; no more can");
    if (first) use.lane = static_cast<std::uint32_t>(lanes_++);
    use.limit = bytes;
    return first && use.bytes > 0;
  }

  Account account(NodeId root) const {
    const auto found = roots_.find(root);
    return found == roots_.end() ? 0 : found->second.account;
  }
  std::size_t lane(NodeId root) const { return lanes_ == 1 ? 0 : accounts_[account(root)].lane; }
  std::size_t lanes() const noexcept { return lanes_; }
  std::size_t used(Account account) const { return account < accounts_.size() ? accounts_[account].bytes : 0; }
  std::size_t limit(Account account) const {
    return account < accounts_.size() ? accounts_[account].limit : kUnlimited;
  }
  // Whether the root's account may have so many bytes more.
  bool fits(NodeId root, std::size_t bytes) const {
    if (lanes_ == 1) return true;
    const Use& use = accounts_[account(root)];
    return use.limit == kUnlimited || use.bytes + bytes <= use.limit;
  }

  // Whether it may once nothing else of the account is there.
  bool could_fit(NodeId root, std::size_t bytes) const {
    return lanes_ == 1 || bytes <= accounts_[account(root)].limit;
  }

  // Broken unless these are the bytes of every root, and the accounts their sums.
  void check(const std::unordered_map<NodeId, std::size_t>& bytes) const {
    std::vector<std::size_t> sums(accounts_.size(), 0);
    std::size_t known = 0;
    for (const auto& [root, r] : roots_) {
      const auto found = bytes.find(root);
      if (r.bytes != (found == bytes.end() ? 0 : found->second))
        throw Broken("usage: root " + std::to_string(root) + " has other bytes than were counted");
      sums[r.account] += r.bytes;
      known += found != bytes.end();
    }
    if (known != bytes.size()) throw Broken("usage: a root with bytes is not known");
    for (Account a = 0; a < sums.size(); ++a)
      if (sums[a] != accounts_[a].bytes) throw Broken("usage: account " + std::to_string(a) + " is not its roots' sum");
  }

 private:
  struct Root {
    Account account = 0;
    std::size_t bytes = 0;
  };
  struct Use {
    std::size_t bytes = 0;
    std::size_t limit = kUnlimited;
    std::uint32_t lane = 0;
  };

  void require(Account account) {
    if (account >= kAccountsMax) throw Invalid("account: must be below " + std::to_string(kAccountsMax));
    if (account >= accounts_.size()) accounts_.resize(std::size_t{account} + 1);
  }

  std::unordered_map<NodeId, Root> roots_;  // never reaped, as roots are
  std::vector<Use> accounts_{1};
  std::size_t lanes_ = 1;
};

}  // namespace kv
