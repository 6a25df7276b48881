// Any text is a codec or a named error; a codec's canonical text stands for the same codec.
#include <cstring>
#include <string>

#include "gradferry/codec.h"
#include "gradferry/error.h"
#include "tests/fuzz/target.h"

namespace gradferry::fuzzing {

void run(Bytes input) {
  const std::string text = input.rest();
  ParsedCodec parsed{};
  try {
    parsed = parse_codec(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_NE(std::string(error.what()).find("codec"), std::string::npos) << error.what();
    return;
  }
  const ParsedCodec again = parse_codec(parsed.canonical);
  EXPECT_EQ(again.codec, parsed.codec) << parsed.canonical;
  EXPECT_EQ(again.canonical, parsed.canonical) << text;
  EXPECT_EQ(std::memcmp(&again.options, &parsed.options, sizeof(CodecOptions)), 0) << text;
  for (const Stage stage : {Stage::kWorker, Stage::kOwner}) {
    for (const uint32_t n : {1U, 33U, 4095U, kTileElements}) {
      const uint32_t bytes =
          parsed.codec->payload_bytes(n, ScalarType::kFloat32, stage, parsed.options);
      EXPECT_GT(bytes, 0);
      EXPECT_EQ(bytes % kPayloadAlignment, 0);
      EXPECT_LE(bytes, n * sizeof(float) + 128) << text;  // a block may be coded whole
    }
  }
}

}  // namespace gradferry::fuzzing
