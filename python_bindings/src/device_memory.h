// Memory of the bindings that run a device's kernels for measurements.
#pragma once

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "gradferry/device_library.h"
#include "gradferry/error.h"
#include "scalar_type.h"

namespace gradferry {

inline at::Tensor zeros_on(c10::Device device, uint64_t num_bytes) {
  return at::zeros({static_cast<int64_t>(num_bytes)},
                   at::TensorOptions().dtype(at::kByte).device(device));
}

// `data`: in host memory. Waits for the copy.
inline at::Tensor upload_to(c10::Device device, const void* data, uint64_t num_bytes) {
  const at::Tensor host =
      at::empty({static_cast<int64_t>(num_bytes)}, at::TensorOptions().dtype(at::kByte));
  std::memcpy(host.mutable_data_ptr(), data, num_bytes);
  return host.to(device);
}

inline Stream current_stream_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

// Throws Error(kConfig) unless `gradient` has what a kernel was told.
inline void expect_gradient(const at::Tensor& gradient, c10::Device device, ScalarType dtype,
                            uint64_t num_elements) {
  GRADFERRY_EXPECTS(gradient.device() == device && gradient.is_contiguous() &&
                        static_cast<uint64_t>(gradient.numel()) == num_elements &&
                        to_scalar_type(gradient.scalar_type()) == dtype,
                    kConfig,
                    "gradient must be contiguous, of the right dtype, on " + device.str() +
                        ", with " + std::to_string(num_elements) + " elements");
}

}  // namespace gradferry
