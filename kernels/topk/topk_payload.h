// The sections of a topk payload on CUDA: values and positions, from shared memory and back.
// All functions are called by whole blocks; none begins or ends with a barrier. Sections begin at
// any byte, so bytes are what is read and written: they are few.
#pragma once

#include <functional>

#include "kernels/cuda/e2m1_codes.h"
#include "kernels/cuda/payload_writer.h"
#include "kernels/topk/topk_block.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk {

static_assert(kTileElements == 32 * kTileThreads);  // a word of a bitmap per thread

// The kept elements, in increasing order of their positions.
struct Kept {
  float values[kMostKept];
  uint16_t positions[kMostKept];
  uint32_t block_largest[e2m1::kGroupBlocks];
};

GRADFERRY_DEVICE uint32_t byte_at(const std::byte* p) { return read<uint8_t>(p); }

// --- encoding ------------------------------------------------------------------------------------

// Values as one group of e2m1.h, each replaced by what its code withholds. A warp takes every
// fourth block, a lane one value of it. Needs a barrier before; ends without one.
GRADFERRY_DEVICE void encode_e2m1(const Slice& slice, Kept& kept, uint32_t k, PayloadWriter& out) {
  const uint32_t blocks = num_blocks(k), codes_end = code_bytes(k);
  for (uint32_t block = slice.warp; block < blocks; block += kTileWarps) {
    const uint32_t i = block * e2m1::kBlock + slice.lane;
    const uint32_t largest = warp_maximum(i < k ? magnitude_bits(kept.values[i]) : 0);
    if (slice.lane == 0) kept.block_largest[block] = largest;
  }
  __syncthreads();
  // Every warp works out all scales: lane b that of block b.
  const uint32_t own = slice.lane < blocks ? kept.block_largest[slice.lane] : 0;
  const int32_t exponent = e2m1::group_exponent(warp_maximum(own));
  const e2m1::BlockScale<float> scale = e2m1::block_scale(from_bits(own), exponent);
  const bool any_scale = __any_sync(kAllLanes, scale.code != 0 ? 1 : 0) != 0;
  if (slice.warp == 0 && slice.lane < blocks) out.byte(codes_end + slice.lane, scale.code);
  if (threadIdx.x == 0) {
    out.byte(codes_end + blocks,
             any_scale ? static_cast<uint32_t>(exponent + e2m1::kExponentBias) : 0);
  }
  for (uint32_t block = slice.warp; block < blocks; block += kTileWarps) {
    const float half_scale = __shfl_sync(kAllLanes, scale.half_scale, static_cast<int>(block));
    const float reciprocal = __shfl_sync(kAllLanes, scale.reciprocal, static_cast<int>(block));
    const uint32_t i = block * e2m1::kBlock + slice.lane;
    const float x = i < k ? kept.values[i] : 0.0f;
    const float doubled = e2m1::nearest_doubled(x, reciprocal);
    const uint32_t code = e2m1::code_of_doubled(doubled);
    const uint32_t above = __shfl_xor_sync(kAllLanes, code, 16);
    const uint32_t byte = block * e2m1::kHalfBlock + slice.lane;
    if (slice.lane < e2m1::kHalfBlock && byte < codes_end) out.byte(byte, code | above << 4);
    if (i < k) kept.values[i] = x - doubled * half_scale;
  }
}

// 12-bit indices: two of them take three bytes, an odd last one two. A thread per pair.
GRADFERRY_DEVICE void encode_indices(const Kept& kept, const Layout& layout, PayloadWriter& out) {
  for (uint32_t j = 2 * threadIdx.x; j < layout.k; j += 2 * kTileThreads) {
    const uint32_t x = kept.positions[j], y = j + 1 < layout.k ? kept.positions[j + 1] : 0;
    const uint32_t offset = layout.values_bytes + j / 2 * 3;
    out.byte(offset, x & 255);
    out.byte(offset + 1, x >> 8 | (y & 15) << 4);
    if (j + 1 < layout.k) out.byte(offset + 2, y >> 4);
  }
}

// Lane l puts together the word of its octet and row l % 8.
GRADFERRY_DEVICE void encode_bitmap(const Slice& slice, const Ranks& ranks, const Layout& layout,
                                    PayloadWriter& out) {
  uint32_t bitmap[kRows];
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    bitmap[row] = ranks.quad(row) << (kQuad * (slice.lane % 8));
  }
  const uint32_t word = rows_to_lanes(slice, bitmap, std::bit_or<>());
  const uint32_t first = 4 * (kWarpLanes * slice.warp + 4 * (slice.lane % 8) + slice.lane / 8);
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    if (first + i < layout.positions_bytes) {
      out.byte(layout.values_bytes + first + i, word >> (8 * i) & 255);
    }
  }
}

// --- decoding ------------------------------------------------------------------------------------

// What marks a tile that is not finite: the only bytes of it that are not zero.
struct Mark {
  uint32_t offset;
  uint32_t byte[2];

  GRADFERRY_DEVICE explicit Mark(const Layout& layout)
      : offset(layout.q4_values ? layout.values_bytes - 1 : 0),
        byte{layout.q4_values ? e2m1::kNonFiniteExponent : kNonFiniteValue & 255,
             layout.q4_values ? 0 : kNonFiniteValue >> 8} {}
  GRADFERRY_DEVICE uint32_t at(uint32_t i) const {
    return i == offset ? byte[0] : i == offset + 1 ? byte[1] : 0;
  }
};

// Values to shared memory. Returns whether those that the thread has seen may be.
GRADFERRY_DEVICE bool decode_bf16(const std::byte* in, uint32_t k, float* values) {
  bool valid = true;
  for (uint32_t j = threadIdx.x; j < k; j += kTileThreads) {
    const float x = bf16_to_float(uint32_t{read<uint16_t>(in + 2 * j)});
    valid = valid && !is_not_finite(x);
    values[j] = unsigned_zero(x);
  }
  return valid;
}
GRADFERRY_DEVICE bool decode_e2m1(const std::byte* in, uint32_t k, float* values) {
  const std::byte* scales = in + code_bytes(k);
  const uint32_t exponent = byte_at(scales + num_blocks(k));
  const e2m1::ScaleRange range = e2m1::scale_range(exponent);
  bool valid = exponent != e2m1::kNonFiniteExponent;
  for (uint32_t j = threadIdx.x; j < k; j += kTileThreads) {
    const uint32_t block = j / e2m1::kBlock, i = j % e2m1::kBlock;
    const uint32_t scale = byte_at(scales + block);
    valid = valid && e2m1::is_valid_scale(scale, range);
    const float half_scale =
        valid
            ? 0.5f * e2m1::decode_scale(scale, static_cast<int32_t>(exponent) - e2m1::kExponentBias)
            : 0.0f;
    const uint32_t pair = byte_at(in + block * e2m1::kHalfBlock + i % e2m1::kHalfBlock);
    values[j] =
        unsigned_zero(e2m1::value_of_code(i < e2m1::kHalfBlock ? pair : pair >> 4, half_scale));
  }
  return valid;
}

// Index j of the section.
GRADFERRY_DEVICE uint32_t index_at(const std::byte* in, uint32_t j) {
  const std::byte* p = in + j / 2 * 3 + j % 2;
  const uint32_t halfword = byte_at(p) | byte_at(p + 1) << 8;
  return j % 2 == 0 ? halfword & 0xfffu : halfword >> 4;
}

// Whether the indices that the thread has seen increase and are of elements, and spare bits 0.
GRADFERRY_DEVICE bool are_indices(const std::byte* in, const Layout& layout) {
  bool valid = true;
  for (uint32_t j = threadIdx.x; j < layout.k; j += kTileThreads) {
    const uint32_t position = index_at(in, j);
    valid = valid && position < layout.num_elements;
    if (j + 1 < layout.k) {
      valid = valid && position < index_at(in, j + 1);
    } else if (j % 2 == 0) {
      valid = valid && byte_at(in + layout.positions_bytes - 1) >> 4 == 0;
    }
  }
  return valid;
}

// The thread's word of a bitmap in the payload.
GRADFERRY_DEVICE uint32_t bitmap_word(const std::byte* in, const Layout& layout) {
  uint32_t word = 0;
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t offset = 4 * threadIdx.x + i;
    if (offset < layout.positions_bytes) word |= byte_at(in + offset) << (8 * i);
  }
  return word;
}
// Whether none of its bits is behind the last element. Behind that one's byte there are none.
GRADFERRY_DEVICE bool is_inside(uint32_t word, uint32_t num_elements) {
  const uint32_t begin = 32 * threadIdx.x;
  return begin + 32 <= num_elements || begin >= num_elements || word >> (num_elements - begin) == 0;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk
