#include "host/residual_sample.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <cmath>
#include <numeric>

namespace gradferry {
namespace {

// Tiles in the sample, about: a quarter of a million elements, which take a fraction of a
// millisecond.
constexpr uint64_t kSampledTiles = 64;
// Number of independent sums: with one, each addition would wait for the one before.
constexpr uint32_t kSums = 8;

template <typename T>
double sum_of_squares(const T* values, uint32_t count) {
  std::array<double, kSums> sums{};
  const auto square = [&](uint32_t i) {
    const auto value = static_cast<double>(values[i]);
    return value * value;
  };
  uint32_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (uint32_t s = 0; s < kSums; ++s) sums[s] += square(i + s);
  }
  for (; i < count; ++i) sums[0] += square(i);
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

double gradient_squares(const void* gradient, ScalarType dtype, const Tile& tile) {
  const uint64_t at = tile.gradient_offset;
  switch (dtype) {
    case ScalarType::kFloat32:
      return sum_of_squares(static_cast<const float*>(gradient) + at, tile.num_elements);
    case ScalarType::kBFloat16:
      return sum_of_squares(static_cast<const c10::BFloat16*>(gradient) + at, tile.num_elements);
    case ScalarType::kFloat16:
      return sum_of_squares(static_cast<const c10::Half*>(gradient) + at, tile.num_elements);
    case ScalarType::kFloat64:
      return sum_of_squares(static_cast<const double*>(gradient) + at, tile.num_elements);
  }
  return 0;
}

ResidualSquares squares(const void* gradient, ScalarType dtype, const Tile& tile,
                        const float* residual) {
  const ResidualSquares result{sum_of_squares(residual, tile.num_elements),
                               gradient_squares(gradient, dtype, tile)};
  // A ratio to a non-finite gradient has no meaning.
  return std::isfinite(result.gradient) ? result : ResidualSquares{};
}

}  // namespace

// Odd, because in a model of equal layers an even stride could always select the same tile.
ResidualSample::ResidualSample(const Layout& layout)
    : layout_(layout), stride_((layout.num_tiles() / kSampledTiles) | 1) {}

ResidualSquares ResidualSample::worker(const ChunkPlan& plan, const void* summed,
                                       const float* residual) const {
  ResidualSquares sum;
  for (const PlannedBatch& planned : plan.encode) {
    if (!planned.worker_residual) continue;
    for (const Tile& tile : planned.tiles) {
      if (takes(tile)) {
        sum += squares(summed, plan.dtype, tile, residual + tile.residual_offset);
      }
    }
  }
  return sum;
}

ResidualSquares ResidualSample::owner(const ChunkPlan& plan, const void* gradient,
                                      const float* residual) const {
  ResidualSquares sum;
  for (const PlannedBatch& planned : plan.decode) {
    if (!planned.owner_residual) continue;
    for (const Tile& tile : planned.tiles) {
      const uint64_t offset = layout_.owner_residual_offset(tile.id);
      if (takes(tile) && offset != kNoResidual) {
        sum += squares(gradient, plan.dtype, tile, residual + offset);
      }
    }
  }
  return sum;
}

}  // namespace gradferry
