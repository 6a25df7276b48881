#include "bucket_engine.h"

#include <unistd.h>

#include <exception>
#include <string>

namespace gradferry {

Error called_after_fork(int process_id) {
  return {ErrorKind::kState, "gradferry was attached in process " + std::to_string(process_id) +
                                 " and called after a fork in process " + std::to_string(getpid()) +
                                 "; attach in the process that trains"};
}

Error finished(const Error& error, const EventLog& log, uint32_t rank) {
  return {error.kind(), std::string(error.what()) +
                            "\nThis hook is finished. To go on, delete this "
                            "DistributedDataParallel first (its hook would run beside that of a "
                            "new one), and attach to a new one." +
                            log.text(rank)};
}

Error describe_failure(const std::exception_ptr& failure, uint32_t rank) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return {ErrorKind::kState, "gradferry failed on rank " + std::to_string(rank) + ": " +
                                   error.what() + "; restart the training"};
  }
}

}  // namespace gradferry
