// How much of the gradient is withheld: residuals beside gradients, on a sample of tiles. A look
// at all of them would cost as much as encoding.
#pragma once

#include "events.h"
#include "layout.h"
#include "plan.h"

namespace gradferry {

class ResidualSample {
 public:
  explicit ResidualSample(const Layout& layout);

  // Worker residuals of the chunk's tiles after encode, beside this rank's gradient.
  ResidualSquares worker(const ChunkPlan& plan, const void* gradient, const float* residual) const;
  // Owner residuals of the tiles that this rank owns, after decode, beside the averaged gradient.
  ResidualSquares owner(const ChunkPlan& plan, const void* gradient, const float* residual) const;

 private:
  bool takes(const Tile& tile) const { return tile.id % stride_ == 0; }

  const Layout& layout_;
  uint64_t stride_;
};

}  // namespace gradferry
