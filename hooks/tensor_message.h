// One tensor as one message, without an exchange: for parameter servers, tests and experiments.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gradferry {

// config_hash identifies the codec; layout_hash dtype and size (docs/wire_format.md, section 2).
struct TensorMessageOptions {
  std::string codec;
  uint64_t config_hash;
  uint64_t layout_hash;
};

// `tensor`: contiguous, not empty, float32, bfloat16, float16 or float64 (codecs that take it), on
// CPU. Returns uint8 of one dimension: header and worker payloads (docs/wire_format.md, section 2).
at::Tensor encode_tensor(const at::Tensor& tensor, const TensorMessageOptions& options,
                         uint64_t seed, uint64_t step);

// Writes into `out` (as above), which gives shape and dtype. Throws Error(kProtocol) for bytes that
// are not such a message of this codec, size and dtype. Seed and step come from the header.
void decode_tensor(const at::Tensor& message, const TensorMessageOptions& options,
                   const at::Tensor& out);

// Writes the sum of such messages of one codec, size and dtype, in their order and in fp32 (float64
// in fp64), times 1 / divisor and rounded once, into `out` (as above). At least one message; seeds
// and steps may differ. Errors as of decode_tensor, with the number of the message, from 0.
void accumulate_tensors(const std::vector<at::Tensor>& messages,
                        const TensorMessageOptions& options, uint32_t divisor,
                        const at::Tensor& out);

}  // namespace gradferry
