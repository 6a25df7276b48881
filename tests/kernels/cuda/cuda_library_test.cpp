#include <gtest/gtest.h>

#include "gradferry/cuda_codecs.h"
#include "gradferry/error.h"

namespace gradferry {
namespace {

// A chunk without tiles, which needs no device to be encoded or decoded.
ChunkBatch empty_chunk(uint32_t rows, ScalarType dtype) {
  return {.tiles = nullptr,
          .num_tiles = 0,
          .codecs = nullptr,
          .rows = rows,
          .dtype = dtype,
          .hold_zero_tiles = false,
          .seed = 0,
          .envelope = {.config_hash = 0,
                       .layout_hash = 0,
                       .step = 0,
                       .chunk = 0,
                       .rank = 0,
                       .phase = Phase::kScatter},
          .progress = nullptr,
          .stream = nullptr};
}

void encode_and_decode(const ChunkBatch& chunk) {
  chunk_kernels().encode({.chunk = chunk,
                          .gradient = nullptr,
                          .gain = nullptr,
                          .residual = nullptr,
                          .messages = nullptr,
                          .num_messages = 0,
                          .out = nullptr});
  chunk_kernels().decode({.chunk = chunk,
                          .received = {},
                          .sent = nullptr,
                          .gradient = nullptr,
                          .residual = nullptr,
                          .flags = nullptr,
                          .findings = nullptr});
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
