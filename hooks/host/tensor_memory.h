// The memory that a Reducer reads gradients from and writes averages to.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradferry/reducer.h"

namespace gradferry {

// What is wrong where averages would be written to one place twice: elements of a tensor share
// memory, or two tensors do. Nothing where all is well. `tensors`: strided, on the CPU, or
// undefined; `named` has their names, in the same order.
std::optional<std::string> memory_shared(const std::vector<at::Tensor>& tensors,
                                         const Reducer::NamedTensors& named);

// A hash of 64 elements of a tensor on the CPU, or of all where there are fewer.
uint64_t sample_of(const at::Tensor& tensor);

}  // namespace gradferry
