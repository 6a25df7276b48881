// A bucket's plan with its tables in device memory, which the kernels of each chunk read. Built and
// uploaded once per plan.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <span>
#include <vector>

#include "gradferry/device_library.h"
#include "plan.h"

namespace gradferry {

// Part of a plan's tables.
template <typename T>
struct Table {
  uint64_t offset = 0;  // bytes
  uint32_t size = 0;    // entries
};

// The tiles of one codec: `num_tiles` from `first` on, in a chunk's table of tiles and in its
// statuses.
struct DeviceBatch {
  uint32_t codec_index;
  bool worker_residual;
  bool owner_residual;
  uint32_t first;
  uint32_t num_tiles;
};

// One stage of a chunk: all tiles, batch after batch.
struct DeviceStage {
  std::vector<DeviceBatch> batches;
  Table<Tile> tiles;
};

struct DeviceChunk {
  const ChunkPlan* plan;
  DeviceStage encode, reduce, decode;
  bool worker_residual = false;    // some tiles have one, so that decode reads what was sent
  Table<uint32_t> decode_sources;  // by tile: rank that sent its message
  // Messages to send: their tiles in message order, as places in the stage's statuses.
  Table<Message> scatter_sent, gather_sent;
  Table<uint32_t> scatter_order, gather_order;
  // Messages received.
  Table<Message> scatter_received, gather_received;
  Table<ReceivedTile> scatter_tiles, gather_tiles;
  // By slot: pointers to the received scatter payloads, by rank.
  std::vector<Table<const std::byte*>> payloads;
  // All-to-all: bytes sent to, and received from, each rank.
  std::vector<int64_t> send_bytes, receive_bytes;
};

class DevicePlan {
 public:
  // `plan` outlives this. `scatter_received`: receive buffer of each slot's scatter, in device
  // memory. Uploads on the current stream of `device`.
  DevicePlan(const BucketPlan& plan, uint32_t rank, std::span<std::byte* const> scatter_received,
             c10::Device device);

  DevicePlan(const DevicePlan&) = delete;
  DevicePlan& operator=(const DevicePlan&) = delete;

  // Registers the tables with `stream`, which uses them too.
  void use_on(const c10::Stream& stream) const;

  const BucketPlan& plan() const { return plan_; }
  const std::vector<DeviceChunk>& chunks() const { return chunks_; }
  // The most tiles in a stage of a chunk.
  uint32_t most_tiles() const { return most_tiles_; }

  template <typename T>
  const T* data(const Table<T>& table) const {
    return reinterpret_cast<const T*>(base_ + table.offset);
  }

 private:
  const BucketPlan& plan_;
  std::vector<DeviceChunk> chunks_;
  uint32_t most_tiles_ = 0;
  at::Tensor staging_;  // pinned; kept because nothing waits for the end of the upload
  at::Tensor tables_;
  const std::byte* base_ = nullptr;
};

}  // namespace gradferry
