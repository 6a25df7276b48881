// The transform of rht and the bytes of its codes on CUDA. A block of 128 is a row of a warp's
// slice (kernels/cuda/slice.h), four elements to a lane, so that strides 1 and 2 of the transform
// stay in a lane and strides 4 .. 64 are lanes 1 .. 16 apart.
//
// Coordinates need no moving about: lane 8 m + s has, in the places of its elements e = 0 .. 3, the
// coordinates 32 m + 8 (s % 4) + 2 e + s / 4.
#pragma once

#include "kernels/cuda/slice.h"
#include "kernels/rht/rht_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht {

// --- transform -----------------------------------------------------------------------------------

// The stride that is `lanes` lanes: x + y in the lower lane, x - y in the upper one.
GRADFERRY_DEVICE void butterfly_across(const Slice& slice, int lanes, float* x) {
  const uint32_t minus = is_upper(slice, lanes) ? kSignBit : 0;
  GRADFERRY_UNROLL
  for (uint32_t e = 0; e < kQuad; ++e) {
    const float other = __shfl_xor_sync(kAllLanes, x[e], lanes);
    x[e] = other + from_bits(bits(x[e]) ^ minus);
  }
}

// H of a row, strides in the order of the format: 16 32 64 1 2 4 8. On codebook values, which are
// small integers, every order gives the same, so this serves both ways.
GRADFERRY_DEVICE void transform_row(const Slice& slice, float* x) {
  butterfly_across(slice, 4, x);
  butterfly_across(slice, 8, x);
  butterfly_across(slice, 16, x);
  butterfly(x[0], x[1]), butterfly(x[2], x[3]);
  butterfly(x[0], x[2]), butterfly(x[1], x[3]);
  butterfly_across(slice, 1, x);
  butterfly_across(slice, 2, x);
}

// --- sums ----------------------------------------------------------------------------------------

// The lane that gets a row from rows_to_lanes with these pairs.
GRADFERRY_DEVICE int lane_of_row(uint32_t row, int first, int second, int third) {
  return ((row & 1) != 0 ? first : 0) | ((row & 2) != 0 ? second : 0) |
         ((row & 4) != 0 ? third : 0);
}

// Sums of a row's numbers, element by element over the lanes told apart by three powers of two; the
// lane's row is that of rows_to_lanes. term(j): the number of the lane's element j.
template <typename Term>
GRADFERRY_DEVICE void fold_rows(const Slice& slice, int first, int second, int third, Term term,
                                float* folded) {
  GRADFERRY_UNROLL
  for (uint32_t e = 0; e < kQuad; ++e) {
    float x[kRows];
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) x[row] = term(kQuad * row + e);
    folded[e] = rows_to_lanes(slice, x, Sum(), first, second, third);
  }
}
GRADFERRY_DEVICE void fold_pairs(int lanes, float* x) {
  GRADFERRY_UNROLL
  for (uint32_t e = 0; e < kQuad; ++e) x[e] = x[e] + __shfl_xor_sync(kAllLanes, x[e], lanes);
}
GRADFERRY_DEVICE float fold_quad(const float* x) { return (x[0] + x[2]) + (x[1] + x[3]); }

// --- codes ---------------------------------------------------------------------------------------

// How many cuts of the codebook lie below a magnitude, by bisection; cuts are multiples of `root`.
template <uint32_t kBits>
struct Quantizer {
  static constexpr uint32_t kCount = (1u << (kBits - 1)) - 1;
  float cut[kCount];

  GRADFERRY_DEVICE explicit Quantizer(float root) {
    // Cuts are copied to constants: device code cannot refer to the array itself.
    using Book = Codebook<kBits>;
    constexpr float k0 = Book::kCuts[0], k1 = Book::kCuts[1], k2 = Book::kCuts[2],
                    k3 = Book::kCuts[3], k4 = Book::kCuts[4], k5 = Book::kCuts[5],
                    k6 = Book::kCuts[6];
    const float all[7] = {k0, k1, k2, k3, k4, k5, k6};
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kCount; ++i) cut[i] = all[i] * root;
  }
  GRADFERRY_DEVICE uint32_t index(float x) const {
    if constexpr (kBits == 2) return x > cut[0] ? 1 : 0;
    if constexpr (kBits == 3) {
      const bool upper = x > cut[1];
      return (upper ? 2u : 0u) | (x > (upper ? cut[2] : cut[0]) ? 1u : 0u);
    }
    if constexpr (kBits == 4) {
      const bool upper = x > cut[3];
      const bool second = x > (upper ? cut[5] : cut[1]);
      const float low = second ? cut[2] : cut[0], high = second ? cut[6] : cut[4];
      return (upper ? 4u : 0u) | (second ? 2u : 0u) | (x > (upper ? high : low) ? 1u : 0u);
    }
  }
};

// Four magnitudes of the codebook as bytes of a word, for __byte_perm.
template <uint32_t kBits>
constexpr uint32_t pack_magnitudes(uint32_t first) {
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(Codebook<kBits>::kMagnitudes[first + i]) << (8 * i);
  }
  return result;
}
// The magnitude of a code: its byte in the last places of 2^23, then without the 2^23.
template <uint32_t kBits>
GRADFERRY_DEVICE float magnitude_of(uint32_t code) {
  constexpr uint32_t kLow = pack_magnitudes<kBits>(0), kHigh = pack_magnitudes<kBits>(4);
  const uint32_t byte = __byte_perm(kLow, kHigh, code & ((1u << (kBits - 1)) - 1));
  return from_bits(__byte_perm(byte, 0x4b000000u, 0x7440)) - 0x1p23f;
}
template <uint32_t kBits>
GRADFERRY_DEVICE float value_of(uint32_t code) {
  return from_bits(bits(magnitude_of<kBits>(code)) | (code << (32 - kBits) & kSignBit));
}

// --- planes --------------------------------------------------------------------------------------
//
// A plane has kWidth bits per coordinate. A byte of it holds 8 / kWidth coordinates 16 kWidth
// apart: one from each lane of a group of kCompany lanes whose numbers differ in the bits `kPairs`.
// Each lane of such a group writes or reads kWidth of the 8 rows. Bytes of even coordinates come
// from lanes with s < 4, odd ones from s + 4: of each eight bytes, the lower lane has the first
// four, the upper one the others.

template <uint32_t kWidth>
struct Plane {
  static_assert(kWidth == 1 || kWidth == 2 || kWidth == 4);
  static constexpr uint32_t kCompany = 8 / kWidth;  // 8, 4 or 2 lanes

  uint32_t shift;   // of the lane's coordinates in a byte
  uint32_t picked;  // the lane writes or reads rows kCompany * i + picked
  uint32_t offset;  // of its words in the plane

  GRADFERRY_DEVICE explicit Plane(const Slice& slice) {
    const uint32_t m = slice.lane / 8, s = slice.lane % 8;
    const uint32_t upper = s / 4;
    if constexpr (kWidth == 4) {
      shift = 4 * (m / 2), picked = m / 2;
      offset = 32 * (m % 2) + 8 * (s % 4) + 4 * upper;
    } else if constexpr (kWidth == 2) {
      shift = 2 * m, picked = m / 2 + 2 * (m % 2);
      offset = 8 * (s % 4) + 4 * upper;
    } else {
      shift = 2 * m + s / 2 % 2, picked = m / 2 + 2 * (m % 2) + 4 * (s / 2 % 2);
      offset = 8 * (s % 2) + 4 * upper;
    }
  }

  GRADFERRY_DEVICE uint32_t row(uint32_t i) const { return kCompany * i + picked; }

  // From fields[row], one field of kWidth bits per byte and element of the lane, to words[i] at
  // `offset` of the plane of row(i).
  GRADFERRY_DEVICE void gather(const Slice& slice, const uint32_t* fields, uint32_t* words) const {
    uint32_t x[kRows], half[kRows / 2], quarter[kRows / 4];
    GRADFERRY_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) x[r] = fields[r] << shift;
    if constexpr (kWidth == 4) {
      halve_rows<8>(slice, 16, x, words, Or());
    } else if constexpr (kWidth == 2) {
      halve_rows<8>(slice, 16, x, half, Or());
      halve_rows<4>(slice, 8, half, words, Or());
    } else {
      halve_rows<8>(slice, 16, x, half, Or());
      halve_rows<4>(slice, 8, half, quarter, Or());
      halve_rows<2>(slice, 2, quarter, words, Or());
    }
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kWidth; ++i) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, words[i], 4);
      words[i] = is_upper(slice, 4) ? __byte_perm(other, words[i], 0x7362)
                                    : __byte_perm(words[i], other, 0x5140);
    }
  }

  // The inverse: bits above a field are other fields'.
  GRADFERRY_DEVICE void spread(const Slice& slice, const uint32_t* words, uint32_t* fields) const {
    uint32_t mine[kWidth];
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kWidth; ++i) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, words[i], 4);
      mine[i] = is_upper(slice, 4) ? __byte_perm(other, words[i], 0x7531)
                                   : __byte_perm(words[i], other, 0x6420);
    }
    constexpr uint32_t kMembers = kWidth == 4 ? 16 : kWidth == 2 ? 24 : 26;
    GRADFERRY_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      const uint32_t source = static_cast<uint32_t>(lane_of_row(r % kCompany, 16, 8, 2));
      const uint32_t lane = (slice.lane & ~kMembers) | source;
      fields[r] = __shfl_sync(kAllLanes, mine[r / kCompany], static_cast<int>(lane)) >> shift;
    }
  }
};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht
