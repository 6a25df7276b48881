// What every codec promises of every call: its definition in include/gradferry/codec.h, word by
// word, and the same result on every instruction set. The contract suite calls with numbers that
// have broken gradient compressors before, fuzz targets with any numbers and bytes.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gradferry/wire.h"
#include "tests/kernels/codec_runner.h"

namespace gradferry::testing {

// The rule for every residual: the new value where it is finite, else what is kept of the old
// one.
inline float kept_unless_finite(double updated, float kept) {
  const float rounded = static_cast<float>(updated);
  return std::isfinite(rounded) ? rounded : kept;
}
inline float kept_by(float gain, float old) {
  const float product = gain * old;
  return std::isfinite(product) ? product : old;
}

inline bool same_status(const std::vector<TileStatus>& a, const std::vector<TileStatus>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](TileStatus x, TileStatus y) {
    return x.checksum == y.checksum && x.flags == y.flags;
  });
}
inline bool same_result(const Result& a, const Result& b) {
  return a.payload == b.payload && a.gradient == b.gradient && a.residual == b.residual &&
         same_status(a.status, b.status);
}

class Laws {
 public:
  explicit Laws(const CallSetup& setup)
      : setup_(setup), parsed_(parse_codec(setup.codec)), run_(setup) {}

  const Runner& run() const { return run_; }

  Result encode(const Buffer& gradient, const Buffer& residual) const {
    Result encoded = run_.encode(Isa::kScalar, gradient, residual);
    expect_same(encoded, [&](Isa isa) {
      return run_.encode(isa, gradient, residual, 0x3c);  // a byte that is not written would differ
    });
    Coded coded(run_, residual);
    const std::vector<double> g = numbers(setup_.dtype, gradient);
    for (size_t i = 0; i < g.size(); ++i) {
      coded.v.push_back(add(setup_.alpha, g[i], residual, coded.old, i));
    }
    for (size_t t = 0; t < run_.tiles().size(); ++t) {
      const auto begin = g.begin() + static_cast<ptrdiff_t>(run_.tiles()[t].gradient_offset);
      coded.held[t] =
          setup_.hold_zero_tiles &&
          std::all_of(begin, begin + run_.tiles()[t].num_elements, [](double x) { return x == 0; });
    }
    check_coded(encoded, Stage::kWorker, coded);
    return encoded;
  }

  Result decode(const Buffer& payload, const Buffer& residual, Stage stage) const {
    Result decoded = run_.decode(Isa::kScalar, payload, residual, stage);
    expect_same(decoded, [&](Isa isa) { return run_.decode(isa, payload, residual, stage); });
    check_decoded(payload, residual.as<float>(), stage, decoded);
    return decoded;
  }

  Result reduce(const std::vector<Buffer>& payloads, const Buffer& residual) const {
    Result reduced = run_.reduce(Isa::kScalar, payloads, residual);
    expect_same(reduced, [&](Isa isa) { return run_.reduce(isa, payloads, residual); });
    Coded coded(run_, residual);
    const std::vector<double> sum = sum_of(payloads, coded.corrupt);
    const double inverse = one_over(payloads.size());
    for (size_t i = 0; i < sum.size(); ++i) {
      coded.v.push_back(add(inverse, sum[i], residual, coded.old, i));
    }
    for (size_t t = 0; t < run_.tiles().size(); ++t) {
      coded.held[t] = setup_.hold_zero_tiles &&
                      std::all_of(payloads.begin(), payloads.end(), [&](const Buffer& payload) {
                        return is_zero(payload, t, Stage::kWorker);
                      });
    }
    check_coded(reduced, Stage::kOwner, coded);
    check_owner_bytes(reduced.payload, coded);
    return reduced;
  }

  Result accumulate(const std::vector<Buffer>& payloads, uint32_t divisor) const {
    Result result = run_.accumulate(Isa::kScalar, payloads, divisor);
    expect_same(result, [&](Isa isa) { return run_.accumulate(isa, payloads, divisor); });
    std::vector<TileStatus> status(run_.tiles().size(), TileStatus{0, 0});
    std::vector<uint32_t> corrupt(status.size());
    const std::vector<double> sum = sum_of(payloads, corrupt);
    Buffer expected = run_.new_gradient();
    for (size_t t = 0; t < status.size(); ++t) {
      status[t].flags = corrupt[t];
      for_elements(t, [&](size_t i) {
        const double mean = combine(one_over(divisor), sum[i], 1, -0.0);
        if (!std::isfinite(round_into(expected, i, mean))) status[t].flags |= kTileNonFinite;
      });
    }
    EXPECT_TRUE(result.gradient == expected);
    EXPECT_TRUE(same_status(result.status, status));
    return result;
  }

  // `own`: what encode gave; `in`: what came back.
  Result undo(const Buffer& own, const Buffer& in, const Buffer& gradient,
              const Buffer& residual) const {
    Result undone = run_.undo(Isa::kScalar, own, in, gradient, residual);
    for (const bool with_status : {true, false}) {
      expect_same(undone, [&](Isa isa) {
        Result other = run_.undo(isa, own, in, gradient, residual, with_status);
        other.status = undone.status;
        return other;
      });
    }
    check_undone(own, in, gradient, residual.as<float>(), undone.residual.as<float>());
    return undone;
  }

 private:
  // What becomes a payload and, where there is one, a residual.
  struct Coded {
    Coded(const Runner& run, const Buffer& residual)
        : old(residual.as<float>()), held(run.tiles().size()), corrupt(run.tiles().size()) {}
    std::vector<double> v;
    std::vector<float> old;
    std::vector<bool> held;         // by tile: a zero tile, which is not coded
    std::vector<uint32_t> corrupt;  // by tile: the flag, where what came was
  };

  bool is_float64() const { return setup_.dtype == ScalarType::kFloat64; }
  double one_over(size_t n) const {
    return is_float64() ? 1.0 / static_cast<double>(n) : 1.0F / static_cast<float>(n);
  }
  // fl(a * x) + fl(b * y), in the arithmetic of the dtype.
  double combine(double a, double x, double b, double y) const {
    if (is_float64()) return a * x + b * y;
    const float ax = static_cast<float>(a) * static_cast<float>(x);
    const float by = static_cast<float>(b) * static_cast<float>(y);
    return ax + by;
  }
  // Adding -0 changes no number.
  double add(double a, double x, const Buffer& residual, const std::vector<float>& old,
             size_t i) const {
    return residual.size() == 0 ? combine(a, x, 1, -0.0) : combine(a, x, setup_.gain, old[i]);
  }
  double minus(double x, double y) const {
    return is_float64() ? x - y : static_cast<float>(x) - static_cast<float>(y);
  }
  // Rounds x to an element of a gradient, and gives it back.
  double round_into(Buffer& gradient, size_t i, double x) const {
    std::byte* place = gradient.data() + i * item_bytes(setup_.dtype);
    write_number(setup_.dtype, x, place);
    return read_number(setup_.dtype, place);
  }
  template <typename Visit>
  void for_elements(size_t tile, const Visit& visit) const {
    const Tile& t = run_.tiles()[tile];
    for (size_t i = t.gradient_offset; i < t.gradient_offset + t.num_elements; ++i) visit(i);
  }
  template <typename Call>
  void expect_same(const Result& scalar, const Call& call) const {
    for (const Isa isa : available_isas()) {
      EXPECT_TRUE(same_result(call(isa), scalar)) << setup_.codec << " on " << isa_name(isa);
    }
  }

  std::span<const std::byte> payload_of(const Buffer& payload, size_t t, Stage stage) const {
    const Tile& tile = run_.tiles()[t];
    const uint32_t offset = stage == Stage::kOwner ? tile.output_offset : tile.payload_offset;
    return {payload.data() + offset, run_.payload_bytes(tile.num_elements, stage)};
  }
  bool is_zero(const Buffer& payload, size_t t, Stage stage) const {
    return std::ranges::all_of(payload_of(payload, t, stage),
                               [](std::byte b) { return b == std::byte(0); });
  }

  // In rank order. Adds to the flags of corrupt tiles.
  std::vector<double> sum_of(const std::vector<Buffer>& payloads,
                             std::vector<uint32_t>& corrupt) const {
    std::vector<double> sum(run_.num_elements(), -0.0);
    for (const Buffer& payload : payloads) {
      const std::vector<double> sent = values(setup_, payload, Stage::kWorker);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] = combine(1, sum[i], 1, sent[i]);
      const Result decoded = run_.decode(Isa::kScalar, payload, Buffer(), Stage::kWorker);
      for (size_t t = 0; t < corrupt.size(); ++t) {
        corrupt[t] |= decoded.status[t].flags & kTileCorrupt;
      }
    }
    return sum;
  }

  // A payload that is well formed, its checksum, and the residual: exactly what it withholds, or
  // what is kept.
  void check_coded(const Result& result, Stage stage, const Coded& coded) const {
    const std::vector<double> sent = values(setup_, result.payload, stage);
    const Result back = run_.decode(Isa::kScalar, result.payload, Buffer(), stage);
    const std::vector<float> updated = result.residual.as<float>();
    for (size_t t = 0; t < run_.tiles().size(); ++t) {
      const std::span<const std::byte> payload = payload_of(result.payload, t, stage);
      ASSERT_EQ(back.status[t].flags & kTileCorrupt, 0) << "tile " << t;
      ASSERT_EQ(result.status[t].checksum,
                word_sum(payload.data(), payload.size(), run_.tiles()[t].message_offset));
      const bool held = coded.held[t];
      ASSERT_TRUE(!held || is_zero(result.payload, t, stage)) << "tile " << t;
      uint32_t flags = coded.corrupt[t];
      const Tile& tile = run_.tiles()[t];
      for (size_t i = tile.gradient_offset; i < tile.gradient_offset + tile.num_elements; ++i) {
        if (!std::isfinite(sent[i])) flags |= kTileNonFinite;
        ASSERT_TRUE(held || std::isfinite(coded.v[i]) || !std::isfinite(sent[i]))
            << "element " << i;
        if (updated.empty()) continue;
        const float kept = kept_by(setup_.gain, coded.old[i]);
        const float expected = held ? kept : kept_unless_finite(minus(coded.v[i], sent[i]), kept);
        ASSERT_EQ(float_bits(updated[i]), float_bits(expected)) << "element " << i;
      }
      ASSERT_EQ(result.status[t].flags, flags) << "tile " << t;
    }
  }

  // What encoding v at the owner's stage gives; of a codec that loses nothing, v rounded.
  void check_owner_bytes(const Buffer& payload, const Coded& coded) const {
    if (!parsed_.codec->lossy) {
      const std::vector<double> sent = values(setup_, payload, Stage::kOwner);
      Buffer rounded = run_.new_gradient();
      for (size_t i = 0; i < sent.size(); ++i) {
        const double expected = round_into(rounded, i, coded.v[i]);
        ASSERT_TRUE(expected == sent[i] || (std::isnan(expected) && std::isnan(sent[i])) ||
                    coded.held[tile_of(i)])
            << "element " << i;
      }
      return;
    }
    const std::vector<float> v(coded.v.begin(), coded.v.end());
    for (size_t t = 0; t < run_.tiles().size(); ++t) {
      Tile tile = run_.tiles()[t];
      const std::span<const std::byte> found = payload_of(payload, t, Stage::kOwner);
      Buffer expected(found.size());
      tile.payload_offset = 0;
      const TileBatch batch = {&tile,       1,           ScalarType::kFloat32, Stage::kOwner, false,
                               setup_.seed, setup_.step, &run_.options(),      nullptr};
      run_.codec(Isa::kScalar).encode(batch, v.data(), 1.0F, nullptr, nullptr, expected.data());
      ASSERT_TRUE(coded.held[t] ||
                  std::ranges::equal(found, std::span(expected.data(), found.size())))
          << "tile " << t;
    }
  }
  size_t tile_of(size_t element) const {
    size_t t = 0;
    while (run_.tiles()[t].gradient_offset + run_.tiles()[t].num_elements <= element) ++t;
    return t;
  }

  // Every number is D rounded once, flags say what arrives, and the residual has the momentum of
  // what is finite. Which payloads are corrupt is what tests/kernels/test_codec_payloads.py asks.
  void check_decoded(const Buffer& payload, const std::vector<float>& old, Stage stage,
                     const Result& decoded) const {
    const std::vector<double> sent = values(setup_, payload, stage);
    const std::vector<float> updated = decoded.residual.as<float>();
    Buffer expected = run_.new_gradient();
    for (size_t t = 0; t < run_.tiles().size(); ++t) {
      const Tile& tile = run_.tiles()[t];
      bool finite = true;
      for (size_t i = tile.gradient_offset; i < tile.gradient_offset + tile.num_elements; ++i) {
        const bool arrives = std::isfinite(round_into(expected, i, sent[i]));
        finite = finite && arrives;
        if (updated.empty()) continue;
        const float kept =
            arrives && setup_.beta != 0
                ? kept_unless_finite(combine(1, old[i], setup_.beta, sent[i]), old[i])
                : old[i];
        ASSERT_EQ(float_bits(updated[i]), float_bits(kept)) << "element " << i;
      }
      const bool corrupt = (decoded.status[t].flags & kTileCorrupt) != 0;
      ASSERT_EQ((decoded.status[t].flags & kTileNonFinite) != 0, !finite) << "tile " << t;
      ASSERT_TRUE(!corrupt || !finite) << "tile " << t;
    }
    ASSERT_TRUE(decoded.gradient == expected);
  }

  void check_undone(const Buffer& own, const Buffer& in, const Buffer& gradient,
                    const std::vector<float>& old, const std::vector<float>& updated) const {
    const std::vector<double> g = numbers(setup_.dtype, gradient);
    const std::vector<double> sent = values(setup_, own, Stage::kWorker);
    const std::vector<double> arrived =
        numbers(setup_.dtype, run_.decode(Isa::kScalar, in, Buffer(), Stage::kOwner).gradient);
    for (size_t i = 0; i < old.size(); ++i) {
      const double taken = combine(setup_.alpha, g[i], 1, -0.0);
      const float expected =
          std::isfinite(arrived[i])
              ? old[i]
              : kept_unless_finite(combine(1, old[i], 1, minus(sent[i], taken)), old[i]);
      ASSERT_EQ(float_bits(updated[i]), float_bits(expected)) << "element " << i;
    }
  }

  CallSetup setup_;
  ParsedCodec parsed_;
  Runner run_;
};

}  // namespace gradferry::testing
