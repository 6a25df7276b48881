// The engine of a device with streams. Two streams of high priority live as long as the engine:
//
//   E   encode, seal                          then the all-to-all, on the backend's own stream
//   F   check, reduce, seal                   then the all-gather, on the backend's own stream
//       check, undo, decode into the bucket, conclude -> Future
//
// Everything is enqueued in bucket order, by run() itself: nothing waits on the host and, once
// every bucket was seen, nothing is allocated. docs/streams.md draws what waits for what. With a
// transport that waits (StagedTransport) a thread of the engine's own does the same instead.
//
// An error on a device is known to the host only later. So a tile that cannot be trusted becomes
// NaN at once; every rank's first fault of step s travels to all at the first bucket of step s + 1,
// and there is looked at by the first bucket of step s + 2, on all ranks.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "bucket_engine.h"
#include "device_plan.h"
#include "device_residuals.h"
#include "device_transport.h"
#include "engine.h"
#include "step_counter.h"
#include "worker.h"

namespace gradferry {

// Chunks in flight: one is encoded, one reduced, one decoded.
inline constexpr size_t kDeviceSlots = 3;

class DeviceEngine final : public BucketEngine {
 public:
  // `transport` is null when nothing is to be exchanged: then gradients stay as they are. Allocates
  // everything and loads every kernel. The engine ends when the last copy of the returned pointer
  // is gone and nothing is in flight.
  static std::shared_ptr<DeviceEngine> start(EngineOptions options, c10::Device device,
                                             ParameterHashes hashes,
                                             std::unique_ptr<DeviceTransport> transport);

  void run(const std::vector<uint32_t>& parameters, UsedMap used, const at::Tensor& gradient,
           FuturePtr future, c10::IValue value) override;

  void pass(const std::vector<uint32_t>& parameters) override;
  bool needs_every_bucket() const override { return options_.needs_every_bucket(); }
  void fail(const Error& error) override { fail(std::make_exception_ptr(error), {}); }

  EngineStats stats() const override;
  uint64_t current_step() const override;
  // Instants and times are the host's, of enqueueing.
  std::vector<BucketEvent> events() const override { return log_.events(); }
  const Layout& layout() const override { return layout_; }

  // These wait for both streams. state() also throws what this rank's device found so far.
  EngineState state() override;
  void load_state(const EngineState& state) override;
  void scale_residuals(float factor) override;
  void skip_step() override;
  void note_optimizer_step() override { optimizer_steps_.note_step(); }
  void add_to_worker_residual(uint32_t parameter, const at::Tensor& values, float factor) override;

 private:
  // Buffers of one chunk in flight.
  struct DeviceSlot {
    DeviceBuffer scatter_send, scatter_receive, gather_send, gather_receive;
    c10::Event free;  // recorded on F when E may use the slot again
  };
  struct BucketJob {
    const DevicePlan* plan;
    at::Tensor gradient;
    FuturePtr future;
    c10::IValue value;
    c10::Event ready;  // the gradient is
    uint64_t step;
    uint64_t number;
    bool begins_step;
    bool begins_optimizer_step;
    BucketEvent event;
    ProfilerContext profiler;
  };
  struct ChunkJob {
    const DeviceChunk* chunk;
    DeviceSlot* slot;
    uint32_t slot_index;
    uint64_t number;
    Transfer scatter, gather;
  };

  DeviceEngine(EngineOptions options, c10::Device device, ParameterHashes hashes,
               std::unique_ptr<DeviceTransport> transport);
  // Set-up (device_setup.cpp).
  void allocate();
  void allocate_slots();
  DeviceBuffer make_buffer(uint64_t num_bytes) const;
  at::Tensor make_tensor(uint64_t num_bytes) const;
  void load_kernels() const;

  // The caller of run().
  void begin_run();
  BucketJob make_job(const std::vector<uint32_t>& parameters, const at::Tensor& gradient,
                     FuturePtr future, c10::IValue value);
  const DevicePlan& plan_for(const std::vector<uint32_t>& parameters, bool warmup);
  void check_gradient(const BucketPlan& plan, const at::Tensor& gradient) const;
  c10::Event take_event();
  void give_back(c10::Event event);
  void submit(BucketJob job);
  void finish_alone(BucketJob& job);
  void fail(const std::exception_ptr& failure, const FuturePtr& future);
  void expect_between_steps(const char* what) const;
  void use_on_both_streams(const at::Tensor& tensor) const;
  c10::StreamGuard behind_all() const;
  [[noreturn]] void raise(const Error& error) const;

  // The caller of run(), or the engine's thread with a transport that waits (device_chunks.cpp).
  void exchange(BucketJob& job);
  void send(BucketJob& job, ChunkJob& chunk);
  void wait(BucketJob& job, Transfer& transfer, Phase phase, uint64_t number);
  void check_messages(const BucketJob& job, const Envelope& expected, Table<Message> messages,
                      Table<ReceivedTile> tiles, const DeviceBuffer& received) const;
  void reduce(BucketJob& job, ChunkJob& chunk);
  void decode(BucketJob& job, ChunkJob& chunk);
  void decode_batch(const BucketJob& job, const ChunkJob& chunk, size_t index);
  void add_momentum_alone(BucketJob& job);
  uint32_t* in_vain(const BucketJob& job) const;
  void reserve_statuses(uint32_t num_tiles);
  // The same, at the beginning of a step (device_commits.cpp).
  void begin_step(BucketJob& job);
  void post_commit(BucketJob& job, uint64_t step);
  void read_last_commit();
  void check_parameters(BucketJob& job);
  void note_fault(const Fault& fault, uint64_t step);
  Envelope envelope(const BucketJob& job, const ChunkJob& chunk, Phase phase) const;
  TileBatch make_batch(const BucketJob& job, const DeviceStage& stage, const DeviceBatch& batch,
                       Stage codec_stage, const at::Tensor& statuses,
                       const c10::Stream& stream) const;
  Findings* findings() const;
  std::string parameter_of(uint64_t tile) const;

  const EngineOptions options_;
  const c10::Device device_;
  const Layout layout_;
  EventLog log_;
  const ParameterHashes hashes_;
  const int process_id_;
  const c10::Stream encode_stream_, finish_stream_;  // E and F
  std::unique_ptr<DeviceTransport> transport_;
  std::shared_ptr<Worker> worker_;  // with a transport that waits

  // Device memory.
  std::optional<DeviceResiduals> residuals_;  // none without a transport or momentum
  at::Tensor findings_;
  std::vector<DeviceSlot> slots_;
  at::Tensor encode_statuses_, finish_statuses_;
  at::Tensor sums_, verdicts_;  // uint64_t and uint32_t per message

  // The commit of the last step: one record per rank, then this rank's first non-finite tile.
  DeviceBuffer commit_send_, commit_receive_;
  at::Tensor commit_result_;  // pinned
  struct PostedCommit {
    uint64_t step, bucket;
  };
  std::optional<PostedCommit> commit_;
  std::optional<uint64_t> uncommitted_step_;
  c10::Event commit_done_;
  DeviceBuffer hashes_send_, hashes_receive_;  // with check_every

  std::array<std::map<std::vector<uint32_t>, DevicePlan>, 2> plans_;  // compressed, dense

  mutable std::mutex mutex_;
  std::vector<c10::Event> events_;  // not in use
  StepCounter steps_;
  OptimizerSteps optimizer_steps_;
  std::optional<Error> death_;
  EngineStats stats_;
};

}  // namespace gradferry
