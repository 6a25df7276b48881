// How fast this machine runs a codec as the engine uses it: for predictions of training steps.
#pragma once

#include <string>

#include "gradferry/codec.h"

namespace gradferry {

struct CodecCostOptions {
  std::string codec = "q4";
  ScalarType dtype = ScalarType::kFloat32;
  uint32_t world_size = 2;
  bool worker_residual = false;
  bool owner_residual = false;
  bool momentum = false;  // decode then adds to the worker residual
  size_t num_elements = size_t{1} << 22;
  int rounds = 5;
};

// Seconds, medians over the rounds.
struct CodecCost {
  double encode_per_element;
  double reduce_per_element;  // that a rank owns, with the payloads of all ranks
  double decode_per_element;
  double check_per_byte;  // of the checksum of what arrives
};

// On one thread, with numbers that are Gaussian. Throws Error(kConfig) for a codec it does not
// know, or less than a tile per rank.
CodecCost codec_cost(const CodecCostOptions& options);

}  // namespace gradferry
