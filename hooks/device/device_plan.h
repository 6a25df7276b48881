// A bucket's plan with its tables in device memory, which the kernels of each chunk read. Built and
// uploaded once per plan.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <vector>

#include "gradferry/device_library.h"
#include "protocol/plan.h"

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

// An all-to-all: bytes sent to, and received from, each rank; without messages of no bytes, of
// which the tables have none. In an all-gather `sent` has the one message to all.
struct DeviceScatter {
  Table<Message> sent, received;
  std::vector<int64_t> send_bytes, receive_bytes;
};

// What siblings do for each other; empty with one rank per node.
struct DeviceSiblings {
  DeviceScatter scatter;
  Table<Message> from_others;   // those of scatter.received that this rank did not send
  Table<ChunkPiece> sent, own;  // pieces of other rails, and of this rank's
};

struct DeviceChunk {
  const ChunkPlan* plan;
  DeviceSiblings siblings;
  DeviceStage encode, reduce, decode;
  bool worker_residual = false;  // some tiles have one, so that decode reads what was sent
  DeviceScatter scatter;         // between peers, as what follows
  // What decode checks: the messages of all owners and, behind them, those that siblings forward.
  // Empty in a reduce-scatter, as `decode` is.
  Table<Message> gathered;
};

class DevicePlan {
 public:
  // `plan` and `layout` outlive this. `codecs`: those of the layout, with the plan's factors.
  // `sum_begin`: where in a buffer of sent messages the node's sum lies (device_exchange.h).
  // Uploads on the current stream of `device`.
  DevicePlan(const BucketPlan& plan, const Layout& layout, const std::vector<ChunkCodec>& codecs,
             uint32_t sum_begin, Collective collective, c10::Device device);

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
