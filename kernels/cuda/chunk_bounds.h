// How many blocks of the kernels of chunks a multiprocessor is to hold, and how large their grids
// are.
#pragma once

#include "kernels/codec_rows.h"
#include "kernels/cuda/cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// For __launch_bounds__: what registers must allow. 65,536 of them are 168 for each of 3 * 128
// threads, 128 of 4, 96 of 5, 80 of 6 and 72 of 7. No kernel may spill.
struct ChunkBounds {
  uint32_t encode, reduce, decode, accumulate;
};
constexpr ChunkBounds bounds_of([[maybe_unused]] CodecRow row) {
#ifdef GRADFERRY_CHUNK_BOUNDS  // a digit each, for all codecs: tools/gpu_check.py --tune
  constexpr uint32_t kDigits = GRADFERRY_CHUNK_BOUNDS;
  return {kDigits / 1000, kDigits / 100 % 10, kDigits / 10 % 10, kDigits % 10};
#else
  switch (row) {
    case CodecRow::q8: return {4, 4, 6, 5};
    case CodecRow::rht: return {3, 3, 5, 4};
    case CodecRow::topk: return {3, 3, 6, 4};
    default: return {4, 4, 7, 5};
  }
#endif
}

// Blocks take tiles in turn: one block at least, at most as many as there are tiles, and at most
// 15/16 of those that the device holds at once, for what computes meanwhile: a guess, not timed.
inline constexpr uint32_t kLeftToOthers = 16;
uint32_t grid_for(const void* kernel, uint32_t num_threads, uint32_t tiles);

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
