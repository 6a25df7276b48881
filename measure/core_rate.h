// How fast the core computes at the moment: to tell a core that a neighbour shares, by a second
// hardware thread or a lower clock, from one that is alone.
#pragma once

namespace gradferry {

// Single-precision fused multiply-adds per second (without such instructions multiplications, each
// with its addition), in a loop of some 10 microseconds that touches no memory.
double multiply_adds_per_second();

}  // namespace gradferry
