// State that the threads of an engine share: whether it still runs, and its counters.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "events.h"
#include "gradferry/error.h"
#include "protocol/workspace.h"
#include "threads.h"

namespace gradferry {

// Counters since attach. BucketEngine::stats() alone fills in `steps`, `wire_bytes` and
// `local_bytes` (what this rank sent to other nodes and within its own, counted where it is posted;
// in the flat exchange every rank is a node), `step_buckets` and `times`.
struct EngineStats {
  uint64_t steps = 0;  // with the current one
  uint64_t buckets = 0;
  uint64_t chunks = 0;
  uint64_t gradient_bytes = 0;
  uint64_t wire_bytes = 0;
  uint64_t local_bytes = 0;
  uint64_t residual_bytes = 0;
  uint64_t workspace_bytes = 0;
  Workspace workspace;  // the part of it that chunks use
  uint64_t workspace_allocations = 0;
  uint64_t in_flight = 0;   // buckets whose Future is not complete, or whose commits have not come
  uint64_t host_waits = 0;  // waits for a device that was a step behind
  std::vector<std::vector<uint32_t>> step_buckets;  // parameters by bucket, last finished step
  StepTimes times;
};

// Everything is guarded by `mutex`. `changed` is notified of every change that a thread may wait
// for, including queues of other objects that use the same mutex.
struct EngineLife {
  mutable std::mutex mutex;
  Signal changed;
  std::optional<Error> death;  // the error that every call throws; once set it never changes
  bool running = false;        // run() is active
  bool stop = false;           // of a host's engine: its last handle is gone, or the process ends
  EngineStats stats;
};

}  // namespace gradferry
