// The engine for buckets in host memory. Two threads exchange a bucket (bucket_engine.h), chunk by
// chunk:
//
//   DDP's thread       take a slot -> encode -> post the scatter                   (scatter lane)
//   finishing thread   wait for a scatter -> reduce -> post the gather             (gather lane)
//                      wait for a gather -> decode into the bucket -> after the
//                      last chunk post the commit                                  (commit lane)
//                      wait for a commit -> complete the bucket's Future
//
// The finishing thread always does the oldest possible job, so that buckets complete in order. In a
// reduce-scatter its first line ends in the bucket, and there is no second one. In an all-gather
// DDP's thread posts the gather, and the Future completes before the commit has come: unless this
// rank has seen a fault, the bucket is right, and the commit can travel beside what follows.
//
// With several ranks per node DDP's thread posts the local scatter, which the finishing thread
// sums, encodes and scatters; what was gathered is forwarded before it is decoded. With four things
// to wait for, the oldest job can be one that a sibling has not come to: so whatever has come is
// done first, and only then is the oldest chunk waited for, which every rank has posted or will
// post without waiting for a newer one.
//
// The finishing thread keeps the engine alive and closes its lanes. It ends when it was asked to
// stop and nothing is in flight. With the native hook, neither thread takes the GIL.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bucket_engine.h"
#include "host/chunk_codecs.h"
#include "host/exchange.h"
#include "lane.h"
#include "residuals.h"

namespace gradferry {

// A copy of what the exchange may change for the parameters that this rank did not use: their
// elements in the bucket, and this rank's residuals. A bucket also holds the old .grad of unused
// parameters, and if no rank used a parameter, its .grad must not change. A rank knows this only
// from the commits of all ranks.
class UnusedCopy {
 public:
  UnusedCopy() = default;
  // `worker` and `owner` are the residuals; undefined: not copied.
  UnusedCopy(const Layout& layout, const std::vector<uint32_t>& parameters, const UsedMap& used,
             const at::Tensor& gradient, const at::Tensor& worker, const at::Tensor& owner);

  // Where no rank used a parameter: restores its elements and residuals, to the bit. `used`
  // combines all ranks.
  void put_back(const UsedMap& used) const;

 private:
  struct CopiedPart {
    size_t position;  // of the parameter in the bucket
    at::Tensor now;   // a view of what may change
    at::Tensor before;
  };
  std::vector<CopiedPart> parts_;
};

// A bucket in flight. After run() has returned, only the finishing thread uses it.
struct BucketJob {
  const BucketPlan* plan;
  at::Tensor gradient;
  FuturePtr future;
  c10::IValue value;
  uint64_t step;
  float loss_scale;  // 0: there is no GradScaler
  Fault fault;
  std::string local_error = {};                // of this rank, when fault is kLocalFailure
  std::vector<uint64_t> nonfinite_tiles = {};  // the lowest, or all if parameters may be unused
  UsedMap used;                                // by this rank
  UnusedCopy unused;
  BucketEvent event;  // each thread writes its own times; run() does so under the engine's mutex
  ProfilerContext profiler = {};
};

// One chunk, from encode to decode.
struct ChunkJob {
  std::shared_ptr<BucketJob> bucket;
  Chunk chunk;
  bool last;  // of its bucket
  std::string encode_error;
};

// Commits in flight: the finishing thread waits for one only if it has nothing else to do, or all
// are in use.
inline constexpr size_t kCommitSlots = 8;

// Bytes that the siblings of options.rank must share, for `memory` of an engine with the options.
// Throws what the engine would.
uint64_t shared_memory_bytes(const EngineOptions& options);

class HostEngine final : public BucketEngine {
 public:
  // `lanes`: all null when world_size is 1; `gather` is also null in a reduce-scatter, and
  // `scatter` in an all-gather. `memory`: shared_memory_bytes(options) that siblings share; null on
  // all siblings: they share none. `local_stage`: for people, through what siblings exchange, and
  // why. `hashes`: of the parameters, in the order of options.parameters. Allocates residuals and
  // workspace, then starts the finishing thread. The engine stops when the last copy of the
  // returned pointer is destroyed.
  static std::shared_ptr<HostEngine> start(EngineOptions options, ParameterHashes hashes,
                                           ExchangeLanes lanes,
                                           const std::shared_ptr<SharedMemory>& memory,
                                           std::string local_stage);

  const std::string& local_stage() const { return local_stage_; }

 private:
  struct Commit {
    std::shared_ptr<BucketJob> bucket;
    at::Tensor records;
    Pending work;
  };
  // What a chunk waits for, in order.
  enum PipelineStage : uint8_t { kLocalScatter, kScatter, kGather, kForward, kStages };
  using Chunks = std::deque<std::unique_ptr<ChunkJob>>;

  HostEngine(EngineOptions options, ParameterHashes hashes, ExchangeLanes lanes,
             const std::shared_ptr<SharedMemory>& memory, std::string local_stage);
  void make_workspace(SharedMemory* memory);

  // DDP's thread.
  void exchange(Bucket bucket) override;
  void begin_step(const Bucket& bucket);
  Fault check_parameters(uint64_t step);
  void send_chunk(const std::shared_ptr<BucketJob>& bucket, const ChunkPlan& plan, bool last,
                  at::Tensor kept);
  Slot* take_slot();
  void send_to_siblings(ChunkJob& job);
  void send_to_all(ChunkJob& job);
  void complete_alone(Bucket bucket);
  bool is_finite(const Bucket& bucket) const;
  void deliver_alone(const Bucket& bucket);
  UnusedCopy copy_unused(const Bucket& bucket, const UsedMap& used) const;
  at::Tensor kept_messages(const BucketPlan& plan);
  bool decode_kept(const BucketPlan& plan, const at::Tensor& gradient) override;

  // Either thread, with its own `codecs`.
  void send_to_peers(ChunkJob& job, ChunkCodecs& codecs, WireStatus status);
  ChunkCodecs::Work work_of(const ChunkJob& job) const;

  // The finishing thread. Its body returns false when it was asked to stop and nothing is in
  // flight. After the first error it informs all ranks, fails every bucket in flight, waits until
  // run() has ended, and returns true.
  bool work();
  bool do_oldest();
  bool take_handed_in();
  bool is_idle() const;
  std::optional<size_t> next_stage() const;
  std::optional<size_t> next_stage_of_peers() const;
  void advance(size_t stage);
  void sum(ChunkJob& job);
  void reduce(ChunkJob& job);
  uint64_t reduce_payloads(const ChunkJob& job);
  void forward(ChunkJob& job);
  void decode(ChunkJob& job);
  void decode_messages(const ChunkJob& job);
  void free_slot(const ChunkJob& job);
  Fault local_fault(const ChunkJob& job, Phase phase) const;
  void note_encode_error(ChunkJob& job, Phase phase) const;
  void post_commit(std::shared_ptr<BucketJob> bucket);
  void finish_commit();
  void put_back_unused(const Commit& commit) const;
  void complete(BucketJob& bucket);
  void deliver_early();
  void deliver(BucketJob& bucket);
  std::optional<Error> verdict_of_commits(int tries);
  void fail_all(const Error& error);
  std::vector<std::shared_ptr<BucketJob>> take_all_buckets();

  // Between steps.
  uint64_t sent_bytes() const override { return exchange_ ? exchange_->sent_bytes() : 0; }
  uint64_t local_bytes() const override { return exchange_ ? exchange_->local_bytes() : 0; }
  SavedResiduals save_residuals(const SavedResiduals& kept) override;
  void make_residuals() override;
  void load_residuals(const SavedResiduals& saved) override;
  void change_worker_residual(uint64_t offset, const at::Tensor& values, float factor) override;
  void multiply_residuals(float factor) override { residuals_.scale(factor); }
  void begin_momentum() override { residuals_.scale_by_parameter(layout_, alphas()); }
  bool changes_residuals(uint64_t step) const;
  void convert_residuals(float scale);
  float loss_scale() const;

  const std::string local_stage_;
  Residuals residuals_;
  bool has_residuals_ = false;
  float residual_scale_ = 0.0F;  // the loss scale they are in; 0 before the first step: none yet
  // These are empty when world_size is 1.
  std::optional<Exchange> exchange_;
  std::vector<Slot> slots_;
  std::vector<at::Tensor> commit_slots_;  // records of all ranks

  // DDP's thread only.
  ChunkCodecs sending_codecs_;
  bool check_is_due_ = false;  // of parameters, with the next bucket that has elements
  float pass_scale_ = 1.0F;    // the loss scale when the pass began; 1 without a GradScaler
  // With keep_gathered: by plan, what was gathered last, chunk by chunk.
  std::map<const BucketPlan*, at::Tensor> kept_;

  // The finishing thread only.
  ChunkCodecs finishing_codecs_;
  std::array<Chunks, kStages> waiting_;
  std::deque<Commit> commits_;

  // Shared by both threads, under life_.mutex.
  Chunks queue_;
  std::deque<Slot*> free_slots_;  // the one used last is the last
};

}  // namespace gradferry
