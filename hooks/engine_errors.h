// What ends an engine, in words.
#pragma once

#include <cstdint>
#include <exception>

#include "events.h"
#include "gradferry/error.h"
#include "layout.h"

namespace gradferry {

// What an exception means for the engine of `rank`: an Error as it is, anything else as a failure
// here.
Error describe_failure(const std::exception_ptr& failure, uint32_t rank);

// The error as every call of an engine gets it from then on, with what the last buckets went
// through.
Error finished(const Error& error, const EventLog& log, uint32_t rank);

// What a call means in another process than the one, `process_id`, that attached.
Error called_after_fork(int process_id);
// What a call means when the process ends.
Error called_at_exit();

// The averaged gradient that holds `tile` "is", or "was", not finite at `step`.
Error nonfinite_mean(const Layout& layout, uint64_t tile, uint64_t step, const char* is);
// A gradient that does not travel is not finite.
Error nonfinite_gradient(uint64_t step);

}  // namespace gradferry
