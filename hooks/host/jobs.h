// Buckets that the host's engine has in flight, and their chunks.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "events.h"
#include "host/exchange.h"
#include "protocol/faults.h"
#include "protocol/plan.h"
#include "used_parameters.h"

namespace gradferry {

// After run() has returned, only the finishing thread uses it.
struct BucketJob {
  const BucketPlan* plan;
  at::Tensor gradient;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10::IValue value;
  uint64_t step;
  float loss_scale;  // 0: there is no GradScaler
  Fault fault;
  std::string local_error;                // of this rank, when fault is kLocalFailure
  std::vector<uint64_t> nonfinite_tiles;  // only the lowest, or all if parameters may be unused
  UsedMap used;                           // by this rank
  UnusedCopy unused;
  BucketEvent event;  // each thread writes its own times; run() does so under the engine's mutex
  ProfilerContext profiler;
};

// One chunk, from encode to decode.
struct ChunkJob {
  std::shared_ptr<BucketJob> bucket;
  Chunk chunk;
  bool last;  // of its bucket
  std::string encode_error;
};

}  // namespace gradferry
