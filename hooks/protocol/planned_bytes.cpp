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

// Adds what the ranks of a rail, of which the plans are, send each other.
void add_rail(const std::vector<BucketPlan>& plans, uint32_t rail,
              const std::vector<uint32_t>& peers, const std::vector<uint32_t>& hosts,
              std::vector<StepBytes>& sent) {
  const auto add = [&](const std::vector<PlannedMessage>& messages, size_t number, uint32_t from,
                       uint32_t to) {
    if (messages.empty()) return;  // the collective has no such stage
    const PlannedMessage& message = messages[number];
    StepBytes& rank = sent[from];
    const bool stays = hosts[from] == hosts[to];
    (stays ? rank.on_host : rank.to_other_hosts) += message.message_bytes;
    if (stays || message.payload_bytes == 0) return;
    if (rank.num_messages++ == 0) rank.shortest_message = message.message_bytes;
    rank.shortest_message = std::min(rank.shortest_message, message.message_bytes);
  };
  for (const BucketPlan& plan : plans) {
    for (const ChunkPlan& chunk : plan.chunks) {
      for (size_t from = 0; from < peers.size(); ++from) {
        for (size_t to = 0; to < peers.size(); ++to) {
          if (to == from) continue;
          add(chunk.scattered, to, peers[from], peers[to]);
          add(chunk.rails[rail].gathered, from, peers[from], peers[to]);
        }
      }
    }
  }
}

// Bytes between siblings with these local indices: the gradients of a rail, and what was gathered.
uint64_t bytes_between(const std::vector<BucketPlan>& plans, uint32_t from, uint32_t to) {
  uint64_t sum = 0;
  for (const BucketPlan& plan : plans) {
    for (const ChunkPlan& chunk : plan.chunks) {
      sum += uint64_t{chunk.dense[to].message_bytes} + chunk.forwarded[from].message_bytes;
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
    plans.clear();
    for (const auto& bucket : buckets) plans.push_back(make_plan(layout, bucket, options));
    add_rail(plans, rail, peers, hosts, sent);
  }
  const uint64_t commits = bytes_of_commits(plans, find_unused_parameters);
  std::map<uint32_t, uint64_t> ranks_on;
  for (const uint32_t host : hosts) ++ranks_on[host];
  for (uint32_t rank = 0; rank < nodes.world_size(); ++rank) {
    const uint64_t here = ranks_on[hosts[rank]];
    sent[rank].to_other_hosts += (hosts.size() - here) * commits;
    sent[rank].on_host += (here - 1) * commits;
    for (const uint32_t sibling : nodes.siblings(rank)) {
      if (sibling == rank) continue;
      sent[rank].on_host +=
          bytes_between(plans, nodes.local_index(rank), nodes.local_index(sibling));
    }
  }
  return sent;
}

}  // namespace gradferry
