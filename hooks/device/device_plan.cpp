#include "device/device_plan.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>

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

// The tiles of a stage: change(tile, rank) completes them.
template <typename Change>
DeviceStage add_stage(TableWriter& writer, const std::vector<PlannedBatch>& planned,
                      const std::vector<ChunkCodec>& codecs, bool PlannedBatch::* has_residual,
                      Change change) {
  DeviceStage stage;
  std::vector<ChunkTile> tiles;
  for (const PlannedBatch& batch : planned) {
    stage.rows |= 1U << codecs[batch.codec_index].row;
    for (size_t i = 0; i < batch.tiles.size(); ++i) {
      ChunkTile& added = tiles.emplace_back(
          ChunkTile{batch.tiles[i], batch.codec_index, 0, batch.*has_residual ? 1U : 0U, 0});
      change(added, batch.ranks[i]);
    }
  }
  stage.tiles = writer.add(tiles);
  return stage;
}

DeviceChunk add_chunk(TableWriter& writer, const ChunkPlan& plan, uint32_t rank,
                      const std::vector<ChunkCodec>& codecs) {
  const auto world_size = static_cast<uint32_t>(plan.shards.size());
  const Shard& own = plan.shards[rank];
  DeviceChunk chunk;
  chunk.plan = &plan;
  std::vector<uint32_t> own_payloads;  // by tile: where this rank's is in the send buffer
  chunk.encode = add_stage(writer, plan.encode, codecs, &PlannedBatch::worker_residual,
                           [&](ChunkTile& tile, uint32_t receiver) {
                             tile.message = receiver;
                             own_payloads.push_back(tile.tile.payload_offset);
                           });
  chunk.reduce = add_stage(writer, plan.reduce, codecs, &PlannedBatch::owner_residual,
                           [](ChunkTile&, uint32_t) {});
  size_t next = 0;
  chunk.decode =
      add_stage(writer, plan.decode, codecs, &PlannedBatch::worker_residual,
                [&](ChunkTile& tile, uint32_t sender) {
                  tile.message = sender;
                  tile.tile.output_offset = own_payloads[next++];
                  tile.tile.message_offset =
                      tile.tile.payload_offset - sender * plan.columns[0].gather_message_bytes - kHeaderBytes;
                });
  for (const PlannedBatch& batch : plan.decode) chunk.worker_residual |= batch.worker_residual;

  std::vector<Message> sent, scattered, gathered;
  uint32_t offset = 0;
  for (uint32_t p = 0; p < world_size; ++p) {
    sent.push_back({offset, plan.shards[p].worker_bytes});
    scattered.push_back({p * own.scatter_bytes, own.worker_bytes});
    gathered.push_back({p * plan.columns[0].gather_message_bytes, plan.shards[p].owner_bytes});
    chunk.send_bytes.push_back(plan.shards[p].scatter_bytes);
    chunk.receive_bytes.push_back(own.scatter_bytes);
    offset += plan.shards[p].scatter_bytes;
  }
  chunk.scatter_sent = writer.add(sent);
  chunk.scatter_received = writer.add(scattered);
  chunk.gather_received = writer.add(gathered);
  chunk.gather_payload_bytes = own.owner_bytes;
  return chunk;
}

}  // namespace

DevicePlan::DevicePlan(const BucketPlan& plan, uint32_t rank, const std::vector<ChunkCodec>& codecs,
                       c10::Device device)
    : plan_(plan) {
  TableWriter writer;
  codecs_ = writer.add(codecs);
  for (const ChunkPlan& chunk : plan_.chunks) {
    chunks_.push_back(add_chunk(writer, chunk, rank, codecs));
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
