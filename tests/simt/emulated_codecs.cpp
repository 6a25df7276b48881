#include <vector>

#include "codec_names.h"  // written by the build: the codecs with a CUDA source
#include "kernels/common/codec_parts.h"
#include "tests/simt/kernel_codecs.h"
#include "tests/simt/machine.h"

namespace gradferry {

#define GRADFERRY_DECLARE(codec)                 \
  namespace emulated {                           \
  extern const CodecFunctions codec##_functions; \
  }
GRADFERRY_FOR_EACH_CUDA_CODEC(GRADFERRY_DECLARE)
#undef GRADFERRY_DECLARE
namespace emulated {
extern const ChunkKernels chunk_kernels;
extern const NodeKernels node_kernels;
extern const MessageKernels message_kernels;
}  // namespace emulated

namespace testing {

const Codec* find_kernels(std::string_view name) {
  static const std::vector<Codec> codecs = [] {
    std::vector<Codec> result;
    const auto add = [&](std::string_view codec_name, const CodecFunctions& functions) {
      for (Codec codec : cpu_codecs(Isa::kScalar)) {
        if (codec.name != codec_name) continue;
        codec.encode = functions.encode;
        codec.decode = functions.decode;
        codec.reduce = functions.reduce;
        codec.accumulate = functions.accumulate;
        codec.undo = functions.undo;
        result.push_back(codec);
      }
    };
#define GRADFERRY_ADD(codec) add(#codec, emulated::codec##_functions);
    GRADFERRY_FOR_EACH_CUDA_CODEC(GRADFERRY_ADD)
#undef GRADFERRY_ADD
    return result;
  }();
  for (const Codec& codec : codecs) {
    if (codec.name == name) return &codec;
  }
  return nullptr;
}

const ChunkKernels& chunk_kernels_on_host() { return emulated::chunk_kernels; }
const NodeKernels& node_kernels_on_host() { return emulated::node_kernels; }
const MessageKernels& message_kernels_on_host() { return emulated::message_kernels; }

void set_schedule(uint64_t seed) { simt::set_seed(seed); }

}  // namespace testing
}  // namespace gradferry
