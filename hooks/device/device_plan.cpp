#include "device/device_plan.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>

#include "messages.h"

namespace gradferry {
namespace {

constexpr uint64_t kTableAlignment = 16;

class TableWriter {
 public:
  template <typename T>
  Table<T> add(const std::vector<T>& entries) {
    const uint64_t offset = bytes_.size();
    const uint64_t num_bytes = entries.size() * sizeof(T);
    bytes_.resize((offset + num_bytes + kTableAlignment - 1) / kTableAlignment * kTableAlignment);
    if (num_bytes != 0) {
      std::memcpy(bytes_.data() + offset, static_cast<const void*>(entries.data()), num_bytes);
    }
    return {offset, static_cast<uint32_t>(entries.size())};
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

DeviceStage add_stage(TableWriter& writer, const std::vector<PlannedBatch>& planned) {
  DeviceStage stage;
  std::vector<Tile> tiles;
  for (const PlannedBatch& batch : planned) {
    stage.batches.push_back({batch.codec_index, batch.worker_residual, batch.owner_residual,
                             static_cast<uint32_t>(tiles.size()),
                             static_cast<uint32_t>(batch.tiles.size())});
    tiles.insert(tiles.end(), batch.tiles.begin(), batch.tiles.end());
  }
  stage.tiles = writer.add(tiles);
  return stage;
}

// The rank of each tile, batch after batch.
std::vector<uint32_t> ranks_of(const std::vector<PlannedBatch>& planned) {
  std::vector<uint32_t> ranks;
  for (const PlannedBatch& batch : planned) {
    ranks.insert(ranks.end(), batch.ranks.begin(), batch.ranks.end());
  }
  return ranks;
}

// Fills in the tiles of `messages`: message m holds the tiles of rank ranks[m].
std::vector<uint32_t> order_tiles(std::vector<Message>& messages,
                                  const std::vector<uint32_t>& ranks,
                                  const std::vector<uint32_t>& tile_ranks) {
  std::vector<uint32_t> order;
  for (size_t m = 0; m < messages.size(); ++m) {
    const auto first = static_cast<uint32_t>(order.size());
    for (uint32_t i = 0; i < tile_ranks.size(); ++i) {
      if (tile_ranks[i] == ranks[m]) order.push_back(i);
    }
    messages[m].first_tile = first;
    messages[m].num_tiles = static_cast<uint32_t>(order.size()) - first;
  }
  return order;
}

// Adds a message that starts at `offset` and holds tiles of these sizes, one after the other.
void add_received(std::vector<Message>& messages, std::vector<ReceivedTile>& tiles, uint32_t offset,
                  const std::vector<uint32_t>& tile_bytes) {
  const auto number = static_cast<uint32_t>(messages.size());
  const auto first = static_cast<uint32_t>(tiles.size());
  uint32_t place = offset + kHeaderBytes;
  for (const uint32_t num_bytes : tile_bytes) {
    tiles.push_back({place, num_bytes, number, place - offset - kHeaderBytes});
    place += num_bytes;
  }
  messages.push_back(
      {offset, place - offset - kHeaderBytes, first, static_cast<uint32_t>(tile_bytes.size())});
}

DeviceChunk add_chunk(TableWriter& writer, const ChunkPlan& plan, uint32_t rank,
                      std::span<std::byte* const> scatter_received) {
  const auto world_size = static_cast<uint32_t>(plan.shards.size());
  const Shard& own = plan.shards[rank];
  DeviceChunk chunk;
  chunk.plan = &plan;
  chunk.encode = add_stage(writer, plan.encode);
  chunk.reduce = add_stage(writer, plan.reduce);
  chunk.decode = add_stage(writer, plan.decode);
  for (const PlannedBatch& batch : plan.decode) chunk.worker_residual |= batch.worker_residual;

  chunk.decode_sources = writer.add(ranks_of(plan.decode));

  std::vector<Message> sent;
  std::vector<uint32_t> ranks;
  uint32_t offset = 0;
  for (uint32_t p = 0; p < world_size; ++p) {
    sent.push_back({offset, plan.shards[p].worker_bytes, 0, 0});
    ranks.push_back(p);
    offset += plan.shards[p].scatter_bytes;
    chunk.send_bytes.push_back(plan.shards[p].scatter_bytes);
    chunk.receive_bytes.push_back(own.scatter_bytes);
  }
  chunk.scatter_order = writer.add(order_tiles(sent, ranks, ranks_of(plan.encode)));
  chunk.scatter_sent = writer.add(sent);
  sent = {{0, own.owner_bytes, 0, 0}};
  chunk.gather_order = writer.add(order_tiles(sent, {rank}, ranks_of(plan.reduce)));
  chunk.gather_sent = writer.add(sent);

  std::vector<Message> scattered, gathered;
  std::vector<ReceivedTile> scattered_tiles, gathered_tiles;
  for (uint32_t r = 0; r < world_size; ++r) {
    add_received(scattered, scattered_tiles, r * own.scatter_bytes, own.worker_tiles);
    add_received(gathered, gathered_tiles, r * plan.gather_message_bytes,
                 plan.shards[r].owner_tiles);
  }
  chunk.scatter_received = writer.add(scattered);
  chunk.scatter_tiles = writer.add(scattered_tiles);
  chunk.gather_received = writer.add(gathered);
  chunk.gather_tiles = writer.add(gathered_tiles);
  for (const std::byte* received : scatter_received) {
    std::vector<const std::byte*> payloads;
    for (const Message& message : scattered) {
      payloads.push_back(received + message.offset + kHeaderBytes);
    }
    chunk.payloads.push_back(writer.add(payloads));
  }
  return chunk;
}

}  // namespace

DevicePlan::DevicePlan(const BucketPlan& plan, uint32_t rank,
                       std::span<std::byte* const> scatter_received, c10::Device device)
    : plan_(plan) {
  TableWriter writer;
  for (const ChunkPlan& chunk : plan_.chunks) {
    chunks_.push_back(add_chunk(writer, chunk, rank, scatter_received));
    const DeviceChunk& added = chunks_.back();
    most_tiles_ = std::max(
        {most_tiles_, added.encode.tiles.size, added.reduce.tiles.size, added.decode.tiles.size});
  }
  if (chunks_.empty()) return;
  const auto num_bytes = static_cast<int64_t>(writer.bytes().size());
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  staging_ = at::empty({num_bytes}, bytes.pinned_memory(true));
  std::memcpy(staging_.mutable_data_ptr(), writer.bytes().data(), writer.bytes().size());
  tables_ = at::empty({num_bytes}, bytes.device(device));
  tables_.copy_(staging_, /*non_blocking=*/true);
  base_ = static_cast<const std::byte*>(tables_.const_data_ptr());
}

void DevicePlan::use_on(const c10::Stream& stream) const {
  if (!tables_.defined()) return;
  c10::impl::VirtualGuardImpl(stream.device_type())
      .recordDataPtrOnStream(tables_.storage().data_ptr(), stream);
}

}  // namespace gradferry
