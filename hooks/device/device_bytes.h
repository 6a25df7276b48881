// Typed pointers into device memory, for kernels; the host must not dereference them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

#include "device/device_transport.h"
#include "gradferry/codec.h"
#include "tensor_bytes.h"

namespace gradferry {

inline std::byte* bytes(const DeviceBuffer& buffer) { return bytes(buffer.device); }
inline uint32_t* words(const at::Tensor& tensor) {
  return static_cast<uint32_t*>(tensor.mutable_data_ptr());
}

}  // namespace gradferry
