// What averages buckets: Engine for gradients on the CPU, DeviceEngine for a device with streams.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <exception>
#include <vector>

#include "events.h"
#include "gradferry/error.h"
#include "layout.h"
#include "used_parameters.h"

namespace gradferry {

struct EngineState;
struct EngineStats;

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

class BucketEngine {
 public:
  virtual ~BucketEngine() = default;

  // Averages `gradient` (dense, flat, contiguous, real, on the engine's device) of `parameters` (in
  // bucket order) in place over all ranks, then completes `future` with `value`. Called in bucket
  // order, from one thread at a time, without the GIL. `used`: by this rank, in this pass; empty:
  // all of them. What no rank used stays as it is.
  virtual void run(const std::vector<uint32_t>& parameters, UsedMap used,
                   const at::Tensor& gradient, FuturePtr future, c10::IValue value) = 0;

  // Buckets that pass through belong to the step as well.
  virtual void pass(const std::vector<uint32_t>& parameters) = 0;
  // Whether some of its promises need every bucket, so that none may pass through.
  virtual bool needs_every_bucket() const = 0;
  // Ends the engine with `error`, which all ranks get to know: a bucket cannot be handed in, and
  // they would wait for it.
  virtual void fail(const Error& error) = 0;

  virtual EngineStats stats() const = 0;
  virtual uint64_t current_step() const = 0;  // counted from 0
  virtual std::vector<BucketEvent> events() const = 0;
  virtual const Layout& layout() const = 0;

  // These throw Error(kState) in the middle of a step.
  virtual EngineState state() = 0;
  virtual void load_state(const EngineState& state) = 0;
  // What the last optimizer step gave will not be used, whatever it is: takes its residuals back.
  // Only with exact_skip, and where it is known which passes that step has (optimizer_steps.h).
  virtual void skip_step() = 0;
  // An optimizer of the model has stepped.
  virtual void note_optimizer_step() = 0;
  // Worker residual of a parameter += factor * values, in the order of memory and unscaled.
  virtual void add_to_worker_residual(uint32_t parameter, const at::Tensor& values,
                                      float factor) = 0;
  virtual void scale_residuals(float factor) = 0;
};

// What an exception means for the engine of `rank`: an Error as it is, anything else as a failure
// here.
Error describe_failure(const std::exception_ptr& failure, uint32_t rank);

// The error as every call of an engine gets it from then on, with what the last buckets went
// through.
Error finished(const Error& error, const EventLog& log, uint32_t rank);

// What a call means in another process than the one, `process_id`, that attached.
Error called_after_fork(int process_id);

}  // namespace gradferry
