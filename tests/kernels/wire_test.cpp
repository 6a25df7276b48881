// What docs/reference/wire_format.md promises of headers, commits and checksums: the law of headers
// is its table, and every field of it is looked at.
#include "gradferry/wire.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "hooks/protocol/messages.h"

namespace gradferry::testing {
namespace {

struct Row {
  uint32_t offset;
  uint32_t num_bytes;
  std::string name;
};

// The rows of the first table after a heading.
std::vector<Row> documented(const std::string& heading) {
  std::ifstream file(GRADFERRY_WIRE_FORMAT);
  std::string line;
  while (std::getline(file, line) && !line.starts_with("### " + heading)) {
  }
  std::vector<Row> rows;
  while (std::getline(file, line) && !line.starts_with("###")) {
    std::istringstream words(line);
    char bar = 0, kind = 0;
    uint32_t offset = 0, bits = 0;
    std::string name;
    if (words >> bar >> offset >> bar >> kind >> bits >> bar >> name) {
      rows.push_back({offset, bits / 8, name});
    }
  }
  return rows;
}

constexpr MessageHeader kHeader = make_header({.config_hash = 0x1122334455667788,
                                               .layout_hash = 0x99aabbccddeeff00,
                                               .step = 7,
                                               .chunk = 0x1ffffffff,
                                               .rank = 3,
                                               .phase = Phase::kGather},
                                              /*payload_bytes=*/4096, /*checksum=*/0xabcdef);

TEST(HeaderLaw, IsTheTableOfTheDocument) {
  const std::vector<Row> rows = documented("Header");
  uint32_t end = 0;
  for (const Row& row : rows) {
    EXPECT_EQ(row.offset, end) << row.name;
    end += row.num_bytes;
    if (row.name == "seed") continue;  // may be anything
    const auto field = std::ranges::find(kHeaderFields, row.name,
                                         [](const HeaderField& f) { return std::string(f.name); });
    ASSERT_NE(field, kHeaderFields.end()) << row.name;
    EXPECT_EQ(field->offset, row.offset) << row.name;
    EXPECT_EQ(field->num_bytes, row.num_bytes) << row.name;
  }
  EXPECT_EQ(end, sizeof(MessageHeader));
  EXPECT_EQ(rows.size(), kHeaderFields.size() + 1);
}

// Every bit of a field, and nothing else, is that field's fault.
TEST(HeaderLaw, EveryBitOfEveryFieldIsLookedAt) {
  EXPECT_EQ(first_mismatch(kHeader, std::bit_cast<HeaderWords>(kHeader)).status, WireStatus::kOk);
  for (const HeaderField& field : kHeaderFields) {
    for (uint32_t bit = 0; bit < 8 * field.num_bytes; ++bit) {
      auto words = std::bit_cast<HeaderWords>(kHeader);
      words.word[(8 * field.offset + bit) / 32] ^= 1U << ((8 * field.offset + bit) % 32);
      const HeaderMismatch found = first_mismatch(kHeader, words);
      EXPECT_EQ(found.status, field.mismatch) << field.name << ", bit " << bit;
      EXPECT_EQ(found.expected ^ found.received, uint64_t{1} << bit) << field.name;
    }
  }
}

TEST(HeaderLaw, TheFirstFieldInTurnIsTheOneThatIsNamed) {
  for (size_t first = 0; first < kHeaderFields.size(); ++first) {
    auto words = std::bit_cast<HeaderWords>(kHeader);
    for (size_t i = first; i < kHeaderFields.size(); ++i) {
      words.word[kHeaderFields[i].offset / 4] ^= 1U << (8 * (kHeaderFields[i].offset % 4));
    }
    EXPECT_EQ(first_mismatch(kHeader, words).status, kHeaderFields[first].mismatch);
  }
}

TEST(HeaderLaw, OfChecksumsThatOfTheSenderIsExpected) {
  auto words = std::bit_cast<HeaderWords>(kHeader);
  ++words.word[offsetof(MessageHeader, checksum) / 4];
  const HeaderMismatch found = first_mismatch(kHeader, words);
  EXPECT_EQ(found.expected, kHeader.checksum + 1);
  EXPECT_EQ(found.received, kHeader.checksum);
}

// --- commits -------------------------------------------------------------------------------------

TEST(CommitRecord, IsTheTableOfTheDocument) {
  const Fault fault{WireStatus::kBadChecksum, Phase::kGather,     3,
                    (1ull << 32) + 5,         0x0123456789abcdef, 0xfedcba9876543210};
  std::vector<std::byte> message(commit_bytes(3));
  write_commit(message.data(), 1, 7, 9, fault, {1, 0, 1}, 62500.0F);
  const std::map<std::string, uint64_t> values = {
      {"magic", 0x59524647},
      {"wire_version", kWireVersion},
      {"phase", 3},
      {"status", static_cast<uint64_t>(WireStatus::kBadChecksum)},
      {"source_rank", 1},
      {"step", 7},
      {"bucket", 9},
      {"failed_chunk", 5},
      {"failed_phase", 2},
      {"failed_rank", 3},
      {"expected", fault.expected},
      {"received", fault.received},
      {"checksum", word_sum(message.data(), 56) + word_sum(message.data() + 64, 8, 56)}};
  uint32_t end = 0;
  for (const Row& row : documented("Commit record")) {
    EXPECT_EQ(row.offset, end) << row.name;
    end += row.num_bytes;
    uint64_t found = 0;
    std::memcpy(&found, message.data() + row.offset, row.num_bytes);
    EXPECT_EQ(found, values.at(row.name)) << row.name;
  }
  EXPECT_EQ(end, sizeof(CommitRecord));
  const std::array<std::byte, 8> map = {std::byte{1}, std::byte{0}, std::byte{1}};
  EXPECT_TRUE(std::equal(map.begin(), map.end(), message.begin() + end));
  // Without an error it has the loss scale, and else zeros.
  write_commit(message.data(), 1, 7, 9, {}, {}, 62500.0F);
  CommitRecord record;
  std::memcpy(&record, message.data(), sizeof(record));
  EXPECT_EQ(record.received, std::bit_cast<uint32_t>(62500.0F));
  EXPECT_EQ(record.failed_chunk + record.failed_phase + record.failed_rank + record.expected, 0);
}

// --- checksums -----------------------------------------------------------------------------------

uint64_t sum_of(const std::vector<uint32_t>& words, size_t offset = 0) {
  return word_sum(reinterpret_cast<const std::byte*>(words.data()), 4 * words.size(), offset);
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

}  // namespace
}  // namespace gradferry::testing
