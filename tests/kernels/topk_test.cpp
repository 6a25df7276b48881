// What the topk codec promises beyond the contract: how many elements each stage keeps. Its bytes
// are compared with the reference by test_codec_bytes.py and test_codec_payloads.py.
#include <gtest/gtest.h>

#include "gradferry/error.h"
#include "tests/kernels/codec_runner.h"
#include "tests/kernels/inputs.h"

namespace gradferry::testing {
namespace {

Runner runner(const std::string& codec, std::vector<uint32_t> sizes = {1}) {
  CallSetup setup;
  setup.codec = codec;
  setup.sizes = std::move(sizes);
  return Runner(setup);
}

// An owner that receives zeros codes exactly its residual. 341 of 4096 indices take as many bytes
// as a bitmap; of 342 the bitmap is smaller.
TEST(TopkCodec, OwnerWritesWhatAWorkerWithItsRatioWrites) {
  const std::vector<uint32_t> sizes = {4096, 4095, 2049, 1000, 128, 3, 1};
  for (const std::string values : {"bf16", "q4"}) {
    for (const std::string ratio : {"0.01", "0.08325", "0.0835", "0.25"}) {
      const Runner owner =
          runner("topk:ratio=0.001,owner_ratio=" + ratio + ",values=" + values, sizes);
      const Runner worker = runner("topk:ratio=" + ratio + ",values=" + values, sizes);
      const size_t n = owner.num_elements();
      const std::vector<float> v = make_residual(Input::kTies, n, 5);
      const Buffer gradient = worker.gradient_from(std::vector<double>(v.begin(), v.end()));
      const Buffer sent =
          owner.encode(Isa::kScalar, owner.gradient_from(std::vector<double>(n)), Buffer()).payload;
      const Buffer zeros(sent.size(), 0, 0);
      for (const Isa isa : available_isas()) {
        EXPECT_TRUE(owner.reduce(isa, {zeros}, Runner::residual_from(v)).payload ==
                    worker.encode(isa, gradient, Buffer()).payload)
            << ratio << " " << values << " " << isa_name(isa);
      }
    }
  }
}

TEST(TopkCodec, OwnerKeepsFourTimesAsManyUnlessToldAndNeverFewer) {
  const auto owner_bytes = [](const std::string& codec) {
    return runner(codec).payload_bytes(4096, Stage::kOwner);
  };
  EXPECT_EQ(owner_bytes("topk:ratio=0.02"), owner_bytes("topk:ratio=0.02,owner_ratio=0.08"));
  EXPECT_EQ(owner_bytes("topk:ratio=0.1"), owner_bytes("topk:ratio=0.1,owner_ratio=0.25"));
  EXPECT_NO_THROW(runner("topk:ratio=0.02,owner_ratio=0.02"));
  try {
    runner("topk:ratio=0.02,owner_ratio=0.01");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_NE(std::string(error.what()).find("owner_ratio is 0.01, less than ratio"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace gradferry::testing
