#include "measure/compressed_mean.h"

#include <algorithm>
#include <vector>

namespace gradferry {
namespace {

// A payload in memory aligned as codecs want it.
struct alignas(64) Block {
  std::byte bytes[64];
};

std::vector<Block> blocks(uint32_t num_bytes) { return std::vector<Block>(num_bytes / 64 + 1); }

}  // namespace

void compressed_mean(const CompressedMeanOptions& options, std::span<const void* const> gradients,
                     void* mean) {
  const ParsedCodec parsed = parse_codec(options.codec);
  const Codec& codec = *parsed.codec;
  const auto bytes = [&](Stage stage) {
    return codec.payload_bytes(kTileElements, options.dtype, stage, parsed.options);
  };
  std::vector<std::vector<Block>> sent(gradients.size(), blocks(bytes(Stage::kWorker)));
  std::vector<Block> reduced = blocks(bytes(Stage::kOwner));
  std::vector<const std::byte*> payloads;
  for (const auto& payload : sent) payloads.push_back(payload.data()->bytes);
  std::vector<float> residual(kTileElements);

  for (uint64_t first = 0; first < options.num_elements; first += kTileElements) {
    const auto count =
        static_cast<uint32_t>(std::min<uint64_t>(kTileElements, options.num_elements - first));
    const Tile tile{first / kTileElements, first, 0, count, 0, 0, 0};
    TileBatch batch{.tiles = &tile,
                    .num_tiles = 1,
                    .dtype = options.dtype,
                    .stage = Stage::kWorker,
                    .hold_zero_tiles = true,
                    .seed = options.seed,
                    .step = 0,
                    .options = &parsed.options,
                    .status = nullptr};
    const auto new_residual = [&](bool wanted) {
      std::ranges::fill(residual, 0.0F);
      return wanted ? residual.data() : nullptr;
    };
    for (size_t rank = 0; rank < gradients.size(); ++rank) {
      codec.encode(batch, gradients[rank], 1.0F, nullptr, new_residual(options.worker_residual),
                   sent[rank].data()->bytes);
    }
    batch.stage = Stage::kOwner;
    codec.reduce(batch, payloads.data(), static_cast<uint32_t>(payloads.size()), nullptr,
                 new_residual(options.owner_residual), reduced.data()->bytes);
    codec.decode(batch, reduced.data()->bytes, mean, 0.0F, nullptr);
  }
}

}  // namespace gradferry
