// Codec strings, options, instruction sets, libraries for devices: what is accepted, and what an
// error says.
#include <gtest/gtest.h>

#include <span>
#include <string>

#include "gradferry/codec.h"
#include "gradferry/device_library.h"
#include "gradferry/error.h"

namespace gradferry {
namespace {

TEST(ParseCodec, CanonicalTextSpellsOutDefaultsInTableOrder) {
  const auto canonical = [](const char* text) { return parse_codec(text).canonical; };
  EXPECT_EQ(canonical("exact"), "exact");
  EXPECT_EQ(canonical("topk"), "topk:ratio=0.01,values=bf16");
  EXPECT_EQ(canonical("topk:values=q4,ratio=1e-2"), "topk:ratio=0.01,values=q4");
  EXPECT_EQ(canonical("topk:owner_ratio=0.0400"), "topk:ratio=0.01,owner_ratio=0.04,values=bf16");
  EXPECT_EQ(canonical("topk:ratio=0.02,owner_ratio=0.02"),
            "topk:ratio=0.02,owner_ratio=0.02,values=bf16");
}

struct Refusal {
  const char* text;
  const char* says;
  bool suggests = false;  // what may have been meant
};

TEST(ParseCodec, BadStringsSayWhatToWriteInstead) {
  constexpr Refusal kRefusals[] = {
      {"topj", "Did you mean 'topk'?", true},
      {"zzzzzzzz", "Codecs: exact, bf16, "},
      {"", "there is no codec ''"},
      {"topk:ration=0.1", "Did you mean 'ratio'?", true},
      {"topk:values=bf61", "Did you mean 'bf16'?", true},
      {"topk:ratio=2", "a number from 0.001 to 0.25"},
      {"topk:ratio=x", "not a number from"},
      {"topk:ratio=nan", "not a number from"},
      {"topk:ratio=0.1x", "not a number from"},
      {"topk:ratio", "not of the form option=value"},
      {"topk:", "not of the form option=value"},
      {"topk:ratio=0.1,", "not of the form option=value"},
      {"topk:ratio=0.1,ratio=0.2", "given twice"},
      {"topk:ratio=0.02,owner_ratio=0.01", "owner_ratio is 0.01, less than ratio"},
      {"exact:ratio=1", "has no options"},
      {"exact:4", "has no options"},
      // Values without their option, of which no option takes the last two.
      {"topk:0.1", "Did you mean 'ratio=0.1'?", true},
      {"topk:q4", "Did you mean 'values=q4'?", true},
      {"topk:2", "not of the form option=value"},
      {"topk:nan", "not of the form option=value"},
  };
  for (const auto& [text, says, suggests] : kRefusals) {
    try {
      parse_codec(text);
      ADD_FAILURE() << text << " was accepted";
    } catch (const Error& error) {
      const std::string what = error.what();
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      EXPECT_NE(what.find(says), std::string::npos) << what;
      EXPECT_EQ(what.find("Did you mean") != std::string::npos, suggests) << what;
    }
  }
}

TEST(ParseCodec, FindsEveryCodecOfTheTable) {
  for (const Codec& codec : codecs()) {
    const ParsedCodec parsed = parse_codec(codec.name);
    EXPECT_EQ(parsed.codec, &codec);
    EXPECT_EQ(parsed.canonical.substr(0, codec.name.size()), codec.name);
    EXPECT_EQ(parse_codec(parsed.canonical).canonical, parsed.canonical);
    EXPECT_FALSE(codec.summary.empty());
  }
}

TEST(Isa, EveryAvailableOneHasTheWholeTable) {
  const std::span<const Codec> scalar = cpu_codecs(Isa::kScalar);
  for (const Isa isa : available_isas()) {
    const std::span<const Codec> table = cpu_codecs(isa);
    ASSERT_EQ(table.size(), scalar.size());
    for (size_t i = 0; i < table.size(); ++i) {
      EXPECT_EQ(table[i].name, scalar[i].name);
      EXPECT_EQ(table[i].payload_bytes, scalar[i].payload_bytes);
      EXPECT_EQ(table[i].encode == scalar[i].encode, isa == Isa::kScalar);
    }
  }
}

// The environment is read once per process, so each value gets a process of its own.
using IsaDeathTest = ::testing::Test;

TEST(IsaDeathTest, EnvironmentForcesOneOrIsRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const Isa isa : available_isas()) {
    EXPECT_EXIT(
        {
          setenv("GRADFERRY_ISA", std::string(isa_name(isa)).c_str(), 1);
          std::exit(active_isa() == isa ? 0 : 1);
        },
        ::testing::ExitedWithCode(0), "");
  }
  EXPECT_EXIT(
      {
        setenv("GRADFERRY_ISA", "avx1024", 1);
        try {
          codecs();
        } catch (const Error& error) {
          std::fputs(error.what(), stderr);
          std::exit(error.kind() == ErrorKind::kConfig ? 7 : 1);
        }
      },
      ::testing::ExitedWithCode(7), "GRADFERRY_ISA is 'avx1024'.*scalar");
}

// --- libraries of kernels for devices ------------------------------------------------------------

void expect_no_library() {
  try {
    message_kernels();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kState);
    EXPECT_NE(std::string(error.what()).find("no device library is in use"), std::string::npos);
  }
}

TEST(DeviceLibrary, IsAskedForInVain) { expect_no_library(); }

TEST(DeviceLibrary, OfAnotherVersionIsRefusedWithBothVersions) {
  DeviceLibrary library{};
  library.version = kDeviceLibraryVersion + 41;
  try {
    use_device_library(library);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    const std::string text = error.what();
    EXPECT_NE(text.find("version " + std::to_string(library.version)), std::string::npos) << text;
    EXPECT_NE(text.find("version " + std::to_string(kDeviceLibraryVersion)), std::string::npos);
  }
  expect_no_library();
}

TEST(DeviceLibrary, RowsOfCodecsAreTheirPlacesInTheTable) {
  for (uint32_t i = 0; i < codecs().size(); ++i) EXPECT_EQ(row_of(codecs()[i]), i);
  EXPECT_EQ(row_of(*parse_codec("exact").codec), 0u);
}

}  // namespace
}  // namespace gradferry
