#include "protocol/planned_bytes.h"

#include <map>
#include <numeric>
#include <string>

#include "gradferry/error.h"
#include "gradferry/wire.h"
#include "protocol/messages.h"

namespace gradferry {
namespace {

using Buckets = std::vector<std::vector<uint32_t>>;

// Plans every bucket as rank `options.rank` does.
std::vector<BucketPlan> plans_of(const Layout& layout, const PlanOptions& options,
                                 const Buckets& buckets) {
  std::vector<BucketPlan> plans;
  for (const auto& bucket : buckets) plans.push_back(make_plan(layout, bucket, options));
  return plans;
}

// Bytes to each peer of the rail of the plans, by node: every rank of the rail sends its peers
// the same.
std::vector<uint64_t> bytes_to_peers(const std::vector<BucketPlan>& plans, uint32_t rail,
                                     size_t num_nodes) {
  std::vector<uint64_t> to_peer(num_nodes, 0);
  for (const BucketPlan& plan : plans) {
    for (const ChunkPlan& chunk : plan.chunks) {
      for (size_t node = 0; node < num_nodes; ++node) {
        to_peer[node] += chunk.shards[node].scatter_bytes + chunk.rails[rail].gather_message_bytes;
      }
    }
  }
  return to_peer;
}

// Bytes to the sibling with this local index: the gradients of its rail, and what was gathered.
uint64_t bytes_to_sibling(const std::vector<BucketPlan>& plans, uint32_t local_index) {
  uint64_t sum = 0;
  for (const BucketPlan& plan : plans) {
    for (const ChunkPlan& chunk : plan.chunks) {
      const uint64_t elements =
          local_index < chunk.rails.size() ? chunk.rails[local_index].num_elements : uint64_t{0};
      sum += kHeaderBytes + elements * item_bytes(chunk.dtype) + chunk.forward_bytes;
    }
  }
  return sum;
}

// Bytes of the commits to each other rank.
uint64_t bytes_of_commits(const std::vector<BucketPlan>& plans, bool find_unused_parameters) {
  uint64_t sum = 0;
  for (const BucketPlan& plan : plans) {
    if (plan.chunks.empty()) continue;
    sum += sizeof(CommitRecord);
    if (find_unused_parameters) sum += used_map_bytes(plan.parameters.size());
  }
  return sum;
}

}  // namespace

std::vector<StepBytes> planned_bytes(const Layout& layout, PlanOptions options,
                                     bool find_unused_parameters, const Buckets& buckets,
                                     const std::vector<uint32_t>& hosts) {
  const Nodes& nodes = layout.nodes();
  GRADFERRY_EXPECTS(hosts.size() == nodes.world_size(), kConfig,
                    "hosts of " + std::to_string(hosts.size()) + " ranks for a world of " +
                        std::to_string(nodes.world_size()));
  std::vector<StepBytes> sent(nodes.world_size());
  std::vector<BucketPlan> plans;
  for (uint32_t rail = 0; rail < nodes.num_rails(); ++rail) {
    const std::vector<uint32_t> peers = nodes.peers(rail);
    options.rank = peers.front();
    plans = plans_of(layout, options, buckets);
    const std::vector<uint64_t> to_peer = bytes_to_peers(plans, rail, peers.size());
    const auto to_all = std::accumulate(to_peer.begin(), to_peer.end(), uint64_t{0});
    std::map<uint32_t, uint64_t> to_host;
    for (size_t node = 0; node < peers.size(); ++node) to_host[hosts[peers[node]]] += to_peer[node];
    for (size_t node = 0; node < peers.size(); ++node) {
      const uint64_t on_host = to_host[hosts[peers[node]]];
      sent[peers[node]].to_other_hosts += to_all - on_host;
      sent[peers[node]].on_host += on_host - to_peer[node];
    }
  }
  const uint64_t commits = bytes_of_commits(plans, find_unused_parameters);
  std::vector<uint64_t> to_sibling(nodes.most_siblings());
  for (uint32_t i = 0; i < to_sibling.size(); ++i) to_sibling[i] = bytes_to_sibling(plans, i);
  std::map<uint32_t, uint64_t> ranks_on;
  for (const uint32_t host : hosts) ++ranks_on[host];
  for (uint32_t rank = 0; rank < nodes.world_size(); ++rank) {
    const uint64_t here = ranks_on[hosts[rank]];
    sent[rank].to_other_hosts += (hosts.size() - here) * commits;
    sent[rank].on_host += (here - 1) * commits;
    for (const uint32_t sibling : nodes.siblings(rank)) {
      if (sibling != rank) sent[rank].on_host += to_sibling[nodes.local_index(sibling)];
    }
  }
  return sent;
}

}  // namespace gradferry
