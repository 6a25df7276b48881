// Operations of a warp's lanes with one another: all lanes of Context::mask have come.
#pragma once

#include "tests/kernels/ptx/program.h"

namespace ptx {

// `sub` is one of these.
enum class Shuffle : uint8_t { kUp, kDown, kButterfly, kIndex };
void shuffle(Context& c, const Op& op);
enum class Vote : uint8_t { kAll, kAny };
void vote(Context& c, const Op& op);
enum class Redux : uint8_t { kAdd, kMin, kMax, kOr };
void redux(Context& c, const Op& op);

void warp_barrier(Context& c, const Op& op);

// mov of registers into the parts of a wider one, and back.
void join_registers(Context& c, const Op& op);
void split_register(Context& c, const Op& op);

}  // namespace ptx
