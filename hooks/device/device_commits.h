// The beginning of a step on a device: ranks exchange the errors of earlier steps and compare their
// parameters.
//
// The host learns of an error on a device only later. So every rank sends its first fault of step s
// to all at the first bucket of step s + 1, with the loss scale of step s, and all ranks read these
// at the first bucket of step s + 2.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>

#include "device/device_context.h"
#include "parameter_hashes.h"
#include "protocol/faults.h"

namespace gradferry {

class DeviceCommits {
 public:
  // Device memory that it takes.
  static uint64_t workspace_bytes(const EngineOptions& options, const Layout& layout);

  // Allocates on F and adds it to the stats. Both arguments outlive this.
  DeviceCommits(DeviceContext& context, const ParameterHashes& hashes);

  // Call it at the first bucket of a step. Throws the error of an earlier step, the same on all
  // ranks, or Error(kDiverged).
  void begin_step(DeviceJob& job);
  // Notes that step `step` exchanges buckets, so that its findings must be sent later.
  void note_step(uint64_t step) { uncommitted_step_ = step; }
  // Drops unsent and unread commits: the next step does not follow the last one.
  void forget();

  // Waits for the device, and throws the error that it has found so far on this rank.
  void expect_no_fault() const;

 private:
  struct PostedCommit {
    uint64_t step, bucket;
  };

  void note_loss_scale();
  void read_last();
  void post(DeviceJob& job, uint64_t step);
  void check_parameters(DeviceJob& job);
  void note_fault(const Fault& fault, uint64_t step) const;
  // The error for what a rank has found in step `step`.
  Error error_of(const Verdict& verdict, uint64_t step) const;

  DeviceContext& context_;
  const EngineOptions& options_;
  const ParameterHashes& hashes_;
  // The commit records of all ranks, then this rank's first non-finite tile.
  DeviceBuffer send_, receive_;
  at::Tensor result_;  // pinned
  c10::Event done_;
  std::optional<PostedCommit> posted_;
  std::optional<uint64_t> uncommitted_step_;
  // With a GradScaler: the loss scales of the last pass and of the one before, whose commit F may
  // still write while E begins the last. One fp32 each.
  at::Tensor scale_, scale_before_;
  DeviceBuffer hashes_send_, hashes_receive_;  // with check_every
};

}  // namespace gradferry
