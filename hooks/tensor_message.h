// Encodes one tensor as one message, without an exchange, for tests, tools and experiments.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

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

}  // namespace gradferry
