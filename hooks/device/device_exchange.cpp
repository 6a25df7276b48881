#include "device/device_exchange.h"

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <array>
#include <utility>

#include "device/device_bytes.h"
#include "messages.h"

namespace gradferry {

DeviceExchange::DeviceExchange(DeviceContext& context, uint64_t other_bytes)
    : context_(context), options_(context.options) {
  const c10::StreamGuard guard(context_.finish_stream);
  const bool exchanges = context_.transport != nullptr;
  const uint64_t progress_bytes =
      sizeof(ChunkProgress) + (uint64_t{options_.world_size} + 1) * sizeof(uint64_t);
  const uint64_t verdicts_bytes = uint64_t{options_.world_size} * sizeof(uint32_t);
  const Workspace workspace =
      plan_workspace(context_.layout, options_.chunk_bytes,
                     {.cap_bytes = options_.workspace_cap_bytes,
                      .other_bytes = other_bytes + 2 * progress_bytes + verdicts_bytes,
                      .most_slots = exchanges ? kDeviceSlots : 1,
                      .gathers_in_place = false});
  expect_offsets_fit(workspace.message_bytes, options_.world_size);
  encode_progress_ = context_.make_tensor(progress_bytes);
  finish_progress_ = context_.make_tensor(progress_bytes);
  verdicts_ = context_.make_tensor(verdicts_bytes);
  EngineStats& stats = context_.life.stats;
  stats.workspace_allocations += workspace.slots;
  for (size_t i = 0; i < workspace.slots; ++i) {
    DeviceSlot& slot = slots_.emplace_back(DeviceSlot{context_.make_buffer(workspace.send_bytes),
                                                      {},
                                                      {},
                                                      {},
                                                      c10::Event(context_.device.type())});
    if (!exchanges) {
      stats.workspace_bytes += workspace.send_bytes;
      return;
    }
    slot.scatter_receive = context_.make_buffer(workspace.receive_bytes);
    slot.gather_send = context_.make_buffer(workspace.own_message_bytes);
    slot.gather_receive = workspace.shared_receive ? slot.scatter_receive
                                                   : context_.make_buffer(workspace.receive_bytes);
  }
  stats.workspace = workspace;
  stats.workspace_bytes += workspace.bytes();
}

// With three slots, one chunk ahead: the backend's stream takes collectives in the order they were
// posted, so chunk c + 1 is scattered before chunk c is gathered, and reduced before chunk c is
// decoded. Otherwise the link would be idle while a chunk is reduced.
void DeviceExchange::average(DeviceJob& job) {
  reserve_flags(job.plan->most_tiles());
  const std::vector<DeviceChunk>& chunks = job.plan->chunks();
  std::array<ChunkJob, kDeviceSlots> jobs;
  const auto at_chunk = [&](size_t i) -> ChunkJob& { return jobs[i % kDeviceSlots]; };
  const size_t decode_behind = slots_.size() - 1,
               reduce_behind = std::min<size_t>(decode_behind, 1);
  for (size_t i = 0; i < chunks.size() + decode_behind; ++i) {
    if (i < chunks.size()) {
      at_chunk(i).chunk = &chunks[i];
      send(job, at_chunk(i));
    }
    if (i >= reduce_behind && i - reduce_behind < chunks.size()) {
      reduce(job, at_chunk(i - reduce_behind));
    }
    if (i >= decode_behind) decode(job, at_chunk(i - decode_behind));
  }
}

ChunkBatch DeviceExchange::chunk_of(const DeviceJob& job, uint64_t number, const DeviceStage& stage,
                                    const at::Tensor& progress, const c10::Stream& stream) const {
  return {.tiles = job.plan->data(stage.tiles),
          .num_tiles = stage.tiles.size,
          .codecs = job.plan->codecs(),
          .rows = stage.rows,
          .dtype = job.plan->plan().dtype,
          // A tile of zeros keeps its residual, except if that carries a momentum, which must
          // continue to decay.
          .hold_zero_tiles = !options_.has_momentum(job.step),
          .seed = options_.seed,
          .envelope = options_.agreement().envelope(job.step, number, Phase::kScatter),
          .progress = static_cast<ChunkProgress*>(progress.mutable_data_ptr()),
          .stream = stream.native_handle()};
}

ReceivedMessages DeviceExchange::received_in(const DeviceJob& job, const Table<Message>& messages,
                                             const DeviceBuffer& buffer) const {
  return {.messages = job.plan->data(messages),
          .num_messages = messages.size,
          .buffer = bytes(buffer),
          .verdicts = words(verdicts_)};
}

// On E, after the last use of the slot on F.
void DeviceExchange::send(DeviceJob& job, ChunkJob& chunk) {
  const TimedRange timed("gradferry::encode", job.event.encode_ns);
  const DeviceChunk& planned = *chunk.chunk;
  {
    const std::lock_guard lock(context_.life.mutex);
    chunk.number = context_.life.stats.chunks++;
  }
  chunk.slot = &slots_[chunk.number % slots_.size()];
  DeviceSlot& slot = *chunk.slot;
  slot.free.block(context_.encode_stream);
  chunk_kernels().encode({.chunk = chunk_of(job, chunk.number, planned.encode, encode_progress_,
                                            context_.encode_stream),
                          .gradient = job.gradient.const_data_ptr(),
                          .gain = context_.residuals->gain(),
                          .residual = context_.residuals->worker(),
                          .messages = job.plan->data(planned.scatter_sent),
                          .num_messages = planned.scatter_sent.size,
                          .out = bytes(slot.scatter_send)});
  chunk.scatter =
      context_.transport->all_to_all(slot.scatter_receive, planned.receive_bytes, slot.scatter_send,
                                     planned.send_bytes, context_.encode_stream);
}

// On F. Messages that cannot be trusted get a verdict, and reduce still processes them: to skip
// them, the host would have to wait for the verdicts.
void DeviceExchange::reduce(DeviceJob& job, ChunkJob& chunk) {
  const DeviceChunk& planned = *chunk.chunk;
  DeviceSlot& slot = *chunk.slot;
  context_.wait(job, chunk.scatter, Phase::kScatter, chunk.number);
  const TimedRange timed("gradferry::reduce", job.event.reduce_ns);
  chunk_kernels().reduce(
      {.chunk =
           chunk_of(job, chunk.number, planned.reduce, finish_progress_, context_.finish_stream),
       .received = received_in(job, planned.scatter_received, slot.scatter_receive),
       .gain = context_.residuals->gain(),
       .residual = context_.residuals->owner(),
       .payload_bytes = planned.gather_payload_bytes,
       .out = bytes(slot.gather_send),
       .findings = context_.findings_on_device()});
  // From here on E may reuse its buffers of the slot, unless decode reads what was sent, or what is
  // received next lies where decode reads.
  if (!freed_by_decode(planned)) slot.free.record(context_.finish_stream);
  chunk.gather =
      context_.transport->all_gather(slot.gather_receive, slot.gather_send,
                                     planned.plan->columns[0].gather_message_bytes, context_.finish_stream);
}

// On F, last: the mean replaces the gradient in the bucket. Tiles of refused messages become NaN,
// so that no rank trains on them before the commit reports the error.
void DeviceExchange::decode(DeviceJob& job, ChunkJob& chunk) {
  const DeviceChunk& planned = *chunk.chunk;
  DeviceSlot& slot = *chunk.slot;
  context_.wait(job, chunk.gather, Phase::kGather, chunk.number);
  const TimedRange timed("gradferry::decode", job.event.decode_ns);
  decode_on(job,
            chunk_of(job, chunk.number, planned.decode, finish_progress_, context_.finish_stream),
            received_in(job, planned.gather_received, slot.gather_receive), slot.scatter_send);
  if (freed_by_decode(planned)) slot.free.record(context_.finish_stream);
}

void DeviceExchange::decode_on(const DeviceJob& job, const ChunkBatch& chunk,
                               const ReceivedMessages& received, const DeviceBuffer& sent) const {
  chunk_kernels().decode({.chunk = chunk,
                          .received = received,
                          .sent = bytes(sent),
                          .gradient = job.gradient.mutable_data_ptr(),
                          .residual = context_.residuals->worker(),
                          .flags = words(flags_),
                          .findings = context_.findings_on_device(),
                          .step_nonfinite = context_.step_nonfinite(job.step)});
}

// Uses one buffer for all tiles, with the codec `exact`, on E.
void DeviceExchange::add_momentum(DeviceJob& job) {
  reserve_flags(job.plan->most_tiles());
  const DeviceBuffer& buffer = slots_.front().scatter_send;
  const c10::Stream& stream = context_.encode_stream;
  for (const DeviceChunk& planned : job.plan->chunks()) {
    chunk_kernels().encode({.chunk = chunk_of(job, 0, planned.encode, encode_progress_, stream),
                            .gradient = job.gradient.const_data_ptr(),
                            .gain = context_.residuals->gain(),
                            .residual = context_.residuals->worker(),
                            .messages = nullptr,
                            .num_messages = 0,
                            .out = bytes(buffer)});
    decode_on(job, chunk_of(job, 0, planned.decode, encode_progress_, stream),
              received_in(job, {}, buffer), buffer);
  }
}

// Only one stream uses it, so a larger one can replace a smaller one in stream order.
void DeviceExchange::reserve_flags(uint32_t num_tiles) {
  const auto num_bytes = static_cast<int64_t>(uint64_t{num_tiles} * sizeof(uint32_t));
  if (flags_.defined() && flags_.numel() >= num_bytes) return;
  const c10::StreamGuard guard(context_.transport ? context_.finish_stream
                                                  : context_.encode_stream);
  flags_ = at::empty({num_bytes}, at::TensorOptions().dtype(at::kByte).device(context_.device));
  const std::lock_guard lock(context_.life.mutex);
  ++context_.life.stats.workspace_allocations;
}

}  // namespace gradferry
