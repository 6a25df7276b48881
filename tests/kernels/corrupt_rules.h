// Which payloads docs/reference/wire_format.md, section 4, calls corrupt, and which elements then
// are NaN: written from the document, with nothing of the codecs.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "gradferry/codec.h"

namespace gradferry::testing {

struct Verdict {
  bool corrupt = false;
  std::vector<bool> nan;  // by element: NaN, as part of a corrupt or a non-finite unit
  bool complete = true;   // false: more may be corrupt than this says
};

// Adds the verdict on elements begin .. end - 1.
inline void judge(Verdict& verdict, uint32_t begin, uint32_t end, bool corrupt, bool non_finite) {
  verdict.corrupt = verdict.corrupt || corrupt;
  if (!corrupt && !non_finite) return;
  std::fill(verdict.nan.begin() + begin, verdict.nan.begin() + end, true);
}

inline uint32_t half_at(const uint8_t* place) { return place[0] | uint32_t{place[1]} << 8; }
inline uint32_t parts(uint32_t n, uint32_t size) { return (n + size - 1) / size; }

// A q4 group with `blocks` scale bytes.
inline bool is_corrupt_group(const uint8_t* scales, uint32_t blocks, uint32_t exponent) {
  if ((exponent >= 1 && exponent <= 9) || (exponent >= 246 && exponent <= 254)) return true;
  for (uint32_t b = 0; b < blocks; ++b) {
    const uint32_t scale = scales[b];
    if (scale >= 0x80 || scale == 0x7f || (scale >= 1 && scale <= 7)) return true;
    if (exponent == 117 + 128 && scale > 0x7a) return true;
    if (scale != 0 && (exponent == 0 || exponent == 255)) return true;
  }
  return false;
}

inline void judge_q4(Verdict& verdict, const uint8_t* payload, uint32_t n) {
  const uint32_t b = parts(n, 32);
  for (uint32_t g = 0; g < parts(n, 1024); ++g) {
    const uint32_t exponent = payload[17 * b + g];
    const uint32_t blocks = std::min(b - 32 * g, 32U);
    judge(verdict, 1024 * g, std::min(n, 1024 * (g + 1)),
          is_corrupt_group(payload + 16 * b + 32 * g, blocks, exponent), exponent == 255);
  }
}

inline void judge_q8(Verdict& verdict, const uint8_t* payload, uint32_t n) {
  for (uint32_t b = 0; b < parts(n, 128); ++b) {
    const uint32_t begin = 128 * b, end = std::min(n, begin + 128);
    const uint32_t scale = half_at(payload + 16 * parts(n, 16) + 2 * b);
    bool corrupt = (scale >= 1 && scale <= 0x7f) || (scale > 0x7c01 && scale != 0x7fc0);
    for (uint32_t i = begin; i < end && scale != 0 && scale != 0x7fc0; ++i) {
      corrupt = corrupt || payload[i] == 0x80;
    }
    judge(verdict, begin, end, corrupt, scale == 0x7fc0);
  }
}

inline bool is_corrupt_bf16_scale(uint32_t scale) {
  return (scale >= 1 && scale <= 0x7f) || (scale >= 0x7f80 && scale != 0x7fc0);
}

inline void judge_sign1(Verdict& verdict, const uint8_t* payload, uint32_t n) {
  for (uint32_t b = 0; b < parts(n, 128); ++b) {
    const uint32_t scale = half_at(payload + 2 * parts(n, 16) + 2 * b);
    judge(verdict, 128 * b, std::min(n, 128 * (b + 1)), is_corrupt_bf16_scale(scale),
          scale == 0x7fc0);
  }
}

// But for scales with which a value is infinite, which only a decoder can tell.
inline void judge_rht(Verdict& verdict, const uint8_t* payload, uint32_t n, uint32_t bits) {
  verdict.complete = false;
  const uint32_t b = parts(n, 128);
  for (uint32_t i = 0; i < b; ++i) {
    const uint32_t scale = half_at(payload + 16 * bits * b + 2 * i);
    judge(verdict, 128 * i, std::min(n, 128 * (i + 1)), is_corrupt_bf16_scale(scale),
          scale == 0x7fc0);
  }
}

struct TopkForm {
  double ratio, owner_ratio;
  bool q4;
};

inline uint32_t index_at(const uint8_t* section, uint32_t j) {
  const uint32_t at = 12 * j / 8;
  const uint32_t low = section[at], high = section[at + 1];
  return j % 2 == 0 ? low | (high & 15) << 8 : low >> 4 | high << 4;
}

inline bool is_corrupt_topk(const uint8_t* payload, uint32_t n, uint32_t k, bool q4) {
  const uint32_t b = parts(k, 32), last = std::min(k - 32 * (b - 1), 16U);
  const uint32_t num_codes = 16 * (b - 1) + last;
  const uint32_t values = q4 ? num_codes + b + 1 : 2 * k;
  if (q4) {
    const uint32_t exponent = payload[values - 1];
    if (exponent == 255 || is_corrupt_group(payload + num_codes, b, exponent)) return true;
  } else {
    for (uint32_t j = 0; j < k; ++j) {
      if ((half_at(payload + 2 * j) & 0x7f80) == 0x7f80) return true;
    }
  }
  const uint8_t* positions = payload + values;
  if (parts(n, 8) < parts(12 * k, 8)) {
    uint32_t ones = 0;
    for (uint32_t i = 0; i < 8 * parts(n, 8); ++i) {
      const bool one = (positions[i / 8] >> i % 8 & 1) != 0;
      if (one && i >= n) return true;
      ones += one;
    }
    return ones != k;
  }
  for (uint32_t j = 0; j < k; ++j) {
    if (index_at(positions, j) >= n) return true;
    if (j > 0 && index_at(positions, j) <= index_at(positions, j - 1)) return true;
  }
  return k % 2 == 1 && positions[12 * k / 8] >> 4 != 0;
}

inline void judge_topk(Verdict& verdict, const uint8_t* payload, uint32_t n, Stage stage,
                       const TopkForm& form) {
  const auto millionths = [](double ratio) {
    return static_cast<uint64_t>(std::floor(ratio * 1e6 + 0.5));
  };
  uint64_t r = millionths(form.ratio);
  if (stage == Stage::kOwner) {
    r = form.owner_ratio != 0 ? millionths(form.owner_ratio) : std::min<uint64_t>(4 * r, 250000);
  }
  const auto k = static_cast<uint32_t>(std::max<uint64_t>(1, (r * uint64_t{n} + 500000) / 1000000));
  const uint32_t b = parts(k, 32);
  const uint32_t values = form.q4 ? 16 * (b - 1) + std::min(k - 32 * (b - 1), 16U) + b + 1 : 2 * k;
  const uint32_t used = values + std::min(parts(12 * k, 8), parts(n, 8));
  std::vector<uint8_t> zeros(used, 0), marker(used, 0);
  if (form.q4) {
    marker[values - 1] = 255;
  } else {
    marker[0] = 0xc0;
    marker[1] = 0x7f;
  }
  if (std::equal(zeros.begin(), zeros.end(), payload)) return;
  const bool non_finite = std::equal(marker.begin(), marker.end(), payload);
  judge(verdict, 0, n, !non_finite && is_corrupt_topk(payload, n, k, form.q4), non_finite);
}

// The value of an option in a canonical codec string; empty where it is left out.
inline std::string option_in(const std::string& canonical, const std::string& name) {
  const size_t at = canonical.find(name + "=");
  if (at == std::string::npos || (canonical[at - 1] != ':' && canonical[at - 1] != ',')) return {};
  const size_t begin = at + name.size() + 1;
  return canonical.substr(begin, canonical.find(',', begin) - begin);
}

// Nothing for a codec whose section has no corrupt payloads, or that is not written here.
inline std::optional<Verdict> verdict_on(const ParsedCodec& codec, const std::byte* bytes,
                                         uint32_t n, Stage stage) {
  const auto* payload = reinterpret_cast<const uint8_t*>(bytes);
  const auto option = [&](const char* name) { return option_in(codec.canonical, name); };
  Verdict verdict{.corrupt = false, .nan = std::vector<bool>(n), .complete = true};
  const std::string_view name = codec.codec->name;
  if (name == "q4") {
    judge_q4(verdict, payload, n);
  } else if (name == "q8") {
    judge_q8(verdict, payload, n);
  } else if (name == "sign1") {
    judge_sign1(verdict, payload, n);
  } else if (name == "rht") {
    judge_rht(verdict, payload, n, static_cast<uint32_t>(std::stoul(option("bits"))));
  } else if (name == "topk") {
    const std::string owner = option("owner_ratio");
    judge_topk(verdict, payload, n, stage,
               {std::stod(option("ratio")), owner.empty() ? 0 : std::stod(owner),
                option("values") == "q4"});
  } else {
    return {};
  }
  return verdict;
}

}  // namespace gradferry::testing
