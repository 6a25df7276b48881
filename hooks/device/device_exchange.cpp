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
  const uint64_t sums_bytes = uint64_t{options_.world_size} * sizeof(uint64_t);
  const uint64_t verdicts_bytes = uint64_t{options_.world_size} * sizeof(uint32_t);
  const Workspace workspace =
      plan_workspace(context_.layout, options_.chunk_bytes,
                     {.cap_bytes = options_.workspace_cap_bytes,
                      .other_bytes = other_bytes + sums_bytes + verdicts_bytes,
                      .most_slots = exchanges ? kDeviceSlots : 1,
                      .gathers_in_place = false});
  expect_offsets_fit(workspace.message_bytes, options_.world_size);
  sums_ = context_.make_tensor(sums_bytes);
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

std::vector<std::byte*> DeviceExchange::scatter_received() const {
  std::vector<std::byte*> received;
  if (!context_.transport) return received;
  for (const DeviceSlot& slot : slots_) received.push_back(bytes(slot.scatter_receive));
  return received;
}

// With three slots, one chunk ahead: the backend's stream takes collectives in the order they were
// posted, so chunk c + 1 is scattered before chunk c is gathered, and reduced before chunk c is
// decoded. Otherwise the link would be idle while a chunk is reduced.
void DeviceExchange::average(DeviceJob& job) {
  reserve_statuses(job.plan->most_tiles());
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

Envelope DeviceExchange::envelope(const DeviceJob& job, const ChunkJob& chunk, Phase phase) const {
  return options_.agreement().envelope(job.step, chunk.number, phase);
}

TileBatch DeviceExchange::make_batch(const DeviceJob& job, const DeviceStage& stage,
                                     const DeviceBatch& batch, Stage codec_stage,
                                     const at::Tensor& all_statuses,
                                     const c10::Stream& stream) const {
  return {.tiles = job.plan->data(stage.tiles) + batch.first,
          .num_tiles = batch.num_tiles,
          .dtype = job.plan->plan().dtype,
          .stage = codec_stage,
          // A tile of zeros keeps its residual, except if that carries a momentum, which must
          // continue to decay.
          .hold_zero_tiles = !options_.has_momentum(job.step),
          .seed = options_.seed,
          .step = job.step,
          .options = &context_.layout.codecs()[batch.codec_index].options,
          .status = statuses(all_statuses) + batch.first,
          .stream = stream.native_handle()};
}

// On E, after the last use of the slot on F.
void DeviceExchange::send(DeviceJob& job, ChunkJob& chunk) {
  const TimedRange timed("gradferry::encode", job.event.encode_ns);
  const DeviceChunk& planned = *chunk.chunk;
  {
    const std::lock_guard lock(context_.life.mutex);
    chunk.number = context_.life.stats.chunks++;
  }
  chunk.slot_index = static_cast<uint32_t>(chunk.number % slots_.size());
  chunk.slot = &slots_[chunk.slot_index];
  DeviceSlot& slot = *chunk.slot;
  slot.free.block(context_.encode_stream);
  for (const DeviceBatch& batch : planned.encode.batches) {
    const ResolvedCodec& resolved = context_.layout.codecs()[batch.codec_index];
    resolved.codec->encode(make_batch(job, planned.encode, batch, Stage::kWorker, encode_statuses_,
                                      context_.encode_stream),
                           job.gradient.const_data_ptr(), options_.alpha(resolved, job.step),
                           context_.residuals->gain(),
                           batch.worker_residual ? context_.residuals->worker() : nullptr,
                           bytes(slot.scatter_send));
  }
  message_kernels().seal({.envelope = envelope(job, chunk, Phase::kScatter),
                          .messages = job.plan->data(planned.scatter_sent),
                          .num_messages = planned.scatter_sent.size,
                          .order = job.plan->data(planned.scatter_order),
                          .status = statuses(encode_statuses_),
                          .findings = nullptr,
                          .buffer = bytes(slot.scatter_send),
                          .stream = context_.encode_stream.native_handle()});
  chunk.scatter =
      context_.transport->all_to_all(slot.scatter_receive, planned.receive_bytes, slot.scatter_send,
                                     planned.send_bytes, context_.encode_stream);
}

// Checks received messages: sums_ and verdicts_ get one entry per message.
void DeviceExchange::check_messages(const DeviceJob& job, const Envelope& expected,
                                    Table<Message> messages, Table<ReceivedTile> tiles,
                                    const DeviceBuffer& received) const {
  message_kernels().check({.envelope = expected,
                           .messages = job.plan->data(messages),
                           .num_messages = messages.size,
                           .tiles = job.plan->data(tiles),
                           .num_tiles = tiles.size,
                           .buffer = bytes(received),
                           .sums = reinterpret_cast<uint64_t*>(bytes(sums_)),
                           .verdicts = words(verdicts_),
                           .findings = context_.findings_on_device(),
                           .stream = context_.finish_stream.native_handle()});
}

// On F. Messages that cannot be trusted get a verdict, and reduce still processes them: to skip
// them, the host would have to wait for the verdicts.
void DeviceExchange::reduce(DeviceJob& job, ChunkJob& chunk) {
  const DeviceChunk& planned = *chunk.chunk;
  DeviceSlot& slot = *chunk.slot;
  context_.wait(job, chunk.scatter, Phase::kScatter, chunk.number);
  const TimedRange timed("gradferry::reduce", job.event.reduce_ns);
  check_messages(job, envelope(job, chunk, Phase::kScatter), planned.scatter_received,
                 planned.scatter_tiles, slot.scatter_receive);
  for (const DeviceBatch& batch : planned.reduce.batches) {
    context_.layout.codecs()[batch.codec_index].codec->reduce(
        make_batch(job, planned.reduce, batch, Stage::kOwner, finish_statuses_,
                   context_.finish_stream),
        job.plan->data(planned.payloads[chunk.slot_index]), options_.world_size,
        context_.residuals->gain(), batch.owner_residual ? context_.residuals->owner() : nullptr,
        bytes(slot.gather_send) + kHeaderBytes);
  }
  message_kernels().seal({.envelope = envelope(job, chunk, Phase::kGather),
                          .messages = job.plan->data(planned.gather_sent),
                          .num_messages = planned.gather_sent.size,
                          .order = job.plan->data(planned.gather_order),
                          .status = statuses(finish_statuses_),
                          .findings = context_.findings_on_device(),
                          .buffer = bytes(slot.gather_send),
                          .stream = context_.finish_stream.native_handle()});
  // From here on E may reuse its buffers of the slot, unless decode reads what was sent, or what is
  // received next lies where decode reads.
  if (!freed_by_decode(planned)) slot.free.record(context_.finish_stream);
  chunk.gather =
      context_.transport->all_gather(slot.gather_receive, slot.gather_send,
                                     planned.plan->gather_message_bytes, context_.finish_stream);
}

// On F, last: the mean replaces the gradient in the bucket. Tiles of refused messages become NaN,
// so that no rank trains on them before the commit reports the error.
void DeviceExchange::decode(DeviceJob& job, ChunkJob& chunk) {
  const DeviceChunk& planned = *chunk.chunk;
  DeviceSlot& slot = *chunk.slot;
  context_.wait(job, chunk.gather, Phase::kGather, chunk.number);
  const TimedRange timed("gradferry::decode", job.event.decode_ns);
  check_messages(job, envelope(job, chunk, Phase::kGather), planned.gather_received,
                 planned.gather_tiles, slot.gather_receive);
  for (size_t b = 0; b < planned.decode.batches.size(); ++b) decode_batch(job, chunk, b);
  if (freed_by_decode(planned)) slot.free.record(context_.finish_stream);
  conclude(job, planned, chunk.number, planned.decode, finish_statuses_, context_.finish_stream);
}

void DeviceExchange::conclude(const DeviceJob& job, const DeviceChunk& planned, uint64_t number,
                              const DeviceStage& stage, const at::Tensor& all_statuses,
                              const c10::Stream& stream) const {
  message_kernels().conclude({.step = job.step,
                              .chunk = number,
                              .tiles = job.plan->data(stage.tiles),
                              .sources = job.plan->data(planned.decode_sources),
                              .status = statuses(all_statuses),
                              .num_tiles = stage.tiles.size,
                              .verdicts = words(verdicts_),
                              .dtype = job.plan->plan().dtype,
                              .gradient = job.gradient.mutable_data_ptr(),
                              .findings = context_.findings_on_device(),
                              .step_nonfinite = context_.step_nonfinite(job.step),
                              .stream = stream.native_handle()});
}

// With a worker residual it inspects the payload before it decodes: where another rank's gradient
// was not finite, what this rank sent has no effect. It must be put back into the residual while
// the bucket still holds this rank's own gradient.
void DeviceExchange::decode_batch(const DeviceJob& job, const ChunkJob& chunk, size_t index) {
  const DeviceChunk& planned = *chunk.chunk;
  const DeviceBatch& batch = planned.decode.batches[index];
  const ResolvedCodec& resolved = context_.layout.codecs()[batch.codec_index];
  const Codec& codec = *resolved.codec;
  const TileBatch arrived = make_batch(job, planned.decode, batch, Stage::kOwner, finish_statuses_,
                                       context_.finish_stream);
  const std::byte* in = bytes(chunk.slot->gather_receive);
  void* gradient = job.gradient.mutable_data_ptr();
  if (!batch.worker_residual) return codec.decode(arrived, in, gradient, 0.0F, nullptr);
  codec.decode(arrived, in, nullptr, 0.0F, nullptr);
  codec.undo(make_batch(job, planned.encode, planned.encode.batches[index], Stage::kWorker,
                        finish_statuses_, context_.finish_stream),
             bytes(chunk.slot->scatter_send), in, gradient, options_.alpha(resolved, job.step),
             context_.residuals->worker());
  codec.decode(arrived, in, gradient, options_.beta(resolved, job.step),
               context_.residuals->worker());
}

// Uses one buffer for all tiles, with the codec `exact`, on E.
void DeviceExchange::add_momentum(DeviceJob& job) {
  reserve_statuses(job.plan->most_tiles());
  const DeviceBuffer& buffer = slots_.front().scatter_send;
  void* gradient = job.gradient.mutable_data_ptr();
  for (const DeviceChunk& planned : job.plan->chunks()) {
    for (const DeviceBatch& batch : planned.encode.batches) {
      const ResolvedCodec& resolved = context_.layout.codecs()[batch.codec_index];
      const Codec& codec = *resolved.codec;
      const TileBatch tiles = make_batch(job, planned.encode, batch, Stage::kWorker,
                                         encode_statuses_, context_.encode_stream);
      codec.encode(tiles, gradient, options_.alpha(resolved, job.step), context_.residuals->gain(),
                   context_.residuals->worker(), bytes(buffer));
      codec.decode(tiles, bytes(buffer), gradient, options_.beta(resolved, job.step),
                   context_.residuals->worker());
    }
    conclude(job, planned, 0, planned.encode, encode_statuses_, context_.encode_stream);
  }
}

// Only one stream uses each tensor, so a larger one can replace a smaller one in stream order.
void DeviceExchange::reserve_statuses(uint32_t num_tiles) {
  const auto num_bytes = static_cast<int64_t>(uint64_t{num_tiles} * sizeof(TileStatus));
  if (encode_statuses_.defined() && encode_statuses_.numel() >= num_bytes) return;
  const auto options = at::TensorOptions().dtype(at::kByte).device(context_.device);
  {
    const c10::StreamGuard guard(context_.encode_stream);
    encode_statuses_ = at::empty({num_bytes}, options);
  }
  const c10::StreamGuard guard(context_.finish_stream);
  finish_statuses_ = at::empty({num_bytes}, options);
  const std::lock_guard lock(context_.life.mutex);
  ++context_.life.stats.workspace_allocations;
}

}  // namespace gradferry
