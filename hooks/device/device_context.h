// State that the parts of a device's engine share: its two streams, memory and transport, and the
// findings of its kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "bucket_engine.h"
#include "device/device_plan.h"
#include "device/device_residuals.h"
#include "device/device_transport.h"
#include "engine_options.h"
#include "events.h"
#include "gradferry/device_library.h"
#include "protocol/layout.h"

namespace gradferry {

// A bucket in flight.
struct DeviceJob {
  const DevicePlan* plan;
  at::Tensor gradient;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10::IValue value;
  c10::Event ready;  // recorded after the gradient was written
  uint64_t step;
  bool begins_step;
  bool begins_momentum;
  bool begins_check;
  bool is_kept;  // answered from what was gathered before
  BucketEvent event;
  ProfilerContext profiler;
};

struct DeviceContext {
  // Creates two high-priority streams. `transport`: null if nothing is exchanged. The other
  // arguments outlive the context.
  DeviceContext(const EngineOptions& options, const Layout& layout, EngineLife& life,
                c10::Device device, std::unique_ptr<DeviceTransport> transport);

  // Allocates residuals and findings on F.
  void make_residuals();

  // Zeroed device memory, uint8, registered with both streams. Zeroes it on the current stream.
  at::Tensor make_tensor(uint64_t num_bytes) const;
  // The same, with pinned host memory if the transport needs it.
  DeviceBuffer make_buffer(uint64_t num_bytes) const;
  // Registers memory of another stream with both: once it is freed, nobody gets it before they are
  // done with what they hold by then.
  void use_on_both_streams(const at::Tensor& tensor) const;

  // Makes E or F wait for a collective. Throws Error(kPeer), which names phase, step and number.
  // `number` is that of the chunk, or of the bucket for a commit.
  void wait(DeviceJob& job, Transfer& transfer, Phase phase, uint64_t number,
            const c10::Stream& stream) const;

  Findings* findings_on_device() const {
    return static_cast<Findings*>(findings.mutable_data_ptr());
  }

  const EngineOptions& options;
  const Layout& layout;
  EngineLife& life;
  const c10::Device device;
  const c10::Stream encode_stream, finish_stream;  // E and F
  const std::unique_ptr<DeviceTransport> transport;

  // In device memory; neither exists before make_residuals().
  std::optional<DeviceResiduals> residuals;
  at::Tensor findings;
};

// Runs each kernel once, on one element, on F, and waits. The first launch of a kernel may load it,
// and loading may wait for the device, which must not happen in a backward pass.
void load_kernels(const DeviceContext& context);

}  // namespace gradferry
