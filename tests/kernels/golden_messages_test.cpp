// Whole messages recorded in tests/kernels/golden/messages.tar: headers, several tiles and codecs
// in one message, gradients of 16 bits, commits with maps, hashes of parameters.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <vector>

#include "gradferry/wire.h"
#include "hooks/hash64.h"
#include "hooks/protocol/messages.h"
#include "hooks/protocol/plan.h"
#include "tests/kernels/codec_runner.h"
#include "tests/kernels/golden_files.h"

namespace gradferry::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr uint32_t kRanks = 2;
constexpr uint64_t kSeed = 7, kStep = 3, kChunk = 5, kBucket = 2;
constexpr uint64_t kConfigHash = 0x1122334455667788, kLayoutHash = 0x99aabbccddeeff00;

struct GoldenParameter {
  const char* name;
  uint64_t num_elements;
  const char* codec;
};
// In the order of tile numbers. The first has a full tile and a short one.
constexpr std::array<GoldenParameter, 7> kParameters{{{"a", 5196, "q4"},
                                                      {"b", 70, "exact"},
                                                      {"c", 200, "q8"},
                                                      {"d", 300, "sign1"},
                                                      {"e", 1000, "topk"},
                                                      {"f", 200, "rht"},
                                                      {"g", 41, "bf16"}}};
const std::vector<uint32_t> kBucketOrder = {4, 0, 2, 6, 1, 3, 5};

struct GoldenType {
  ScalarType dtype;
  std::string name;
};
const std::array<GoldenType, 3> kTypes{{{ScalarType::kFloat32, "float32"},
                                        {ScalarType::kBFloat16, "bfloat16"},
                                        {ScalarType::kFloat16, "float16"}}};

Layout golden_layout(ScalarType dtype, uint32_t rank) {
  std::vector<ParameterSpec> specs;
  for (const auto& [name, num_elements, codec] : kParameters) {
    specs.push_back({.name = name,
                     .num_elements = num_elements,
                     .dtype = dtype,
                     .codec = codec,
                     .warmup = "exact",
                     .worker_residual = false,
                     .owner_residual = false});
  }
  return {specs, rank, Nodes::flat(kRanks)};
}

// The bucket of a rank: its golden gradient over and over, times 2^12, rounded to the dtype.
Bytes golden_bucket(ScalarType dtype, uint32_t rank, uint64_t num_elements) {
  const std::string file = golden("gradient", "gradient_rank" + std::to_string(rank));
  std::vector<float> numbers(file.size() / sizeof(float));
  std::memcpy(numbers.data(), file.data(), file.size());
  const uint32_t item = item_bytes(dtype);
  Bytes bucket(num_elements * item);
  for (uint64_t i = 0; i < num_elements; ++i) {
    write_number(dtype, 4096.0 * numbers[i % numbers.size()], bucket.data() + i * item);
  }
  return bucket;
}

// What one rank sends of the bucket, which is one chunk.
class GoldenRank {
 public:
  GoldenRank(Isa isa, ScalarType dtype, uint32_t rank)
      : isa_(isa),
        rank_(rank),
        layout_(golden_layout(dtype, rank)),
        plan_(make_plan(layout_, kBucketOrder,
                        {.rank = rank,
                         .chunk_bytes = 512 * 1024,
                         .equal_scatter = false,
                         .codecs = CodecChoice::kOwn,
                         .residuals = false})),
        bucket_(golden_bucket(dtype, rank, plan_.num_elements)) {}

  const ChunkPlan& chunk() const { return plan_.chunks.front(); }
  size_t num_chunks() const { return plan_.chunks.size(); }

  // By receiver, this rank included.
  std::vector<Bytes> scatter() const {
    size_t sum = 0;
    for (const Shard& shard : chunk().shards) sum += shard.scatter_bytes;
    Bytes all(sum);
    for (const PlannedBatch& planned : chunk().encode) {
      std::vector<TileStatus> status(planned.tiles.size());
      codec(planned).encode(batch(planned, Stage::kWorker, status), bucket_.data(), 1.0f, &kOne,
                            nullptr, all.data());
    }
    std::vector<Bytes> messages;
    const std::byte* begin = all.data();
    for (const Shard& shard : chunk().shards) {
      messages.emplace_back(begin, begin + shard.scatter_bytes);
      begin += shard.scatter_bytes;
      seal(messages.back(), Phase::kScatter, shard.worker_bytes);
    }
    return messages;
  }

  // `received`: scatter messages for this rank, by sender. Without padding.
  Bytes gather(const std::vector<Bytes>& received) const {
    std::vector<const std::byte*> payloads;
    for (const Bytes& message : received) payloads.push_back(message.data() + kHeaderBytes);
    Bytes message(kHeaderBytes + chunk().shards[rank_].owner_bytes);
    for (const PlannedBatch& planned : chunk().reduce) {
      std::vector<TileStatus> status(planned.tiles.size());
      codec(planned).reduce(batch(planned, Stage::kOwner, status), payloads.data(), kRanks, &kOne,
                            nullptr, message.data() + kHeaderBytes);
    }
    seal(message, Phase::kGather, chunk().shards[rank_].owner_bytes);
    return message;
  }

  // As if the parameters' bits were those of the bucket.
  Bytes hashes() const {
    std::vector<uint64_t> hashes(kParameters.size());
    const std::byte* begin = bucket_.data();
    for (const uint32_t index : kBucketOrder) {
      const uint64_t num_bytes = kParameters[index].num_elements * item_bytes(plan_.dtype);
      hashes[index] = hash64(begin, num_bytes);
      begin += num_bytes;
    }
    Bytes message(hash_message_bytes(hashes.size()));
    write_hashes({rank_, kRanks, kConfigHash, kLayoutHash}, kStep, kChunk, hashes, message.data());
    return message;
  }

 private:
  static constexpr float kOne = 1.0f;

  const Codec& codec(const PlannedBatch& planned) const {
    const std::string_view name = layout_.codecs()[planned.codec_index].codec->name;
    for (const Codec& each : cpu_codecs(isa_)) {
      if (each.name == name) return each;
    }
    throw std::logic_error("codec is missing from a table");
  }
  TileBatch batch(const PlannedBatch& planned, Stage stage, std::vector<TileStatus>& status) const {
    return {.tiles = planned.tiles.data(),
            .num_tiles = static_cast<uint32_t>(planned.tiles.size()),
            .dtype = plan_.dtype,
            .stage = stage,
            .hold_zero_tiles = true,
            .seed = kSeed,
            .step = kStep,
            .options = &layout_.codecs()[planned.codec_index].options,
            .status = status.data()};
  }
  void seal(Bytes& message, Phase phase, uint32_t payload_bytes) const {
    write_header(message.data(), {kConfigHash, kLayoutHash, kStep, kChunk, rank_, phase},
                 WireStatus::kOk, payload_bytes,
                 word_sum(message.data() + kHeaderBytes, payload_bytes));
  }

  Isa isa_;
  uint32_t rank_;
  Layout layout_;
  BucketPlan plan_;
  Bytes bucket_;
};

TEST(GoldenMessages, OfABucketStillDescribeTheWireFormat) {
  for (const auto& [dtype, name] : kTypes) {
    for (const Isa isa : available_isas()) {
      std::vector<GoldenRank> ranks;
      std::vector<std::vector<Bytes>> sent;  // by sender and receiver
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        ranks.emplace_back(isa, dtype, rank);
        ASSERT_EQ(ranks[rank].num_chunks(), 1u);
        sent.push_back(ranks[rank].scatter());
      }
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        const std::string here = name + "_", at = "rank" + std::to_string(rank);
        const uint32_t other = 1 - rank;
        expect_golden("messages", here + "scatter_" + at + "_to_rank" + std::to_string(other),
                      as_string(sent[rank][other]));
        expect_golden("messages", here + "gather_" + at,
                      as_string(ranks[rank].gather({sent[0][rank], sent[1][rank]})));
      }
      expect_golden("messages", name + "_hashes_rank0", as_string(ranks[0].hashes()));
    }
  }
}

std::string commit_message(uint32_t rank, const Fault& fault, const UsedMap& used,
                           float loss_scale) {
  Bytes message(commit_bytes(used.size()));
  write_commit(message.data(), rank, kStep, kBucket, fault, used, loss_scale);
  return as_string(message);
}

TEST(GoldenMessages, CommitsStillDescribeTheWireFormat) {
  const UsedMap used = {1, 0, 1, 1, 0, 1, 1};
  expect_golden("messages", "commit_rank0", commit_message(0, {}, used, 0.0F));
  expect_golden("messages", "commit_scaled_rank0", commit_message(0, {}, used, 6.25e4F));
  const Fault fault{WireStatus::kBadChecksum, Phase::kGather,     0,
                    (1ull << 32) + kChunk,    0x0123456789abcdef, 0xfedcba9876543210};
  expect_golden("messages", "commit_rank1",
                commit_message(1, fault, {1, 1, 0, 1, 0, 0, 1}, 6.25e4F));
}

}  // namespace
}  // namespace gradferry::testing
