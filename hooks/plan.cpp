#include "plan.h"

#include <algorithm>

#include "gradferry/wire.h"

namespace gradferry {
namespace {

// A tile of the bucket, before its chunk is known.
struct BucketTile {
  const Parameter* parameter;
  uint64_t id;
  uint64_t gradient_offset;
  uint64_t worker_residual;  // kNoResidual when there is none
  uint32_t num_elements;
  uint32_t worker_bytes;
  uint32_t owner_bytes;
  uint32_t owner;
};

std::vector<BucketTile> tiles_of(const Layout& layout, const BucketPlan& plan, CodecChoice codecs) {
  std::vector<BucketTile> tiles;
  uint64_t offset = 0;
  for (const uint32_t index : plan.parameters) {
    const Parameter& parameter = layout.parameters()[index];
    for (uint32_t t = 0; t < parameter.num_tiles; ++t) {
      const uint32_t n = layout.tile_elements(parameter, t);
      const uint64_t start = uint64_t{t} * kTileElements;
      const uint64_t id = parameter.first_tile + t;
      const bool keeps = parameter.worker_residual != kNoResidual;
      tiles.push_back({.parameter = &parameter,
                       .id = id,
                       .gradient_offset = offset + start,
                       .worker_residual = keeps ? parameter.worker_residual + start : kNoResidual,
                       .num_elements = n,
                       .worker_bytes = layout.payload_bytes(parameter, n, Stage::kWorker, codecs),
                       .owner_bytes = layout.payload_bytes(parameter, n, Stage::kOwner, codecs),
                       .owner = layout.owner(id)});
    }
    offset += parameter.num_elements;
  }
  return tiles;
}

// Finds the batch of the tile's codec and residuals, or adds it.
PlannedBatch& batch_for(std::vector<PlannedBatch>& batches, const Parameter& parameter,
                        const PlanOptions& options) {
  const uint32_t codec = Layout::codec_index(parameter, options.codecs);
  const bool worker = options.residuals && parameter.worker_residual != kNoResidual;
  const bool owner = options.residuals && parameter.owner_residual;
  for (PlannedBatch& batch : batches) {
    if (batch.codec_index == codec && batch.worker_residual == worker &&
        batch.owner_residual == owner) {
      return batch;
    }
  }
  return batches.emplace_back(PlannedBatch{codec, worker, owner, {}, {}});
}

// Sets the sizes of scatter messages. Backends have their own all-to-all for messages of one size;
// any others they send one by one. A little padding is worth that; but not in a chunk whose only
// tile is longer than chunk_bytes: buffers have room for one such message.
void size_scatter_messages(std::vector<Shard>& shards, const PlanOptions& options) {
  uint64_t sum = 0, longest = 0;
  for (Shard& shard : shards) {
    shard.scatter_bytes = kHeaderBytes + shard.worker_bytes;
    sum += shard.scatter_bytes;
    longest = std::max<uint64_t>(longest, shard.scatter_bytes);
  }
  const uint64_t padding = shards.size() * longest - sum;
  if (!options.equal_scatter || longest > kHeaderBytes + options.chunk_bytes ||
      padding * kScatterPaddingPart > sum) {
    return;
  }
  for (Shard& shard : shards) shard.scatter_bytes = static_cast<uint32_t>(longest);
}

ChunkPlan plan_chunk(const Layout& layout, std::span<const BucketTile> tiles,
                     const PlanOptions& options) {
  ChunkPlan chunk{.dtype = tiles.front().parameter->dtype,
                  .shards = std::vector<Shard>(layout.world_size()),
                  .gather_message_bytes = 0,
                  .encode = {},
                  .reduce = {},
                  .decode = {}};
  for (const BucketTile& tile : tiles) {
    Shard& shard = chunk.shards[tile.owner];
    shard.worker_bytes += tile.worker_bytes;
    shard.owner_bytes += tile.owner_bytes;
  }
  size_scatter_messages(chunk.shards, options);
  std::vector<uint32_t> message_start(layout.world_size());  // of the scatter messages
  uint32_t start = 0;
  for (uint32_t rank = 0; rank < layout.world_size(); ++rank) {
    message_start[rank] = start;
    start += chunk.shards[rank].scatter_bytes;
    chunk.gather_message_bytes =
        std::max(chunk.gather_message_bytes, kHeaderBytes + chunk.shards[rank].owner_bytes);
  }
  std::vector<uint32_t> worker_offset(layout.world_size(), 0);
  std::vector<uint32_t> owner_offset(layout.world_size(), 0);
  for (const BucketTile& tile : tiles) {
    const uint32_t in_worker = worker_offset[tile.owner];
    const uint32_t in_owner = owner_offset[tile.owner];
    const auto add = [&](std::vector<PlannedBatch>& batches, uint64_t residual,
                         uint32_t payload_offset, uint32_t output_offset, uint32_t message_offset) {
      PlannedBatch& batch = batch_for(batches, *tile.parameter, options);
      batch.tiles.push_back({tile.id, tile.gradient_offset, residual, tile.num_elements,
                             payload_offset, output_offset, message_offset});
      batch.ranks.push_back(tile.owner);
    };
    const uint32_t arrives_at = tile.owner * chunk.gather_message_bytes + kHeaderBytes + in_owner;
    add(chunk.encode, tile.worker_residual, message_start[tile.owner] + kHeaderBytes + in_worker,
        arrives_at, in_worker);
    if (tile.owner == options.rank) {
      add(chunk.reduce, layout.owner_residual_offset(tile.id), in_worker, in_owner, in_owner);
    }
    add(chunk.decode, tile.worker_residual, arrives_at, 0, 0);
    worker_offset[tile.owner] += tile.worker_bytes;
    owner_offset[tile.owner] += tile.owner_bytes;
  }
  return chunk;
}

}  // namespace

BucketPlan make_plan(const Layout& layout, const std::vector<uint32_t>& parameters,
                     const PlanOptions& options) {
  BucketPlan plan;
  plan.parameters = parameters;
  for (const uint32_t index : parameters) {
    plan.num_elements += layout.parameters()[index].num_elements;
    plan.dtype = layout.parameters()[index].dtype;
  }
  const std::vector<BucketTile> tiles = tiles_of(layout, plan, options.codecs);
  std::vector<uint32_t> worker_bytes(layout.world_size(), 0);
  std::vector<uint32_t> owner_bytes(layout.world_size(), 0);
  size_t first = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const BucketTile& tile = tiles[i];
    const bool full = worker_bytes[tile.owner] + tile.worker_bytes > options.chunk_bytes ||
                      owner_bytes[tile.owner] + tile.owner_bytes > options.chunk_bytes;
    if (full && i > first) {
      plan.chunks.push_back(
          plan_chunk(layout, std::span(tiles).subspan(first, i - first), options));
      first = i;
      std::fill(worker_bytes.begin(), worker_bytes.end(), 0);
      std::fill(owner_bytes.begin(), owner_bytes.end(), 0);
    }
    worker_bytes[tile.owner] += tile.worker_bytes;
    owner_bytes[tile.owner] += tile.owner_bytes;
  }
  if (first < tiles.size()) {
    plan.chunks.push_back(plan_chunk(layout, std::span(tiles).subspan(first), options));
  }
  return plan;
}

}  // namespace gradferry
