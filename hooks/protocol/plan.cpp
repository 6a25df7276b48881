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

// The messages of a chunk in one stage that have these payloads, one after the other. `equal`: of
// one size if that costs little: backends have their own collectives for those, and send any others
// one by one.
std::vector<PlannedMessage> messages_with(const std::vector<uint32_t>& payloads, bool equal,
                                          uint64_t most_empty = kMostWithoutTiles) {
  const bool sends_empty = std::cmp_less_equal(std::ranges::count(payloads, 0), most_empty);
  uint64_t sum = 0, longest = 0;
  std::vector<PlannedMessage> messages;
  for (const uint32_t payload : payloads) {
    const uint32_t size = payload != 0 || sends_empty ? kHeaderBytes + payload : 0;
    messages.push_back({payload, size, static_cast<uint32_t>(sum)});
    sum += size;
    longest = std::max<uint64_t>(longest, size);
  }
  if (!equal || (messages.size() * longest - sum) * kPaddingPart > sum) return messages;
  for (uint32_t i = 0; i < messages.size(); ++i) {
    messages[i].message_bytes = static_cast<uint32_t>(longest);
    messages[i].start = i * messages[i].message_bytes;
  }
  return messages;
}

// FNV-1a of 64 bits, over whole tile numbers instead of bytes.
uint64_t hash_of(std::span<const BucketTile> tiles) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const BucketTile& tile : tiles) hash = (hash ^ tile.id) * 0x100000001b3;
  return hash;
}

// How many of these tiles are the next chunk: always the first, and of every owner the first unless
// its rail is full.
size_t tiles_of_chunk(const Layout& layout, std::span<const BucketTile> tiles,
                      const PlanOptions& options) {
  struct Sizes {
    uint64_t worker = 0, owner = 0, dense = 0;  // messages in each stage, and gradients
  };
  const Nodes& nodes = layout.nodes();
  std::vector<Sizes> owners(nodes.world_size()), rails(nodes.num_rails());
  for (size_t i = 0; i < tiles.size(); ++i) {
    const BucketTile& tile = tiles[i];
    Sizes& owner = owners[tile.owner];
    Sizes& rail = rails[nodes.local_index(tile.owner)];
    const uint64_t header = owner.dense == 0 ? kHeaderBytes : 0;
    const uint64_t worker = header + tile.worker_bytes, gathered = header + tile.owner_bytes;
    const uint64_t dense = uint64_t{piece_elements(tile)} * item_bytes(tile.parameter->dtype);
    const auto exceed = [&](const Sizes& sizes, uint64_t most) {
      return std::max(sizes.worker + worker, sizes.owner + gathered) > most;
    };
    if (header == 0 && exceed(owner, kHeaderBytes + uint64_t{options.chunk_bytes})) return i;
    if (i != 0 && (exceed(rail, options.rail_bytes) ||
                   (!nodes.is_flat() && rail.dense + dense > options.dense_bytes))) {
      return i;
    }
    for (Sizes* sizes : {&owner, &rail}) {
      sizes->worker += worker;
      sizes->owner += gathered;
      sizes->dense += dense;
    }
  }
  return tiles.size();
}

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
  }

  ChunkPlan plan() {
    size_messages();
    // Those of this rank's rail first: where `decode` undoes, it needs the batch of `encode`.
    for (const BucketTile& tile : tiles_) place(tile);
    if (!nodes_.is_flat()) {
      std::vector<uint32_t> dense(nodes_.most_siblings(), 0);
      for (uint32_t i = 0; i < chunk_.rails.size(); ++i) {
        dense[i] = chunk_.rails[i].num_elements * item_bytes(chunk_.dtype);
      }
      chunk_.dense = messages_with(dense, /*equal=*/false, dense.size());
    }
    for (std::vector<PlannedBatch>* batches : {&own_decode_, &other_decode_}) {
      std::move(batches->begin(), batches->end(), std::back_inserter(chunk_.decode));
    }
    return std::move(chunk_);
  }

 private:
  void size_messages() {
    std::vector<uint32_t> to_owner(nodes_.world_size(), 0), from_owner(nodes_.world_size(), 0);
    for (const BucketTile& tile : tiles_) {
      to_owner[tile.owner] += tile.worker_bytes;
      from_owner[tile.owner] += tile.owner_bytes;
    }
    const auto between_peers = [&](uint32_t rail, const std::vector<uint32_t>& by_owner,
                                   bool equal) {
      std::vector<uint32_t> payloads;
      for (const uint32_t peer : nodes_.peers(rail)) payloads.push_back(by_owner[peer]);
      return messages_with(payloads, equal);
    };
    if (scatters(options_.collective) && nodes_.is_leader(options_.rank)) {
      chunk_.scattered = between_peers(own_rail_, to_owner, options_.equal_scatter);
    }
    if (!gathers(options_.collective)) return;
    // As if every node had as many ranks as the largest.
    std::vector<uint32_t> gathered(nodes_.most_siblings(), 0);
    for (uint32_t i = 0; i < chunk_.rails.size(); ++i) {
      chunk_.rails[i].gathered = between_peers(i, from_owner, /*equal=*/true);
      gathered[i] = static_cast<uint32_t>(total_bytes(chunk_.rails[i].gathered));
    }
    if (nodes_.is_flat()) return;
    chunk_.forwarded = messages_with(gathered, /*equal=*/true, gathered.size());
    for (PlannedMessage& message : chunk_.forwarded) {
      message.payload_bytes = message.message_bytes - kHeaderBytes;  // padding cannot be told apart
    }
    for (uint32_t i = 0; i < chunk_.rails.size(); ++i) {
      for (PlannedMessage& message : chunk_.rails[i].gathered) {
        message.start += chunk_.forwarded[i].start + kHeaderBytes;
      }
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
           chunk_.scattered[node].start + kHeaderBytes + in_worker, arrives_at, in_worker});
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
  std::vector<uint32_t> in_worker_, in_owner_;  // payload bytes so far, by owner
  std::vector<PlannedBatch> own_decode_, other_decode_;
  ChunkPlan chunk_{};
};

}  // namespace

std::vector<int64_t> sizes_of(std::span<const PlannedMessage> messages) {
  std::vector<int64_t> sizes;
  for (const PlannedMessage& message : messages) sizes.push_back(message.message_bytes);
  return sizes;
}

int64_t total_bytes(std::span<const PlannedMessage> messages) {
  if (messages.empty()) return 0;
  const PlannedMessage &first = messages.front(), &last = messages.back();
  return int64_t{last.start} + last.message_bytes - first.start;
}

BucketPlan make_plan(const Layout& layout, const std::vector<uint32_t>& parameters,
                     const PlanOptions& options) {
  BucketPlan plan;
  plan.parameters = parameters;
  for (const uint32_t index : parameters) {
    plan.num_elements += layout.parameters()[index].num_elements;
    plan.dtype = layout.parameters()[index].dtype;
  }
  const std::vector<BucketTile> tiles = tiles_of(layout, plan, options);
  std::span<const BucketTile> left = tiles;
  while (!left.empty()) {
    const size_t number = tiles_of_chunk(layout, left, options);
    plan.chunks.push_back(ChunkPlanner(layout, left.first(number), options).plan());
    left = left.subspan(number);
  }
  return plan;
}

}  // namespace gradferry
