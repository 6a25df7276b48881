// One world from its beginning to its end, and all that must hold in it.
#pragma once

#include "tests/faults/sim/world.h"

namespace gradferry::sim {

// What came about, for statistics.
struct Came {
  bool went_wrong = false;  // a fault befell, or a rank differed
  bool ended_in_error = false;
  bool resumed = false;
};

// Plays it without faults, in another order, with its faults, and from a checkpoint. Throws Broken.
Came check_world(const World& world);

}  // namespace gradferry::sim
