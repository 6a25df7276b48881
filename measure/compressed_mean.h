// What a compressed all-reduce must give, worked out in one process: the codec's three functions
// one after the other, tile by tile, without messages, chunks or threads.
#pragma once

#include <span>
#include <string>

#include "gradferry/codec.h"

namespace gradferry {

struct CompressedMeanOptions {
  std::string codec = "q4";
  ScalarType dtype = ScalarType::kFloat32;
  size_t num_elements = 0;
  uint64_t seed = 0;
  bool worker_residual = false;  // each zero, as in a new engine
  bool owner_residual = false;
};

// Writes to `mean` what every rank has after the first step of an engine whose one parameter has
// these gradients, by rank. Throws Error(kConfig) for a codec it does not know.
void compressed_mean(const CompressedMeanOptions& options, std::span<const void* const> gradients,
                     void* mean);

}  // namespace gradferry
