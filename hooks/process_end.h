// Whether the process is ending.
#pragma once

#include <atomic>

namespace gradferry {

// Set when gradferry is shut down at exit. After that no thread may take the GIL, and what our
// threads still hold is not freed.
inline std::atomic<bool> process_is_ending{false};

}  // namespace gradferry
