#include "kernels/chunk_launch.h"
#include "kernels/common/tile_launch.h"
#include "kernels/exact/exact_cuda.h"
#include "kernels/exact/exact_float64_kernels.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

using Launcher = TileLauncher<exact::TileCodec>;

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

void accumulate(const TileBatch& batch, const std::byte* const* payload_by_rank,
                uint32_t world_size, uint32_t divisor, void* gradient) {
  if (batch.dtype == ScalarType::kFloat64) {
    exact_float64::accumulate(batch, payload_by_rank, world_size, divisor, gradient);
  } else {
    Launcher::accumulate(batch, payload_by_rank, world_size, divisor, gradient);
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
const CodecFunctions exact_functions = {&encode, &decode, &reduce, &accumulate, &undo};

extern const ChunkKernels exact_chunks;
const ChunkKernels exact_chunks = ChunkLauncher<WithExact<exact::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
