// The engine for buckets in host memory. Which thread does a step of the exchange
// (bucket_engine.h), and on which lane it goes:
//
//   DDP's thread         scatter: encode, post                         (scatter lane)
//   finishing thread     wait -> reduce -> gather: post                (gather lane)
//                        wait -> decode -> commit                      (commit lane) -> Future
//
// With two levels DDP's thread posts the local scatter (local scatter lane) and the finishing
// thread adds up and encodes; what was gathered goes through the forward lane before it is decoded.
// In an all-gather DDP's thread posts the gather.
//
// The finishing thread keeps the engine alive and closes its lanes. It ends when it was asked to
// stop and nothing is in flight. With the native hook, neither thread takes the GIL.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bucket_engine.h"
#include "host/bucket_pipeline.h"
#include "host/chunk_codecs.h"
#include "host/exchange.h"
#include "host/host_residuals.h"
#include "host/jobs.h"
#include "host/residual_sample.h"
#include "lane.h"

namespace gradferry {

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
  HostEngine(EngineOptions options, ParameterHashes hashes, ExchangeLanes lanes,
             const std::shared_ptr<SharedMemory>& memory, std::string local_stage);

  void exchange(Bucket bucket) override;
  bool decode_kept(const BucketPlan& plan, const at::Tensor& gradient) override;
  uint64_t sent_bytes() const override { return exchange_ ? exchange_->sent_bytes() : 0; }
  uint64_t local_bytes() const override { return exchange_ ? exchange_->local_bytes() : 0; }
  SavedResiduals save_residuals(const SavedResiduals& kept) override;
  void make_residuals() override;
  void load_residuals(const SavedResiduals& saved) override;
  void change_worker_residual(uint64_t offset, const at::Tensor& values, float factor) override;
  void multiply_residuals(float factor) override;
  void begin_momentum() override;

  void begin_step(const Bucket& bucket);
  Fault check_parameters(uint64_t step);
  void complete_alone(Bucket bucket);
  UnusedCopy copy_unused(const Bucket& bucket, const UsedMap& used) const;
  bool changes_residuals(uint64_t step) const;
  bool is_finite(const Bucket& bucket) const;
  void deliver_alone(const Bucket& bucket);
  void send_chunk(const std::shared_ptr<BucketJob>& bucket, const ChunkPlan& plan, bool last,
                  at::Tensor kept);
  void send_to_siblings(ChunkJob& job);
  at::Tensor kept_messages(const BucketPlan& plan);
  float loss_scale() const;

  const std::string local_stage_;
  const ResidualSample sample_;
  HostResiduals residuals_;
  // Empty when world_size is 1.
  std::optional<Exchange> exchange_;
  std::optional<BucketPipeline> pipeline_;

  // DDP's thread only.
  ChunkCodecs codecs_;
  bool check_is_due_ = false;  // of parameters, with the next bucket that has elements
  float pass_scale_ = 1.0F;    // the loss scale when the pass began; 1 without a GradScaler
  // With keep_gathered: by plan, what was gathered last, chunk by chunk.
  std::map<const BucketPlan*, at::Tensor> kept_;
};

}  // namespace gradferry
