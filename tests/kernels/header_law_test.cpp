// The law of headers is the table of docs/reference/wire_format.md, and every field of it is looked
// at.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "gradferry/wire.h"

namespace gradferry::testing {
namespace {

struct Row {
  uint32_t offset;
  uint32_t num_bytes;
  std::string name;
};

// The rows of the first table after "### Header".
std::vector<Row> documented() {
  std::ifstream file(GRADFERRY_WIRE_FORMAT);
  std::string line;
  while (std::getline(file, line) && !line.starts_with("### Header")) {
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
  const std::vector<Row> rows = documented();
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

TEST(HeaderLaw, EqualHeadersAgree) {
  EXPECT_EQ(first_mismatch(kHeader, std::bit_cast<HeaderWords>(kHeader)).status, WireStatus::kOk);
}

// Every bit of a field, and nothing else, is that field's fault.
TEST(HeaderLaw, EveryBitOfEveryFieldIsLookedAt) {
  for (const HeaderField& field : kHeaderFields) {
    for (uint32_t bit = 0; bit < 8 * field.num_bytes; ++bit) {
      auto words = std::bit_cast<HeaderWords>(kHeader);
      words.word[(8 * field.offset + bit) / 32] ^= 1U << ((8 * field.offset + bit) % 32);
      const HeaderMismatch found = first_mismatch(kHeader, words);
      EXPECT_EQ(found.status, field.refused) << field.name << ", bit " << bit;
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
    EXPECT_EQ(first_mismatch(kHeader, words).status, kHeaderFields[first].refused);
  }
}

TEST(HeaderLaw, OfChecksumsThatOfTheSenderIsExpected) {
  auto words = std::bit_cast<HeaderWords>(kHeader);
  ++words.word[offsetof(MessageHeader, checksum) / 4];
  const HeaderMismatch found = first_mismatch(kHeader, words);
  EXPECT_EQ(found.expected, kHeader.checksum + 1);
  EXPECT_EQ(found.received, kHeader.checksum);
}

}  // namespace
}  // namespace gradferry::testing
