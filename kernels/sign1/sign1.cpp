#include "kernels/sign1/sign1_layout.h"

namespace gradferry {

extern const CodecDescription sign1_description;
const CodecDescription sign1_description = {
    .name = "sign1",
    .summary = "signs, the mean magnitude per 128 elements (1.1 bits per element)",
    .lossy = true,
    .supports_float64 = false,
    .options = {},
    .parse = &parse_nothing,
    .payload_bytes = &GRADFERRY_KERNEL_NAMESPACE::sign1::payload_bytes,
};

}  // namespace gradferry
