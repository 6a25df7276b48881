// The table of codecs: one row each. Everything that lists, parses, tests or times codecs reads it.
#include <array>
#include <string>

#include "gradferry/codec.h"
#include "gradferry/device_library.h"
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

// The library given to use_device_library(); version 0 before that.
DeviceLibrary device_library;

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

void use_device_library(const DeviceLibrary& library) {
  GRADFERRY_EXPECTS(library.version == kDeviceLibraryVersion, kConfig,
                    "the device library has version " + std::to_string(library.version) +
                        ", and this gradferry needs version " +
                        std::to_string(kDeviceLibraryVersion) + "; install both together");
  device_library = library;
}

namespace {

const DeviceLibrary& library_in_use() {
  GRADFERRY_EXPECTS(device_library.version != 0, kState,
                    "no device library is in use; call use_cuda_codecs() first");
  return device_library;
}

}  // namespace

const ChunkKernels& chunk_kernels() { return library_in_use().chunks; }
const NodeKernels& node_kernels() { return library_in_use().nodes; }
const MessageKernels& message_kernels() { return library_in_use().messages; }

bool is_capturing(Stream stream) { return library_in_use().is_capturing(stream); }

std::span<const Codec> codecs() { return cpu_codecs(active_isa()); }

uint32_t row_of(const Codec& codec) { return static_cast<uint32_t>(&codec - codecs().data()); }

}  // namespace gradferry
