#include "kernels/q8/q8_layout.h"

namespace gradferry {

extern const CodecDescription q8_description;
const CodecDescription q8_description = {
    .name = "q8",
    .summary = "8-bit integers, a scale per 128 elements (8.1 bits per element)",
    .lossy = true,
    .supports_float64 = false,
    .options = {},
    .parse = &parse_nothing,
    .payload_bytes = &GRADFERRY_KERNEL_NAMESPACE::q8::payload_bytes,
};

}  // namespace gradferry
