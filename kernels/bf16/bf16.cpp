#include "kernels/bf16/bf16_layout.h"

namespace gradferry {

extern const CodecDescription bf16_description;
const CodecDescription bf16_description = {
    .name = "bf16",
    .summary = "cast to bfloat16, summed in fp32 (16 bits per element)",
    .lossy = true,
    .supports_float64 = false,
    .options = {},
    .parse = &parse_nothing,
    .payload_bytes = &GRADFERRY_KERNEL_NAMESPACE::bf16::payload_bytes,
};

}  // namespace gradferry
