#include "protocol/nodes.h"

#include <algorithm>
#include <string>

#include "gradferry/error.h"

namespace gradferry {

Nodes Nodes::flat(uint32_t world_size) {
  std::vector<std::vector<uint32_t>> members;
  for (uint32_t rank = 0; rank < world_size; ++rank) members.push_back({rank});
  return Nodes(std::move(members));
}

Nodes::Nodes(std::vector<std::vector<uint32_t>> members) : members_(std::move(members)) {
  size_t world_size = 0;
  for (const auto& ranks : members_) world_size += ranks.size();
  GRADFERRY_EXPECTS(
      world_size >= 1 && world_size <= kMostRanks, kConfig,
      "world size " + std::to_string(world_size) + " is not in 1.." + std::to_string(kMostRanks));
  constexpr NodePlace kNone{~0U, ~0U};
  places_.assign(world_size, kNone);
  num_rails_ = ~0U;
  most_siblings_ = 0;
  for (uint32_t node = 0; node < members_.size(); ++node) {
    const auto& ranks = members_[node];
    const bool in_order = !ranks.empty() && std::is_sorted(ranks.begin(), ranks.end()) &&
                          (node == 0 || members_[node - 1].front() < ranks.front());
    GRADFERRY_EXPECTS(in_order, kConfig,
                      "node " + std::to_string(node) +
                          " has no ranks, or they or the nodes are not in rising order");
    const auto num_ranks = static_cast<uint32_t>(ranks.size());
    num_rails_ = std::min(num_rails_, num_ranks);
    most_siblings_ = std::max(most_siblings_, num_ranks);
    for (uint32_t i = 0; i < ranks.size(); ++i) {
      GRADFERRY_EXPECTS(ranks[i] < world_size && places_[ranks[i]].node == kNone.node, kConfig,
                        "nodes of " + std::to_string(world_size) + " ranks have rank " +
                            std::to_string(ranks[i]) + " twice, or not at all");
      places_[ranks[i]] = {node, i};
    }
  }
}

std::vector<uint32_t> Nodes::peers(uint32_t rail) const {
  std::vector<uint32_t> ranks;
  for (const auto& members : members_) ranks.push_back(members[rail]);
  return ranks;
}

}  // namespace gradferry
