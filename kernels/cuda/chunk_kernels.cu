// The choice of kernels for a chunk: those for its one codec and `exact`, or several.
#include <map>
#include <mutex>
#include <utility>

#include "kernels/cuda/chunk_launch.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

#define GRADFERRY_DECLARE(codec) extern const CodecKernels codec##_chunks;
GRADFERRY_FOR_EACH_CODEC(GRADFERRY_DECLARE)
#undef GRADFERRY_DECLARE

// What the device holds is asked for once: that takes longer than a launch.
uint32_t grid_for(const void* kernel, uint32_t num_threads, uint32_t tiles) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, uint32_t> known;
  int device = 0;
  GRADFERRY_CUDA_TRY(cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  uint32_t& most = known[{device, kernel}];
  if (most == 0) {
    int multiprocessors = 0, blocks = 0;
    GRADFERRY_CUDA_TRY(
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    GRADFERRY_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &blocks, kernel, static_cast<int>(num_threads), 0));
    const auto all = static_cast<uint32_t>(multiprocessors * blocks);
    most = all - all / kLeftToOthers;
  }
  const uint32_t wanted = tiles == 0 ? 1 : tiles;
  return wanted < most ? wanted : most;
}

namespace {

constexpr uint32_t bit_of(CodecRow row) { return 1u << static_cast<uint32_t>(row); }
static_assert(static_cast<uint32_t>(CodecRow::kEnd) <= 32, "ChunkBatch::rows has a bit for each");
static_assert(bit_of(CodecRow::exact) == 1);

#define GRADFERRY_ADDRESS(codec) &codec##_chunks,
constexpr const CodecKernels* kKernels[] = {GRADFERRY_FOR_EACH_CODEC(GRADFERRY_ADDRESS)};
#undef GRADFERRY_ADDRESS

// A launch for every codec beside `exact`, whose tiles the last one takes.
template <auto kStage, typename Call>
void run(const Call& call) {
  constexpr uint32_t kExact = bit_of(CodecRow::exact);
  uint32_t others = call.chunk.rows & ~kExact, row = 0;
  Call part = call;
  for (; (others & (others - 1)) != 0; ++row) {
    part.chunk.rows = others & (1u << row);
    others &= ~part.chunk.rows;
    if (part.chunk.rows != 0) (kKernels[row]->*kStage)(part, false);
  }
  while (others >> row > 1) ++row;
  part.chunk.rows = others | (call.chunk.rows & kExact);
  (kKernels[others == 0 ? 0 : row]->*kStage)(part, true);
}

}  // namespace

extern const ChunkKernels chunk_kernels;
const ChunkKernels chunk_kernels{&run<&CodecKernels::encode, EncodeChunkCall>,
                                 &run<&CodecKernels::reduce, ReduceChunkCall>,
                                 &run<&CodecKernels::decode, DecodeChunkCall>,
                                 &run<&CodecKernels::accumulate, AccumulateChunkCall>};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
