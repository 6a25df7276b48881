// bf16: numbers cast to bfloat16, two bytes each. docs/reference/wire_format.md, section "bf16".
#pragma once

#include "kernels/common/codec_parts.h"
#include "kernels/common/lane.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::bf16 {

GRADFERRY_LANE uint32_t payload_bytes(uint32_t num_elements, ScalarType, Stage,
                                      const CodecOptions&) {
  return round_up(2 * num_elements, kPayloadAlignment);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::bf16
