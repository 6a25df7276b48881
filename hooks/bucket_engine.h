// The engine: takes buckets, exchanges each with all ranks, and completes the bucket's Future. This
// is the base class of the engine for the host (host/) and of the engine for devices with streams
// (device/). It holds their options and counters, assigns buckets to steps, handles failures, and
// serves the calls of checkpoints and optimizers between steps. The engines differ in the memory of
// the bucket, and so in which threads or streams do the work and wait.
//
// The exchange of a bucket, as every rank does it:
//
//   for every chunk of the bucket's plan:
//     scatter  v = alpha * gradient + worker residual, by tile
//              send encode(v) to the tile's owner
//              worker residual = v - decode(encode(v))
//     reduce   u = sum over ranks of decode(what they sent) / world size + owner residual,
//              for the tiles that this rank owns
//              owner residual = u - decode(encode(u))
//     gather   send encode(u) to every rank
//     decode   gradient = decode(encode(u)), of every tile; worker residual += m * gradient
//   commit     send this rank's status to every rank; once all have come complete the Future, with
//              the error if one of them is one
//
// Without momentum m is 0 and alpha 1. Otherwise the residual carries the momentum besides the
// compression error, and the bucket receives the momentum; for m see momentum_behind(). Steps for
// whose codec a tile has no residual leave those lines out. The cases:
//
//   flat            all ranks are peers: as above
//   two levels      local scatter, before: send every sibling the gradients of its rail as they
//                   are; add up those of the own rail. Scatter, reduce and gather are between the
//                   peers of a rail, with nodes in the place of ranks. Forward, before decode: send
//                   every sibling what was gathered
//   reduce-scatter  reduce ends in gradient = u: no gather, no decode
//   all-gather      send encode(v) of own tiles to every rank, then decode: no scatter, no reduce;
//                   nothing is averaged, and the Future completes before the commit
//   world of one    nothing is sent. With momentum gradient = v with `exact`, as above. Without, v
//                   delivers the residual of a larger world, if a loaded state has one; the memory
//                   for it is allocated when it is loaded
//
// A chunk is encoded while earlier ones travel. Chunks of a bucket, and buckets, keep their order
// in every step of the exchange.
//
// After the first error an engine is dead: it informs all ranks (peers.h), and every call throws
// that error.
#pragma once

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "engine_options.h"
#include "events.h"
#include "gradferry/error.h"
#include "parameter_hashes.h"
#include "protocol/layout.h"
#include "protocol/messages.h"
#include "protocol/plan.h"
#include "protocol/workspace.h"
#include "threads.h"

namespace gradferry {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// A Future of `type` for the coming content of `tensor`. If `tensor` is on a device with streams,
// waiting for the Future makes the current stream wait.
FuturePtr make_future(c10::TypePtr type, const at::Tensor& tensor);

// Residuals as a checkpoint holds them: fp32 tensors of one dimension on the CPU. Both of no
// elements: there are none.
struct SavedResiduals {
  at::Tensor worker;
  at::Tensor owner;
  // With which gradients were multiplied; 0: zero residuals, no units yet.
  float loss_scale = 0.0F;
};

struct EngineState {
  uint64_t steps;  // finished
  SavedResiduals residuals;
};

// Finds the step of a bucket. DDP's bucket index and is_last are unreliable, so a step begins when
// a bucket has a parameter that was already seen in the current step, or after end().
class StepCounter {
 public:
  explicit StepCounter(size_t num_parameters) : seen_(num_parameters, false) {}

  // Counts a bucket that goes to the engine. Returns whether it is the first such one of its step.
  bool add(const std::vector<uint32_t>& parameters) {
    pass(parameters);
    current_.push_back(parameters);
    return current_.size() == 1;
  }
  // Counts a bucket that passes through.
  void pass(const std::vector<uint32_t>& parameters) {
    const bool begins = std::any_of(parameters.begin(), parameters.end(),
                                    [&](uint32_t index) { return seen_[index]; });
    if (begins) {
      restart(step_ + 1);
      finished_ = std::exchange(current_, {});
    }
    for (const uint32_t index : parameters) seen_[index] = true;
  }

  // The current step, if it has begun, gets no more buckets, although some parameters had none.
  void end() {
    if (num_seen() != 0) std::fill(seen_.begin(), seen_.end(), true);
  }

  uint64_t step() const { return step_; }
  // A step counts from its first bucket, also if that passes through.
  uint64_t finished_steps() const { return step_ + (num_seen() == 0 ? 0 : 1); }
  size_t num_parameters() const { return seen_.size(); }
  size_t num_seen() const {
    return static_cast<size_t>(std::count(seen_.begin(), seen_.end(), true));
  }
  // Parameters by bucket, of the last finished step.
  const std::vector<std::vector<uint32_t>>& finished() const { return finished_; }

  // The next bucket begins `step`.
  void resume(uint64_t step) {
    restart(step);
    current_.clear();
  }

 private:
  void restart(uint64_t step) {
    step_ = step;
    std::fill(seen_.begin(), seen_.end(), false);
  }

  uint64_t step_ = 0;
  std::vector<bool> seen_;  // by parameter
  std::vector<std::vector<uint32_t>> current_;
  std::vector<std::vector<uint32_t>> finished_;
};

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

// What the threads of an engine share. Everything is guarded by `mutex`, and so are queues of an
// engine. `changed` is notified of every change that a thread may wait for.
struct EngineLife {
  mutable std::mutex mutex;
  Signal changed;
  std::optional<Error> death;  // the error that every call throws; once set it never changes
  bool running = false;        // run() is active
  bool stop = false;           // of a host's engine: its last handle is gone, or the process ends
  EngineStats stats;
};

class BucketEngine {
 public:
  virtual ~BucketEngine() = default;
  BucketEngine(const BucketEngine&) = delete;
  BucketEngine& operator=(const BucketEngine&) = delete;

  // Exchanges `gradient` (dense, flat, contiguous, real, on the engine's device) of `parameters`
  // (in bucket order) in place, then completes `future` with `value`: with the average over all
  // ranks; in a reduce-scatter of the parameters that this rank owns, while the others stay as they
  // are; in an all-gather with the values of every parameter's owner. Called in
  // bucket order, from one thread at a time, without the GIL. `used`: which parameters this rank
  // used in this pass; empty: all of them. Parameters that no rank used do not change. May block
  // while earlier buckets are in flight. On a device the caller of a reduce-scatter keeps
  // `gradient` until the streams that wait for `future` are behind it: other Futures see to that
  // themselves, but torch's allocator then reuses the memory later. Throws Error(kConfig),
  // Error(kState) or what goes wrong here, which ends the engine. An error that ended it before is
  // that of `future`.
  void run(const std::vector<uint32_t>& parameters, UsedMap used, const at::Tensor& gradient,
           const FuturePtr& future, c10::IValue value);

  // The memory of a gradient may be freed before anybody has waited for its Future: on a device
  // nobody gets it before the engine is done with what is enqueued by then. torch's allocator holds
  // such memory back for a while, so call it for no other.
  virtual void expect_early_end(const at::Tensor& /*gradient*/) const {}
  // Counts a bucket that passes through as part of the step.
  void pass(const std::vector<uint32_t>& parameters);
  // The current step gets no more buckets, although some parameters had none.
  void end_step();
  // Whether an option needs every bucket, so that none may pass through.
  bool needs_every_bucket() const { return options_.needs_every_bucket(); }
  // Ends the engine with `error` and informs all ranks, which would otherwise wait for a bucket
  // that does not reach the engine. False when it had ended before.
  bool fail(const Error& error);
  // Throws the error that has ended the engine, if one has.
  void expect_alive() const;
  // Waits until nothing is in flight, with all commits, then does what expect_alive() does; on a
  // device also throws what it has found so far, for which the host waits. The Futures of an
  // all-gather on a host complete before the commits have come: call this where something follows
  // that all ranks must come to. Every rank waits for the same buckets, so that all of them throw.
  void settle();
  // With keep_gathered: puts into `gradient` what the last run() with these parameters received,
  // and sends nothing. False: there was none. On the thread of run(), and throws what that does.
  bool decode_kept(const std::vector<uint32_t>& parameters, const at::Tensor& gradient);

  EngineStats stats() const;
  uint64_t current_step() const;  // counted from 0
  // On a device, all times are those at which the host enqueues work.
  std::vector<BucketEvent> events() const { return log_.events(); }
  const Layout& layout() const { return layout_; }

  // These throw the death of the engine, and Error(kState) in the middle of a step. On a device
  // they wait for its streams, and throw what it has found by then.
  // `kept`: an earlier result of this engine that nobody uses any more. Where it fits, its memory
  // is overwritten and returned.
  EngineState state(const SavedResiduals& kept = {});
  void load_state(const EngineState& state);
  // worker residual of a parameter += factor * values. `values` (flat, on the engine's device) are
  // in memory order and not multiplied by a loss scale.
  void add_to_worker_residual(uint32_t parameter, const at::Tensor& values, float factor);
  void scale_residuals(float factor);

  // Compares these parameters from now on, in the order of the layout, as check_every says. On the
  // thread that calls run().
  void compare(const std::vector<at::Tensor>& parameters) { hashes_ = ParameterHashes(parameters); }

 protected:
  // A bucket to exchange.
  struct Bucket {
    const BucketPlan* plan;
    UsedMap used = {};
    at::Tensor gradient;
    FuturePtr future;
    c10::IValue value;
    uint64_t step = 0;             // counted from 0
    bool begins_step = false;      // the first of its pass that does not pass through
    bool begins_momentum = false;  // begin_momentum() must come first
    bool begins_check = false;     // of parameters, as check_every says
    BucketEvent event = {};
  };

  // `device`: where gradients are. `exchanges`: false in a world of one, where nothing is sent.
  // Throws Error(kConfig) if the collective cannot do what the options ask for.
  BucketEngine(EngineOptions options, ParameterHashes hashes, c10::Device device, bool exchanges);

  // The part of run() after the bucket was accepted. An exception ends the engine.
  virtual void exchange(Bucket bucket) = 0;
  // Throws what a device has found so far.
  virtual void expect_no_fault() {}
  // The part of decode_kept() after the bucket was found sound.
  virtual bool decode_kept(const BucketPlan& plan, const at::Tensor& gradient) = 0;
  // What this rank sent to ranks of other nodes, and to those of its own.
  virtual uint64_t sent_bytes() const = 0;
  virtual uint64_t local_bytes() const = 0;

  // Residuals between steps, with life_.mutex held.
  virtual SavedResiduals save_residuals(const SavedResiduals& kept) = 0;
  // Allocates memory for residuals, if there is none yet.
  virtual void make_residuals() = 0;
  virtual void load_residuals(const SavedResiduals& saved) = 0;
  // worker residual [offset ..] += factor * values
  virtual void change_worker_residual(uint64_t offset, const at::Tensor& values, float factor) = 0;
  virtual void multiply_residuals(float factor) = 0;
  // Multiplies the residuals of every parameter by its alpha: the residual of the
  // warm-up becomes a part of the momentum, which delivers it once in sum.
  virtual void begin_momentum() = 0;
  // By parameter: the gradient's share of what a step with momentum encodes.
  std::vector<float> alphas() const;
  // Whether the engine needs memory for residuals from the beginning.
  bool begins_with_residuals() const { return exchanges_ || options_.momentum != 0; }

  // Asks the engine to stop: its last handle is gone, or the process is ending.
  void request_stop();
  // Gives the bucket its number and counts it as in flight.
  void count_in(Bucket& bucket);
  // Throws `error` as an exception that autograd can pass on to Python.
  [[noreturn]] void raise(const Error& error) const;

  const EngineOptions options_;
  const c10::Device device_;
  const bool exchanges_;
  const Layout layout_;
  ParameterHashes hashes_;
  const int process_id_;
  EventLog log_;

  EngineLife life_;

 private:
  bool begin_run();
  Bucket accept(const std::vector<uint32_t>& parameters, UsedMap used, const at::Tensor& gradient,
                FuturePtr future, c10::IValue value);
  const BucketPlan& plan_for(const std::vector<uint32_t>& parameters, uint64_t step);
  void check_gradient(const BucketPlan& plan, const at::Tensor& gradient) const;
  void expect_between_steps(const char* what) const;
  bool turn_to_momentum(uint64_t finished_steps);
  void finish_warmup();

  std::array<std::map<std::vector<uint32_t>, BucketPlan>, 2> plans_;  // by warm-up; run() alone
  StepCounter steps_;                                                 // under life_.mutex
  uint64_t checks_begun_ = 0;                                         // under life_.mutex
  bool momentum_began_ = false;  // begin_momentum() was called, or a state is from later
};

}  // namespace gradferry
