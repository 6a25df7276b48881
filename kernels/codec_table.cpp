// The table of codecs: one row each. Everything that lists, parses, tests or times codecs reads it.
#include <array>
#include <string>

#include "gradferry/codec.h"
#include "gradferry/error.h"
#include "kernels/codec_rows.h"

namespace gradferry {

#define GRADFERRY_DECLARE(codec) extern const CodecFunctions codec##_functions;
namespace scalar {
GRADFERRY_FOR_EACH_CODEC(GRADFERRY_DECLARE)
}
#if defined(GRADFERRY_X86_KERNELS)
namespace avx2 {
GRADFERRY_FOR_EACH_CODEC(GRADFERRY_DECLARE)
}
namespace avx512 {
GRADFERRY_FOR_EACH_CODEC(GRADFERRY_DECLARE)
}
#endif
#undef GRADFERRY_DECLARE

namespace {

// What set_cuda_codecs() was given.
std::span<const Codec> cuda_rows;

#define GRADFERRY_TABLE(isa)                                                         \
  [] {                                                                               \
    static const auto table = std::to_array<Codec>({GRADFERRY_FOR_EACH_CODEC(isa)}); \
    return std::span<const Codec>(table);                                            \
  }()
#define GRADFERRY_SCALAR_ROW(codec) make_row(codec##_description, scalar::codec##_functions),
#define GRADFERRY_AVX2_ROW(codec) make_row(codec##_description, avx2::codec##_functions),
#define GRADFERRY_AVX512_ROW(codec) make_row(codec##_description, avx512::codec##_functions),

}  // namespace

std::span<const Codec> cpu_codecs(Isa isa) {
  for (const Isa available : available_isas()) {
    if (available != isa) continue;
    switch (isa) {
#if defined(GRADFERRY_X86_KERNELS)
      case Isa::kAvx512: return GRADFERRY_TABLE(GRADFERRY_AVX512_ROW);
      case Isa::kAvx2: return GRADFERRY_TABLE(GRADFERRY_AVX2_ROW);
#endif
      default: return GRADFERRY_TABLE(GRADFERRY_SCALAR_ROW);
    }
  }
  throw Error(ErrorKind::kConfig, "instruction set '" + std::string(isa_name(isa)) +
                                      "' is not available in this build or on this processor; "
                                      "choose one that available_isas() lists");
}

void set_cuda_codecs(std::span<const Codec> rows) { cuda_rows = rows; }

std::span<const Codec> codecs(Device device) {
  return device == Device::kCpu ? cpu_codecs(active_isa()) : cuda_rows;
}

}  // namespace gradferry
