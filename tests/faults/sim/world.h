// A world: ranks, their model, options of the engine, steps, and what goes wrong. All of it follows
// from one row of choices.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hooks/engine_options.h"
#include "tests/faults/sim/choices.h"
#include "tests/faults/sim/network.h"

namespace gradferry::sim {

// What the numbers of a gradient are like.
enum class Numbers : uint8_t {
  kWhole,     // small whole numbers, whose sums are exact
  kZeros,     // of both signs
  kUniform,   // between -1 and 1
  kWide,      // of sizes from 2^-40 to 2^40
  kTiny,      // subnormal
  kHuge,      // near the largest, so that sums overflow
  kNaN,       // uniform, but for one element of one rank
  kInfinity,  // likewise
};

// What happens before a step, on all ranks.
enum class Before : uint8_t { kNothing, kScaleResiduals, kAddToResidual };

struct Step {
  int loss_scale_exponent = 0;  // the scale is a power of two
  Before before = Before::kNothing;
  std::vector<Numbers> numbers;            // by parameter
  std::vector<std::vector<uint8_t>> used;  // by rank and parameter, where they may be unused
  std::vector<uint8_t> passes;             // by bucket: no rank hands it over; empty: all do
};

// How one rank differs from the others.
enum class Difference : uint8_t {
  kNone,
  kConfig,       // it has another configuration hash
  kLayout,       // another layout hash
  kStep,         // it is a step further
  kOrder,        // it hands over its buckets in another order
  kParameters,   // its parameters are others
  kShortBucket,  // it hands over a bucket that is too short
  kFailure,      // it tells of an error of its own
  kLossScale,    // its GradScaler has another scale
};

struct World {
  uint32_t size = 1;
  std::vector<std::vector<uint32_t>> nodes;
  bool siblings_share = false;
  std::vector<ParameterSpec> parameters;
  std::vector<std::vector<uint32_t>> buckets;  // parameters, in the order in which they come
  Collective collective = Collective::kAllReduce;
  uint64_t warmup_steps = 0;
  bool compressed_warmup = false;
  double momentum = 0;
  bool raise_nonfinite = false;
  bool has_loss_scale = false;
  bool may_be_unused = false;
  uint64_t check_every = 0;
  uint32_t chunk_bytes = 0;
  bool equal_scatter = false;
  bool little_memory = false;  // not for a tile of every owner at once
  std::vector<Step> steps;
  uint64_t data_seed = 0;
  uint64_t order_seed = 0;  // of what happens first; 0: in order

  // What goes wrong, once. The fault's message is a share of all messages of the world, in 1/65536.
  Fault fault;
  Difference difference = Difference::kNone;
  uint32_t different_rank = 0;
  uint64_t different_step = 0;
  bool resumes = false;  // afterwards, from the last state that all ranks have saved
  uint32_t resized = 0;  // with so many ranks; 0: with as many

  static World draw(Choices& choices);
  std::string text() const;

  bool goes_wrong() const {
    return fault.mishap != Mishap::kNone || difference != Difference::kNone;
  }
  // Of one rank, but for what binds it to others. `goes_wrong`: the rank that differs gets its own.
  EngineOptions options(uint32_t rank, bool goes_wrong) const;
  // Whether buckets may pass without the engine.
  bool has_passes() const { return !steps.front().passes.empty(); }
  bool passes(uint64_t step, size_t bucket) const {
    return has_passes() && steps[step].passes[bucket] != 0;
  }
  // Whether any rank uses the parameter in a step, and its bucket does not pass.
  bool is_used(uint64_t step, uint32_t parameter) const;
};

}  // namespace gradferry::sim
