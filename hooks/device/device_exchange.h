// Enqueues the work for the chunks of a bucket on the streams E and F and on the transport.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <vector>

#include "device/device_context.h"

namespace gradferry {

// Chunks in flight, if their memory may be so large: one is encoded, one reduced, one decoded.
inline constexpr size_t kDeviceSlots = 3;

class DeviceExchange {
 public:
  // Allocates the workspace on F and adds it to the stats. `context` outlives the exchange.
  // `other_bytes`: what else of the engine's counts as workspace.
  DeviceExchange(DeviceContext& context, uint64_t other_bytes);

  // Enqueues everything from encode to the mean in the bucket. E already waits for the gradient.
  void average(DeviceJob& job);
  // Momentum mode in a world of one, where nothing is sent: gradient becomes momentum. On E alone.
  void add_momentum(DeviceJob& job);

  // The receive buffer of each slot's scatter, in device memory; none in a world of one.
  std::vector<std::byte*> scatter_received() const;

 private:
  // Buffers of one chunk in flight.
  struct DeviceSlot {
    DeviceBuffer scatter_send, scatter_receive, gather_send, gather_receive;
    c10::Event free;  // recorded on F when E may use the slot again
  };
  struct ChunkJob {
    const DeviceChunk* chunk;
    DeviceSlot* slot;
    uint32_t slot_index;
    uint64_t number;
    Transfer scatter, gather;
  };

  bool freed_by_decode(const DeviceChunk& planned) const {
    return planned.worker_residual || slots_.size() == 1;
  }
  void send(DeviceJob& job, ChunkJob& chunk);
  void reduce(DeviceJob& job, ChunkJob& chunk);
  void decode(DeviceJob& job, ChunkJob& chunk);
  void decode_batch(const DeviceJob& job, const ChunkJob& chunk, size_t index);
  void check_messages(const DeviceJob& job, const Envelope& expected, Table<Message> messages,
                      Table<ReceivedTile> tiles, const DeviceBuffer& received) const;
  void conclude(const DeviceJob& job, const DeviceChunk& planned, uint64_t number,
                const DeviceStage& stage, const at::Tensor& statuses,
                const c10::Stream& stream) const;
  Envelope envelope(const DeviceJob& job, const ChunkJob& chunk, Phase phase) const;
  TileBatch make_batch(const DeviceJob& job, const DeviceStage& stage, const DeviceBatch& batch,
                       Stage codec_stage, const at::Tensor& statuses,
                       const c10::Stream& stream) const;
  void reserve_statuses(uint32_t num_tiles);

  DeviceContext& context_;
  const EngineOptions& options_;
  std::vector<DeviceSlot> slots_;
  at::Tensor encode_statuses_, finish_statuses_;  // of the tiles of a chunk, E's and F's
  at::Tensor sums_, verdicts_;                    // uint64_t and uint32_t per message
};

}  // namespace gradferry
