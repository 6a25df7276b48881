// The bf16 codec on CPU. Bound by memory: encoding moves 4 bytes in and 2 out per fp32 element.
#include "kernels/bf16/bf16_layout.h"
#include "kernels/common/cast_codec.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

struct Bf16 {
  static constexpr uint32_t kUnit = 1024;
  static constexpr uint32_t kBlock = kChunk;

  static constexpr decltype(Codec::payload_bytes) payload_bytes = &bf16::payload_bytes;
  static uint32_t encode(const Unit& unit, const float* v, std::byte* payload, float* residual) {
    return encode_cast<ScalarType::kBFloat16>(unit, v, payload, residual,
                                              [](F32 x) { return saturate_bf16(x); });
  }
  template <typename Sink>
  static uint32_t decode(const Unit& unit, const std::byte* payload, Sink sink) {
    return decode_cast<ScalarType::kBFloat16>(unit, payload, sink);
  }
};

}  // namespace

extern const CodecFunctions bf16_functions;
const CodecFunctions bf16_functions = TileDriver<Bf16>::functions();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
