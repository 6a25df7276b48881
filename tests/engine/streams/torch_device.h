// The machine as torch sees it: a PrivateUse1 device with streams, events, memory and the few
// operators that matter here; every other operator runs on the CPU between two copies.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "machine.h"

namespace fake_device {

inline constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

// The machine's number of a stream.
uint32_t number_of(const c10::Stream& stream);
uint32_t current_stream();
// The same memory as a CPU tensor, for the machine's thread.
at::Tensor on_host(const at::Tensor& tensor);

// To be called once, before the device is used.
void register_device();

}  // namespace fake_device
