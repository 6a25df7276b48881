#include "kernels/q4/q4_layout.h"

namespace gradferry {

extern const CodecDescription q4_description;
const CodecDescription q4_description = {
    .name = "q4",
    .summary = "4-bit floats (E2M1), a scale per 32 elements (4.3 bits per element)",
    .lossy = true,
    .supports_float64 = false,
    .options = {},
    .parse = &parse_nothing,
    .payload_bytes = &GRADFERRY_KERNEL_NAMESPACE::q4::payload_bytes,
};

}  // namespace gradferry
