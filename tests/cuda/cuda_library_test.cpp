#include <gtest/gtest.h>

#include "gradferry/cuda_codecs.h"
#include "gradferry/error.h"

namespace gradferry {
namespace {

// A chunk without tiles, which needs no device to be encoded or decoded.
ChunkBatch empty_chunk(uint32_t rows, ScalarType dtype) {
  ChunkBatch chunk{};
  chunk.rows = rows;
  chunk.dtype = dtype;
  return chunk;
}

void encode_and_decode(const ChunkBatch& chunk) {
  EncodeChunkCall encode{};
  encode.chunk = chunk;
  chunk_kernels().encode(encode);
  DecodeChunkCall decode{};
  decode.chunk = chunk;
  chunk_kernels().decode(decode);
}

TEST(CudaLibrary, HasKernelsForEveryCodecAndForMixtures) {
  use_cuda_codecs();
  uint32_t all_rows = 0;
  for (const Codec& codec : codecs()) all_rows |= 1u << row_of(codec);
  for (const ScalarType dtype :
       {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16}) {
    for (const Codec& codec : codecs()) encode_and_decode(empty_chunk(1u << row_of(codec), dtype));
    encode_and_decode(empty_chunk(all_rows, dtype));
  }
}

TEST(CudaLibrary, HasFloat64KernelsForExactAlone) {
  use_cuda_codecs();
  for (const Codec& codec : codecs()) {
    const ChunkBatch chunk = empty_chunk(1u << row_of(codec), ScalarType::kFloat64);
    if (codec.supports_float64) {
      encode_and_decode(chunk);
    } else {
      EXPECT_THROW(encode_and_decode(chunk), Error) << codec.name;
    }
  }
}

}  // namespace
}  // namespace gradferry
