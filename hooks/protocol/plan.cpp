#include "protocol/plan.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

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
  uint32_t worker_bytes;  // 0 in an all-gather
  uint32_t owner_bytes;   // 0 in a reduce-scatter
  uint32_t owner;
  uint32_t turn;  // how many of its owner come before it in the bucket
};

// Between siblings, where pieces begin on a cache line.
uint32_t piece_elements(const BucketTile& tile) {
  return (tile.num_elements + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

// In the order in which chunks take them.
std::vector<BucketTile> tiles_of(const Layout& layout, const BucketPlan& plan,
                                 const PlanOptions& options) {
  const bool averages = scatters(options.collective);
  const Stage gathered = averages ? Stage::kOwner : Stage::kWorker;
  std::vector<BucketTile> tiles;
  std::vector<uint32_t> turns(layout.world_size(), 0);
  uint64_t offset = 0;
  for (const uint32_t index : plan.parameters) {
    const Parameter& parameter = layout.parameters()[index];
    for (uint32_t t = 0; t < parameter.num_tiles; ++t) {
      const uint32_t n = layout.tile_elements(parameter, t);
      const uint64_t start = uint64_t{t} * kTileElements;
      const uint64_t id = parameter.first_tile + t;
      const auto payload_bytes = [&](Stage stage) {
        return layout.payload_bytes(parameter, n, stage, options.codecs);
      };
      tiles.push_back({.parameter = &parameter,
                       .id = id,
                       .gradient_offset = offset + start,
                       .worker_residual = layout.worker_residual_offset(id),
                       .num_elements = n,
                       .worker_bytes = averages ? payload_bytes(Stage::kWorker) : 0,
                       .owner_bytes = gathers(options.collective) ? payload_bytes(gathered) : 0,
                       .owner = layout.owner(id),
                       .turn = turns[layout.owner(id)]++});
    }
    offset += parameter.num_elements;
  }
  // In bucket order all tiles of an owner follow each other, and chunks would go to one rank each.
  if (options.collective != Collective::kAllReduce) {
    std::ranges::sort(tiles, {}, [](const BucketTile& tile) {
      return std::pair(tile.turn, tile.gradient_offset);
    });
  }
  return tiles;
}

// Finds the batch of the tile's codec and residuals, or adds it.
PlannedBatch& batch_for(std::vector<PlannedBatch>& batches, const BucketTile& tile,
                        const PlanOptions& options) {
  const uint32_t codec = Layout::codec_index(*tile.parameter, options.codecs);
  const bool worker = options.residuals && tile.worker_residual != kNoResidual;
  const bool owner = options.residuals && tile.parameter->owner_residual;
  for (PlannedBatch& batch : batches) {
    if (batch.codec_index == codec && batch.worker_residual == worker &&
        batch.owner_residual == owner) {
      return batch;
    }
  }
  return batches.emplace_back(PlannedBatch{codec, worker, owner, {}, {}});
}

// The sizes of messages with these payloads, which a chunk has in one stage. `equal`: of one size
// if that costs little: backends have their own collectives for those, and send any others one by
// one. A message without tiles is a header, which tells ranks that do different things; where such
// headers cost more than a little, there is no message.
std::vector<uint32_t> message_sizes(const std::vector<uint32_t>& payloads, bool equal) {
  uint64_t sum = 0, longest = 0, empty = 0;
  for (const uint32_t payload : payloads) {
    sum += payload == 0 ? 0 : kHeaderBytes + uint64_t{payload};
    longest = std::max<uint64_t>(longest, kHeaderBytes + uint64_t{payload});
    empty += payload == 0 ? 1 : 0;
  }
  const bool sends_empty = empty <= kPaddingPart && empty * kHeaderBytes * kPaddingPart <= sum;
  if (sends_empty) sum += empty * kHeaderBytes;
  std::vector<uint32_t> sizes;
  for (const uint32_t payload : payloads) {
    sizes.push_back(payload == 0 && !sends_empty ? 0 : kHeaderBytes + payload);
  }
  if (equal && (sizes.size() * longest - sum) * kPaddingPart <= sum) {
    std::ranges::fill(sizes, static_cast<uint32_t>(longest));
  }
  return sizes;
}

// FNV-1a of 64 bits, over whole tile numbers instead of bytes.
uint64_t hash_of(std::span<const BucketTile> tiles) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const BucketTile& tile : tiles) hash = (hash ^ tile.id) * 0x100000001b3;
  return hash;
}

// How large a chunk is so far.
class ChunkSizes {
 public:
  ChunkSizes(const Layout& layout, const PlanOptions& options)
      : nodes_(layout.nodes()),
        options_(options),
        owners_(nodes_.world_size()),
        rails_(nodes_.num_rails()) {}

  // False if the tile belongs to the next chunk. Any chunk takes its first tile, and of every owner
  // the first.
  bool add(const BucketTile& tile) {
    Sizes& owner = owners_[tile.owner];
    Sizes& rail = rails_[nodes_.local_index(tile.owner)];
    const uint64_t header = owner.is_empty ? kHeaderBytes : 0;
    const uint64_t dense = uint64_t{piece_elements(tile)} * item_bytes(tile.parameter->dtype);
    const bool exceeds = owner.worker + tile.worker_bytes > options_.chunk_bytes ||
                         owner.owner + tile.owner_bytes > options_.chunk_bytes;
    const bool is_full = rail.worker + header + tile.worker_bytes > options_.rail_bytes ||
                         rail.owner + header + tile.owner_bytes > options_.rail_bytes ||
                         (!nodes_.is_flat() && rail.dense + dense > options_.dense_bytes);
    if ((exceeds && !owner.is_empty) || (is_full && !is_empty_)) return false;
    for (Sizes* sizes : {&owner, &rail}) {
      sizes->worker += header + tile.worker_bytes;
      sizes->owner += header + tile.owner_bytes;
      sizes->dense += dense;
      sizes->is_empty = false;
    }
    owner.worker -= header;
    owner.owner -= header;
    is_empty_ = false;
    return true;
  }

  void clear() {
    std::ranges::fill(owners_, Sizes{});
    std::ranges::fill(rails_, Sizes{});
    is_empty_ = true;
  }

 private:
  // Bytes: payloads of an owner, messages of a rail; and gradients.
  struct Sizes {
    uint64_t worker = 0, owner = 0, dense = 0;
    bool is_empty = true;
  };
  const Nodes& nodes_;
  const PlanOptions& options_;
  std::vector<Sizes> owners_, rails_;
  bool is_empty_ = true;
};

// Where the tiles of a chunk lie in its messages.
class ChunkPlanner {
 public:
  ChunkPlanner(const Layout& layout, std::span<const BucketTile> tiles, const PlanOptions& options)
      : nodes_(layout.nodes()),
        layout_(layout),
        tiles_(tiles),
        options_(options),
        own_rail_(nodes_.local_index(options.rank)),
        in_worker_(nodes_.world_size(), 0),
        in_owner_(nodes_.world_size(), 0) {
    chunk_.dtype = tiles.front().parameter->dtype;
    chunk_.tiles_hash = hash_of(tiles);
    chunk_.rails.resize(nodes_.num_rails());
    chunk_.shards.resize(nodes_.num_nodes());
  }

  ChunkPlan plan() {
    size_messages();
    // Those of this rank's rail first: where `decode` undoes, it needs the batch of `encode`.
    for (const BucketTile& tile : tiles_) place(tile);
    for (std::vector<PlannedBatch>* batches : {&own_decode_, &other_decode_}) {
      std::move(batches->begin(), batches->end(), std::back_inserter(chunk_.decode));
    }
    return std::move(chunk_);
  }

 private:
  void size_messages() {
    std::vector<uint32_t> owner_bytes(nodes_.world_size(), 0);
    for (const BucketTile& tile : tiles_) {
      owner_bytes[tile.owner] += tile.owner_bytes;
      if (nodes_.local_index(tile.owner) != own_rail_) continue;
      Shard& shard = chunk_.shards[nodes_.node_of(tile.owner)];
      shard.worker_bytes += tile.worker_bytes;
      shard.owner_bytes += tile.owner_bytes;
    }
    if (scatters(options_.collective)) size_scatter_messages();
    if (gathers(options_.collective)) size_gather_messages(owner_bytes);
  }

  void size_scatter_messages() {
    std::vector<uint32_t> payloads;
    for (const Shard& shard : chunk_.shards) payloads.push_back(shard.worker_bytes);
    const std::vector<uint32_t> sizes = message_sizes(payloads, options_.equal_scatter);
    uint32_t start = 0;
    for (size_t node = 0; node < sizes.size(); ++node) {
      chunk_.shards[node].scatter_bytes = sizes[node];
      message_start_.push_back(std::exchange(start, start + sizes[node]));
    }
  }

  void size_gather_messages(const std::vector<uint32_t>& owner_bytes) {
    for (uint32_t rail = 0; rail < nodes_.num_rails(); ++rail) {
      std::vector<uint32_t> payloads;
      for (const uint32_t peer : nodes_.peers(rail)) payloads.push_back(owner_bytes[peer]);
      const std::vector<uint32_t> sizes = message_sizes(payloads, /*equal=*/true);
      for (size_t node = 0; node < sizes.size(); ++node) {
        chunk_.rails[rail].gathered.push_back({payloads[node], sizes[node], 0});
      }
    }
    if (!nodes_.is_flat()) size_forwarded_messages();
    for (uint32_t rail = 0; rail < nodes_.num_rails(); ++rail) {
      uint32_t start = nodes_.is_flat() ? 0 : chunk_.forward[rail].start + kHeaderBytes;
      for (Gathered& message : chunk_.rails[rail].gathered) {
        message.start = std::exchange(start, start + message.message_bytes);
      }
    }
  }

  // As if every node had as many ranks as the largest. A rank without a rail has gathered nothing.
  void size_forwarded_messages() {
    std::vector<uint32_t> payloads(nodes_.most_siblings(), 0);
    for (uint32_t rail = 0; rail < nodes_.num_rails(); ++rail) {
      for (const Gathered& message : chunk_.rails[rail].gathered) {
        payloads[rail] += message.message_bytes;
      }
    }
    uint64_t sum = 0, longest = 0;
    for (const uint32_t payload : payloads) {
      sum += kHeaderBytes + uint64_t{payload};
      longest = std::max<uint64_t>(longest, kHeaderBytes + uint64_t{payload});
    }
    const bool equal = (payloads.size() * longest - sum) * kPaddingPart <= sum;
    uint32_t start = 0;
    for (const uint32_t payload : payloads) {
      const uint32_t size = equal ? static_cast<uint32_t>(longest) : kHeaderBytes + payload;
      chunk_.forward.push_back({std::exchange(start, start + size), size});
    }
  }

  void place(const BucketTile& tile) {
    const uint32_t node = nodes_.node_of(tile.owner), index = nodes_.local_index(tile.owner);
    Rail& rail = chunk_.rails[index];
    uint64_t gradient_offset = tile.gradient_offset;
    if (!nodes_.is_flat()) {
      gradient_offset = rail.num_elements;
      rail.pieces.push_back({tile.gradient_offset, tile.num_elements, rail.num_elements});
      rail.num_elements += piece_elements(tile);
    }
    const uint32_t in_worker =
        std::exchange(in_worker_[tile.owner], in_worker_[tile.owner] + tile.worker_bytes);
    const uint32_t in_owner =
        std::exchange(in_owner_[tile.owner], in_owner_[tile.owner] + tile.owner_bytes);
    const uint32_t arrives_at =
        gathers(options_.collective) ? rail.gathered[node].start + kHeaderBytes + in_owner : 0;
    const auto add = [&](std::vector<PlannedBatch>& batches, uint32_t rank, const Tile& placed) {
      PlannedBatch& batch = batch_for(batches, tile, options_);
      batch.tiles.push_back(placed);
      batch.ranks.push_back(rank);
    };
    const bool is_own = index == own_rail_;
    if (!scatters(options_.collective)) {
      if (tile.owner == options_.rank) {
        add(chunk_.encode, 0,
            {tile.id, gradient_offset, kNoResidual, tile.num_elements, kHeaderBytes + in_owner,
             arrives_at, in_owner});
      }
    } else if (is_own) {
      add(chunk_.encode, node,
          {tile.id, gradient_offset, tile.worker_residual, tile.num_elements,
           message_start_[node] + kHeaderBytes + in_worker, arrives_at, in_worker});
    }
    if (scatters(options_.collective) && tile.owner == options_.rank) {
      add(chunk_.reduce, node,
          {tile.id, tile.gradient_offset, layout_.owner_residual_offset(tile.id), tile.num_elements,
           in_worker, in_owner, in_owner});
    }
    if (!gathers(options_.collective)) return;
    add(is_own ? own_decode_ : other_decode_, tile.owner,
        {tile.id, tile.gradient_offset, tile.worker_residual, tile.num_elements, arrives_at, 0, 0});
  }

  const Nodes& nodes_;
  const Layout& layout_;
  const std::span<const BucketTile> tiles_;
  const PlanOptions& options_;
  const uint32_t own_rail_;
  std::vector<uint32_t> message_start_;         // of the scatter messages, by node
  std::vector<uint32_t> in_worker_, in_owner_;  // payload bytes so far, by owner
  std::vector<PlannedBatch> own_decode_, other_decode_;
  ChunkPlan chunk_{};
};

}  // namespace

BucketPlan make_plan(const Layout& layout, const std::vector<uint32_t>& parameters,
                     const PlanOptions& options) {
  BucketPlan plan;
  plan.parameters = parameters;
  for (const uint32_t index : parameters) {
    plan.num_elements += layout.parameters()[index].num_elements;
    plan.dtype = layout.parameters()[index].dtype;
  }
  const std::vector<BucketTile> tiles = tiles_of(layout, plan, options);
  ChunkSizes sizes(layout, options);
  size_t first = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    if (!sizes.add(tiles[i])) {
      plan.chunks.push_back(
          ChunkPlanner(layout, std::span(tiles).subspan(first, i - first), options).plan());
      first = i;
      sizes.clear();
      sizes.add(tiles[i]);
    }
  }
  if (first < tiles.size()) {
    plan.chunks.push_back(ChunkPlanner(layout, std::span(tiles).subspan(first), options).plan());
  }
  return plan;
}

}  // namespace gradferry
