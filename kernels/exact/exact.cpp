#include "kernels/common/codec_parts.h"

namespace gradferry {

extern const CodecDescription exact_description;
const CodecDescription exact_description = {
    .name = "exact",
    .summary = "the gradient's own dtype, summed in rank order (64, 32 or 16 bits per element)",
    .lossy = false,
    .supports_float64 = true,
    .options = {},
    .parse = &parse_nothing,
    .payload_bytes =
        [](uint32_t num_elements, ScalarType dtype, Stage, const CodecOptions&) {
          return round_up(num_elements * item_bytes(dtype), kPayloadAlignment);
        },
};

}  // namespace gradferry
