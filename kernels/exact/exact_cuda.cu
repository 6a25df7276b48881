// The exact codec on CUDA: the gradient's own numbers. Bound by memory at every dtype. fp64 is
// summed in fp64 and so has kernels of its own, exact_float64_kernels.h.
#include "kernels/common/cast_kernels.h"
#include "kernels/common/tile_launch.h"
#include "kernels/exact/exact_float64_kernels.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

struct Exact {
  using Options = NoOptions;
  static constexpr bool kUnitsAreQuads = false;
  static constexpr bool kUsesDtype = true;
  static constexpr uint32_t kMinBlocks = 0;

  GRADFERRY_DEVICE static uint32_t payload_bytes(uint32_t n, ScalarType dtype, Stage, Options) {
    return round_up(n * item_bytes(dtype), kPayloadAlignment);
  }
  template <ScalarType dtype, bool>
  GRADFERRY_DEVICE static uint32_t encode(const TileUnit<Options>& unit, float* v,
                                          PayloadWriter& out) {
    return encode_cast<dtype>(unit.slice, unit.payload_bytes, v, out, [](float x) { return x; });
  }
  template <ScalarType dtype, typename Sink>
  GRADFERRY_DEVICE static uint32_t decode(const TileUnit<Options>& unit, const std::byte* payload,
                                          Sink sink) {
    return decode_cast<dtype>(unit.slice, unit.payload_bytes, payload, sink);
  }
};

using Launcher = TileLauncher<Exact>;

void encode(const TileBatch& batch, const void* gradient, float alpha, const float* gain,
            float* residual, std::byte* out) {
  if (batch.dtype == ScalarType::kFloat64) {
    exact_float64::encode(batch, gradient, alpha, gain, residual, out);
  } else {
    Launcher::encode(batch, gradient, alpha, gain, residual, out);
  }
}

void decode(const TileBatch& batch, const std::byte* in, void* gradient, float beta,
            float* residual) {
  if (batch.dtype == ScalarType::kFloat64) {
    exact_float64::decode(batch, in, gradient, beta, residual);
  } else {
    Launcher::decode(batch, in, gradient, beta, residual);
  }
}

void reduce(const TileBatch& batch, const std::byte* const* payload_by_rank, uint32_t world_size,
            const float* gain, float* owner_residual, std::byte* out) {
  if (batch.dtype == ScalarType::kFloat64) {
    exact_float64::reduce(batch, payload_by_rank, world_size, gain, owner_residual, out);
  } else {
    Launcher::reduce(batch, payload_by_rank, world_size, gain, owner_residual, out);
  }
}

void undo(const TileBatch& batch, const std::byte* own_payload, const std::byte* in,
          const void* gradient, float alpha, float* residual) {
  if (batch.dtype == ScalarType::kFloat64) {
    exact_float64::undo(batch, own_payload, in, gradient, alpha, residual);
  } else {
    Launcher::undo(batch, own_payload, in, gradient, alpha, residual);
  }
}

}  // namespace

extern const CodecFunctions exact_functions;
const CodecFunctions exact_functions = {&encode, &decode, &reduce, &undo};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
