// A tensor's memory as bytes, wherever it lies.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace gradferry {

inline std::byte* bytes(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

}  // namespace gradferry
