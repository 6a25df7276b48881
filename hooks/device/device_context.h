// What the parts of a device's engine work with: its two streams, its memory, its transport, and
// what its kernels found.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "device/device_plan.h"
#include "device/device_residuals.h"
#include "device/device_transport.h"
#include "engine_life.h"
#include "engine_options.h"
#include "events.h"
#include "gradferry/device_library.h"
#include "layout.h"

namespace gradferry {

// A bucket under way.
struct DeviceJob {
  const DevicePlan* plan;
  at::Tensor gradient;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10::IValue value;
  c10::Event ready;  // the gradient is
  uint64_t step;
  bool begins_step;
  bool begins_optimizer_step;
  bool begins_momentum;
  BucketEvent event;
  ProfilerContext profiler;
};

struct DeviceContext {
  // Two streams of high priority. `transport`: null when nothing is to be exchanged. The rest is
  // the engine's and outlives the context.
  DeviceContext(const EngineOptions& options, const Layout& layout, EngineLife& life,
                c10::Device device, std::unique_ptr<DeviceTransport> transport);

  // Device memory of zeros that both streams use for as long as it lives. Work of the current
  // stream.
  at::Tensor make_tensor(uint64_t num_bytes) const;
  // The same, with a host side where the transport wants one.
  DeviceBuffer make_buffer(uint64_t num_bytes) const;
  void use_on_both_streams(const at::Tensor& tensor) const;

  // Has F wait for a collective. Throws Error(kPeer), saying where. `number` is the chunk's, of a
  // commit the bucket's.
  void wait(DeviceJob& job, Transfer& transfer, Phase phase, uint64_t number) const;

  Findings* findings_on_device() const {
    return static_cast<Findings*>(findings.mutable_data_ptr());
  }
  // Where kernels note that a result of the step is not finite; null without exact_skip and in
  // steps that touch no residual.
  uint32_t* step_nonfinite(uint64_t step) const {
    return options.touches_residuals(step) ? residuals->step_nonfinite() : nullptr;
  }

  const EngineOptions& options;
  const Layout& layout;
  EngineLife& life;
  const c10::Device device;
  const c10::Stream encode_stream, finish_stream;  // E and F
  const std::unique_ptr<DeviceTransport> transport;

  // Device memory; none without a transport or momentum.
  std::optional<DeviceResiduals> residuals;
  at::Tensor findings;
};

}  // namespace gradferry
