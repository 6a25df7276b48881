// The engine: takes a bucket, and completes a Future once the averaged gradient is in it. This is
// the roof over the engine for the host (host/) and that for devices with streams (device/): what
// they are told, what they count, which step a bucket belongs to, how they fail, and what a
// checkpoint or an optimizer asks of them between steps. They differ in where gradients lie, and so
// in what does the work and who waits.
//
// In momentum mode a rank encodes (1 - m) * gradient + residual and adds m * decoded to the
// residual, which so carries the momentum beside what was withheld; what arrives in the bucket is
// the momentum. Every tile does so, also `exact` ones and those of a world of one. For `m` see
// momentum.h.
//
// After the first error an engine is dead: all ranks are told (peers.h), and every call gets that
// error.
#pragma once

#include <ATen/core/ivalue.h>

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "engine_life.h"
#include "engine_options.h"
#include "events.h"
#include "gradferry/error.h"
#include "layout.h"
#include "optimizer_steps.h"
#include "parameter_hashes.h"
#include "plan.h"
#include "step_counter.h"
#include "used_parameters.h"

namespace gradferry {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// Residuals as a checkpoint holds them: fp32 tensors of one dimension on the CPU.
struct SavedResiduals {
  at::Tensor worker;
  at::Tensor owner;
  float loss_scale;  // of the residuals; 0 when they are zero and have no units yet
};

struct EngineState {
  uint64_t steps;  // finished
  SavedResiduals residuals;
};

class BucketEngine {
 public:
  virtual ~BucketEngine() = default;
  BucketEngine(const BucketEngine&) = delete;
  BucketEngine& operator=(const BucketEngine&) = delete;

  // Averages `gradient` (dense, flat, contiguous, real, on the engine's device) of `parameters` (in
  // bucket order) in place over all ranks, then completes `future` with `value`. Called in bucket
  // order, from one thread at a time, without the GIL. `used`: by this rank, in this pass; empty:
  // all of them. What no rank used stays as it is. May block while earlier buckets are under way.
  void run(const std::vector<uint32_t>& parameters, UsedMap used, const at::Tensor& gradient,
           FuturePtr future, c10::IValue value);

  // Buckets that pass through belong to the step as well.
  void pass(const std::vector<uint32_t>& parameters);
  // Whether some of its promises need every bucket, so that none may pass through.
  bool needs_every_bucket() const { return options_.needs_every_bucket(); }
  // Ends the engine with `error`, which all ranks get to know: a bucket cannot be handed in, and
  // they would wait for it.
  void fail(const Error& error);

  EngineStats stats() const;
  uint64_t current_step() const;  // counted from 0
  // On a device, instants and times are the host's, of enqueueing.
  std::vector<BucketEvent> events() const { return log_.events(); }
  const Layout& layout() const { return layout_; }

  // These throw Error(kState) in the middle of a step.
  EngineState state();
  void load_state(const EngineState& state);
  // What the last optimizer step gave will not be used, whatever it is: takes its residuals back.
  // Only with exact_skip, and where it is known which passes that step has (optimizer_steps.h).
  void skip_step();
  // Worker residual of a parameter += factor * values, in the order of memory and unscaled.
  void add_to_worker_residual(uint32_t parameter, const at::Tensor& values, float factor);
  void scale_residuals(float factor);

  // An optimizer of the model has stepped.
  void note_optimizer_step() { optimizer_steps_.note_step(); }

 protected:
  // A bucket that is to be averaged.
  struct Bucket {
    const BucketPlan* plan;
    UsedMap used;
    at::Tensor gradient;
    FuturePtr future;
    c10::IValue value;
    uint64_t step;               // counted from 0
    bool begins_step;            // the first of its pass that is compressed
    bool begins_optimizer_step;  // with exact_skip: residuals are kept from here on
    bool begins_momentum;        // begin_momentum() has to come before
    BucketEvent event;
  };

  // `device`: where gradients lie. `exchanges`: false in a world of one, where nothing travels.
  BucketEngine(EngineOptions options, ParameterHashes hashes, c10::Device device, bool exchanges);

  // run(), once the bucket was accepted. What it throws ends the engine.
  virtual void average(Bucket bucket) = 0;
  // What this rank sent to others.
  virtual uint64_t sent_bytes() const = 0;

  // Residuals between steps, with life_.mutex held.
  virtual SavedResiduals save_residuals() = 0;
  virtual void load_residuals(const SavedResiduals& saved) = 0;
  // Back to what they were before the last optimizer step.
  virtual void take_back_step() = 0;
  virtual void change_worker_residual(const Parameter& parameter, const at::Tensor& values,
                                      float factor) = 0;
  virtual void multiply_residuals(float factor) = 0;
  // Multiplies the residuals of every parameter by its alpha, copies of them, too: what the warm-up
  // has withheld of gradients becomes a part of the momentum, which delivers it once in sum.
  virtual void begin_momentum() = 0;
  // By parameter: the gradient's share of what a step with momentum encodes.
  std::vector<float> alphas() const;

  // The engine is told to stop: its last handle is gone, or the process ends.
  void request_stop();
  // Gives the bucket its number and counts it as in flight.
  void count_in(Bucket& bucket);
  // Throws what autograd can show to Python.
  [[noreturn]] void raise(const Error& error) const;

  const EngineOptions options_;
  const c10::Device device_;
  const bool exchanges_;
  const Layout layout_;
  const ParameterHashes hashes_;
  const int process_id_;
  EventLog log_;

  EngineLife life_;

 private:
  void begin_run();
  Bucket accept(const std::vector<uint32_t>& parameters, UsedMap used, const at::Tensor& gradient,
                FuturePtr future, c10::IValue value);
  const BucketPlan& plan_for(const std::vector<uint32_t>& parameters, uint64_t step);
  void check_gradient(const BucketPlan& plan, const at::Tensor& gradient) const;
  void expect_between_steps(const char* what) const;
  bool turn_to_momentum(uint64_t finished_steps);
  void finish_warmup();

  std::array<std::map<std::vector<uint32_t>, BucketPlan>, 2> plans_;  // by warm-up; run() alone
  StepCounter steps_;                                                 // under life_.mutex
  bool momentum_began_ = false;  // begin_momentum() was called, or a state is from later
  OptimizerSteps optimizer_steps_;
};

}  // namespace gradferry
