#include "kernels/chunk_launch.h"
#include "kernels/common/tile_launch.h"
#include "kernels/rht/rht_cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

template <typename F>
void with_bits(const TileBatch& batch, F f) {
  switch (batch.options->as<rht::Options>().bits) {
    case 2: return f.template operator()<TileLauncher<rht::Rht<rht::OneWidth<2>>>>();
    case 3: return f.template operator()<TileLauncher<rht::Rht<rht::OneWidth<3>>>>();
    default: return f.template operator()<TileLauncher<rht::Rht<rht::OneWidth<4>>>>();
  }
}

void encode(const TileBatch& batch, const void* gradient, float alpha, const float* gain,
            float* residual, std::byte* out) {
  with_bits(batch, [&]<typename Launcher>() {
    Launcher::encode(batch, gradient, alpha, gain, residual, out);
  });
}
void decode(const TileBatch& batch, const std::byte* in, void* gradient, float beta,
            float* residual) {
  with_bits(batch,
            [&]<typename Launcher>() { Launcher::decode(batch, in, gradient, beta, residual); });
}
void reduce(const TileBatch& batch, const std::byte* const* payload_by_rank, uint32_t world_size,
            const float* gain, float* owner_residual, std::byte* out) {
  with_bits(batch, [&]<typename Launcher>() {
    Launcher::reduce(batch, payload_by_rank, world_size, gain, owner_residual, out);
  });
}
void accumulate(const TileBatch& batch, const std::byte* const* payload_by_rank,
                uint32_t world_size, uint32_t divisor, void* gradient) {
  with_bits(batch, [&]<typename Launcher>() {
    Launcher::accumulate(batch, payload_by_rank, world_size, divisor, gradient);
  });
}
void undo(const TileBatch& batch, const std::byte* own_payload, const std::byte* in,
          const void* gradient, float alpha, float* residual) {
  with_bits(batch, [&]<typename Launcher>() {
    Launcher::undo(batch, own_payload, in, gradient, alpha, residual);
  });
}

}  // namespace

extern const CodecFunctions rht_functions;
const CodecFunctions rht_functions = {&encode, &decode, &reduce, &accumulate, &undo};

extern const ChunkKernels rht_chunks;
const ChunkKernels rht_chunks = ChunkLauncher<WithExact<rht::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
