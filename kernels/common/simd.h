// Vectors of float and uint32_t for the instruction set this object file is compiled for.
//
// Each simd_*.h defines, in the object file's own namespace:
//   F32, U32, Mask       vectors of kLanes floats, unsigned integers, truth values
//   arithmetic           F32: + - * / < > ==; U32: + - * & | ^ << >> <= >= ==; Mask: & |
//   bits, from_bits, select, any, all, minimum, maximum (see lane.h), reduce_maximum
//   square_root, multiply_high (see lane.h); or_where: a | b in the lanes of a mask, a elsewhere
//   lane_maxima          of kLanes vectors: lane l is the maximum of vector l
//   load, store          kLanes elements at any address
//   stream               store past the caches, to an aligned address; finish_streams orders them
//   load_bytes, load_halfwords, store_bytes, store_halfwords
//                        kLanes integers of 8 or 16 bits; stores take values that fit
//   load_signed_bytes    kLanes integers of 8 bits, as floats
//   has_byte             whether one of num_bytes bytes, a multiple of 128, is this one
//   load_fp16, store_fp16  kLanes IEEE half-precision numbers, rounded to nearest, ties to even
//   Table16, lookup      a table of 16 floats in registers, indexed by the low 4 bits of each lane
//   Table8, lookup, scaled  one of 8 floats, indexed by the low 3 bits; all of them times a factor
//   SignedTable8         a table of 8 floats >= 0 that, multiplied by a factor > 0, gives a
//   ScaledTable8, lookup one indexed by the low 3 bits of each lane and negated where bit 3 is set
// There is no fused multiply-add and no approximate reciprocal, on purpose: every target must
// produce the same bits.
#pragma once

#include "kernels/common/lane.h"

#if defined(GRADFERRY_KERNEL_AVX512)
#include "kernels/common/simd_avx512.h"
#elif defined(GRADFERRY_KERNEL_AVX2)
#include "kernels/common/simd_avx2.h"
#else
#include "kernels/common/simd_scalar.h"
#endif

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// Loops step through whole chunks of this many elements, whatever the instruction set.
inline constexpr uint32_t kChunk = 16;
static_assert(kChunk % kLanes == 0);

GRADFERRY_LANE void prefetch(const void* address) {
  if constexpr (kLanes > 1) __builtin_prefetch(address, 0, 3);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
