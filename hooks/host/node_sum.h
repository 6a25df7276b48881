// What ranks of one node do to a chunk before it is compressed: each gives its siblings the
// gradients of their rails, and adds up those of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol/plan.h"

namespace gradferry {

// Copies the tiles of a rail from the bucket to a message.
void pack_rail(const ChunkPlan& plan, uint32_t rail, const void* gradient, std::byte* message);

// sum = scale * (the gradients of all siblings, added in rank order), of this rank's `rail`.
// Computed in fp32 (fp64 for fp64) and rounded once, to the bucket's dtype, as the mean is.
// `gradients`: messages of siblings; null: this rank's own are taken from the bucket.
void sum_rail(const ChunkPlan& plan, uint32_t rail, const std::vector<const std::byte*>& gradients,
              const void* own, double scale, void* sum);

}  // namespace gradferry
