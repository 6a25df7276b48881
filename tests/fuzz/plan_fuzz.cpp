// Plans of any bucket of any model in any world: every element has one place in every step of the
// exchange, what one rank sends is what the other expects, and all of it fits the buffers.
#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "gradferry/error.h"
#include "gradferry/wire.h"
#include "hooks/protocol/plan.h"
#include "hooks/protocol/workspace.h"
#include "tests/fuzz/codec_calls.h"

namespace gradferry::fuzzing {
namespace {

struct World {
  std::vector<ParameterSpec> parameters;
  std::vector<uint32_t> bucket;
  std::vector<std::vector<uint32_t>> members;  // of nodes
  PlanOptions options{};
  WorkspaceLimits limits{};
};

// One rank's view.
struct Rank {
  Layout layout;
  BucketPlan plan;
};

// Marks ranges of which none may overlap another.
class Ranges {
 public:
  void add(uint64_t begin, uint64_t size) { parts_.emplace_back(begin, begin + size); }
  // Whether they are 0 .. size - 1, each once.
  bool cover(uint64_t size) { return disjoint() && total() == size && end() <= size; }
  bool disjoint() {
    std::ranges::sort(parts_);
    for (size_t i = 1; i < parts_.size(); ++i) {
      if (parts_[i].first < parts_[i - 1].second) return false;
    }
    return true;
  }
  uint64_t end() const { return parts_.empty() ? 0 : parts_.back().second; }

 private:
  uint64_t total() const {
    uint64_t sum = 0;
    for (const auto& [begin, end] : parts_) sum += end - begin;
    return sum;
  }
  std::vector<std::pair<uint64_t, uint64_t>> parts_;
};

World take_world(Bytes& input) {
  World world;
  const uint32_t drawn = 1 + input.below(4);
  const bool flat = input.flip();
  // So many that some need not send.
  const uint32_t num_nodes = drawn == 4 ? 3 + kMostWithoutTiles : drawn;
  uint32_t world_size = 0;
  for (uint32_t node = 0; node < num_nodes; ++node) {
    auto& ranks = world.members.emplace_back(flat ? 1 : 1 + input.below(4));
    std::iota(ranks.begin(), ranks.end(), world_size);
    world_size += static_cast<uint32_t>(ranks.size());
  }
  Collective collective = Collective::kAllReduce;
  if (flat && input.flip()) {
    collective = input.flip() ? Collective::kReduceScatter : Collective::kAllGather;
  }
  const ScalarType dtype = static_cast<ScalarType>(input.below(4));
  for (uint32_t count = 1 + input.below(6); count > 0; --count) {
    const auto codec = [&] {
      // Those whose payload is the same in both stages.
      constexpr std::array kGathered = {"exact", "bf16", "q8", "q4"};
      const std::string text = scatters(collective)
                                   ? take_codec(input)
                                   : std::string(kGathered[input.below(kGathered.size())]);
      const bool fits = parse_codec(text).codec->supports_float64;
      return dtype == ScalarType::kFloat64 && !fits ? std::string("exact") : text;
    };
    ParameterSpec& spec = world.parameters.emplace_back();
    spec.name = "p";
    spec.num_elements = input.flip() ? input.take<uint16_t>() : input.take<uint8_t>();
    spec.dtype = dtype;
    spec.codec = codec();
    spec.warmup = codec();
    spec.worker_residual = input.flip();
    spec.owner_residual = input.flip();
    if (collective != Collective::kAllReduce) spec.owner = input.below(world_size);
  }
  std::vector<uint32_t> order(world.parameters.size());
  std::iota(order.begin(), order.end(), 0U);
  for (uint32_t i = 0; i < order.size(); ++i) std::swap(order[i], order[input.below(order.size())]);
  order.resize(1 + input.below(order.size()));
  world.bucket = std::move(order);
  const uint64_t cap = uint64_t{input.take<uint16_t>()} * 1024;
  const Nodes nodes(world.members);
  const uint32_t most = 1 + input.take<uint32_t>() % (1U << 20);
  world.options = {.rank = 0,
                   .chunk_bytes = chunk_bytes_within(cap, world_size, most),
                   .equal_scatter = input.flip(),
                   .codecs = static_cast<CodecChoice>(input.below(3)),
                   .residuals = input.flip(),
                   .collective = collective};
  world.options.dense_bytes =
      dense_bytes_within(cap, world.options.chunk_bytes, nodes, world.options.equal_scatter);
  world.options.rail_bytes = rail_bytes_within(cap, nodes);
  world.limits = {.cap_bytes = cap,
                  .other_bytes = input.take<uint16_t>(),
                  .most_slots = 1 + input.below(8),
                  .gathers_in_place = input.flip(),
                  .siblings_share = input.flip() && !nodes.is_flat()};
  return world;
}

template <typename Visit>
void each_tile(const std::vector<PlannedBatch>& batches, const Visit& visit) {
  for (const PlannedBatch& batch : batches) {
    ASSERT_EQ(batch.tiles.size(), batch.ranks.size());
    for (size_t i = 0; i < batch.tiles.size(); ++i) visit(batch, batch.tiles[i], batch.ranks[i]);
  }
}

uint32_t bytes_of(const Rank& rank, const Tile& tile, Stage stage, const PlanOptions& options) {
  return rank.layout.payload_bytes(rank.layout.parameter_of(tile.id), tile.num_elements, stage,
                                   options.codecs);
}

// Owners are those of parameters that have one. Residuals of a rank's tiles lie apart, inside of
// what the layout counts.
void check_layout(const World& world, const Layout& layout) {
  Ranges worker, owner;
  for (size_t i = 0; i < world.parameters.size(); ++i) {
    const Parameter& parameter = layout.parameters()[i];
    for (uint32_t t = 0; t < parameter.num_tiles; ++t) {
      const uint64_t id = parameter.first_tile + t;
      ASSERT_EQ(&layout.parameter_of(id), &parameter);
      ASSERT_EQ(layout.owner(id), world.parameters[i].owner.value_or(layout.owner(id)));
      const uint32_t n = layout.tile_elements(parameter, t);
      ASSERT_TRUE(n >= 1 && n <= kTileElements);
      const uint64_t at = layout.worker_residual_offset(id), own = layout.owner_residual_offset(id);
      // The leader of a tile on a node keeps the node's residual; the tile's owner its own.
      const bool leads = layout.nodes().local_index(layout.rank()) == layout.rail(id);
      ASSERT_EQ(at != kNoResidual, parameter.worker_residual && leads);
      ASSERT_EQ(own != kNoResidual, parameter.owner_residual && layout.owner(id) == layout.rank());
      if (at != kNoResidual) worker.add(at, n);
      if (own != kNoResidual) owner.add(own, n);
    }
  }
  ASSERT_TRUE(worker.disjoint() && owner.disjoint());
  ASSERT_LE(worker.end(), layout.worker_residual_elements());
  ASSERT_LE(owner.end(), layout.owner_residual_elements());
}

// Every element is in one tile of decode, in one piece of one rail, and, summed over owners, in
// one of reduce; in that of its rail it is in one of encode. In an all-gather it is in one of its
// owner's encode alone. A tile is where the bucket has it.
void check_elements(const World& world, const std::vector<Rank>& ranks) {
  const Nodes& nodes = ranks[0].layout.nodes();
  const uint64_t n = ranks[0].plan.num_elements;
  const Collective collective = world.options.collective;
  std::map<uint64_t, uint64_t> lies_at;  // in the bucket, by tile
  uint64_t begin = 0;
  for (const uint32_t index : world.bucket) {
    const Parameter& parameter = ranks[0].layout.parameters()[index];
    for (uint32_t t = 0; t < parameter.num_tiles; ++t) {
      lies_at[parameter.first_tile + t] = begin + uint64_t{t} * kTileElements;
    }
    begin += parameter.num_elements;
  }
  Ranges of_owners;
  for (uint32_t r = 0; r < ranks.size(); ++r) {
    Ranges encoded, decoded, pieces;
    uint64_t in_rail = 0, of_encode = 0;
    for (const ChunkPlan& chunk : ranks[r].plan.chunks) {
      for (uint32_t rail = 0; rail < chunk.rails.size(); ++rail) {
        Ranges message;
        for (const Piece& piece : chunk.rails[rail].pieces) {
          pieces.add(piece.gradient_offset, piece.num_elements);
          message.add(piece.offset, piece.num_elements);
          ASSERT_EQ(piece.offset % kPieceAlignment, 0);
          if (rail == nodes.local_index(r)) in_rail += piece.num_elements;
        }
        ASSERT_TRUE(message.disjoint());
        ASSERT_LE(message.end(), chunk.rails[rail].num_elements);
      }
      each_tile(chunk.encode, [&](const auto&, const Tile& tile, uint32_t) {
        of_encode += tile.num_elements;
        ASSERT_TRUE(!nodes.is_flat() || tile.gradient_offset == lies_at.at(tile.id));
        Ranges& each = scatters(collective) ? encoded : of_owners;
        if (nodes.is_flat()) each.add(tile.gradient_offset, tile.num_elements);
      });
      each_tile(chunk.decode, [&](const auto&, const Tile& tile, uint32_t) {
        ASSERT_EQ(tile.gradient_offset, lies_at.at(tile.id));
        decoded.add(tile.gradient_offset, tile.num_elements);
      });
      each_tile(chunk.reduce, [&](const auto&, const Tile& tile, uint32_t) {
        ASSERT_EQ(ranks[r].layout.owner(tile.id), r);
        ASSERT_TRUE(!nodes.is_flat() || tile.gradient_offset == lies_at.at(tile.id));
        of_owners.add(tile.gradient_offset, tile.num_elements);
      });
    }
    ASSERT_TRUE(!nodes.is_flat() || encoded.cover(scatters(collective) ? n : 0));
    ASSERT_TRUE(nodes.is_flat() || pieces.cover(n));
    ASSERT_TRUE(nodes.is_flat() || in_rail == of_encode);
    ASSERT_TRUE(decoded.cover(gathers(collective) ? n : 0));
  }
  ASSERT_TRUE(of_owners.cover(n));
}

// What `sender` writes for the peer on `node` is what that one reads, and lies in the send buffer
// between the header of its message and the next message.
void check_scatter(const World& world, const std::vector<Rank>& ranks, uint32_t sender, size_t c,
                   uint32_t node) {
  const Nodes& nodes = ranks[0].layout.nodes();
  const ChunkPlan& chunk = ranks[sender].plan.chunks[c];
  const uint32_t receiver = nodes.peers(nodes.local_index(sender))[node];
  const PlannedMessage& planned = chunk.scattered[node];
  std::map<uint64_t, Tile> expected;
  each_tile(ranks[receiver].plan.chunks[c].reduce,
            [&](const auto&, const Tile& tile, uint32_t) { expected[tile.id] = tile; });
  Ranges message;
  each_tile(chunk.encode, [&](const auto&, const Tile& tile, uint32_t to) {
    if (to != node) return;
    const auto found = expected.find(tile.id);
    ASSERT_NE(found, expected.end());
    ASSERT_EQ(found->second.num_elements, tile.num_elements);
    ASSERT_EQ(tile.payload_offset, planned.start + kHeaderBytes + found->second.payload_offset);
    ASSERT_EQ(tile.message_offset, found->second.payload_offset);
    message.add(tile.message_offset, bytes_of(ranks[sender], tile, Stage::kWorker, world.options));
    expected.erase(found);
  });
  ASSERT_TRUE(expected.empty());
  ASSERT_TRUE(message.cover(planned.payload_bytes));
  ASSERT_EQ(planned.message_bytes, ranks[receiver].plan.chunks[c].scattered[node].message_bytes);
}

// What every rank decodes is where the owner's message brings it.
void check_gather(const World& world, const std::vector<Rank>& ranks, uint32_t r, size_t c) {
  const Nodes& nodes = ranks[0].layout.nodes();
  const ChunkPlan& chunk = ranks[r].plan.chunks[c];
  std::vector<std::map<uint64_t, uint32_t>> sent(ranks.size());  // offsets, by tile
  for (uint32_t owner = 0; owner < ranks.size(); ++owner) {
    Ranges message;
    const bool averages = scatters(world.options.collective);
    const ChunkPlan& of_owner = ranks[owner].plan.chunks[c];
    each_tile(averages ? of_owner.reduce : of_owner.encode,
              [&](const auto&, const Tile& tile, uint32_t) {
                const uint32_t offset = averages ? tile.output_offset : tile.message_offset;
                sent[owner][tile.id] = offset;
                message.add(offset, bytes_of(ranks[owner], tile, Stage::kOwner, world.options));
              });
    if (!nodes.is_leader(owner)) continue;
    const PlannedMessage& planned =
        chunk.rails[nodes.local_index(owner)].gathered[nodes.node_of(owner)];
    ASSERT_TRUE(message.cover(planned.payload_bytes));
  }
  each_tile(chunk.decode, [&](const auto&, const Tile& tile, uint32_t owner) {
    ASSERT_EQ(ranks[r].layout.owner(tile.id), owner);
    const PlannedMessage& planned =
        chunk.rails[nodes.local_index(owner)].gathered[nodes.node_of(owner)];
    ASSERT_EQ(tile.payload_offset,
              uint64_t{planned.start} + kHeaderBytes + sent[owner].at(tile.id));
  });
}

// Messages follow each other. Few owners without tiles get or send a header, many nothing; padding
// is little, and not in between.
void check_messages(const std::vector<PlannedMessage>& messages, uint64_t start, bool may_pad) {
  const auto empty = std::ranges::count(messages, 0U, &PlannedMessage::payload_bytes);
  uint64_t sent = 0, unpadded = 0;
  for (const PlannedMessage& message : messages) {
    ASSERT_EQ(message.start, start + sent);
    const bool is_sent = message.payload_bytes != 0 || empty <= int64_t{kMostWithoutTiles};
    const uint64_t least = is_sent ? kHeaderBytes + message.payload_bytes : 0;
    ASSERT_GE(message.message_bytes, least);
    sent += message.message_bytes;
    unpadded += least;
  }
  if (sent == unpadded) return;
  ASSERT_TRUE(may_pad);
  ASSERT_LE((sent - unpadded) * kPaddingPart, unpadded);
  for (const PlannedMessage& message : messages) {
    ASSERT_EQ(message.message_bytes, messages.front().message_bytes);
  }
}

// All of a chunk, alike on all ranks. Siblings get those of a rail behind a header.
void check_sizes(const World& world, const Nodes& nodes, const ChunkPlan& chunk,
                 const ChunkPlan& of_first) {
  check_messages(chunk.scattered, 0, world.options.equal_scatter);
  if (!gathers(world.options.collective)) return;
  uint64_t forwarded = 0;
  for (size_t i = 0; i < chunk.forwarded.size(); ++i) {
    const PlannedMessage& message = chunk.forwarded[i];
    ASSERT_EQ(message.start, std::exchange(forwarded, forwarded + message.message_bytes));
    ASSERT_EQ(message.message_bytes, of_first.forwarded[i].message_bytes);
    ASSERT_EQ(message.message_bytes, kHeaderBytes + message.payload_bytes);
  }
  for (uint32_t rail = 0; rail < nodes.num_rails(); ++rail) {
    const auto& gathered = chunk.rails[rail].gathered;
    const PlannedMessage whole = nodes.is_flat() ? PlannedMessage{} : chunk.forwarded[rail];
    check_messages(gathered, nodes.is_flat() ? 0 : whole.start + kHeaderBytes, true);
    ASSERT_TRUE(nodes.is_flat() || total_bytes(gathered) <= int64_t{whole.payload_bytes});
  }
}

void check_fits(const World& world, const Rank& rank, const Workspace& space) {
  const Nodes& nodes = rank.layout.nodes();
  EXPECT_LE(space.bytes() + world.limits.other_bytes, world.limits.cap_bytes);
  EXPECT_TRUE(space.slots >= 1 && space.slots <= world.limits.most_slots);
  const bool leader = nodes.is_leader(rank.layout.rank());
  for (const ChunkPlan& chunk : rank.plan.chunks) {
    uint64_t sent = 0, dense = 0;
    for (const PlannedMessage& message : chunk.scattered) {
      sent += message.message_bytes;
      ASSERT_LE(message.message_bytes, space.message_bytes);
    }
    if (leader && !chunk.scattered.empty()) {
      ASSERT_LE(sent, space.send_bytes);
      const PlannedMessage& own = chunk.scattered[nodes.node_of(rank.layout.rank())];
      ASSERT_LE(uint64_t{nodes.num_nodes()} * own.message_bytes, space.receive_bytes);
    }
    if (!gathers(world.options.collective)) continue;
    uint64_t gathered = 0;
    for (const Rail& rail : chunk.rails) {
      for (const PlannedMessage& message : rail.gathered) {
        ASSERT_LE(message.message_bytes, space.message_bytes);
        gathered += message.message_bytes;
      }
      dense += kHeaderBytes + uint64_t{rail.num_elements} * item_bytes(chunk.dtype);
    }
    if (!nodes.is_flat()) {
      const PlannedMessage& last = chunk.forwarded[space.num_siblings - 1];
      gathered = uint64_t{last.start} + last.message_bytes;
    }
    ASSERT_LE(gathered, space.gathered_bytes);
    if (!nodes.is_flat() && !world.limits.siblings_share) {
      ASSERT_LE(dense, space.dense_send_bytes);
    }
  }
}

// Each plans for itself, and posts collectives in an order that depends on its slots; siblings that
// share memory map the same, although extra ranks need less.
void check_alike(const World& world, const std::vector<Rank>& ranks,
                 const std::vector<Workspace>& spaces) {
  const Nodes& nodes = ranks[0].layout.nodes();
  for (uint32_t r = 0; r < spaces.size(); ++r) {
    if (!world.limits.siblings_share) {
      ASSERT_EQ(spaces[r].slots, spaces[0].slots);
      continue;
    }
    const std::vector<uint32_t> siblings = nodes.siblings(r);
    const Workspace &space = spaces[r], &first = spaces[siblings.front()];
    ASSERT_EQ(space.slots, first.slots);
    ASSERT_EQ(space.shared_bytes, first.shared_bytes);
    ASSERT_EQ(space.gathered_bytes, first.gathered_bytes);
    ASSERT_EQ(space.dense_place_bytes, first.dense_place_bytes);
    if (space.shared_bytes == 0) continue;
    const uint64_t places = uint64_t{nodes.num_rails()} * (siblings.size() - 1);
    ASSERT_LE(space.gathered_bytes + places * space.dense_place_bytes, space.shared_bytes);
    for (const ChunkPlan& chunk : ranks[r].plan.chunks) {
      for (const Rail& rail : chunk.rails) {
        ASSERT_LE(uint64_t{rail.num_elements} * item_bytes(chunk.dtype), space.dense_place_bytes);
      }
    }
  }
}

}  // namespace

void run(Bytes input) {
  const World world = take_world(input);
  const Nodes nodes(world.members);
  std::vector<Rank> ranks;
  for (uint32_t r = 0; r < nodes.world_size(); ++r) {
    Layout layout(world.parameters, r, nodes);
    PlanOptions options = world.options;
    options.rank = r;
    BucketPlan plan = make_plan(layout, world.bucket, options);
    ranks.push_back({std::move(layout), std::move(plan)});
  }
  check_elements(world, ranks);
  std::vector<Workspace> spaces;
  for (uint32_t r = 0; r < ranks.size(); ++r) {
    check_layout(world, ranks[r].layout);
    ASSERT_EQ(ranks[r].plan.chunks.size(), ranks[0].plan.chunks.size());
    for (size_t c = 0; c < ranks[r].plan.chunks.size(); ++c) {
      const bool sends = scatters(world.options.collective) && nodes.is_leader(r);
      for (uint32_t node = 0; node < nodes.num_nodes() && sends; ++node) {
        check_scatter(world, ranks, r, c, node);
      }
      if (gathers(world.options.collective)) check_gather(world, ranks, r, c);
      check_sizes(world, nodes, ranks[r].plan.chunks[c], ranks[0].plan.chunks[c]);
    }
    try {
      spaces.push_back(plan_workspace(ranks[r].layout, world.options, world.limits));
      check_fits(world, ranks[r], spaces.back());
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      EXPECT_NE(std::string(error.what()).find("workspace_cap_mb="), std::string::npos);
    }
  }
  if (spaces.size() == ranks.size()) check_alike(world, ranks, spaces);
}

}  // namespace gradferry::fuzzing
