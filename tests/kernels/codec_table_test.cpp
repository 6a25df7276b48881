// Codec strings, options, instruction sets, libraries for devices: what is accepted, and what an
// error says.
#include <gtest/gtest.h>

#include <array>

#include "gradferry/device_library.h"
#include "gradferry/error.h"
#include "kernels/parse_codec.h"

namespace gradferry {
namespace {

constexpr std::array<std::string_view, 2> kValueChoices = {"bf16", "q4"};
constexpr std::array<OptionSpec, 3> kOptions = {{
    {.name = "ratio",
     .default_value = "0.01",
     .help = "",
     .minimum = 1e-6,
     .maximum = 0.25,
     .choices = {}},
    {.name = "owner_ratio",
     .default_value = "",
     .help = "",
     .minimum = 1e-6,
     .maximum = 0.25,
     .choices = {}},
    {.name = "values",
     .default_value = "bf16",
     .help = "",
     .minimum = 0,
     .maximum = 0,
     .choices = kValueChoices},
}};

CodecOptions count_values(std::span<const std::string_view> values) {
  return CodecOptions::from<uint32_t>(static_cast<uint32_t>(values.size()));
}

std::vector<Codec> table() {
  Codec sparse = {};
  sparse.name = "sparse";
  sparse.options = kOptions;
  sparse.parse = &count_values;
  Codec plain = {};
  plain.name = "plain";
  plain.parse = &count_values;
  return {plain, sparse};
}

std::string canonical(std::string_view text) {
  static const std::vector<Codec> codecs = table();
  return parse_codec_in(text, codecs).canonical;
}

std::string error_of(std::string_view text) {
  try {
    return "accepted as " + canonical(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    return error.what();
  }
}

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST(ParseCodec, CanonicalTextSpellsOutDefaultsInTableOrder) {
  EXPECT_EQ(canonical("plain"), "plain");
  EXPECT_EQ(canonical("sparse"), "sparse:ratio=0.01,values=bf16");
  EXPECT_EQ(canonical("sparse:values=q4,ratio=1e-2"), "sparse:ratio=0.01,values=q4");
  EXPECT_EQ(canonical("sparse:owner_ratio=0.0400"),
            "sparse:ratio=0.01,owner_ratio=0.04,values=bf16");
}

TEST(ParseCodec, MisspeltNamesGetASuggestion) {
  EXPECT_TRUE(contains(error_of("sparze"), "Did you mean 'sparse'?"));
  EXPECT_TRUE(contains(error_of("zzzzzzzz"), "Codecs: plain, sparse"));
  EXPECT_FALSE(contains(error_of("zzzzzzzz"), "Did you mean"));
  EXPECT_TRUE(contains(error_of("sparse:ration=0.1"), "Did you mean 'ratio'?"));
  EXPECT_TRUE(contains(error_of("sparse:values=bf61"), "Did you mean 'bf16'?"));
}

TEST(ParseCodec, BadOptionsSayWhatToWriteInstead) {
  EXPECT_TRUE(contains(error_of("sparse:ratio=2"), "a number from 1e-06 to 0.25"));
  EXPECT_TRUE(contains(error_of("sparse:ratio=x"), "not a number from"));
  EXPECT_TRUE(contains(error_of("sparse:ratio=nan"), "not a number from"));
  EXPECT_TRUE(contains(error_of("sparse:ratio=0.1x"), "not a number from"));
  EXPECT_TRUE(contains(error_of("sparse:ratio"), "not of the form option=value"));
  EXPECT_TRUE(contains(error_of("sparse:"), "not of the form option=value"));
  EXPECT_TRUE(contains(error_of("sparse:ratio=0.1,"), "not of the form option=value"));
  EXPECT_TRUE(contains(error_of("sparse:ratio=0.1,ratio=0.2"), "given twice"));
  EXPECT_TRUE(contains(error_of("plain:ratio=1"), "has no options"));
  EXPECT_TRUE(contains(error_of("plain:4"), "has no options"));
  EXPECT_TRUE(contains(error_of(""), "there is no codec ''"));
}

TEST(ParseCodec, ValuesWithoutTheirOptionGetASuggestion) {
  EXPECT_TRUE(contains(error_of("sparse:0.1"), "Did you mean 'ratio=0.1'?"));
  EXPECT_TRUE(contains(error_of("sparse:q4"), "Did you mean 'values=q4'?"));
  EXPECT_FALSE(contains(error_of("sparse:2"), "Did you mean"));  // no option takes it
  EXPECT_FALSE(contains(error_of("sparse:nan"), "Did you mean"));
}

TEST(ParseCodec, TopkRefusesAnOwnerThatKeepsFewerThanWorkers) {
  EXPECT_NO_THROW(parse_codec("topk:ratio=0.02,owner_ratio=0.02"));
  try {
    parse_codec("topk:ratio=0.02,owner_ratio=0.01");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_TRUE(contains(error.what(), "owner_ratio is 0.01, less than ratio"));
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

// --- libraries of kernels for devices
// --------------------------------------------------------------

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
