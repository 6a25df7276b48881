// The exact codec on CPU: the gradient's own numbers. Bound by memory at every dtype. fp64 is
// summed in fp64 and so has its own walk over the tiles, exact_float64.h.
#include "kernels/common/cast_codec.h"
#include "kernels/exact/exact_float64.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

struct Exact {
  static constexpr uint32_t kUnit = 1024;
  static constexpr uint32_t kBlock = kChunk;

  static uint32_t payload_bytes(uint32_t n, ScalarType dtype, Stage, const CodecOptions&) {
    return round_up(n * item_bytes(dtype), kPayloadAlignment);
  }
  static uint32_t encode(const Unit& unit, const float* v, std::byte* payload, float* residual) {
    return with_dtype(unit.batch.dtype, [&]<ScalarType dtype>() {
      return encode_cast<dtype>(unit, v, payload, residual, [](F32 x) { return x; });
    });
  }
  template <typename Sink>
  static uint32_t decode(const Unit& unit, const std::byte* payload, Sink sink) {
    return with_dtype(unit.batch.dtype,
                      [&]<ScalarType dtype>() { return decode_cast<dtype>(unit, payload, sink); });
  }
};

using Driver = TileDriver<Exact>;

void encode(const TileBatch& batch, const void* gradient, float alpha, const float* gain,
            float* residual, std::byte* out) {
  if (batch.dtype == ScalarType::kFloat64) {
    exact_float64::encode(batch, gradient, alpha, gain, residual, out);
  } else {
    Driver::encode(batch, gradient, alpha, gain, residual, out);
  }
}

void decode(const TileBatch& batch, const std::byte* in, void* gradient, float beta,
            float* residual) {
  if (batch.dtype == ScalarType::kFloat64) {
    exact_float64::decode(batch, in, gradient, beta, residual);
  } else {
    Driver::decode(batch, in, gradient, beta, residual);
  }
}

void reduce(const TileBatch& batch, const std::byte* const* payload_by_rank, uint32_t world_size,
            const float* gain, float* owner_residual, std::byte* out) {
  if (batch.dtype == ScalarType::kFloat64) {
    exact_float64::reduce(batch, payload_by_rank, world_size, gain, owner_residual, out);
  } else {
    Driver::reduce(batch, payload_by_rank, world_size, gain, owner_residual, out);
  }
}

void accumulate(const TileBatch& batch, const std::byte* const* payload_by_rank,
                uint32_t world_size, uint32_t divisor, void* gradient) {
  if (batch.dtype == ScalarType::kFloat64) {
    exact_float64::accumulate(batch, payload_by_rank, world_size, divisor, gradient);
  } else {
    Driver::accumulate(batch, payload_by_rank, world_size, divisor, gradient);
  }
}

void undo(const TileBatch& batch, const std::byte* own_payload, const std::byte* in,
          const void* gradient, float alpha, float* residual) {
  if (batch.dtype == ScalarType::kFloat64) {
    exact_float64::undo(batch, own_payload, in, gradient, alpha, residual);
  } else {
    Driver::undo(batch, own_payload, in, gradient, alpha, residual);
  }
}

}  // namespace

extern const CodecFunctions exact_functions;
const CodecFunctions exact_functions = {&encode, &decode, &reduce, &accumulate, &undo};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
