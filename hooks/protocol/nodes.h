// Which ranks share a node, and with it a NIC. Ranks of one node add their gradients
// before anything is compressed; nodes exchange compressed sums.
//
//             rail 0  rail 1
//   node 0    rank 0    rank 1        ranks of a row: siblings
//   node 1    rank 2    rank 3        ranks of a rail: peers
//
// A rail is what peers exchange: every tile is in the rail of its owner, and is summed, encoded
// and sent by the rank of that rail on every node, its leader there. There are as many rails
// as the smallest node has ranks; ranks beyond them, on larger nodes, only give and take. With one
// rank per node there is one rail, and every rank is every tile's leader.
#pragma once

#include <cstdint>
#include <vector>

namespace gradferry {

// A world may have.
inline constexpr uint32_t kMostRanks = 65535;

class Nodes {
 public:
  // Every rank is a node of its own.
  static Nodes flat(uint32_t world_size);
  // `members`: the ranks of every node, rising; nodes in the order of their first ranks. Throws
  // Error(kConfig) unless every rank occurs once.
  explicit Nodes(std::vector<std::vector<uint32_t>> members);

  uint32_t world_size() const { return static_cast<uint32_t>(places_.size()); }
  uint32_t num_nodes() const { return static_cast<uint32_t>(members_.size()); }
  uint32_t num_rails() const { return num_rails_; }
  // How many ranks the largest node has.
  uint32_t most_siblings() const { return most_siblings_; }
  bool is_flat() const { return num_nodes() == world_size(); }

  const std::vector<uint32_t>& siblings(uint32_t rank) const { return members_[node_of(rank)]; }
  // The ranks of a rail, by node.
  std::vector<uint32_t> peers(uint32_t rail) const;
  uint32_t node_of(uint32_t rank) const { return places_[rank].node; }
  // Its place among its siblings: its rail, if below num_rails().
  uint32_t local_index(uint32_t rank) const { return places_[rank].local_index; }
  bool is_leader(uint32_t rank) const { return local_index(rank) < num_rails_; }

 private:
  struct NodePlace {
    uint32_t node;
    uint32_t local_index;
  };
  std::vector<std::vector<uint32_t>> members_;
  std::vector<NodePlace> places_;  // by rank
  uint32_t num_rails_, most_siblings_;
};

}  // namespace gradferry
