// Whether the process ends.
#pragma once

#include <atomic>

namespace gradferry {

// Set once gradferry was shut down at exit. From then on the GIL must not be taken, and what
// threads of ours still hold is left to the end of the process.
inline std::atomic<bool> process_is_ending{false};

}  // namespace gradferry
