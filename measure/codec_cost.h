// Time that a codec takes on this machine when used as in the engine, for predictions of steps.
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
  double reduce_per_element;  // per element that a rank owns, from the payloads of all ranks
  double decode_per_element;
  double check_per_byte;  // checksum of received messages
};

// Measures on one thread with Gaussian numbers. Throws Error(kConfig) for an unknown codec, or less
// than a tile per rank.
CodecCost codec_cost(const CodecCostOptions& options);

}  // namespace gradferry
