// q4: where the codes, scales and exponents of a tile lie. docs/reference/wire_format.md, section
// "q4".
#pragma once

#include "kernels/common/codec_parts.h"
#include "kernels/common/e2m1.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q4 {

using namespace e2m1;  // q4 is nothing but E2M1 groups, one after the other

GRADFERRY_LANE uint32_t num_blocks(uint32_t num_elements) { return (num_elements + 31) / 32; }
GRADFERRY_LANE uint32_t num_groups(uint32_t num_elements) { return (num_elements + 1023) / 1024; }
GRADFERRY_LANE uint32_t scales_offset(uint32_t num_elements) {
  return kHalfBlock * num_blocks(num_elements);
}
GRADFERRY_LANE uint32_t exponents_offset(uint32_t num_elements) {
  return (kHalfBlock + 1) * num_blocks(num_elements);
}
GRADFERRY_LANE uint32_t payload_bytes(uint32_t num_elements, ScalarType, Stage,
                                      const CodecOptions&) {
  return round_up(exponents_offset(num_elements) + num_groups(num_elements), kPayloadAlignment);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q4
