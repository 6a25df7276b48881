// What must hold in every world. All of these throw Broken.
#pragma once

#include "tests/faults/sim/play.h"

namespace gradferry::sim {

// Of a world in which nothing goes wrong: no rank waits for a second, none ends with an error but
// for a NaN that is to be one, and then all end with the same.
void expect_calm(const World& world, const Seen& seen);

// Every rank has the same averages, bit for bit.
void expect_equal_ranks(const World& world, const Seen& seen);

// In every watched step: averages and what is withheld add up to what went in, and residuals are
// finite.
void expect_nothing_lost(const World& world, const Seen& seen);

// Every step that `seen` has ended well as in `twin`, to the bit, and its saved states are those.
void expect_same_steps(const Seen& seen, const Seen& twin);

// After something went wrong: ranks that are left end in time, with one error, which says where.
void expect_named_errors(const World& world, const Seen& seen);

// What is withheld from the mean of `states`, by parameter and element.
std::vector<std::vector<float>> still_missing(const World& world,
                                              const std::vector<EngineState>& states);

}  // namespace gradferry::sim
