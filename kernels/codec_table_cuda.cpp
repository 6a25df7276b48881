// The table of codecs on CUDA, in the library of the CUDA kernels.
#include <array>

#include "gradferry/cuda_codecs.h"
#include "kernels/codec_rows.h"

namespace gradferry {

namespace cuda {
#define GRADFERRY_DECLARE(codec) extern const CodecFunctions codec##_functions;
GRADFERRY_FOR_EACH_CODEC(GRADFERRY_DECLARE)
#undef GRADFERRY_DECLARE
}  // namespace cuda

void use_cuda_codecs() {
#define GRADFERRY_ROW(codec) make_row(codec##_description, cuda::codec##_functions),
  static const auto table = std::to_array<Codec>({GRADFERRY_FOR_EACH_CODEC(GRADFERRY_ROW)});
#undef GRADFERRY_ROW
  set_cuda_codecs(table);
}

}  // namespace gradferry
