#include "protocol/planned_bytes.h"

#include <algorithm>
#include <map>
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

// Adds what the ranks of a rail, of which the plans are, send each other.
void add_rail(const std::vector<BucketPlan>& plans, uint32_t rail,
              const std::vector<uint32_t>& peers, const std::vector<uint32_t>& hosts,
              std::vector<StepBytes>& sent) {
  std::map<uint32_t, uint64_t> ranks_on;
  for (const uint32_t peer : peers) ++ranks_on[hosts[peer]];
  // The same of every rank: what it sends to owners, by host and of its own shard.
  struct Scattered {
    uint64_t bytes = 0, messages = 0;
    uint32_t shortest = ~0U;
  };
  for (const BucketPlan& plan : plans) {
    for (const ChunkPlan& chunk : plan.chunks) {
      Scattered all;
      std::map<uint32_t, Scattered> to_host;
      const auto count = [](Scattered& to, uint32_t num_bytes, uint32_t payload_bytes) {
        to.bytes += num_bytes;
        if (payload_bytes == 0) return;
        ++to.messages;
        to.shortest = std::min(to.shortest, num_bytes);
      };
      for (size_t node = 0; node < peers.size(); ++node) {
        const Shard& shard = chunk.shards[node];
        count(all, shard.scatter_bytes, shard.worker_bytes);
        count(to_host[hosts[peers[node]]], shard.scatter_bytes, shard.worker_bytes);
      }
      for (size_t node = 0; node < peers.size(); ++node) {
        StepBytes& rank = sent[peers[node]];
        const uint32_t host = hosts[peers[node]];
        const uint64_t here = ranks_on[host], elsewhere = peers.size() - here;
        Gathered own;
        if (!chunk.rails[rail].gathered.empty()) own = chunk.rails[rail].gathered[node];
        rank.to_other_hosts += all.bytes - to_host[host].bytes + elsewhere * own.message_bytes;
        rank.on_host +=
            to_host[host].bytes - chunk.shards[node].scatter_bytes + (here - 1) * own.message_bytes;
        if (elsewhere == 0) continue;
        const bool gathers = own.payload_bytes != 0;
        rank.num_messages +=
            all.messages - to_host[host].messages + (gathers ? elsewhere : uint64_t{0});
        // Owners on its own host may have the shortest; of equal tiles all are.
        uint32_t shortest = all.shortest;
        if (gathers) shortest = std::min(shortest, own.message_bytes);
        if (shortest == ~0U) continue;
        rank.shortest_message =
            rank.shortest_message == 0 ? shortest : std::min(rank.shortest_message, shortest);
      }
    }
  }
}

// Bytes to the sibling with this local index: the gradients of its rail.
uint64_t bytes_to_sibling(const std::vector<BucketPlan>& plans, uint32_t local_index) {
  uint64_t sum = 0;
  for (const BucketPlan& plan : plans) {
    for (const ChunkPlan& chunk : plan.chunks) {
      const uint64_t elements =
          local_index < chunk.rails.size() ? chunk.rails[local_index].num_elements : uint64_t{0};
      sum += kHeaderBytes + elements * item_bytes(chunk.dtype);
    }
  }
  return sum;
}

// Bytes to each sibling from the one with this local index: what it has gathered.
uint64_t bytes_forwarded(const std::vector<BucketPlan>& plans, uint32_t local_index) {
  uint64_t sum = 0;
  for (const BucketPlan& plan : plans) {
    for (const ChunkPlan& chunk : plan.chunks) sum += chunk.forward[local_index].message_bytes;
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
    add_rail(plans, rail, peers, hosts, sent);
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
    const uint64_t forwarded =
        nodes.is_flat() ? 0 : bytes_forwarded(plans, nodes.local_index(rank));
    for (const uint32_t sibling : nodes.siblings(rank)) {
      if (sibling == rank) continue;
      sent[rank].on_host += to_sibling[nodes.local_index(sibling)] + forwarded;
    }
  }
  return sent;
}

}  // namespace gradferry
