// The kernels for chunks of any mixture of codecs, and the choice between them and those for one
// codec and `exact`.
#include "codec_headers.h"  // written by the build: every kernels/<codec>/<codec>_cuda.h
#include "kernels/cuda/chunk_launch.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

#define GRADFERRY_DECLARE(codec) extern const ChunkKernels codec##_chunks;
GRADFERRY_FOR_EACH_CODEC(GRADFERRY_DECLARE)
#undef GRADFERRY_DECLARE

namespace {

struct EveryCodec {
  static constexpr bool kHasFloat64 = false;
  static constexpr uint32_t kMinBlocks = 1;

  template <typename F>
  GRADFERRY_DEVICE static void with(uint32_t row, F f) {
    switch (static_cast<CodecRow>(row)) {
#define GRADFERRY_CASE(codec) \
  case CodecRow::codec: return f.template operator()<codec::TileCodec>();
      GRADFERRY_FOR_EACH_CODEC(GRADFERRY_CASE)
#undef GRADFERRY_CASE
      default: return;
    }
  }
};

constexpr uint32_t bit_of(CodecRow row) { return 1u << static_cast<uint32_t>(row); }
static_assert(static_cast<uint32_t>(CodecRow::kEnd) <= 32, "ChunkBatch::rows has a bit for each");

const ChunkKernels& kernels_for(const ChunkBatch& chunk) {
  static constexpr ChunkKernels kEvery = ChunkLauncher<EveryCodec>::kernels();
  const uint32_t others = chunk.rows & ~bit_of(CodecRow::exact);
  if (others == 0) return exact_chunks;
#define GRADFERRY_CHOOSE(codec) \
  if (others == bit_of(CodecRow::codec)) return codec##_chunks;
  GRADFERRY_FOR_EACH_CODEC(GRADFERRY_CHOOSE)
#undef GRADFERRY_CHOOSE
  return kEvery;
}

void encode(const EncodeChunkCall& call) { kernels_for(call.chunk).encode(call); }
void reduce(const ReduceChunkCall& call) { kernels_for(call.chunk).reduce(call); }
void decode(const DecodeChunkCall& call) { kernels_for(call.chunk).decode(call); }
void accumulate(const AccumulateChunkCall& call) { kernels_for(call.chunk).accumulate(call); }

}  // namespace

extern const ChunkKernels chunk_kernels;
const ChunkKernels chunk_kernels{&encode, &reduce, &decode, &accumulate};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
