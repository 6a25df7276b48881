// The device engine's second half: what is enqueued for a bucket, chunk by chunk.
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "device_engine.h"

namespace gradferry {
namespace {

std::byte* bytes(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}
std::byte* bytes(const DeviceBuffer& buffer) { return bytes(buffer.device); }
uint32_t* words(const at::Tensor& tensor) {
  return static_cast<uint32_t*>(tensor.mutable_data_ptr());
}
TileStatus* statuses(const at::Tensor& tensor) {
  return static_cast<TileStatus*>(tensor.mutable_data_ptr());
}

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

void DeviceEngine::begin_step(BucketJob& job) {
  read_last_commit();
  if (uncommitted_step_) post_commit(job, *uncommitted_step_);
  if (job.step < options_.warmup_steps) return;  // without residuals
  const at::Tensor& scale = options_.loss_scale;
  message_kernels().rescale(
      {.loss_scale = scale.defined() ? scale.const_data_ptr<float>() : nullptr,
       .residual_scale = residual_scale_.mutable_data_ptr<float>(),
       .gain = gain_.mutable_data_ptr<float>(),
       .stream = encode_stream_.native_handle()});
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
          .hold_zero_tiles = true,
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
    layout_.codecs()[batch.codec_index].codec->encode(
        make_batch(job, planned.encode, batch, Stage::kWorker, encode_statuses_, encode_stream_),
        job.gradient.const_data_ptr(), 1.0F, gain_.const_data_ptr<float>(),
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
    throw lost_contact(options_.rank, phase, job.step, number, error.what());
  }
}

void DeviceEngine::reduce(BucketJob& job, ChunkJob& chunk) {
  const DeviceChunk& planned = *chunk.chunk;
  DeviceSlot& slot = *chunk.slot;
  wait(job, chunk.scatter, Phase::kScatter, chunk.number);
  const TimedRange timed("gradferry::reduce", job.event.reduce_ns);
  message_kernels().check({.envelope = envelope(job, chunk, Phase::kScatter),
                           .messages = job.plan->data(planned.scatter_received),
                           .num_messages = planned.scatter_received.size,
                           .tiles = job.plan->data(planned.scatter_tiles),
                           .num_tiles = planned.scatter_tiles.size,
                           .buffer = bytes(slot.scatter_receive),
                           .sums = words(sums_),
                           .verdicts = words(verdicts_),
                           .findings = findings(),
                           .stream = finish_stream_.native_handle()});
  for (const DeviceBatch& batch : planned.reduce.batches) {
    layout_.codecs()[batch.codec_index].codec->reduce(
        make_batch(job, planned.reduce, batch, Stage::kOwner, finish_statuses_, finish_stream_),
        job.plan->data(planned.payloads[chunk.slot_index]), options_.world_size,
        gain_.const_data_ptr<float>(), batch.owner_residual ? residuals_->owner() : nullptr,
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
  // What follows is F's alone.
  slot.free.record(finish_stream_);
  chunk.gather = transport_->all_gather(slot.gather_receive, slot.gather_send,
                                        planned.plan->gather_message_bytes, finish_stream_);
}

void DeviceEngine::decode(BucketJob& job, ChunkJob& chunk) {
  const DeviceChunk& planned = *chunk.chunk;
  DeviceSlot& slot = *chunk.slot;
  wait(job, chunk.gather, Phase::kGather, chunk.number);
  const TimedRange timed("gradferry::decode", job.event.decode_ns);
  message_kernels().check({.envelope = envelope(job, chunk, Phase::kGather),
                           .messages = job.plan->data(planned.gather_received),
                           .num_messages = planned.gather_received.size,
                           .tiles = job.plan->data(planned.gather_tiles),
                           .num_tiles = planned.gather_tiles.size,
                           .buffer = bytes(slot.gather_receive),
                           .sums = words(sums_),
                           .verdicts = words(verdicts_),
                           .findings = findings(),
                           .stream = finish_stream_.native_handle()});
  for (const DeviceBatch& batch : planned.decode.batches) {
    layout_.codecs()[batch.codec_index].codec->decode(
        make_batch(job, planned.decode, batch, Stage::kOwner, finish_statuses_, finish_stream_),
        bytes(slot.gather_receive), job.gradient.mutable_data_ptr(), 0.0F, nullptr);
  }
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
                              .stream = finish_stream_.native_handle()});
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

// --- commits
// ---------------------------------------------------------------------------------------

// Of `step`, before the first bucket of the next one.
void DeviceEngine::post_commit(BucketJob& job, uint64_t step) {
  const auto records = static_cast<int64_t>(sizeof(CommitRecord)) * options_.world_size;
  message_kernels().commit(
      {.step = step,
       .bucket = job.number,
       .rank = options_.rank,
       .findings = findings(),
       .record = reinterpret_cast<CommitRecord*>(bytes(commit_send_)),
       .nonfinite_tile = reinterpret_cast<uint64_t*>(bytes(commit_receive_) + records),
       .stream = finish_stream_.native_handle()});
  Transfer transfer =
      transport_->all_gather(commit_receive_, commit_send_, sizeof(CommitRecord), finish_stream_);
  wait(job, transfer, Phase::kCommit, job.number);
  const c10::StreamGuard guard(finish_stream_);
  commit_result_.copy_(commit_receive_.device, /*non_blocking=*/true);
  commit_done_.record(finish_stream_);
  commit_ = PostedCommit{step, job.number};
}

// The commit was enqueued a whole step ago. Where it is not done yet the host is that far ahead of
// the device, and waits: an error must come up at the same bucket on every rank.
void DeviceEngine::read_last_commit() {
  if (!commit_) return;
  const auto [step, bucket] = *commit_;
  if (!commit_done_.query()) {
    commit_done_.synchronize();
    const std::lock_guard lock(mutex_);
    ++stats_.host_waits;
  }
  uint32_t reporter = 0;
  const Fault fault = read_commit({options_.rank, options_.world_size, 0, 0}, commit_result_, step,
                                  bucket, &reporter);
  if (fault) throw Error(ErrorKind::kProtocol, describe(fault, reporter, step));
  uint64_t nonfinite_tile = 0;
  std::memcpy(&nonfinite_tile, bytes(commit_result_) + sizeof(CommitRecord) * options_.world_size,
              sizeof(nonfinite_tile));
  GRADFERRY_EXPECTS(!options_.raise_nonfinite || nonfinite_tile == 0, kState,
                    "the averaged gradient of '" + parameter_of(nonfinite_tile - 1) +
                        "' was not finite at step " + std::to_string(step) +
                        "; lower the learning rate or the loss scale, or attach with "
                        "nonfinite='propagate' to see it in .grad");
}

std::string DeviceEngine::parameter_of(uint64_t tile) const {
  const auto& parameters = layout_.parameters();
  const auto after = std::upper_bound(
      parameters.begin(), parameters.end(), tile,
      [](uint64_t id, const Parameter& parameter) { return id < parameter.first_tile; });
  return std::prev(after)->name;
}

// --- set-up
// ----------------------------------------------------------------------------------------

// Runs every kernel that a bucket may need once, on one element: the first launch of a kernel may
// load it, and loading may wait for the device.
void DeviceEngine::load_kernels() const {
  std::set<std::pair<uint32_t, ScalarType>> used;  // codecs and the dtypes they take
  for (const Parameter& parameter : layout_.parameters()) {
    used.emplace(0, parameter.dtype);
    used.emplace(parameter.codec_index, parameter.dtype);
  }
  uint64_t most_bytes = sizeof(MessageHeader);  // of anything below
  for (const auto& [index, dtype] : used) {
    const auto& [codec, options] = layout_.codecs()[index];
    for (const Stage stage : {Stage::kWorker, Stage::kOwner}) {
      most_bytes = std::max<uint64_t>(most_bytes, codec->payload_bytes(1, dtype, stage, options));
    }
  }
  const c10::StreamGuard guard(finish_stream_);
  const at::Tensor memory = make_tensor(16 * most_bytes);
  const auto part = [&](uint64_t i) { return bytes(memory) + i * most_bytes; };
  Tile tile{};
  tile.num_elements = 1;
  at::Tensor staging = at::zeros({2 * static_cast<int64_t>(most_bytes)},
                                 at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  const std::byte* payload = part(2);
  std::memcpy(bytes(staging), &tile, sizeof(tile));
  std::memcpy(bytes(staging) + most_bytes, static_cast<const void*>(&payload), sizeof(payload));
  memory.narrow(0, 0, staging.numel()).copy_(staging, /*non_blocking=*/true);
  const auto* tiles = reinterpret_cast<const Tile*>(part(0));
  const auto* payloads = reinterpret_cast<const std::byte* const*>(part(1));
  auto* status = reinterpret_cast<TileStatus*>(part(4));
  auto* residual = reinterpret_cast<float*>(part(5));
  const Stream stream = finish_stream_.native_handle();

  const auto load = [&](const ResolvedCodec& codec, ScalarType dtype) {
    const TileBatch batch{.tiles = tiles,
                          .num_tiles = 1,
                          .dtype = dtype,
                          .stage = Stage::kWorker,
                          .hold_zero_tiles = true,
                          .seed = 0,
                          .step = 0,
                          .options = &codec.options,
                          .status = status,
                          .stream = stream};
    const float* gain = gain_.const_data_ptr<float>();
    for (float* kept : {static_cast<float*>(nullptr), residual}) {
      codec.codec->encode(batch, part(3), 1.0F, gain, kept, part(2));
      codec.codec->reduce(batch, payloads, 1, gain, kept, part(6));
    }
    codec.codec->decode(batch, part(2), part(3), 0.0F, nullptr);
  };
  for (const auto& [index, dtype] : used) load(layout_.codecs()[index], dtype);
  const auto* messages = reinterpret_cast<const Message*>(part(7));
  const auto* zeros = reinterpret_cast<const uint32_t*>(part(7));
  auto* found = reinterpret_cast<Findings*>(part(8));
  auto* scratch = reinterpret_cast<uint32_t*>(part(9));
  const Envelope envelope{0, 0, 0, 0, 0, Phase::kScatter};
  message_kernels().rescale({nullptr, residual, residual, stream});
  message_kernels().seal({envelope, messages, 1, zeros, status, found, part(10), stream});
  message_kernels().check({envelope, messages, 1, reinterpret_cast<const ReceivedTile*>(part(7)), 1,
                           part(10), scratch, scratch + 1, found, stream});
  message_kernels().conclude(
      {0, 0, tiles, zeros, status, 1, zeros, ScalarType::kFloat32, part(3), found, stream});
  message_kernels().commit({0, 0, 0, found, reinterpret_cast<CommitRecord*>(part(11)),
                            reinterpret_cast<uint64_t*>(part(12)), stream});
  finish_stream_.synchronize();
}

}  // namespace gradferry
