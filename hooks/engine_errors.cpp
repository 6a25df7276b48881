#include "engine_errors.h"

#include <unistd.h>

#include <string>

#include "threads.h"

namespace gradferry {
namespace {

std::string at_step(uint64_t step) {
  return " not finite at step " + std::to_string(step) +
         "; lower the learning rate or the loss scale";
}

}  // namespace

Error describe_failure(const std::exception_ptr& failure, uint32_t rank) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return with_memory([&] {
      return Error(ErrorKind::kState, "gradferry failed on rank " + std::to_string(rank) + ": " +
                                          error.what() + "; restart the training");
    });
  }
}

Error finished(const Error& error, const EventLog& log, const EngineOptions& options) {
  return with_memory([&] {
    return Error(error.kind(), std::string(error.what()) + "\n" + options.recovery_hint +
                                   log.text(options.world_rank()));
  });
}

Error called_after_fork(int process_id) {
  return {ErrorKind::kState, "gradferry was set up in process " + std::to_string(process_id) +
                                 " and called after a fork in process " + std::to_string(getpid()) +
                                 "; set it up in the process that trains"};
}

Error called_at_exit() {
  return {ErrorKind::kState, "gradferry was shut down; it cannot compress at exit"};
}

Error nonfinite_mean(const Layout& layout, uint64_t tile, uint64_t step, const char* is) {
  return {ErrorKind::kState, "the averaged gradient of '" + layout.parameter_of(tile).name + "' " +
                                 is + at_step(step) +
                                 ", or attach with nonfinite='propagate' to see it in .grad"};
}

Error nonfinite_gradient(uint64_t step) {
  return {ErrorKind::kState, "a gradient is" + at_step(step)};
}

}  // namespace gradferry
