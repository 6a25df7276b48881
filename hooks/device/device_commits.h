// How a step begins on a device: what the last ones found travels to all ranks, and parameters are
// compared.
//
// An error on a device is known to the host only later. So every rank's first fault of step s
// travels to all at the first bucket of step s + 1, and there is looked at by the first bucket of
// step s + 2, on all ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>

#include "device/device_context.h"
#include "faults.h"
#include "parameter_hashes.h"

namespace gradferry {

class DeviceCommits {
 public:
  // Allocates on F, and counts it. Both outlive the commits.
  DeviceCommits(DeviceContext& context, const ParameterHashes& hashes);

  // At the first bucket of a step. Throws what an earlier step found, the same on all ranks, or
  // Error(kDiverged).
  void begin_step(DeviceJob& job);
  // Step `step` has buckets that are exchanged, so that its findings will have to be told.
  void note_step(uint64_t step) { uncommitted_step_ = step; }
  // The steps before are not those that the next one follows.
  void forget();

  // Throws what this rank's device has found so far. Waits for it.
  void expect_no_fault() const;

 private:
  struct PostedCommit {
    uint64_t step, bucket;
  };

  void read_last();
  void post(DeviceJob& job, uint64_t step);
  void check_parameters(DeviceJob& job);
  void note_fault(const Fault& fault, uint64_t step) const;

  DeviceContext& context_;
  const EngineOptions& options_;
  const ParameterHashes& hashes_;
  // One record per rank, then this rank's first non-finite tile.
  DeviceBuffer send_, receive_;
  at::Tensor result_;  // pinned
  c10::Event done_;
  std::optional<PostedCommit> posted_;
  std::optional<uint64_t> uncommitted_step_;
  DeviceBuffer hashes_send_, hashes_receive_;  // with check_every
};

}  // namespace gradferry
