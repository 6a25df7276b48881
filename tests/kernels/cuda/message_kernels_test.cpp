// The kernels of steps, against the definitions of docs/reference/wire_format.md in
// include/gradferry/wire.h.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/kernels/cuda/chunk_run.h"

namespace gradferry::testing {
namespace {

class Messages : public LibraryTest {};

TEST_P(Messages, RescaleGivesTheGainToThePresentLossScale) {
  float residual_scale = 0, gain = 0;
  const auto rescale = [&](const float* loss_scale) {
    library().messages.rescale({loss_scale, &residual_scale, &gain, nullptr});
    return gain;
  };
  const float first = 1024, second = 512, third = 3;
  EXPECT_EQ(rescale(&first), 1.0f);
  EXPECT_EQ(rescale(&second), 0.5f);
  EXPECT_EQ(rescale(&third), 3.0f / 512.0f);
  EXPECT_EQ(rescale(nullptr), 1.0f / 3.0f);
  EXPECT_EQ(residual_scale, 1.0f);
}

TEST_P(Messages, ScaleMultipliesWhatStaysFinite) {
  for (const uint64_t n : {0, 1, 127, 129, 300000}) {
    std::vector<float> values(n), expected(n);
    for (uint64_t i = 0; i < n; ++i) {
      const bool huge = i % 7 == 3;
      values[i] = huge ? -0x1p127f : static_cast<float>(i) - 5;
      expected[i] = huge ? values[i] : values[i] * 3;
    }
    const float factor = 3, one = 1;
    library().messages.scale({&factor, values.data(), n, nullptr});
    EXPECT_EQ(values, expected);
    library().messages.scale({&one, values.data(), n, nullptr});
    EXPECT_EQ(values, expected);
  }
}

TEST_P(Messages, CommitWritesItsRecordAndTakesTheTile) {
  Findings findings{.status = 10,
                    .phase = 2,
                    .rank = 3,
                    .reserved = 0,
                    .step = 7,
                    .chunk = 0x500000006,
                    .expected = 11,
                    .received = 12,
                    .nonfinite_tile = 44};
  CommitRecord record{};
  uint64_t tile = 0;
  const float scale = 1024;
  CommitRecord expected = make_commit(2, 7, 9, findings, scale);
  library().messages.commit({7, 9, 2, &scale, &findings, &record, &tile, nullptr});
  expected.checksum =
      word_sum(reinterpret_cast<const std::byte*>(&expected), offsetof(CommitRecord, checksum));
  EXPECT_EQ(std::memcmp(&record, &expected, sizeof(record)), 0);
  EXPECT_EQ(tile, 44u);
  EXPECT_EQ(findings.nonfinite_tile, 0u);
  EXPECT_EQ(findings.status, 10u);  // stays
}

TEST_P(Messages, CommitWithoutAnErrorHasTheLossScale) {
  for (const float scale : {1024.0f, std::numeric_limits<float>::infinity(), 0.0f}) {
    Findings findings{};
    CommitRecord record{};
    uint64_t tile = 0;
    const bool is_there = scale != 0;
    library().messages.commit(
        {7, 9, 2, is_there ? &scale : nullptr, &findings, &record, &tile, nullptr});
    EXPECT_EQ(record.status, 0u);
    EXPECT_EQ(record.expected, 0u);
    EXPECT_EQ(record.received, std::bit_cast<uint32_t>(scale));
    const auto* bytes = reinterpret_cast<const std::byte*>(&record);
    EXPECT_EQ(record.checksum, word_sum(bytes, offsetof(CommitRecord, checksum)));
  }
}

INSTANTIATE_TEST_SUITE_P(Libraries, Messages, ::testing::ValuesIn(both_libraries()), library_name);

}  // namespace
}  // namespace gradferry::testing
