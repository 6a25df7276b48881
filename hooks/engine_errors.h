// The texts of errors that end an engine.
#pragma once

#include <cstdint>
#include <exception>

#include "engine_options.h"
#include "events.h"
#include "gradferry/error.h"
#include "protocol/layout.h"

namespace gradferry {

// An exception in the engine of `rank` as an Error: an Error unchanged, anything else as a failure
// of this rank.
Error describe_failure(const std::exception_ptr& failure, uint32_t rank);

// The error that every later call of the engine throws: `error`, what to do, and the last buckets
// of `log`.
Error finished(const Error& error, const EventLog& log, const EngineOptions& options);

// The error of a call in another process than `process_id`, the one that set it up.
Error called_after_fork(int process_id);
// What a call means when the process ends.
Error called_at_exit();

// The averaged gradient that holds `tile` "is", or "was", not finite at `step`.
Error nonfinite_mean(const Layout& layout, uint64_t tile, uint64_t step, const char* is);
// The error in place of nonfinite_mean() in a world of one, where nothing is sent.
Error nonfinite_gradient(uint64_t step);

}  // namespace gradferry
