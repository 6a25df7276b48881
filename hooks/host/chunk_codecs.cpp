#include "host/chunk_codecs.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>

namespace gradferry {
namespace {

// Calls `use` with a number of the type.
template <typename Use>
auto with_number(ScalarType dtype, const Use& use) {
  if (dtype == ScalarType::kBFloat16) return use(c10::BFloat16());
  if (dtype == ScalarType::kFloat16) return use(c10::Half());
  if (dtype == ScalarType::kFloat64) return use(double());
  return use(float());
}

// --- sums of a node ---

template <typename Item, typename Number>
void add(const Item* x, uint32_t n, bool is_first, Number* total) {
  if (is_first) {
    for (uint32_t i = 0; i < n; ++i) total[i] = static_cast<Number>(x[i]);
  } else {
    for (uint32_t i = 0; i < n; ++i) total[i] += static_cast<Number>(x[i]);
  }
}

// Tile by tile, so that the total stays in the cache.
template <typename Item, typename Number>
void sum_pieces(const Rail& rail, const std::vector<const std::byte*>& gradients, const void* own,
                double scale, void* sum) {
  const auto* own_items = static_cast<const Item*>(own);
  const auto factor = static_cast<Number>(scale);
  std::array<Number, kTileElements> total;  // NOLINT(*-member-init): add() begins with all of it
  for (const Piece& piece : rail.pieces) {
    const uint32_t n = piece.num_elements;
    bool is_first = true;
    for (const std::byte* message : gradients) {
      add(message == nullptr ? own_items + piece.gradient_offset
                             : reinterpret_cast<const Item*>(message) + piece.offset,
          n, std::exchange(is_first, false), total.data());
    }
    Item* to = static_cast<Item*>(sum) + piece.offset;
    for (uint32_t i = 0; i < n; ++i) to[i] = static_cast<Item>(total[i] * factor);
  }
}

// --- samples of residuals ---

// Tiles in the sample, about: a quarter of a million elements, which take a fraction of a
// millisecond.
constexpr uint64_t kSampledTiles = 64;
// Number of independent sums: with one, each addition would wait for the one before.
constexpr uint32_t kSums = 8;

template <typename T>
double sum_of_squares(const T* values, uint32_t count) {
  std::array<double, kSums> sums{};
  const auto square = [&](uint32_t i) {
    const auto value = static_cast<double>(values[i]);
    return value * value;
  };
  uint32_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (uint32_t s = 0; s < kSums; ++s) sums[s] += square(i + s);
  }
  for (; i < count; ++i) sums[0] += square(i);
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

ResidualSquares squares(const void* gradient, ScalarType dtype, const Tile& tile,
                        const float* residual) {
  const double of_gradient = with_number(dtype, [&](auto number) {
    const auto* numbers = static_cast<const decltype(number)*>(gradient);
    return sum_of_squares(numbers + tile.gradient_offset, tile.num_elements);
  });
  // A ratio to a non-finite gradient has no meaning.
  if (!std::isfinite(of_gradient)) return {};
  return {sum_of_squares(residual, tile.num_elements), of_gradient};
}

}  // namespace

void pack_rail(const ChunkPlan& plan, uint32_t rail, const void* gradient, std::byte* message) {
  const uint64_t item = item_bytes(plan.dtype);
  for (const Piece& piece : plan.rails[rail].pieces) {
    std::memcpy(message + piece.offset * item,
                static_cast<const std::byte*>(gradient) + piece.gradient_offset * item,
                piece.num_elements * item);
  }
}

void sum_rail(const ChunkPlan& plan, uint32_t rail, const std::vector<const std::byte*>& gradients,
              const void* own, double scale, void* sum) {
  with_number(plan.dtype, [&](auto number) {
    using Item = decltype(number);
    using Number = std::conditional_t<std::is_same_v<Item, double>, double, float>;
    sum_pieces<Item, Number>(plan.rails[rail], gradients, own, scale, sum);
  });
}

// An odd stride, because in a model of equal layers an even one could always select the same tile.
ChunkCodecs::ChunkCodecs(const EngineOptions& options, const Layout& layout,
                         const Residuals& residuals)
    : options_(options),
      layout_(layout),
      residuals_(residuals),
      sample_stride_((layout.num_tiles() / kSampledTiles) | 1) {}

TileBatch ChunkCodecs::make_batch(const Work& work, const PlannedBatch& planned, Stage stage) {
  if (status_.size() < planned.tiles.size()) status_.resize(planned.tiles.size());
  return {.tiles = planned.tiles.data(),
          .num_tiles = static_cast<uint32_t>(planned.tiles.size()),
          .dtype = work.plan->dtype,
          .stage = stage,
          // A tile of zeros keeps its residual, except if that carries a momentum, which must
          // continue to decay.
          .hold_zero_tiles = !options_.has_momentum(work.step),
          .seed = options_.seed,
          .step = work.step,
          .options = &codec_of(planned).options,
          .status = status_.data()};
}

void ChunkCodecs::encode(const Work& work, std::byte* messages, std::vector<uint64_t>& checksums) {
  for (const PlannedBatch& planned : work.plan->encode) {
    const TileBatch batch = make_batch(work, planned, Stage::kWorker);
    const ResolvedCodec& resolved = codec_of(planned);
    resolved.codec->encode(batch, work.summed, options_.alpha(resolved, work.step),
                           /*gain=*/nullptr,
                           planned.worker_residual ? residuals_.worker() : nullptr, messages);
    for (size_t i = 0; i < planned.tiles.size(); ++i) {
      checksums[planned.ranks[i]] += status_[i].checksum;
    }
  }
}

ChunkCodecs::Reduced ChunkCodecs::reduce(const Work& work,
                                         const std::vector<const std::byte*>& payloads,
                                         std::byte* payload) {
  Reduced reduced;
  for (const PlannedBatch& planned : work.plan->reduce) {
    const TileBatch batch = make_batch(work, planned, Stage::kOwner);
    codec_of(planned).codec->reduce(batch, payloads.data(), static_cast<uint32_t>(payloads.size()),
                                    /*gain=*/nullptr,
                                    planned.owner_residual ? residuals_.owner() : nullptr, payload);
    for (size_t i = 0; i < planned.tiles.size(); ++i) {
      reduced.checksum += status_[i].checksum;
      reduced.corrupt_tiles += (status_[i].flags & kTileCorrupt) != 0;
    }
  }
  return reduced;
}

ChunkCodecs::Reduced ChunkCodecs::accumulate(const Work& work,
                                             const std::vector<const std::byte*>& payloads) {
  const auto world_size = static_cast<uint32_t>(payloads.size());
  Reduced reduced;
  for (const PlannedBatch& planned : work.plan->reduce) {
    const TileBatch batch = make_batch(work, planned, Stage::kWorker);
    codec_of(planned).codec->accumulate(batch, payloads.data(), world_size, world_size,
                                        work.gradient);
    for (size_t i = 0; i < planned.tiles.size(); ++i) {
      const uint32_t flags = status_[i].flags;
      if ((flags & kTileNonFinite) != 0) reduced.nonfinite_tiles.push_back(planned.tiles[i].id);
      reduced.corrupt_tiles += (flags & kTileCorrupt) != 0;
    }
  }
  return reduced;
}

// The codec takes all payloads of a tile together. Decoding one by one shows which is corrupt.
std::optional<uint32_t> ChunkCodecs::sender_of_corrupt(
    const Work& work, const std::vector<const std::byte*>& payloads) {
  for (uint32_t rank = 0; rank < payloads.size(); ++rank) {
    for (const PlannedBatch& planned : work.plan->reduce) {
      const TileBatch batch = make_batch(work, planned, Stage::kWorker);
      codec_of(planned).codec->decode(batch, payloads[rank], nullptr, 0.0F, nullptr);
      for (size_t i = 0; i < planned.tiles.size(); ++i) {
        if ((status_[i].flags & kTileCorrupt) != 0) return rank;
      }
    }
  }
  return std::nullopt;
}

ChunkCodecs::DecodedTiles ChunkCodecs::decode(const Work& work, const std::byte* messages,
                                              const std::byte* sent) {
  DecodedTiles decoded;
  const auto& batches = work.plan->decode;
  for (size_t b = 0; b < batches.size(); ++b) {
    const PlannedBatch& planned = batches[b];
    decode_batch(work, b, messages, sent);
    for (size_t i = 0; i < planned.tiles.size(); ++i) {
      const uint32_t flags = status_[i].flags;
      if ((flags & kTileNonFinite) != 0) decoded.nonfinite_tiles.push_back(planned.tiles[i].id);
      if ((flags & kTileCorrupt) != 0) decoded.corrupt_sources.push_back(planned.ranks[i]);
    }
  }
  return decoded;
}

// With a worker residual it inspects the payload before it decodes: where another rank's gradient
// was not finite, what this rank sent has no effect. It must be put back into the residual while
// the bucket still holds this rank's own gradient.
void ChunkCodecs::decode_batch(const Work& work, size_t index, const std::byte* messages,
                               const std::byte* sent) {
  const PlannedBatch& planned = work.plan->decode[index];
  const ResolvedCodec& resolved = codec_of(planned);
  const Codec& codec = *resolved.codec;
  const TileBatch batch = make_batch(work, planned, Stage::kOwner);
  if (!planned.worker_residual) {
    codec.decode(batch, messages, work.gradient, 0.0F, nullptr);
    return;
  }
  codec.decode(batch, messages, nullptr, 0.0F, nullptr);
  codec.undo(make_batch(work, work.plan->encode[index], Stage::kWorker), sent, messages,
             work.summed, options_.alpha(resolved, work.step), residuals_.worker());
  codec.decode(batch, messages, work.gradient, options_.beta(resolved, work.step),
               residuals_.worker());
}

// Encodes and decodes tile by tile through a payload on the stack. All tiles use `exact`.
void ChunkCodecs::deliver_alone(const Work& work) {
  alignas(kPayloadAlignment) std::byte payload[kTileElements * sizeof(double)];
  for (const PlannedBatch& planned : work.plan->encode) {
    const ResolvedCodec& resolved = codec_of(planned);
    const Codec& codec = *resolved.codec;
    TileBatch batch = make_batch(work, planned, Stage::kWorker);
    batch.num_tiles = 1;
    for (Tile tile : planned.tiles) {
      tile.payload_offset = 0;
      batch.tiles = &tile;
      codec.encode(batch, work.gradient, options_.alpha(resolved, work.step), /*gain=*/nullptr,
                   residuals_.worker(), payload);
      codec.decode(batch, payload, work.gradient, options_.beta(resolved, work.step),
                   residuals_.worker());
    }
  }
}

ResidualSquares ChunkCodecs::sample_worker(const Work& work) const {
  ResidualSquares sum;
  for (const PlannedBatch& planned : work.plan->encode) {
    for (const Tile& tile : planned.tiles) {
      if (!planned.worker_residual || !is_sampled(tile)) continue;
      const float* residual = residuals_.worker() + tile.residual_offset;
      sum += squares(work.summed, work.plan->dtype, tile, residual);
    }
  }
  return sum;
}

ResidualSquares ChunkCodecs::sample_owner(const Work& work) const {
  ResidualSquares sum;
  for (const PlannedBatch& planned : work.plan->decode) {
    for (const Tile& tile : planned.tiles) {
      const uint64_t offset = layout_.owner_residual_offset(tile.id);
      if (!planned.owner_residual || !is_sampled(tile) || offset == kNoResidual) continue;
      sum += squares(work.gradient, work.plan->dtype, tile, residuals_.owner() + offset);
    }
  }
  return sum;
}

}  // namespace gradferry
