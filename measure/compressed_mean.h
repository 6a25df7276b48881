// The expected result of a compressed all-reduce, computed in one process: encode, reduce and
// decode tile by tile, without messages, chunks or threads.
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
  bool worker_residual = false;  // residuals are zero, as in a new engine
  bool owner_residual = false;
};

// Writes to `mean` the result of the first step of an engine with one parameter. gradients[r] is
// that of rank r; all are in host memory, with num_elements elements of dtype. Throws
// Error(kConfig) for an unknown codec.
void compressed_mean(const CompressedMeanOptions& options, std::span<const void* const> gradients,
                     void* mean);

}  // namespace gradferry
