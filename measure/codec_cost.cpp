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

}  // namespace

CodecCost codec_cost(const CodecCostOptions& options) {
  const ParsedCodec parsed = parse_codec(options.codec, Device::kCpu);
  const Codec& codec = *parsed.codec;
  const size_t num_tiles = options.num_elements / kTileElements;
  const size_t num_owned = num_tiles / std::max(options.world_size, 1U);
  GRADFERRY_EXPECTS(num_owned > 0 && options.rounds > 0, kConfig,
                    "codec_cost takes at least one round, and a tile for every rank");
  GRADFERRY_EXPECTS(codec.supports_float64 || options.dtype != ScalarType::kFloat64, kConfig,
                    "codec '" + options.codec + "' takes no float64");
  const auto payload = [&](Stage stage) {
    return codec.payload_bytes(kTileElements, options.dtype, stage, parsed.options);
  };
  const uint32_t sent_bytes = payload(Stage::kWorker);
  const uint32_t reduced_bytes = payload(Stage::kOwner);
  const size_t num_elements = num_tiles * kTileElements;

  Buffer gradient(num_elements * item_bytes(options.dtype));
  fill(gradient.bytes(), num_elements, options.dtype);
  Buffer residual(num_elements * sizeof(float));
  Buffer owner_residual(num_owned * kTileElements * sizeof(float));
  Buffer sent(num_tiles * size_t{sent_bytes});
  Buffer reduced(num_tiles * size_t{reduced_bytes});
  std::vector<TileStatus> status(kSectionTiles);
  // Payloads of the ranks: shares of what this thread has encoded.
  std::vector<const std::byte*> payloads;
  for (uint32_t rank = 0; rank < options.world_size; ++rank) {
    payloads.push_back(sent.bytes() + rank * num_owned * sent_bytes);
  }

  const std::vector<Tile> to_owner = tiles_of(num_tiles, sent_bytes, reduced_bytes);
  const std::vector<Tile> to_ranks = tiles_of(num_tiles, reduced_bytes, reduced_bytes);
  const auto batch = [&](const std::vector<Tile>& tiles, size_t first, size_t count, Stage stage) {
    return TileBatch{.tiles = &tiles[first],
                     .num_tiles = static_cast<uint32_t>(count),
                     .dtype = options.dtype,
                     .stage = stage,
                     .hold_zero_tiles = !options.momentum,
                     .seed = 0,
                     .step = 0,
                     .options = &parsed.options,
                     .status = status.data(),
                     .stream = nullptr};
  };
  float* kept = options.worker_residual ? residual.floats() : nullptr;
  const float gain = 1.0F;
  const Work encode = [&](size_t first, size_t count) {
    codec.encode(batch(to_owner, first, count, Stage::kWorker), gradient.bytes(), 0.5F, &gain, kept,
                 sent.bytes());
  };
  const Work reduce = [&](size_t first, size_t count) {
    codec.reduce(batch(to_owner, first, count, Stage::kOwner), payloads.data(), options.world_size,
                 &gain, options.owner_residual ? owner_residual.floats() : nullptr,
                 reduced.bytes());
  };
  // What is reduced fills the first tiles; decode walks payloads of its own format.
  const Work decode = [&](size_t first, size_t count) {
    const TileBatch tiles = batch(to_ranks, first, count, Stage::kOwner);
    if (kept) codec.decode(tiles, reduced.bytes(), nullptr, 0.0F, nullptr);
    codec.decode(tiles, reduced.bytes(), gradient.bytes(), options.momentum ? 0.5F : 0.0F, kept);
  };
  uint64_t checksum = 0;
  const Work check = [&](size_t first, size_t count) {
    checksum += word_sum(sent.bytes() + first * sent_bytes, count * sent_bytes);
  };

  const auto pass = [](const Work& work, size_t tiles) {
    Sections sections;
    for (size_t first = 0; first < tiles; first += kSectionTiles) {
      const size_t count = std::min(kSectionTiles, tiles - first);
      sections.push_back(seconds_of([&] { work(first, count); }));
    }
    return Pass{sections};
  };
  std::vector<Pass> encoded, reduces, decoded, checked;
  for (int round = 0; round <= options.rounds; ++round) {
    const std::vector<Pass> now = {pass(encode, num_tiles), pass(reduce, num_owned),
                                   pass(decode, num_owned), pass(check, num_tiles)};
    if (round == 0) continue;  // memory is touched for the first time
    encoded.push_back(now[0]);
    reduces.push_back(now[1]);
    decoded.push_back(now[2]);
    checked.push_back(now[3]);
  }
  const auto owned = static_cast<double>(num_owned * kTileElements);
  volatile uint64_t used = checksum;  // so that it is computed
  (void)used;
  return {typical_seconds(encoded, &median) / static_cast<double>(num_elements),
          typical_seconds(reduces, &median) / owned, typical_seconds(decoded, &median) / owned,
          typical_seconds(checked, &median) / (static_cast<double>(num_tiles) * sent_bytes)};
}

}  // namespace gradferry
