// What averages buckets: Engine for gradients on the CPU, DeviceEngine for a device with streams.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

namespace gradferry {

struct EngineState;
struct EngineStats;

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

class BucketEngine {
 public:
  virtual ~BucketEngine() = default;

  // Averages `gradient` (dense, flat, contiguous, real, on the engine's device) of `parameters` (in
  // bucket order) in place over all ranks, then completes `future` with `value`. Called in bucket
  // order, from one thread at a time, without the GIL.
  virtual void run(const std::vector<uint32_t>& parameters, const at::Tensor& gradient,
                   FuturePtr future, c10::IValue value) = 0;

  virtual EngineStats stats() const = 0;
  // Both throw Error(kState) while buckets are in flight.
  virtual EngineState state() const = 0;
  virtual void load_state(const EngineState& state) = 0;
};

}  // namespace gradferry
