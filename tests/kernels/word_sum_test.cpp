// What docs/reference/wire_format.md promises of the checksum.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "gradferry/wire.h"

namespace gradferry::testing {
namespace {

uint64_t sum_of(const std::vector<uint32_t>& words, size_t offset = 0) {
  return word_sum(reinterpret_cast<const std::byte*>(words.data()), 4 * words.size(), offset);
}

std::vector<uint32_t> random_words(size_t num_words) {
  std::mt19937 random(1);
  std::vector<uint32_t> words(num_words);
  for (uint32_t& word : words) word = static_cast<uint32_t>(random());
  return words;
}

TEST(WordSum, IsTheDocumentedSumAndThatOfItsParts) {
  EXPECT_EQ(sum_of({}), 0u);
  EXPECT_EQ(sum_of({1, 10, 100}), 3 + 50 + 700u);
  EXPECT_EQ(sum_of({0xffffffff, 0xffffffff}, 8), 0xffffffffu * uint64_t{7 + 9});
  const std::vector<uint32_t> words = random_words(1000);
  for (const ptrdiff_t split : {0, 1, 16, 999, 1000}) {
    const std::vector<uint32_t> before(words.begin(), words.begin() + split);
    const std::vector<uint32_t> after(words.begin() + split, words.end());
    EXPECT_EQ(sum_of(before) + sum_of(after, before.size() * 4), sum_of(words));
  }
}

// A flip adds or subtracts what its bit alone sums to. Two of them cancel when these are equal, or
// when they add up to 0 modulo 2^64.
TEST(WordSum, NoTwoFlippedBitsCancel) {
  constexpr size_t kWords = 40000;  // of several tiles
  std::vector<uint64_t> changes;
  for (size_t i = 0; i < kWords; ++i) {
    for (uint32_t bit = 0; bit < 32; ++bit) {
      changes.push_back(sum_of({1u << bit}, 4 * i));
      changes.push_back(uint64_t{0} - changes.back());
    }
  }
  // The checksum's own bits. The top one is its own negative.
  for (uint32_t bit = 0; bit < 63; ++bit) {
    changes.push_back(uint64_t{1} << bit);
    changes.push_back(uint64_t{0} - changes.back());
  }
  changes.push_back(uint64_t{1} << 63);
  std::ranges::sort(changes);
  EXPECT_EQ(std::ranges::adjacent_find(changes), changes.end());
  EXPECT_NE(changes.front(), 0u);
}

// The top bit is where a sum has the least room above it.
TEST(WordSum, NoTwoTopBitsOfTheLongestMessageCancel) {
  std::mt19937_64 random(2);
  constexpr uint64_t kWords = uint64_t{1} << 30;  // 4 GiB
  const auto top = [](uint64_t word) { return sum_of({0x80000000u}, 4 * word); };
  for (uint32_t i = 0; i < 100000; ++i) {
    const uint64_t a = random() % kWords, b = random() % kWords;
    if (a == b) continue;
    ASSERT_NE(top(a), top(b));
    ASSERT_NE(top(a) + top(b), 0u);
  }
  for (uint64_t distance = 1; distance < kWords; distance *= 2) {
    ASSERT_NE(top(0), top(distance));
    ASSERT_NE(top(0) + top(distance), 0u);
    ASSERT_NE(top(kWords - 1) + top(kWords - 1 - distance), 0u);
  }
}

TEST(WordSum, SeesSwappedWordsAndClearedBits) {
  const std::vector<uint32_t> words = random_words(8192);
  const uint64_t sum = sum_of(words);
  std::mt19937 random(3);
  for (uint32_t i = 0; i < 2000; ++i) {
    std::vector<uint32_t> changed = words;
    const size_t a = random() % words.size(), b = random() % words.size();
    std::swap(changed[a], changed[b]);
    ASSERT_EQ(sum_of(changed) == sum, words[a] == words[b]);
    changed = words;
    const uint32_t mask = ~(1u << random() % 32);
    const size_t end = std::max(a, b);
    for (size_t j = std::min(a, b); j < end; j += 1 + random() % 64) changed[j] &= mask;
    ASSERT_EQ(sum_of(changed) == sum, changed == words);
  }
}

}  // namespace
}  // namespace gradferry::testing
