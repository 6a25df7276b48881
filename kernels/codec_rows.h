// The rows of the codec table, one per codec: for the CPU's functions and the kernels of devices.
#pragma once

#include "kernels/common/codec_parts.h"

// A codec's description comes from kernels/<codec>/<codec>.cpp, its functions from
// kernels/<codec>/<codec>_cpu.cpp, once per instruction set, and its kernels for chunks from
// kernels/<codec>/<codec>_cuda.cu.
#define GRADFERRY_FOR_EACH_CODEC(row) \
  row(exact) row(bf16) row(q4) row(q8) row(sign1) row(rht) row(topk)

namespace gradferry {

#define GRADFERRY_DECLARE(codec) extern const CodecDescription codec##_description;
GRADFERRY_FOR_EACH_CODEC(GRADFERRY_DECLARE)
#undef GRADFERRY_DECLARE

// Which row is whose.
#define GRADFERRY_NAME(codec) codec,
enum class CodecRow : uint32_t { GRADFERRY_FOR_EACH_CODEC(GRADFERRY_NAME) kEnd };
#undef GRADFERRY_NAME

inline Codec make_row(const CodecDescription& description, const CodecFunctions& functions) {
  return {.name = description.name,
          .summary = description.summary,
          .lossy = description.lossy,
          .supports_float64 = description.supports_float64,
          .seeded = description.seeded,
          .options = description.options,
          .parse = description.parse,
          .payload_bytes = description.payload_bytes,
          .sent_share = description.sent_share,
          .encode = functions.encode,
          .decode = functions.decode,
          .reduce = functions.reduce,
          .accumulate = functions.accumulate,
          .undo = functions.undo};
}

}  // namespace gradferry
