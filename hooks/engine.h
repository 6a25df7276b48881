// The engine: takes a bucket, and completes a Future once the averaged gradient is in it.
//
//   autograd thread      encode chunk -> post its all-to-all           (scatter lane)
//   finishing thread     wait -> reduce -> post its all-gather         (gather lane)
//                        wait -> decode into the bucket -> commit      (commit lane) -> Future
//
// In momentum mode a rank encodes (1 - m) * gradient + residual and adds m * decoded to the
// residual, which so carries the momentum beside what was withheld; what arrives in the bucket is
// the momentum. Every tile does so, also `exact` ones and those of a world of one. For `m` see
// momentum.h.
//
// The finishing thread keeps the engine alive and closes its lanes. It ends when it was told to
// stop and nothing is in flight. On the native path neither thread takes the GIL. After the first
// error an engine is dead: all ranks are told (peers.h), every call gets that error, and its lanes
// are closed.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bucket_engine.h"
#include "events.h"
#include "exchange.h"
#include "gradferry/error.h"
#include "layout.h"
#include "momentum.h"
#include "optimizer_steps.h"
#include "parameter_hashes.h"
#include "peers.h"
#include "plan.h"
#include "residual_sample.h"
#include "residuals.h"
#include "used_parameters.h"

namespace gradferry {

// Chunks in flight. Four keep both lanes busy: one is encoded, one scattered, two gathered.
inline constexpr size_t kSlots = 4;
inline constexpr size_t kCommitSlots = 8;  // buckets whose commits are in flight
// All-gathers in flight: with two, one travels while the other is decoded.
inline constexpr size_t kGathersInFlight = 2;

// Turns an Error into an exception that torch's autograd can show to Python.
using ExceptionFactory = std::exception_ptr (*)(const Error&);

struct EngineOptions {
  std::vector<ParameterSpec> parameters;  // in the order of named_parameters()
  uint32_t rank;
  uint32_t world_size;
  uint64_t config_hash;
  uint64_t layout_hash;
  uint64_t seed;
  uint64_t warmup_steps;  // first steps, in which every tile travels as `exact`
  double momentum;        // 0: none; then every parameter has a worker residual
  bool raise_nonfinite;   // a decoded NaN or infinity is an error instead of being handed on
  bool exact_skip;        // a step with a NaN or infinity leaves the residuals as it found them
  at::Tensor loss_scale;  // one fp32 that a GradScaler writes after every step; undefined: 1
  uint64_t check_every;   // steps between comparisons of all ranks' parameters; 0: none
  uint32_t chunk_bytes;   // most payload bytes per owner and stage in one chunk
  bool find_unused_parameters;  // DDP's: commits tell which parameters a rank used
  ExceptionFactory make_exception;
  std::shared_ptr<Peers> peers;  // never null

  bool in_warmup(uint64_t step) const { return step < warmup_steps; }
  bool has_momentum(uint64_t step) const { return momentum != 0 && !in_warmup(step); }
  // The gradient's share of what a step encodes, and the decoded share that stays in the residual.
  float alpha(const ResolvedCodec& codec, uint64_t step) const {
    return in_warmup(step) ? 1.0F : static_cast<float>(1.0 - momentum_behind(codec, momentum));
  }
  float beta(const ResolvedCodec& codec) const {
    return static_cast<float>(momentum_behind(codec, momentum));
  }
  bool needs_every_bucket() const { return momentum != 0 || exact_skip; }
  bool check_is_due(uint64_t step) const {
    return check_every != 0 && step != 0 && step % check_every == 0;
  }
};

// Counters since attach. wire_bytes is what this rank sent to others, counted where it is posted.
struct EngineStats {
  uint64_t steps = 0;  // the current step, counted from 0
  uint64_t buckets = 0;
  uint64_t chunks = 0;
  uint64_t gradient_bytes = 0;
  uint64_t wire_bytes = 0;
  uint64_t residual_bytes = 0;
  uint64_t workspace_bytes = 0;
  uint64_t workspace_allocations = 0;
  uint64_t in_flight = 0;                           // buckets whose Future is not complete
  uint64_t host_waits = 0;                          // for a device that was a step behind
  std::vector<std::vector<uint32_t>> step_buckets;  // parameters by bucket, last finished step
  StepTimes times;
};

// What a checkpoint must hold; fp32 tensors of one dimension on CPU.
struct EngineState {
  uint64_t steps;  // finished
  at::Tensor worker_residual;
  at::Tensor owner_residual;
  float loss_scale;  // of the residuals; 0 when they are zero and have no units yet
};

class Engine final : public BucketEngine {
 public:
  // `backends`: three gloo backends of our own (scatter, gather, commit), or none when world_size
  // is 1. `hashes` of the parameters, in the order of options.parameters. Allocates residuals and
  // workspace, then starts the finishing thread. The engine stops when the last copy of the
  // returned pointer is gone.
  static std::shared_ptr<Engine> start(EngineOptions options, ParameterHashes hashes,
                                       std::vector<c10::intrusive_ptr<c10d::Backend>> backends);

  // Blocks while all slots are in use.
  void run(const std::vector<uint32_t>& parameters, UsedMap used, const at::Tensor& gradient,
           FuturePtr future, c10::IValue value) override;

  void pass(const std::vector<uint32_t>& parameters) override;
  bool needs_every_bucket() const override { return options_.needs_every_bucket(); }
  void fail(const Error& error) override;

  EngineStats stats() const override;
  uint64_t current_step() const override;
  std::vector<BucketEvent> events() const override { return log_.events(); }

  EngineState state() override;
  void load_state(const EngineState& state) override;
  void skip_step() override;
  void note_optimizer_step() override { optimizer_steps_.note_step(); }
  void add_to_worker_residual(uint32_t parameter, const at::Tensor& values, float factor) override;
  void scale_residuals(float factor) override;

  const Layout& layout() const override { return layout_; }

  // Tells every engine of the process to stop; waits at most `timeout` for what is in flight.
  static void shutdown_all(std::chrono::milliseconds timeout);

 private:
  // A bucket under way. After run() returned, only the finishing thread touches it.
  struct BucketJob {
    at::Tensor gradient;
    FuturePtr future;
    c10::IValue value;
    uint64_t number;
    uint64_t step;
    float gain;  // to the residuals; only this thread and the finishing one read it
    Fault fault;
    std::string local_error;                // of this rank, when fault is kLocalFailure
    std::vector<uint64_t> nonfinite_tiles;  // the first; all when some parameters may be unused
    const BucketPlan* plan;
    UsedMap used;  // by this rank
    UnusedCopy unused;
    // Each thread writes its own times; those of run() under mutex_.
    BucketEvent event;
    ProfilerContext profiler;
  };
  // A chunk under way, from encode to decode.
  struct ChunkJob {
    std::shared_ptr<BucketJob> bucket;
    Chunk chunk;
    bool last;  // of its bucket
    std::string encode_error;
  };
  struct Commit {
    std::shared_ptr<BucketJob> bucket;
    at::Tensor receive;
    Pending work;
  };

  Engine(EngineOptions options, ParameterHashes hashes,
         std::vector<c10::intrusive_ptr<c10d::Backend>> backends);
  void allocate();

  // Autograd thread (engine.cpp).
  void begin_run(const std::vector<uint32_t>& parameters);
  void note_bucket(const std::vector<uint32_t>& parameters);
  void begin_step();
  Fault check_parameters(uint64_t step);
  void send_bucket(const std::vector<uint32_t>& parameters, UsedMap used,
                   const at::Tensor& gradient, FuturePtr future, c10::IValue value);
  void keep_unused(BucketJob& bucket, UsedMap used);
  void check_gradient(const BucketPlan& plan, const at::Tensor& gradient) const;
  const BucketPlan& plan_for(const std::vector<uint32_t>& parameters, bool warmup);
  void send_chunk(const std::shared_ptr<BucketJob>& bucket, const ChunkPlan& plan, bool last);
  Slot* take_slot();
  void encode(const ChunkJob& job, std::vector<uint64_t>& checksums);
  void run_alone(const BucketPlan& plan, const std::shared_ptr<BucketJob>& bucket);
  void add_momentum_alone(const ChunkPlan& plan, const std::shared_ptr<BucketJob>& bucket);

  // Finishing thread (engine_finish.cpp).
  void finish();
  bool finish_one();
  void reduce_chunk(std::unique_ptr<ChunkJob> job);
  uint64_t reduce(const ChunkJob& job);
  uint32_t sender_of_corrupt(const ChunkJob& job);
  void decode_chunk(std::unique_ptr<ChunkJob> job);
  void decode(const ChunkJob& job);
  void decode_with_residual(const ChunkJob& job, size_t batch_index);
  void post_commit(std::shared_ptr<BucketJob> bucket);
  void finish_commit();
  void put_back_unused(const Commit& commit);
  void complete(BucketJob& bucket);
  Fault local_fault(const ChunkJob& job, Phase phase) const;
  void end(const std::optional<Error>& error);

  TileBatch make_batch(const PlannedBatch& planned, const ChunkJob& job, Stage stage,
                       std::vector<TileStatus>& status) const;
  float loss_scale() const;
  void expect_between_steps(const char* what) const;
  void settle();
  std::string parameter_of(uint64_t tile) const;
  void log_failed(std::vector<std::shared_ptr<BucketJob>> jobs);
  void request_stop();
  [[noreturn]] void raise(const Error& error) const;

  const EngineOptions options_;
  std::atomic<uint64_t> wire_bytes_{0};
  const Layout layout_;
  const ResidualSample sample_;
  EventLog log_;
  const ParameterHashes hashes_;
  std::vector<Lane> lanes_;
  std::optional<Exchange> exchange_;  // none when world_size is 1
  std::optional<at::ThreadLocalState> clean_;
  const int process_id_;

  Residuals residuals_;
  std::vector<Slot> slots_;
  std::vector<std::pair<at::Tensor, at::Tensor>> commit_slots_;  // send, receive

  // Autograd thread only.
  std::array<std::map<std::vector<uint32_t>, BucketPlan>, 2> plans_;  // by warm-up
  float gain_ = 1.0F;                                                 // of the current step
  bool check_is_due_ = false;                                         // in the current step
  std::vector<TileStatus> encode_status_;
  std::vector<uint64_t> checksums_;

  // Finishing thread only.
  std::deque<std::unique_ptr<ChunkJob>> gathers_;
  std::deque<Commit> commits_;
  std::vector<TileStatus> finish_status_;
  std::vector<const std::byte*> payloads_;

  // Shared, under mutex_.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<ChunkJob>> queue_;
  std::vector<Slot*> free_slots_;
  std::vector<bool> seen_in_step_;  // by parameter
  bool step_began_ = false;         // a bucket of the step reached the codecs
  OptimizerSteps optimizer_steps_;
  bool step_nonfinite_ = false;  // a result of the optimizer step is not finite
  std::vector<std::vector<uint32_t>> current_buckets_;
  std::optional<Error> death_;
  bool running_ = false;  // run() is active
  bool stop_ = false;
  bool ended_ = false;
  EngineStats stats_;
};

}  // namespace gradferry
