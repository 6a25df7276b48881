// The device engine's second part: what is enqueued for a bucket, chunk by chunk.
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <array>
#include <utility>

#include "device_bytes.h"
#include "device_engine.h"

namespace gradferry {
namespace {

struct BucketBracket {
  explicit BucketBracket(DeviceTransport& of) : transport(of) { transport.begin_bucket(); }
  ~BucketBracket() { transport.end_bucket(); }
  BucketBracket(const BucketBracket&) = delete;
  BucketBracket& operator=(const BucketBracket&) = delete;
  DeviceTransport& transport;
};

}  // namespace

// One chunk ahead: the backend's stream takes collectives in the order they were posted, so chunk
// c + 1 is scattered before chunk c is gathered, and reduced before chunk c is decoded. Otherwise
// the link would be idle while a chunk is reduced.
void DeviceEngine::exchange(BucketJob& job) {
  const c10::DeviceGuard guard(device_);
  const BucketBracket bracket(*transport_);
  job.ready.block(encode_stream_);
  give_back(std::move(job.ready));
  if (job.begins_step) begin_step(job);
  uncommitted_step_ = job.step;
  reserve_statuses(job.plan->most_tiles());

  const std::vector<DeviceChunk>& chunks = job.plan->chunks();
  std::array<ChunkJob, kDeviceSlots> jobs;
  const auto at_chunk = [&](size_t i) -> ChunkJob& { return jobs[i % kDeviceSlots]; };
  for (size_t i = 0; i < chunks.size() + 2; ++i) {
    if (i < chunks.size()) {
      at_chunk(i).chunk = &chunks[i];
      send(job, at_chunk(i));
    }
    if (i >= 1 && i - 1 < chunks.size()) reduce(job, at_chunk(i - 1));
    if (i >= 2) decode(job, at_chunk(i - 2));
  }
  {
    const std::lock_guard lock(mutex_);
    --stats_.in_flight;
  }
  job.event.encoded_ns = job.event.complete_ns = EventLog::now();
  log_.add(job.event);
  const c10::StreamGuard finish(finish_stream_);
  job.gradient.reset();
  job.future->markCompleted(std::move(job.value));
}

Envelope DeviceEngine::envelope(const BucketJob& job, const ChunkJob& chunk, Phase phase) const {
  return {.config_hash = options_.config_hash,
          .layout_hash = options_.layout_hash,
          .step = job.step,
          .chunk = chunk.number,
          .rank = options_.rank,
          .phase = phase};
}

Findings* DeviceEngine::findings() const {
  return static_cast<Findings*>(findings_.mutable_data_ptr());
}

TileBatch DeviceEngine::make_batch(const BucketJob& job, const DeviceStage& stage,
                                   const DeviceBatch& batch, Stage codec_stage,
                                   const at::Tensor& all_statuses,
                                   const c10::Stream& stream) const {
  return {.tiles = job.plan->data(stage.tiles) + batch.first,
          .num_tiles = batch.num_tiles,
          .dtype = job.plan->plan().dtype,
          .stage = codec_stage,
          .hold_zero_tiles = !options_.has_momentum(job.step),
          .seed = options_.seed,
          .step = job.step,
          .options = &layout_.codecs()[batch.codec_index].options,
          .status = statuses(all_statuses) + batch.first,
          .stream = stream.native_handle()};
}

void DeviceEngine::send(BucketJob& job, ChunkJob& chunk) {
  const TimedRange timed("gradferry::encode", job.event.encode_ns);
  const DeviceChunk& planned = *chunk.chunk;
  {
    const std::lock_guard lock(mutex_);
    chunk.number = stats_.chunks++;
  }
  chunk.slot_index = static_cast<uint32_t>(chunk.number % slots_.size());
  chunk.slot = &slots_[chunk.slot_index];
  DeviceSlot& slot = *chunk.slot;
  slot.free.block(encode_stream_);
  for (const DeviceBatch& batch : planned.encode.batches) {
    const ResolvedCodec& resolved = layout_.codecs()[batch.codec_index];
    resolved.codec->encode(
        make_batch(job, planned.encode, batch, Stage::kWorker, encode_statuses_, encode_stream_),
        job.gradient.const_data_ptr(), options_.alpha(resolved, job.step), residuals_->gain(),
        batch.worker_residual ? residuals_->worker() : nullptr, bytes(slot.scatter_send));
  }
  message_kernels().seal({.envelope = envelope(job, chunk, Phase::kScatter),
                          .messages = job.plan->data(planned.scatter_sent),
                          .num_messages = planned.scatter_sent.size,
                          .order = job.plan->data(planned.scatter_order),
                          .status = statuses(encode_statuses_),
                          .findings = nullptr,
                          .buffer = bytes(slot.scatter_send),
                          .stream = encode_stream_.native_handle()});
  chunk.scatter = transport_->all_to_all(slot.scatter_receive, planned.receive_bytes,
                                         slot.scatter_send, planned.send_bytes, encode_stream_);
}

void DeviceEngine::wait(BucketJob& job, Transfer& transfer, Phase phase, uint64_t number) {
  const TimedRange timed("gradferry::network", job.event.network_ns);
  try {
    transport_->wait(transfer, finish_stream_);
  } catch (const std::exception& error) {
    throw lost_contact(*options_.peers, options_.rank, phase, job.step, number, error.what());
  }
}

// What came: sums_ and verdicts_ get an entry per message.
void DeviceEngine::check_messages(const BucketJob& job, const Envelope& expected,
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
                           .findings = findings(),
                           .stream = finish_stream_.native_handle()});
}

void DeviceEngine::reduce(BucketJob& job, ChunkJob& chunk) {
  const DeviceChunk& planned = *chunk.chunk;
  DeviceSlot& slot = *chunk.slot;
  wait(job, chunk.scatter, Phase::kScatter, chunk.number);
  const TimedRange timed("gradferry::reduce", job.event.reduce_ns);
  check_messages(job, envelope(job, chunk, Phase::kScatter), planned.scatter_received,
                 planned.scatter_tiles, slot.scatter_receive);
  for (const DeviceBatch& batch : planned.reduce.batches) {
    layout_.codecs()[batch.codec_index].codec->reduce(
        make_batch(job, planned.reduce, batch, Stage::kOwner, finish_statuses_, finish_stream_),
        job.plan->data(planned.payloads[chunk.slot_index]), options_.world_size, residuals_->gain(),
        batch.owner_residual ? residuals_->owner() : nullptr,
        bytes(slot.gather_send) + sizeof(MessageHeader));
  }
  message_kernels().seal({.envelope = envelope(job, chunk, Phase::kGather),
                          .messages = job.plan->data(planned.gather_sent),
                          .num_messages = planned.gather_sent.size,
                          .order = job.plan->data(planned.gather_order),
                          .status = statuses(finish_statuses_),
                          .findings = findings(),
                          .buffer = bytes(slot.gather_send),
                          .stream = finish_stream_.native_handle()});
  // What follows is F's alone, unless decode looks at what was sent.
  if (!planned.worker_residual) slot.free.record(finish_stream_);
  chunk.gather = transport_->all_gather(slot.gather_receive, slot.gather_send,
                                        planned.plan->gather_message_bytes, finish_stream_);
}

void DeviceEngine::decode(BucketJob& job, ChunkJob& chunk) {
  const DeviceChunk& planned = *chunk.chunk;
  DeviceSlot& slot = *chunk.slot;
  wait(job, chunk.gather, Phase::kGather, chunk.number);
  const TimedRange timed("gradferry::decode", job.event.decode_ns);
  check_messages(job, envelope(job, chunk, Phase::kGather), planned.gather_received,
                 planned.gather_tiles, slot.gather_receive);
  for (size_t b = 0; b < planned.decode.batches.size(); ++b) decode_batch(job, chunk, b);
  if (planned.worker_residual) slot.free.record(finish_stream_);
  message_kernels().conclude({.step = job.step,
                              .chunk = chunk.number,
                              .tiles = job.plan->data(planned.decode.tiles),
                              .sources = job.plan->data(planned.decode_sources),
                              .status = statuses(finish_statuses_),
                              .num_tiles = planned.decode.tiles.size,
                              .verdicts = words(verdicts_),
                              .dtype = job.plan->plan().dtype,
                              .gradient = job.gradient.mutable_data_ptr(),
                              .findings = findings(),
                              .in_vain = in_vain(job),
                              .stream = finish_stream_.native_handle()});
}

uint32_t* DeviceEngine::in_vain(const BucketJob& job) const {
  return options_.in_warmup(job.step) ? nullptr : residuals_->in_vain();
}

// With a worker residual it looks before it decodes: where another rank's gradient was not finite,
// what this rank sent was in vain, and its own gradient is still there to tell what that was.
void DeviceEngine::decode_batch(const BucketJob& job, const ChunkJob& chunk, size_t index) {
  const DeviceChunk& planned = *chunk.chunk;
  const DeviceBatch& batch = planned.decode.batches[index];
  const ResolvedCodec& resolved = layout_.codecs()[batch.codec_index];
  const Codec& codec = *resolved.codec;
  const TileBatch arrived =
      make_batch(job, planned.decode, batch, Stage::kOwner, finish_statuses_, finish_stream_);
  const std::byte* in = bytes(chunk.slot->gather_receive);
  void* gradient = job.gradient.mutable_data_ptr();
  if (!batch.worker_residual) return codec.decode(arrived, in, gradient, 0.0F, nullptr);
  codec.decode(arrived, in, nullptr, 0.0F, nullptr);
  codec.undo(make_batch(job, planned.encode, planned.encode.batches[index], Stage::kWorker,
                        finish_statuses_, finish_stream_),
             bytes(chunk.slot->scatter_send), in, gradient, options_.alpha(resolved, job.step),
             residuals_->worker());
  codec.decode(arrived, in, gradient, options_.beta(resolved), residuals_->worker());
}

// A world of one: nothing travels, but there is the momentum. On E alone, from one buffer, with the
// codec exact.
void DeviceEngine::add_momentum_alone(BucketJob& job) {
  const c10::DeviceGuard guard(device_);
  job.ready.block(encode_stream_);
  if (job.begins_optimizer_step) residuals_->begin_step(encode_stream_);
  if (job.begins_step) {
    residuals_->begin_pass(options_.loss_scale, job.begins_optimizer_step, encode_stream_);
  }
  reserve_statuses(job.plan->most_tiles());
  const DeviceBuffer& buffer = slots_.front().scatter_send;
  void* gradient = job.gradient.mutable_data_ptr();
  for (const DeviceChunk& planned : job.plan->chunks()) {
    for (const DeviceBatch& batch : planned.encode.batches) {
      const ResolvedCodec& resolved = layout_.codecs()[batch.codec_index];
      const Codec& codec = *resolved.codec;
      const TileBatch tiles =
          make_batch(job, planned.encode, batch, Stage::kWorker, encode_statuses_, encode_stream_);
      codec.encode(tiles, gradient, options_.alpha(resolved, job.step), residuals_->gain(),
                   residuals_->worker(), bytes(buffer));
      codec.decode(tiles, bytes(buffer), gradient, options_.beta(resolved), residuals_->worker());
    }
    message_kernels().conclude({.step = job.step,
                                .chunk = 0,
                                .tiles = job.plan->data(planned.encode.tiles),
                                .sources = job.plan->data(planned.decode_sources),
                                .status = statuses(encode_statuses_),
                                .num_tiles = planned.encode.tiles.size,
                                .verdicts = words(verdicts_),
                                .dtype = job.plan->plan().dtype,
                                .gradient = gradient,
                                .findings = findings(),
                                .in_vain = in_vain(job),
                                .stream = encode_stream_.native_handle()});
  }
}

// Each belongs to one stream alone: a larger one takes the place of a smaller one in its order.
void DeviceEngine::reserve_statuses(uint32_t num_tiles) {
  const auto num_bytes = static_cast<int64_t>(uint64_t{num_tiles} * sizeof(TileStatus));
  if (encode_statuses_.defined() && encode_statuses_.numel() >= num_bytes) return;
  const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
  {
    const c10::StreamGuard guard(encode_stream_);
    encode_statuses_ = at::empty({num_bytes}, options);
  }
  const c10::StreamGuard guard(finish_stream_);
  finish_statuses_ = at::empty({num_bytes}, options);
  const std::lock_guard lock(mutex_);
  ++stats_.workspace_allocations;
}

}  // namespace gradferry
