#include "device/device_context.h"

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "protocol/faults.h"

namespace gradferry {
namespace {

c10::Stream new_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

}  // namespace

DeviceContext::DeviceContext(const EngineOptions& of, const Layout& its_layout,
                             EngineLife& its_life, c10::Device on,
                             std::unique_ptr<DeviceTransport> through)
    : options(of),
      layout(its_layout),
      life(its_life),
      device(on),
      encode_stream(new_stream(on)),
      finish_stream(new_stream(on)),
      transport(std::move(through)) {
  if (options.loss_scale.defined()) use_on_both_streams(options.loss_scale);
}

void DeviceContext::make_residuals() {
  const c10::StreamGuard guard(finish_stream);
  residuals.emplace(layout, device);
  for (const at::Tensor& tensor : residuals->tensors()) use_on_both_streams(tensor);
  findings = make_tensor(sizeof(Findings));
  life.stats.residual_bytes = residuals->num_bytes();
}

at::Tensor DeviceContext::make_tensor(uint64_t num_bytes) const {
  const auto kind = at::TensorOptions().dtype(at::kByte).device(device);
  at::Tensor tensor = at::zeros({static_cast<int64_t>(num_bytes)}, kind);
  use_on_both_streams(tensor);
  return tensor;
}

DeviceBuffer DeviceContext::make_buffer(uint64_t num_bytes) const {
  DeviceBuffer buffer{make_tensor(num_bytes), {}};
  if (transport && transport->waits()) {
    buffer.host = at::zeros({static_cast<int64_t>(num_bytes)},
                            at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  }
  return buffer;
}

void DeviceContext::use_on_both_streams(const at::Tensor& tensor) const {
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), encode_stream);
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), finish_stream);
}

void DeviceContext::wait(DeviceJob& job, Transfer& transfer, Phase phase, uint64_t number,
                         const c10::Stream& stream) const {
  const TimedRange timed("gradferry::network", job.event.network_ns);
  try {
    transport->wait(transfer, stream);
  } catch (const std::exception& error) {
    throw options.peers->cause(phase, job.step, number, error.what());
  }
}

}  // namespace gradferry
