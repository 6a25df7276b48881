// The engine of a device with streams. Two streams of high priority live as long as the engine:
//
//   E   encode                                then the all-to-all, on the backend's own stream
//   F   check and reduce                      then the all-gather, on the backend's own stream
//       check and decode into the bucket -> Future
//
// In a reduce-scatter F checks and accumulates into the bucket instead.
//
// Where nodes have several ranks E also packs what siblings sum, and sums, and F forwards what was
// gathered.
//
// run() itself enqueues everything in bucket order: the host does not wait and, after every bucket
// was seen once, nothing is allocated. docs/design/streams.md shows what waits for what. With a
// transport that waits (StagedTransport), a thread of the engine does this work instead.
//
// The host learns of an error on a device only later (device_commits.h). So a tile that cannot be
// trusted becomes NaN at once.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "background_thread.h"
#include "bucket_engine.h"
#include "device/device_commits.h"
#include "device/device_context.h"
#include "device/device_exchange.h"

namespace gradferry {

class DeviceEngine final : public BucketEngine {
 public:
  // `transport` is null if nothing is exchanged. Allocates everything and loads every kernel. The
  // engine ends when the last copy of the returned pointer is destroyed and nothing is in flight.
  static std::shared_ptr<DeviceEngine> start(EngineOptions options, c10::Device device,
                                             ParameterHashes hashes,
                                             std::unique_ptr<DeviceTransport> transport);

  ~DeviceEngine() override;

  void expect_early_end(const at::Tensor& gradient) const override {
    context_.use_on_both_streams(gradient);
  }

 private:
  DeviceEngine(EngineOptions options, c10::Device device, ParameterHashes hashes,
               std::unique_ptr<DeviceTransport> transport);

  void exchange(Bucket bucket) override;
  void expect_no_fault() override;
  bool decode_kept(const BucketPlan& plan, const at::Tensor& gradient) override;
  uint64_t sent_bytes() const override;
  uint64_t local_bytes() const override;
  SavedResiduals save_residuals(const SavedResiduals& kept) override;
  void make_residuals() override;
  void load_residuals(const SavedResiduals& saved) override;
  void change_worker_residual(uint64_t offset, const at::Tensor& values, float factor) override;
  void multiply_residuals(float factor) override;
  void begin_momentum() override;

  void expect_no_capture() const;
  DeviceJob make_job(Bucket bucket);
  const DevicePlan& plan_for(const BucketPlan& plan, uint64_t step);
  void begin_step(const DeviceJob& job);
  void exchange(DeviceJob& job);
  void exchange_later(DeviceJob job);
  void complete(DeviceJob& job) const;
  void complete_alone(DeviceJob job);
  c10::Event take_event();
  void give_back(c10::Event event);
  c10::StreamGuard behind_all() const;

  DeviceContext context_;
  // Empty without residuals; commits_ exists only if something is sent.
  std::optional<DeviceExchange> exchange_;
  std::optional<DeviceCommits> commits_;
  std::shared_ptr<Worker> worker_;  // with a transport that waits

  c10::Event last_pass_{device_.type()};  // recorded on F where a pass begins

  std::map<const BucketPlan*, DevicePlan> plans_;  // DDP's thread only
  std::vector<c10::Event> events_;                 // not in use; under life_.mutex
};

}  // namespace gradferry
