// Stacks that one thread of the host switches between. Written for x86-64: the registers a function
// must preserve are pushed, the stack pointer is exchanged, and they are popped again. No system
// call is involved, which is what makes playing thousands of threads cheap.
#pragma once

#include <cstddef>

namespace gradferry::sim {

// Saves where the running code is to *save, and continues where `to` was saved.
extern "C" void gradferry_switch_stack(void** save, void* to);

// Of a fresh stack that ends at `end`, a multiple of 16: what to give to gradferry_switch_stack, so
// that `entry`, which must not return, is called on it.
void* prepare_stack(std::byte* end, void (*entry)());

}  // namespace gradferry::sim
