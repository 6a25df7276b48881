// What the host's engine has under way: buckets, and chunks of them.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "events.h"
#include "faults.h"
#include "host/exchange.h"
#include "plan.h"
#include "used_parameters.h"

namespace gradferry {

// Once run() has returned, only the finishing thread touches it.
struct BucketJob {
  const BucketPlan* plan;
  at::Tensor gradient;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10::IValue value;
  uint64_t step;
  float gain;  // to the residuals
  Fault fault;
  std::string local_error;                // of this rank, when fault is kLocalFailure
  std::vector<uint64_t> nonfinite_tiles;  // the first; all when some parameters may be unused
  UsedMap used;                           // by this rank
  UnusedCopy unused;
  BucketEvent event;  // each thread writes its own times; those of run() under the engine's mutex
  ProfilerContext profiler;
};

// From encode to decode.
struct ChunkJob {
  std::shared_ptr<BucketJob> bucket;
  Chunk chunk;
  bool last;  // of its bucket
  std::string encode_error;
};

}  // namespace gradferry
