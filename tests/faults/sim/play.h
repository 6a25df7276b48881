// Plays a world with real engines, and keeps what every rank saw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "hooks/bucket_engine.h"
#include "tests/faults/sim/world.h"

namespace gradferry::sim {

// Of the process group, in simulated time.
inline constexpr std::chrono::milliseconds kTimeout{8000};

using Bytes = std::vector<std::byte>;

// A step that ended well on a rank.
struct StepSeen {
  std::vector<Bytes> buckets;  // their averaged gradients
  // Between steps, where that is watched, or was saved.
  std::optional<EngineState> before, after;
};

struct RankSeen {
  std::map<uint64_t, StepSeen> steps;
  std::optional<Error> error;
  std::string later_error;  // of a call after that
  TimePoint end{};
  bool has_ended = false;  // not so if it was killed or halted
};

struct Seen {
  std::vector<RankSeen> ranks;
  std::chrono::milliseconds duration{};
  uint64_t num_messages = 0;
  bool befallen = false;  // the fault of the world has come about
};

struct Playing {
  uint64_t order_seed = 0;
  // State is taken before and after every step; else after every second one.
  bool watched = false;
  bool goes_wrong = false;  // with the fault and difference of the world
  // Ranks destroy their engines while the last step is in flight.
  bool lets_go = false;
  uint64_t fault_message = 0;  // its number
  uint64_t first_step = 0;
  std::vector<EngineState> states = {};  // by rank, to begin with; empty: none
  // In place of states, where those were of other ranks: by parameter, what is added to the worker
  // residual of every rank.
  std::vector<std::vector<float>> missing = {};
};

// Throws Broken when ranks wait for what never comes, or one counts other bytes than it sends.
Seen play(const World& world, const Playing& playing);

// The gradient of a parameter, as fp64 values of its dtype.
std::vector<double> gradient_of(const World& world, uint64_t step, uint32_t rank,
                                uint32_t parameter);
// What every element of a residual that the world adds to has.
inline constexpr float kAdded = 0.5F;

at::ScalarType torch_dtype(ScalarType dtype);

}  // namespace gradferry::sim
