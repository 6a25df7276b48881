#include <gtest/gtest.h>

#include "gradferry/codec.h"
#include "gradferry/cuda_codecs.h"

namespace gradferry {
namespace {

TEST(CudaTable, HasEveryCodecOnceItIsUsed) {
  EXPECT_TRUE(codecs(Device::kCuda).empty());
  use_cuda_codecs();
  const std::span<const Codec> cpu = codecs(Device::kCpu), cuda = codecs(Device::kCuda);
  ASSERT_EQ(cuda.size(), cpu.size());
  for (size_t i = 0; i < cpu.size(); ++i) {
    EXPECT_EQ(cuda[i].name, cpu[i].name);
    EXPECT_EQ(cuda[i].payload_bytes, cpu[i].payload_bytes);
    for (const bool differs :
         {cuda[i].encode != cpu[i].encode, cuda[i].decode != cpu[i].decode,
          cuda[i].reduce != cpu[i].reduce, cuda[i].accumulate != cpu[i].accumulate,
          cuda[i].undo != cpu[i].undo}) {
      EXPECT_TRUE(differs) << cpu[i].name;
    }
  }
  EXPECT_EQ(parse_codec("q4", Device::kCuda).codec, &cuda[2]);
}

// A batch without tiles needs no device.
TEST(CudaTable, EmptyBatchLaunchesNothing) {
  use_cuda_codecs();
  for (const Codec& codec : codecs(Device::kCuda)) {
    const ParsedCodec parsed = parse_codec(codec.name, Device::kCuda);
    const TileBatch batch{nullptr, 0, ScalarType::kFloat32, Stage::kWorker, true,
                          0,       0, &parsed.options,      nullptr,        nullptr};
    codec.encode(batch, nullptr, 1.0f, nullptr, nullptr, nullptr);
    codec.decode(batch, nullptr, nullptr, 0.0f, nullptr);
    codec.reduce(batch, nullptr, 2, nullptr, nullptr, nullptr);
    codec.accumulate(batch, nullptr, 2, 2, nullptr);
    codec.undo(batch, nullptr, nullptr, nullptr, 1.0f, nullptr);
  }
}

}  // namespace
}  // namespace gradferry
