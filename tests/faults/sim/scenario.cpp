#include "tests/faults/sim/scenario.h"

#include <algorithm>
#include <optional>

#include "tests/faults/sim/check.h"

namespace gradferry::sim {
namespace {

bool any_error(const Seen& seen) {
  return std::ranges::any_of(seen.ranks,
                             [](const RankSeen& rank) { return rank.error.has_value(); });
}

// The last step after which every rank has saved its state.
std::optional<uint64_t> last_saved(const World& world, const Seen& seen) {
  for (uint64_t number = world.steps.size(); number-- > 0;) {
    const bool saved = std::ranges::all_of(seen.ranks, [&](const RankSeen& rank) {
      const auto step = rank.steps.find(number);
      return step != rank.steps.end() && step->second.after;
    });
    if (saved) return number;
  }
  return std::nullopt;
}

std::vector<EngineState> states_after(const Seen& seen, uint64_t number) {
  std::vector<EngineState> states;
  for (const RankSeen& rank : seen.ranks) states.push_back(*rank.steps.at(number).after);
  return states;
}

// The same training with other ranks, each on a node of its own.
World resized(const World& world) {
  World other = world;
  other.size = world.resized;
  other.nodes.clear();
  for (uint32_t rank = 0; rank < other.size; ++rank) other.nodes.push_back({rank});
  other.siblings_share = false;
  for (ParameterSpec& spec : other.parameters) {
    if (spec.owner) spec.owner = *spec.owner % other.size;
    if (other.size == 1) place_alone(spec);
  }
  for (Step& step : other.steps) {
    step.used.resize(other.size, std::vector<uint8_t>(other.parameters.size(), 1));
  }
  return other;
}

// Ranks that begin anew with the states after step `number`.
void check_resume(const World& world, const Seen& seen, const Seen& twin, uint64_t number) {
  Playing playing{.order_seed = world.order_seed ^ 1, .watched = true, .first_step = number + 1};
  playing.states = states_after(seen, number);
  if (world.resized == 0) {
    const Seen resumed = play(world, playing);
    expect_equal_ranks(world, resumed);
    expect_nothing_lost(world, resumed);
    expect_same_steps(resumed, twin);
    return;
  }
  const World other = resized(world);
  playing.missing = still_missing(world, playing.states);
  playing.states.clear();
  const Seen resumed = play(other, playing);
  expect_equal_ranks(other, resumed);
  expect_nothing_lost(other, resumed);
}

}  // namespace

Came check_world(const World& world) {
  Came came;
  const Seen twin = play(world, {.order_seed = 0, .watched = true});
  expect_calm(world, twin);
  expect_equal_ranks(world, twin);
  expect_nothing_lost(world, twin);

  Playing playing{.order_seed = world.order_seed, .goes_wrong = world.goes_wrong()};
  playing.lets_go = world.order_seed % 4 == 3;
  playing.fault_message = world.fault.message * twin.num_messages / 65536;
  const Seen seen = play(world, playing);
  expect_equal_ranks(world, seen);
  expect_same_steps(seen, twin);
  if (world.goes_wrong()) {
    expect_named_errors(world, seen);
  } else {
    expect_calm(world, seen);
  }
  came.went_wrong = seen.befallen || world.difference != Difference::kNone;
  came.ended_in_error = any_error(seen);

  const auto saved = world.resumes ? last_saved(world, seen) : std::nullopt;
  // Where a loss scale may differ, units do too; resizing is only for the state's own.
  const bool goes_on =
      saved && *saved + 1 < world.steps.size() && !(world.resized != 0 && world.has_loss_scale);
  if (goes_on) {
    check_resume(world, seen, twin, *saved);
    came.resumed = true;
  }
  return came;
}

}  // namespace gradferry::sim
