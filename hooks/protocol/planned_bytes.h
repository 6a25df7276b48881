// The bytes that ranks send in a step, from the plans that engines follow, without sending any.
#pragma once

#include <cstdint>
#include <vector>

#include "protocol/layout.h"
#include "protocol/plan.h"

namespace gradferry {

// Bytes that a rank sends in a step: as `wire_bytes` and `local_bytes` of its engine's statistics,
// where every node is a host.
struct StepBytes {
  uint64_t to_other_hosts = 0;
  uint64_t on_host = 0;  // to other ranks of its own host
  // Of those with tiles to other hosts: how many, and the shortest; 0: there are none.
  uint64_t num_messages = 0;
  uint32_t shortest_message = 0;
};

// Returns what each rank sends in a step, and throws Error(kConfig) unless every rank has a host.
// `options`: the rank in it has no meaning here.
// `find_unused_parameters`: DDP's option, for gradients on the CPU: commits carry maps.
// `buckets`: the parameters of every bucket of the step, in bucket order.
// `hosts`: the host of every rank; the ranks of a node share one.
std::vector<StepBytes> planned_bytes(const Layout& layout, PlanOptions options,
                                     bool find_unused_parameters,
                                     const std::vector<std::vector<uint32_t>>& buckets,
                                     const std::vector<uint32_t>& hosts);

}  // namespace gradferry
