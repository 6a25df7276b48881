// A bucket's plan with its tables in device memory, which the kernels of each chunk read. Built and
// uploaded once per plan.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

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

// One stage of a chunk: all of its tiles, whatever their codecs. `rows`: as in ChunkBatch.
struct DeviceStage {
  Table<ChunkTile> tiles;
  uint32_t rows = 0;
};

struct DeviceChunk {
  const ChunkPlan* plan;
  DeviceStage encode, reduce, decode;
  bool worker_residual = false;  // some tiles have one, so that decode reads what was sent
  Table<Message> scatter_sent, scatter_received, gather_received;
  uint32_t gather_payload_bytes;  // of the message that this rank sends
  // All-to-all: bytes sent to, and received from, each rank.
  std::vector<int64_t> send_bytes, receive_bytes;
};

class DevicePlan {
 public:
  // `plan` outlives this. `codecs`: those of the layout, with the plan's factors. Uploads on the
  // current stream of `device`.
  DevicePlan(const BucketPlan& plan, uint32_t rank, const std::vector<ChunkCodec>& codecs,
             c10::Device device);

  DevicePlan(const DevicePlan&) = delete;
  DevicePlan& operator=(const DevicePlan&) = delete;

  // Registers the tables with `stream`, which uses them too.
  void use_on(const c10::Stream& stream) const;

  const BucketPlan& plan() const { return plan_; }
  const std::vector<DeviceChunk>& chunks() const { return chunks_; }
  // On the device.
  const ChunkCodec* codecs() const { return data(codecs_); }
  // The most tiles in a stage of a chunk.
  uint32_t most_tiles() const { return most_tiles_; }

  template <typename T>
  const T* data(const Table<T>& table) const {
    return reinterpret_cast<const T*>(base_ + table.offset);
  }

 private:
  const BucketPlan& plan_;
  std::vector<DeviceChunk> chunks_;
  Table<ChunkCodec> codecs_;
  uint32_t most_tiles_ = 0;
  at::Tensor staging_;  // pinned; kept because nothing waits for the end of the upload
  at::Tensor tables_;
  const std::byte* base_ = nullptr;
};

}  // namespace gradferry
