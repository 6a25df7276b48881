// Calls of an engine without DDP: a caller hands over the buckets of a step and waits for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bucket_engine.h"
#include "worker.h"

namespace gradferry {

// The buckets of one call, on their way.
class PendingExchange {
 public:
  // `engine`: which uses the gradients until the Futures are waited for.
  PendingExchange(std::shared_ptr<BucketEngine> engine, std::vector<at::Tensor> gradients,
                  std::vector<FuturePtr> futures);
  // Without wait() the gradients can be freed too early.
  ~PendingExchange();
  PendingExchange(PendingExchange&&) = default;
  PendingExchange& operator=(PendingExchange&&) = delete;

  // Returns when every gradient holds its average; on a device, when the current stream waits for
  // that. Throws the first error.
  void wait();
  // Whether wait() would return or throw at once. On a device: whether all was enqueued.
  bool is_completed() const;

 private:
  std::shared_ptr<BucketEngine> engine_;
  std::vector<at::Tensor> gradients_;  // on a device, until they are waited for
  std::vector<FuturePtr> futures_;  // by bucket; then of the thread that handed them over, if any
};

class Exchanger {
 public:
  struct HandedBucket {
    std::vector<uint32_t> parameters;
    at::Tensor gradient;  // as for BucketEngine::run()
  };

  explicit Exchanger(std::shared_ptr<BucketEngine> engine);
  // Buckets of earlier calls are still averaged.
  ~Exchanger();
  Exchanger(const Exchanger&) = delete;
  Exchanger& operator=(const Exchanger&) = delete;

  // Averages the buckets in place over all ranks, in their order, which is that of all ranks; in a
  // reduce-scatter what this rank owns of them. From one thread at a time, without the GIL.
  // `in_background`: run() of the engine encodes and waits for chunks in flight, on a slow network
  // nearly until the end; a thread of this object does that. Else throws what run() throws.
  PendingExchange start(std::vector<HandedBucket> buckets, bool in_background);

 private:
  const std::shared_ptr<BucketEngine> engine_;
  const int process_id_;
  std::shared_ptr<Worker> worker_;  // started by the first call in the background
};

}  // namespace gradferry
