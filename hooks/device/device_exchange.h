// Enqueues the work for the chunks of a bucket on the streams E and F and on the transport.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <vector>

#include "device/device_context.h"
#include "protocol/workspace.h"

namespace gradferry {

// Chunks in flight, if their memory may be so large: one is encoded, one reduced, one decoded.
inline constexpr size_t kDeviceSlots = 3;
// Where nodes have several ranks: one is packed, one summed and encoded, one reduced, one
// forwarded, one decoded.
inline constexpr size_t kDeviceSlotsOfNodes = 5;

class DeviceExchange {
 public:
  // Allocates the workspace on F and adds it to the stats. `context` outlives the exchange.
  // `other_bytes`: what else of the engine's counts as workspace.
  DeviceExchange(DeviceContext& context, uint64_t other_bytes);

  // Enqueues everything from encode to the result in the bucket. E already waits for the gradient.
  void enqueue(DeviceJob& job);
  // With keep_gathered: decodes what the last enqueue() of the job's plan has gathered, on F alone,
  // which already waits for the gradient. There was one.
  void decode_kept(DeviceJob& job);
  // The same as ChunkCodecs::deliver_alone(), on E alone.
  void deliver_alone(DeviceJob& job);

  // Bytes from the start of a slot's `scatter_send` to the node's sum, which lies behind the
  // messages: so decode finds in one buffer what was sent and what was encoded.
  uint32_t sum_begin() const { return sum_begin_; }

 private:
  // Buffers of one chunk in flight.
  struct DeviceSlot {
    DeviceBuffer dense_send, dense_receive;  // between siblings
    DeviceBuffer scatter_send, scatter_receive, gather_send;
    // What decode reads, unless that is kept; this and gather_send: not in a reduce-scatter.
    DeviceBuffer gathered;
    c10::Event free;  // recorded on F when E may use the slot again
  };
  struct DeviceChunkJob {
    const DeviceChunk* chunk;
    DeviceSlot* slot;
    uint64_t number;
    DeviceBuffer gathered;
    Transfer local_scatter, scatter, gather, forward;
  };
  // What a plan's last gather has received, chunk by chunk, and the numbers in its messages. No
  // event frees it: whoever gathers again comes after the parameters decoded from it were used.
  struct KeptMessages {
    DeviceBuffer gathered;
    uint64_t step, first_chunk;
  };
  // How many chunks a stage is behind the first one.
  struct Behind {
    size_t encode, reduce, forward, decode;
  };

  bool freed_by_decode(const DeviceChunk& planned) const {
    return planned.worker_residual || !scatters_;
  }
  DeviceSlot make_slot(const Workspace& workspace) const;
  Behind stages() const;
  void begin(DeviceJob& job, DeviceChunkJob& chunk, const DeviceChunk& planned);
  void send_to_siblings(DeviceJob& job, DeviceChunkJob& chunk);
  void sum(DeviceJob& job, DeviceChunkJob& chunk);
  void send(DeviceJob& job, DeviceChunkJob& chunk);
  void encode(const DeviceJob& job, const DeviceChunkJob& chunk, Phase phase,
              const DeviceBuffer& out) const;
  void reduce(DeviceJob& job, DeviceChunkJob& chunk);
  void accumulate(DeviceJob& job, DeviceChunkJob& chunk);
  void post_gather(DeviceChunkJob& chunk, const c10::Stream& stream);
  void forward(DeviceJob& job, DeviceChunkJob& chunk);
  void decode(DeviceJob& job, DeviceChunkJob& chunk);
  void decode_gathered(DeviceJob& job, const DeviceChunkJob& chunk, const DeviceSlot& slot) const;
  KeptMessages& kept_for(const DevicePlan& plan);
  std::byte* sum_of(const DeviceSlot& slot) const;
  Envelope envelope(const DeviceJob& job, const DeviceChunkJob& chunk, Phase phase) const;
  ChunkBatch chunk_of(const DeviceJob& job, const Envelope& envelope, const DeviceStage& stage,
                      const at::Tensor& progress, const c10::Stream& stream) const;
  ReceivedMessages received_in(const DeviceJob& job, const Table<Message>& messages,
                               const DeviceBuffer& buffer, const at::Tensor& verdicts) const;
  void decode_on(const DeviceJob& job, const ChunkBatch& chunk, const ReceivedMessages& received,
                 const DeviceBuffer& sent) const;
  void reserve_flags(uint32_t num_tiles);

  DeviceContext& context_;
  const EngineOptions& options_;
  const Nodes& nodes_;
  const bool scatters_, gathers_;
  const uint32_t local_index_;  // of this rank
  uint32_t sum_begin_ = 0;
  std::vector<DeviceSlot> slots_;
  std::map<const DevicePlan*, KeptMessages> kept_;
  at::Tensor encode_progress_, finish_progress_;  // E's and F's: ChunkProgress
  at::Tensor verdicts_, sibling_verdicts_;        // uint32_t per message
  at::Tensor flags_;  // uint32_t per tile of a chunk, on the stream that writes the bucket
};

}  // namespace gradferry
