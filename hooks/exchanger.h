// Calls of an engine without DDP's hook: a caller hands over buckets and waits for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "background_thread.h"
#include "bucket_engine.h"

namespace gradferry {

// The buckets of one call, on their way.
class PendingExchange {
 public:
  // `engine`: which uses `on_device` until the Futures are waited for.
  PendingExchange(std::shared_ptr<BucketEngine> engine, std::vector<at::Tensor> on_device,
                  std::vector<FuturePtr> futures);
  // Without wait() the buckets can be freed too early.
  ~PendingExchange();
  PendingExchange(PendingExchange&&) = default;
  PendingExchange& operator=(PendingExchange&&) = delete;

  // Returns when every bucket holds its result; on a device, when the current stream waits for
  // that. Throws the first error.
  void wait();
  // Whether wait() would return or throw at once. On a device: whether all was enqueued.
  bool is_completed() const;

 private:
  std::shared_ptr<BucketEngine> engine_;
  std::vector<at::Tensor> on_device_;  // buckets there, until they are waited for
  std::vector<FuturePtr> futures_;  // by bucket; then of the thread that handed them over, if any
};

class Exchanger {
 public:
  struct HandedBucket {
    std::vector<uint32_t> parameters;
    at::Tensor values;  // gradients, or parameters to gather: as for BucketEngine::run()
  };

  explicit Exchanger(std::shared_ptr<BucketEngine> engine);
  // Buckets of earlier calls are still exchanged.
  ~Exchanger();
  Exchanger(const Exchanger&) = delete;
  Exchanger& operator=(const Exchanger&) = delete;

  // Exchanges the buckets in place, in their order, which is that of all ranks. From one thread at
  // a time, without the GIL. `in_background`: run() of the engine encodes and waits for chunks in
  // flight, on a slow network nearly until the end; a thread of this object does that. Else throws
  // what run() throws.
  PendingExchange start(std::vector<HandedBucket> buckets, bool in_background);

 private:
  const std::shared_ptr<BucketEngine> engine_;
  const int process_id_;
  std::shared_ptr<Worker> worker_;  // started by the first call in the background
};

}  // namespace gradferry
