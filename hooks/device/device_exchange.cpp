#include "device/device_exchange.h"

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "protocol/messages.h"

namespace gradferry {
namespace {

uint32_t* words(const at::Tensor& tensor) {
  return static_cast<uint32_t*>(tensor.mutable_data_ptr());
}

}  // namespace

DeviceExchange::DeviceExchange(DeviceContext& context, uint64_t other_bytes)
    : context_(context),
      options_(context.options),
      nodes_(context.layout.nodes()),
      scatters_(scatters(options_.collective)),
      gathers_(gathers(options_.collective)),
      local_index_(nodes_.local_index(options_.rank)) {
  const c10::StreamGuard guard(context_.finish_stream);
  const bool exchanges = context_.transport != nullptr;
  // The number on the largest node, so that all ranks plan the same slots.
  const uint64_t num_siblings = nodes_.is_flat() ? 0 : nodes_.most_siblings();
  const uint64_t most_messages = options_.world_size + num_siblings;
  const uint64_t progress_bytes = sizeof(ChunkProgress) + (most_messages + 1) * sizeof(uint64_t);
  const uint64_t verdicts_bytes = most_messages * sizeof(uint32_t);
  const uint64_t sibling_verdicts_bytes = num_siblings * sizeof(uint32_t);
  const Workspace workspace = plan_workspace(
      context_.layout, options_.planning(CodecChoice::kOwn, /*residuals=*/false),
      {.cap_bytes = options_.workspace_cap_bytes,
       .other_bytes = other_bytes + 2 * progress_bytes + verdicts_bytes + sibling_verdicts_bytes,
       .most_slots = !exchanges         ? 1
                     : nodes_.is_flat() ? kDeviceSlots
                                        : kDeviceSlotsOfNodes,
       .gathers_in_place = false,
       .keeps_gathered = options_.keep_gathered});
  expect_offsets_fit(workspace.message_bytes, options_.world_size);
  encode_progress_ = context_.make_tensor(progress_bytes);
  finish_progress_ = context_.make_tensor(progress_bytes);
  verdicts_ = context_.make_tensor(verdicts_bytes);
  if (num_siblings != 0) sibling_verdicts_ = context_.make_tensor(sibling_verdicts_bytes);
  sum_begin_ = static_cast<uint32_t>(workspace.send_bytes);
  EngineStats& stats = context_.life.stats;
  stats.workspace_allocations += workspace.slots;
  for (size_t i = 0; i < workspace.slots; ++i) slots_.push_back(make_slot(workspace));
  if (!exchanges) {
    stats.workspace_bytes += workspace.send_bytes;
    return;
  }
  stats.workspace = workspace;
  stats.workspace_bytes += workspace.bytes();
}

// In torch's memory. What a backend registers (supportsTensorAlloc) belongs to its process group,
// which the engine does not keep alive.
DeviceExchange::DeviceSlot DeviceExchange::make_slot(const Workspace& workspace) const {
  DeviceSlot slot{.dense_send = {},
                  .dense_receive = {},
                  .scatter_send = context_.make_buffer(workspace.send_bytes + workspace.sum_bytes),
                  .scatter_receive = {},
                  .gather_send = {},
                  .gathered = {},
                  .free = c10::Event(context_.device.type())};
  if (!context_.transport) return slot;
  if (!nodes_.is_flat()) {
    slot.dense_send = context_.make_buffer(workspace.dense_send_bytes);
    slot.dense_receive = context_.make_buffer(workspace.dense_receive_bytes);
  }
  slot.scatter_receive = context_.make_buffer(workspace.receive_bytes);
  if (!gathers_) return slot;
  slot.gather_send = context_.make_buffer(workspace.own_message_bytes);
  slot.gathered = context_.make_buffer(workspace.gathered_bytes);
  return slot;
}

// Each stage one chunk behind the one before it, as far as slots allow: backends' streams take
// collectives in the order they were posted, so with three slots chunk c + 1 is scattered before
// chunk c is gathered, and reduced before chunk c is decoded. Otherwise the link would be idle
// while a chunk is reduced.
DeviceExchange::Behind DeviceExchange::stages() const {
  const auto behind = [&](size_t stage) { return std::min(stage, slots_.size() - 1); };
  if (nodes_.is_flat()) return {0, behind(1), behind(1), behind(gathers_ ? 2 : 1)};
  return {behind(1), behind(2), behind(3), behind(4)};
}

void DeviceExchange::enqueue(DeviceJob& job) {
  reserve_flags(job.plan->most_tiles());
  const std::vector<DeviceChunk>& chunks = job.plan->chunks();
  std::array<DeviceChunkJob, kDeviceSlotsOfNodes> jobs;
  const auto at_chunk = [&](size_t i) -> DeviceChunkJob& { return jobs[i % jobs.size()]; };
  const Behind behind = stages();
  KeptMessages* kept = nullptr;
  if (options_.keep_gathered) {
    kept = &kept_for(*job.plan);
    kept->step = job.step;
    kept->first_chunk = context_.life.stats.chunks;  // only this thread writes it
  }
  uint64_t kept_begin = 0;
  for (size_t i = 0; i < chunks.size() + behind.decode; ++i) {
    const auto is_due = [&](size_t by) { return i >= by && i - by < chunks.size(); };
    if (is_due(0)) {
      begin(job, at_chunk(i), chunks[i]);
      if (kept != nullptr) {
        const uint64_t size = total_bytes(chunks[i].plan->rails.front().gathered);
        at_chunk(i).gathered = kept->gathered.part(kept_begin, size);
        kept_begin += size;
      }
    }
    if (is_due(behind.encode)) send(job, at_chunk(i - behind.encode));
    if (scatters_ && is_due(behind.reduce)) {
      DeviceChunkJob& chunk = at_chunk(i - behind.reduce);
      gathers_ ? reduce(job, chunk) : accumulate(job, chunk);
    }
    if (is_due(behind.forward)) forward(job, at_chunk(i - behind.forward));
    if (gathers_ && is_due(behind.decode)) decode(job, at_chunk(i - behind.decode));
  }
}

Envelope DeviceExchange::envelope(const DeviceJob& job, const DeviceChunkJob& chunk,
                                  Phase phase) const {
  return options_.agreement().envelope(job.step, chunk.number, phase,
                                       chunk.chunk->plan->tiles_hash);
}

ChunkBatch DeviceExchange::chunk_of(const DeviceJob& job, const Envelope& envelope,
                                    const DeviceStage& stage, const at::Tensor& progress,
                                    const c10::Stream& stream) const {
  return {.tiles = job.plan->data(stage.tiles),
          .num_tiles = stage.tiles.size,
          .codecs = job.plan->codecs(),
          .rows = stage.rows,
          .dtype = job.plan->plan().dtype,
          // A tile of zeros keeps its residual, except if that carries a momentum, which must
          // continue to decay.
          .hold_zero_tiles = !options_.has_momentum(job.step),
          .seed = options_.seed,
          .envelope = envelope,
          .progress = static_cast<ChunkProgress*>(progress.mutable_data_ptr()),
          .stream = stream.native_handle()};
}

ReceivedMessages DeviceExchange::received_in(const DeviceJob& job, const Table<Message>& messages,
                                             const DeviceBuffer& buffer,
                                             const at::Tensor& verdicts) const {
  if (messages.size == 0) return {};
  return {.messages = job.plan->data(messages),
          .num_messages = messages.size,
          .buffer = bytes(buffer),
          .verdicts = words(verdicts)};
}

std::byte* DeviceExchange::sum_of(const DeviceSlot& slot) const {
  return bytes(slot.scatter_send) + sum_begin_;
}

// E uses the slot after its last use on F.
void DeviceExchange::begin(DeviceJob& job, DeviceChunkJob& chunk, const DeviceChunk& planned) {
  {
    const std::lock_guard lock(context_.life.mutex);
    chunk.number = context_.life.stats.chunks++;
  }
  chunk.chunk = &planned;
  chunk.slot = &slots_[chunk.number % slots_.size()];
  chunk.gathered = chunk.slot->gathered;
  chunk.slot->free.block(context_.encode_stream);
  if (!nodes_.is_flat()) send_to_siblings(job, chunk);
}

// On E. Siblings get the gradients of the tiles that they sum.
void DeviceExchange::send_to_siblings(DeviceJob& job, DeviceChunkJob& chunk) {
  const TimedRange timed("gradferry::encode", job.event.encode_ns);
  const DeviceSiblings& siblings = chunk.chunk->siblings;
  const DeviceSlot& slot = *chunk.slot;
  node_kernels().pack({.pieces = job.plan->data(siblings.sent),
                       .num_pieces = siblings.sent.size,
                       .dtype = job.plan->plan().dtype,
                       .gradient = job.gradient.const_data_ptr(),
                       .envelope = envelope(job, chunk, Phase::kLocalScatter),
                       .messages = job.plan->data(siblings.scatter.sent),
                       .num_messages = siblings.scatter.sent.size,
                       .out = bytes(slot.dense_send),
                       .stream = context_.encode_stream.native_handle()});
  chunk.local_scatter = context_.transport->all_to_all(
      Among::kSiblings, slot.dense_receive, siblings.scatter.receive_bytes, slot.dense_send,
      siblings.scatter.send_bytes, context_.encode_stream);
}

// On E. A message that cannot be trusted makes the sum NaN, which every codec carries to all ranks.
// reduce looks again and reports it, since findings belong to one stream.
void DeviceExchange::sum(DeviceJob& job, DeviceChunkJob& chunk) {
  context_.wait(job, chunk.local_scatter, Phase::kLocalScatter, chunk.number,
                context_.encode_stream);
  const TimedRange timed("gradferry::encode", job.event.encode_ns);
  const DeviceSiblings& siblings = chunk.chunk->siblings;
  node_kernels().sum({.pieces = job.plan->data(siblings.own),
                      .num_pieces = siblings.own.size,
                      .dtype = job.plan->plan().dtype,
                      .gradient = job.gradient.const_data_ptr(),
                      .envelope = envelope(job, chunk, Phase::kLocalScatter),
                      .messages = job.plan->data(siblings.scatter.received),
                      .num_messages = siblings.scatter.received.size,
                      .received = bytes(chunk.slot->dense_receive),
                      // The mean of nodes' sums times this is the mean of ranks.
                      .scale = static_cast<double>(nodes_.num_nodes()) / nodes_.world_size(),
                      .sum = sum_of(*chunk.slot),
                      .stream = context_.encode_stream.native_handle()});
}

// On E. In an all-gather the message to all ranks.
void DeviceExchange::send(DeviceJob& job, DeviceChunkJob& chunk) {
  if (!nodes_.is_leader(options_.rank)) return;
  if (!nodes_.is_flat()) sum(job, chunk);
  const TimedRange timed("gradferry::encode", job.event.encode_ns);
  const DeviceSlot& slot = *chunk.slot;
  if (!scatters_) {
    encode(job, chunk, Phase::kGather, slot.gather_send);
    post_gather(chunk, context_.encode_stream);
    return;
  }
  encode(job, chunk, Phase::kScatter, slot.scatter_send);
  const DeviceScatter& scatter = chunk.chunk->scatter;
  chunk.scatter =
      context_.transport->all_to_all(Among::kPeers, slot.scatter_receive, scatter.receive_bytes,
                                     slot.scatter_send, scatter.send_bytes, context_.encode_stream);
}

// The messages of a chunk of which no tile is this rank's to encode are headers alone, if there are
// any.
void DeviceExchange::encode(const DeviceJob& job, const DeviceChunkJob& chunk, Phase phase,
                            const DeviceBuffer& out) const {
  const DeviceChunk& planned = *chunk.chunk;
  const Message* messages = job.plan->data(planned.scatter.sent);
  if (planned.scatter.sent.size == 0) return;
  if (planned.encode.tiles.size == 0) {
    node_kernels().pack({.pieces = nullptr,
                         .num_pieces = 0,
                         .dtype = job.plan->plan().dtype,
                         .gradient = nullptr,
                         .envelope = envelope(job, chunk, phase),
                         .messages = messages,
                         .num_messages = planned.scatter.sent.size,
                         .out = bytes(out),
                         .stream = context_.encode_stream.native_handle()});
    return;
  }
  chunk_kernels().encode(
      {.chunk = chunk_of(job, envelope(job, chunk, phase), planned.encode, encode_progress_,
                         context_.encode_stream),
       .gradient = nodes_.is_flat() ? job.gradient.const_data_ptr() : sum_of(*chunk.slot),
       .gain = nullptr,
       .residual = context_.residuals->worker(),
       .messages = messages,
       .num_messages = planned.scatter.sent.size,
       .out = bytes(out)});
}

// On F. Messages that cannot be trusted get a verdict, and reduce still processes them: to skip
// them, the host would have to wait for the verdicts. A rank without peers checks its siblings'.
void DeviceExchange::reduce(DeviceJob& job, DeviceChunkJob& chunk) {
  const DeviceChunk& planned = *chunk.chunk;
  const DeviceSlot& slot = *chunk.slot;
  const bool has_peers = nodes_.is_leader(options_.rank);
  if (has_peers) {
    context_.wait(job, chunk.scatter, Phase::kScatter, chunk.number, context_.finish_stream);
  } else {
    context_.wait(job, chunk.local_scatter, Phase::kLocalScatter, chunk.number,
                  context_.finish_stream);
  }
  const TimedRange timed("gradferry::reduce", job.event.reduce_ns);
  PlannedMessage own{}, forwarded{};
  if (has_peers) own = planned.plan->rails[local_index_].gathered[nodes_.node_of(options_.rank)];
  if (!nodes_.is_flat()) forwarded = planned.plan->forwarded[local_index_];
  chunk_kernels().reduce(
      {.chunk = chunk_of(job, envelope(job, chunk, Phase::kScatter), planned.reduce,
                         finish_progress_, context_.finish_stream),
       .received = received_in(job, planned.scatter.received, slot.scatter_receive, verdicts_),
       .gain = nullptr,
       .residual = context_.residuals->owner(),
       .payload_bytes = own.payload_bytes,
       // A message of a header alone, which is not sent, has its place here, too.
       .out = has_peers ? bytes(slot.gather_send) : nullptr,
       .findings = context_.findings_on_device(),
       .from_siblings =
           received_in(job, planned.siblings.from_others, slot.dense_receive, sibling_verdicts_),
       .forward_payload_bytes = forwarded.payload_bytes,
       .forward = nodes_.is_flat() ? nullptr : bytes(slot.gathered) + forwarded.start});
  // From here on E may reuse its buffers of the slot, unless decode reads what was sent.
  if (!freed_by_decode(planned)) chunk.slot->free.record(context_.finish_stream);
  if (has_peers) post_gather(chunk, context_.finish_stream);
}

// On F, last in a reduce-scatter: the means replace this rank's part of the bucket, or NaN, as in
// decode. What other ranks own is not touched, and no rank hears of this chunk before the commit.
void DeviceExchange::accumulate(DeviceJob& job, DeviceChunkJob& chunk) {
  const DeviceChunk& planned = *chunk.chunk;
  const DeviceSlot& slot = *chunk.slot;
  context_.wait(job, chunk.scatter, Phase::kScatter, chunk.number, context_.finish_stream);
  const TimedRange timed("gradferry::reduce", job.event.reduce_ns);
  chunk_kernels().accumulate(
      {.chunk = chunk_of(job, envelope(job, chunk, Phase::kScatter), planned.reduce,
                         finish_progress_, context_.finish_stream),
       .received = received_in(job, planned.scatter.received, slot.scatter_receive, verdicts_),
       .gradient = job.gradient.mutable_data_ptr(),
       .flags = words(flags_),
       .findings = context_.findings_on_device(),
       .nonfinite_is_fault = options_.raise_nonfinite});
  chunk.slot->free.record(context_.finish_stream);
}

// Into the message to siblings, behind its header, or to where decode reads at once.
void DeviceExchange::post_gather(DeviceChunkJob& chunk, const c10::Stream& stream) {
  const auto& messages = chunk.chunk->plan->rails[local_index_].gathered;
  chunk.gather = context_.transport->all_gather(
      Among::kPeers, chunk.gathered.part(messages.front().start, total_bytes(messages)),
      sizes_of(messages), chunk.slot->gather_send, stream);
}

// On F, which has nothing to do here but to wait: the next chunk's all-to-all, for which it waits
// next, is behind this all-gather on the peers' stream.
void DeviceExchange::forward(DeviceJob& job, DeviceChunkJob& chunk) {
  if (nodes_.is_flat()) return;
  if (nodes_.is_leader(options_.rank)) {
    context_.wait(job, chunk.gather, Phase::kGather, chunk.number, context_.finish_stream);
  }
  const DeviceSlot& slot = *chunk.slot;
  const std::vector<PlannedMessage>& messages = chunk.chunk->plan->forwarded;
  const PlannedMessage& own = messages[local_index_];
  chunk.forward = context_.transport->all_gather(
      Among::kSiblings, slot.gathered,
      sizes_of(std::span(messages).first(nodes_.siblings(options_.rank).size())),
      slot.gathered.part(own.start, own.message_bytes), context_.finish_stream);
}

// On F, last: the mean replaces the gradient in the bucket. Tiles of rejected messages become NaN,
// so that no rank trains on them before the commit reports the error.
void DeviceExchange::decode(DeviceJob& job, DeviceChunkJob& chunk) {
  const DeviceChunk& planned = *chunk.chunk;
  const DeviceSlot& slot = *chunk.slot;
  if (nodes_.is_flat()) {
    context_.wait(job, chunk.gather, Phase::kGather, chunk.number, context_.finish_stream);
  } else {
    context_.wait(job, chunk.forward, Phase::kForward, chunk.number, context_.finish_stream);
  }
  decode_gathered(job, chunk, slot);
  if (freed_by_decode(planned)) chunk.slot->free.record(context_.finish_stream);
}

// On F.
void DeviceExchange::decode_gathered(DeviceJob& job, const DeviceChunkJob& chunk,
                                     const DeviceSlot& slot) const {
  const TimedRange timed("gradferry::decode", job.event.decode_ns);
  const DeviceChunk& planned = *chunk.chunk;
  decode_on(job,
            chunk_of(job, envelope(job, chunk, Phase::kScatter), planned.decode, finish_progress_,
                     context_.finish_stream),
            received_in(job, planned.gathered, chunk.gathered, verdicts_), slot.scatter_send);
}

// The messages are checked again, with the numbers that they have, so that rejected ones become NaN
// again.
void DeviceExchange::decode_kept(DeviceJob& job) {
  reserve_flags(job.plan->most_tiles());
  const KeptMessages& kept = kept_.at(job.plan);
  job.step = kept.step;
  uint64_t begin = 0;
  uint64_t number = kept.first_chunk;
  for (const DeviceChunk& planned : job.plan->chunks()) {
    const uint64_t size = total_bytes(planned.plan->rails.front().gathered);
    const DeviceChunkJob chunk{.chunk = &planned,
                               .slot = nullptr,
                               .number = number++,
                               .gathered = kept.gathered.part(begin, size),
                               .local_scatter = {},
                               .scatter = {},
                               .gather = {},
                               .forward = {}};
    decode_gathered(job, chunk, slots_.front());
    begin += size;
  }
}

DeviceExchange::KeptMessages& DeviceExchange::kept_for(const DevicePlan& plan) {
  const auto found = kept_.find(&plan);
  if (found != kept_.end()) return found->second;
  uint64_t num_bytes = 0;
  for (const DeviceChunk& planned : plan.chunks()) {
    num_bytes += total_bytes(planned.plan->rails.front().gathered);
  }
  const c10::StreamGuard guard(context_.encode_stream);  // the gather is posted behind E
  KeptMessages made{.gathered = context_.make_buffer(num_bytes), .step = 0, .first_chunk = 0};
  KeptMessages& kept = kept_.emplace(&plan, std::move(made)).first->second;
  const std::lock_guard lock(context_.life.mutex);
  context_.life.stats.workspace_bytes += num_bytes;
  ++context_.life.stats.workspace_allocations;
  return kept;
}

void DeviceExchange::decode_on(const DeviceJob& job, const ChunkBatch& chunk,
                               const ReceivedMessages& received, const DeviceBuffer& sent) const {
  chunk_kernels().decode({.chunk = chunk,
                          .received = received,
                          .sent = bytes(sent),
                          .gradient = job.gradient.mutable_data_ptr(),
                          .residual = context_.residuals->worker(),
                          .flags = words(flags_),
                          .findings = context_.findings_on_device()});
}

// Uses one buffer for all tiles, with the codec `exact`, on E.
void DeviceExchange::deliver_alone(DeviceJob& job) {
  reserve_flags(job.plan->most_tiles());
  const DeviceBuffer& buffer = slots_.front().scatter_send;
  const c10::Stream& stream = context_.encode_stream;
  const Envelope nobody = options_.agreement().envelope(job.step, 0, Phase::kScatter);
  for (const DeviceChunk& planned : job.plan->chunks()) {
    chunk_kernels().encode(
        {.chunk = chunk_of(job, nobody, planned.encode, encode_progress_, stream),
         .gradient = job.gradient.const_data_ptr(),
         .gain = nullptr,
         .residual = context_.residuals->worker(),
         .messages = nullptr,
         .num_messages = 0,
         .out = bytes(buffer)});
    decode_on(
        job, chunk_of(job, nobody, planned.decode, encode_progress_, stream),
        {.messages = nullptr, .num_messages = 0, .buffer = bytes(buffer), .verdicts = nullptr},
        buffer);
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
