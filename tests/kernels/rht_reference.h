// A block of rht by docs/reference/wire_format.md, element by element: shares nothing with the
// kernels.
#pragma once

#include <algorithm>
#include <array>
#include <cfloat>
#include <optional>
#include <utility>
#include <vector>

#include "tests/kernels/numbers.h"

namespace gradferry::testing::rht_reference {

using Block = std::array<float, 128>;

inline std::array<uint32_t, 4> philox_words(std::array<uint32_t, 4> c, uint32_t key0,
                                            uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xd2511f53} * c[0], product1 = uint64_t{0xcd9e8d57} * c[2];
    c = {static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(product1),
         static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key1, static_cast<uint32_t>(product0)};
    key0 += 0x9e3779b9;
    key1 += 0xbb67ae85;
  }
  return c;
}

inline void hadamard(Block& x) {
  for (const size_t d : {16, 32, 64, 1, 2, 4, 8}) {
    for (size_t i = 0; i < 128; ++i) {
      if ((i & d) != 0) continue;
      const float a = x[i], b = x[i + d];
      x[i] = a + b;
      x[i + d] = a - b;
    }
  }
}

// Position in the block of coordinate p.
inline size_t element_of(size_t p) { return p / 32 * 32 + p % 32 / 2 + p % 2 * 16; }

inline float sum(Block x) {
  for (size_t n = 64; n > 0; n /= 2) {
    for (size_t i = 0; i < n; ++i) x[i] = x[i] + x[i + n];
  }
  return x[0];
}

struct Book {
  std::vector<float> magnitudes, cuts;
};

inline Book book_of(int bits) {
  if (bits == 4) {
    return {{5, 15, 25, 36, 48, 62, 79, 104},
            {0x1.0c76a8p-2f, 0x1.0c76a8p-1f, 0x1.996826p-1f, 0x1.19e2fcp+0f, 0x1.712326p+0f,
             0x1.d92abap+0f, 0x1.330e1cp+1f}};
  }
  if (bits == 3) return {{10, 31, 55, 88}, {0x1.009630p-1f, 0x1.0d1a64p+0f, 0x1.bf764ep+0f}};
  return {{3, 10}, {0x1.f6a4f8p-1f}};
}

struct Coded {
  uint16_t scale = 0;
  std::vector<uint8_t> codes;
  Block decoded = {};
};

inline float bf16_of(float x) { return bf16_value(bf16_bits(x)); }

inline void write_plane(std::vector<uint8_t>& codes, size_t first, int width, size_t p, int value) {
  const size_t bytes = size_t{16} * static_cast<size_t>(width);
  codes[first + p % bytes] |=
      static_cast<uint8_t>(value << (static_cast<size_t>(width) * (p / bytes)));
}

// What a block is divided by, as a power of two, before it is coded; its energy then.
struct Scaled {
  Block x;
  float q;
  int e;
};

// None for a block with a number that is not finite.
inline std::optional<Scaled> scaled(const Block& v) {
  const auto energy = [](const Block& x) {
    Block squares;
    for (size_t i = 0; i < 128; ++i) squares[i] = x[i] * x[i];
    return sum(squares);
  };
  const float q = energy(v);
  if (q >= 0x1p-100f && q <= 0x1p100f) return Scaled{v, q, 0};
  float largest = 0;
  for (const float y : v) {
    if (!std::isfinite(y)) return std::nullopt;
    largest = std::max(largest, std::fabs(y));
  }
  if (largest == 0) return Scaled{v, 0, 0};
  const int e = std::clamp(std::ilogb(largest), -126, 126);
  Block x;
  for (size_t i = 0; i < 128; ++i) x[i] = v[i] * std::ldexp(1.0f, -e);
  return Scaled{x, energy(x), e};
}

inline Coded code_block(const Block& v, const std::array<uint32_t, 4>& words, int bits) {
  Coded result;
  result.codes.assign(size_t{16} * static_cast<size_t>(bits), 0);
  const Book book = book_of(bits);
  const std::optional<Scaled> block = scaled(v);
  if (!block) {
    result.scale = 0x7fc0;
    result.decoded.fill(NAN);
    return result;
  }
  const auto& [x, q, e] = *block;
  if (q == 0) return result;
  Block h, sign, c, products;
  for (size_t i = 0; i < 128; ++i) sign[i] = (words[i / 32] >> (i % 32) & 1) != 0 ? -1.0f : 1.0f;
  for (size_t i = 0; i < 128; ++i) h[i] = sign[i] * x[i];
  hadamard(h);
  double power = 0;
  std::vector<uint8_t> codes = result.codes;
  for (size_t p = 0; p < 128; ++p) {
    const float z = h[element_of(p)];
    size_t index = 0;
    for (const float cut : book.cuts) index += std::fabs(z) > cut * std::sqrt(q) ? 1 : 0;
    const bool negative = std::signbit(z);
    c[element_of(p)] = negative ? -book.magnitudes[index] : book.magnitudes[index];
    products[p] = std::fabs(z) * book.magnitudes[index];
    power += std::pow(book.magnitudes[index], 2);
    const int plain = static_cast<int>(index), s = negative ? 1 : 0;
    if (bits == 3) {
      write_plane(codes, 0, 2, p, plain);
      write_plane(codes, 32, 1, p, s);
    } else {
      write_plane(codes, 0, bits, p, plain | s << (bits - 1));
    }
  }
  double scale = std::ldexp(bf16_of(sum(products) / static_cast<float>(power)), e - 7);
  if (scale < 0x1p-126) return result;
  hadamard(c);
  const auto value = [&](size_t i) { return scale * static_cast<double>(sign[i] * c[i]); };
  for (size_t i = 0; i < 128 && e >= 120; ++i) {
    while (std::fabs(value(i)) > FLT_MAX) {
      scale = bf16_value(static_cast<uint16_t>(bf16_bits(static_cast<float>(scale)) - 1));
    }
  }
  for (size_t i = 0; i < 128; ++i) result.decoded[i] = static_cast<float>(value(i));
  result.scale = bf16_bits(static_cast<float>(scale));
  result.codes = std::move(codes);
  return result;
}

}  // namespace gradferry::testing::rht_reference
