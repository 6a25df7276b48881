#include "measure/codec_cost.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "gradferry/error.h"
#include "gradferry/wire.h"
#include "measure/pass_times.h"

namespace gradferry {
namespace {

constexpr size_t kPeriod = 4099;  // of the random numbers: prime, so that tiles differ

// Memory aligned as codecs want it.
struct alignas(64) Block {
  std::byte bytes[64];
};
class Buffer {
 public:
  explicit Buffer(size_t num_bytes) : blocks_(num_bytes / sizeof(Block) + 1) {}
  std::byte* bytes() { return blocks_.data()->bytes; }
  float* floats() { return reinterpret_cast<float*>(bytes()); }

 private:
  std::vector<Block> blocks_;
};

// Gaussian numbers as `exact` payloads decode to them: in any dtype.
void fill(std::byte* out, size_t num_elements, ScalarType dtype) {
  std::mt19937 generator(0);
  std::normal_distribution<float> normal;
  const uint32_t size = item_bytes(dtype);
  std::vector<std::byte> numbers(kPeriod * size);
  for (size_t i = 0; i < kPeriod; ++i) {
    const float value = normal(generator);
    const double wide = value;
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    const auto half = static_cast<uint16_t>(bits >> 16);  // a finite number in fp16 as well
    const void* source = &bits;
    if (size == 2) source = &half;
    if (size == 8) source = &wide;
    std::memcpy(&numbers[i * size], source, size);
  }
  for (size_t i = 0; i < num_elements; ++i) {
    std::memcpy(out + i * size, &numbers[i % kPeriod * size], size);
  }
}

std::vector<Tile> tiles_of(size_t num_tiles, uint32_t sent_bytes, uint32_t reduced_bytes) {
  std::vector<Tile> tiles;
  for (size_t i = 0; i < num_tiles; ++i) {
    tiles.push_back({.id = i,
                     .gradient_offset = i * kTileElements,
                     .residual_offset = i * kTileElements,
                     .num_elements = kTileElements,
                     .payload_offset = static_cast<uint32_t>(i * sent_bytes),
                     .output_offset = static_cast<uint32_t>(i * reduced_bytes),
                     .message_offset = 0});
  }
  return tiles;
}

// Tiles that a rank owns.
size_t owned_tiles(const CodecCostOptions& options) {
  return options.num_elements / kTileElements / std::max(options.world_size, 1U);
}

// One codec with payloads, residuals and gradients of its own: each stage as a pass over tiles.
class Stages {
 public:
  Stages(const CodecCostOptions& options, const ParsedCodec& parsed)
      : options_(options),
        parsed_(parsed),
        num_tiles_(options.num_elements / kTileElements),
        num_owned_(owned_tiles(options)),
        sent_bytes_(payload_bytes(Stage::kWorker)),
        to_owner_(tiles_of(num_tiles_, sent_bytes_, payload_bytes(Stage::kOwner))),
        to_ranks_(tiles_of(num_tiles_, payload_bytes(Stage::kOwner), payload_bytes(Stage::kOwner))),
        gradient_(num_elements() * item_bytes(options.dtype)),
        residual_(num_elements() * sizeof(float)),
        owner_residual_(num_owned_ * kTileElements * sizeof(float)),
        sent_(num_tiles_ * size_t{sent_bytes_}),
        reduced_(num_tiles_ * size_t{payload_bytes(Stage::kOwner)}),
        status_(kSectionTiles) {
    fill(gradient_.bytes(), num_elements(), options.dtype);
    // Payloads of the ranks: shares of what this thread has encoded.
    for (uint32_t rank = 0; rank < options.world_size; ++rank) {
      payloads_.push_back(sent_.bytes() + rank * num_owned_ * sent_bytes_);
    }
  }

  size_t num_tiles() const { return num_tiles_; }
  size_t num_owned() const { return num_owned_; }
  size_t num_elements() const { return num_tiles_ * kTileElements; }
  size_t num_sent_bytes() const { return num_tiles_ * size_t{sent_bytes_}; }

  void encode(size_t first, size_t count) {
    codec().encode(batch(to_owner_, first, count, Stage::kWorker), gradient_.bytes(), 0.5F, &kGain,
                   kept(), sent_.bytes());
  }

  void reduce(size_t first, size_t count) {
    codec().reduce(batch(to_owner_, first, count, Stage::kOwner), payloads_.data(),
                   options_.world_size, &kGain,
                   options_.owner_residual ? owner_residual_.floats() : nullptr, reduced_.bytes());
  }

  // What is reduced fills the first tiles; decode walks payloads of its own format.
  void decode(size_t first, size_t count) {
    const TileBatch tiles = batch(to_ranks_, first, count, Stage::kOwner);
    if (kept() != nullptr) codec().decode(tiles, reduced_.bytes(), nullptr, 0.0F, nullptr);
    codec().decode(tiles, reduced_.bytes(), gradient_.bytes(), options_.momentum ? 0.5F : 0.0F,
                   kept());
  }

  void check(size_t first, size_t count) {
    checksum_ = checksum_ + word_sum(sent_.bytes() + first * sent_bytes_, count * sent_bytes_);
  }

 private:
  static constexpr float kGain = 1.0F;

  const Codec& codec() const { return *parsed_.codec; }
  float* kept() { return options_.worker_residual ? residual_.floats() : nullptr; }
  uint32_t payload_bytes(Stage stage) const {
    return codec().payload_bytes(kTileElements, options_.dtype, stage, parsed_.options);
  }
  TileBatch batch(const std::vector<Tile>& tiles, size_t first, size_t count, Stage stage) {
    return {.tiles = &tiles[first],
            .num_tiles = static_cast<uint32_t>(count),
            .dtype = options_.dtype,
            .stage = stage,
            .hold_zero_tiles = !options_.momentum,
            .seed = 0,
            .step = 0,
            .options = &parsed_.options,
            .status = status_.data()};
  }

  const CodecCostOptions& options_;
  const ParsedCodec& parsed_;
  const size_t num_tiles_, num_owned_;
  const uint32_t sent_bytes_;
  const std::vector<Tile> to_owner_, to_ranks_;
  Buffer gradient_, residual_, owner_residual_, sent_, reduced_;
  std::vector<TileStatus> status_;
  std::vector<const std::byte*> payloads_;
  volatile uint64_t checksum_ = 0;  // so that it is computed
};

}  // namespace

CodecCost codec_cost(const CodecCostOptions& options) {
  const ParsedCodec parsed = parse_codec(options.codec);
  GRADFERRY_EXPECTS(owned_tiles(options) > 0 && options.rounds > 0, kConfig,
                    "codec_cost takes at least one round, and a tile for every rank");
  GRADFERRY_EXPECTS(parsed.codec->supports_float64 || options.dtype != ScalarType::kFloat64,
                    kConfig, "codec '" + options.codec + "' takes no float64");
  Stages stages(options, parsed);
  const auto pass = [&](void (Stages::*stage)(size_t, size_t), size_t tiles) {
    Sections sections;
    for (size_t first = 0; first < tiles; first += kSectionTiles) {
      const size_t count = std::min(kSectionTiles, tiles - first);
      sections.push_back(seconds_of([&] { (stages.*stage)(first, count); }));
    }
    return Pass{sections};
  };
  std::vector<Pass> encoded, reduces, decoded, checked;
  for (int round = 0; round <= options.rounds; ++round) {
    const std::vector<Pass> now = {
        pass(&Stages::encode, stages.num_tiles()), pass(&Stages::reduce, stages.num_owned()),
        pass(&Stages::decode, stages.num_owned()), pass(&Stages::check, stages.num_tiles())};
    if (round == 0) continue;  // memory is touched for the first time
    encoded.push_back(now[0]);
    reduces.push_back(now[1]);
    decoded.push_back(now[2]);
    checked.push_back(now[3]);
  }
  const auto owned = static_cast<double>(stages.num_owned() * kTileElements);
  return {typical_seconds(encoded, &median) / static_cast<double>(stages.num_elements()),
          typical_seconds(reduces, &median) / owned, typical_seconds(decoded, &median) / owned,
          typical_seconds(checked, &median) / static_cast<double>(stages.num_sent_bytes())};
}

}  // namespace gradferry
