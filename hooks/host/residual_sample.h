// Compares the norms of residuals and gradients on a sample of tiles. Reading all tiles would cost
// as much as encoding.
#pragma once

#include "events.h"
#include "protocol/layout.h"
#include "protocol/plan.h"

namespace gradferry {

class ResidualSample {
 public:
  explicit ResidualSample(const Layout& layout);

  // For the chunk's tiles after encode: worker residual and what was encoded.
  ResidualSquares worker(const ChunkPlan& plan, const void* summed, const float* residual) const;
  // For the tiles that this rank owns, after decode: owner residual and averaged gradient.
  ResidualSquares owner(const ChunkPlan& plan, const void* gradient, const float* residual) const;

 private:
  bool takes(const Tile& tile) const { return tile.id % stride_ == 0; }

  const Layout& layout_;
  uint64_t stride_;
};

}  // namespace gradferry
