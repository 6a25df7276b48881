// The device engine's set-up: memory and kernels.
#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "device_bytes.h"
#include "device_engine.h"

namespace gradferry {

// Memory that both streams use for as long as it lives.
at::Tensor DeviceEngine::make_tensor(uint64_t num_bytes) const {
  const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
  at::Tensor tensor = at::zeros({static_cast<int64_t>(num_bytes)}, options);
  use_on_both_streams(tensor);
  return tensor;
}

void DeviceEngine::use_on_both_streams(const at::Tensor& tensor) const {
  const c10::impl::VirtualGuardImpl guard(device_.type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), encode_stream_);
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), finish_stream_);
}

DeviceBuffer DeviceEngine::make_buffer(uint64_t num_bytes) const {
  DeviceBuffer buffer{make_tensor(num_bytes), {}};
  if (transport_ && transport_->waits()) {
    buffer.host = at::zeros({static_cast<int64_t>(num_bytes)},
                            at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  }
  return buffer;
}

void DeviceEngine::allocate() {
  const c10::StreamGuard guard(finish_stream_);
  residuals_.emplace(layout_, options_.exact_skip, device_);
  for (const at::Tensor& tensor : residuals_->tensors()) use_on_both_streams(tensor);
  stats_.residual_bytes = residuals_->num_bytes();
  findings_ = make_tensor(sizeof(Findings));
  sums_ = make_tensor(uint64_t{options_.world_size} * sizeof(uint64_t));
  verdicts_ = make_tensor(uint64_t{options_.world_size} * sizeof(uint32_t));
  allocate_slots();
  // E must not see memory before it was zeroed; from here on events see to the order.
  finish_stream_.synchronize();
}

void DeviceEngine::allocate_slots() {
  const uint64_t message_bytes =
      sizeof(MessageHeader) +
      std::min<uint64_t>(options_.chunk_bytes, layout_.largest_shard_bytes());
  expect_offsets_fit(message_bytes, options_.world_size);
  const uint64_t all = message_bytes * options_.world_size;
  if (!transport_) {
    slots_.push_back({make_buffer(all), {}, {}, {}, c10::Event(device_.type())});
    stats_.workspace_bytes += all;
    stats_.workspace_allocations = 1;
    return;
  }
  for (size_t i = 0; i < kDeviceSlots; ++i) {
    slots_.push_back({make_buffer(all), make_buffer(all), make_buffer(message_bytes),
                      make_buffer(all), c10::Event(device_.type())});
    stats_.workspace_bytes += 3 * all + message_bytes;
  }
  const uint64_t records = sizeof(CommitRecord) * options_.world_size;
  commit_send_ = make_buffer(sizeof(CommitRecord));
  commit_receive_ = make_buffer(records + sizeof(uint64_t));
  commit_result_ = at::zeros({static_cast<int64_t>(records + sizeof(uint64_t))},
                             at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  stats_.workspace_bytes += 2 * records + 2 * sizeof(CommitRecord);
  stats_.workspace_allocations = kDeviceSlots + 1;
  if (options_.check_every == 0) return;
  const uint64_t hashes = hash_message_bytes(layout_.parameters().size());
  hashes_send_ = make_buffer(hashes);
  hashes_receive_ = make_buffer(hashes * options_.world_size);
  stats_.workspace_bytes += hashes * (options_.world_size + 1);
  ++stats_.workspace_allocations;
}

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
    const float* gain = residuals_->gain();
    for (float* kept : {static_cast<float*>(nullptr), residual}) {
      codec.codec->encode(batch, part(3), 1.0F, gain, kept, part(2));
      codec.codec->reduce(batch, payloads, 1, gain, kept, part(6));
    }
    codec.codec->decode(batch, part(2), part(3), 0.0F, nullptr);
    codec.codec->undo(batch, part(2), part(2), part(3), 1.0F, residual);
  };
  for (const auto& [index, dtype] : used) load(layout_.codecs()[index], dtype);
  const auto* messages = reinterpret_cast<const Message*>(part(7));
  const auto* zeros = reinterpret_cast<const uint32_t*>(part(7));
  auto* found = reinterpret_cast<Findings*>(part(8));
  auto* sums = reinterpret_cast<uint64_t*>(part(9));
  auto* word = reinterpret_cast<uint32_t*>(part(13));
  const Envelope envelope{0, 0, 0, 0, 0, Phase::kScatter};
  message_kernels().take_back({word, residual, residual, 1, stream});
  message_kernels().rescale({nullptr, residual, residual, word, stream});
  message_kernels().seal({envelope, messages, 1, zeros, status, found, part(10), stream});
  message_kernels().check({envelope, messages, 1, reinterpret_cast<const ReceivedTile*>(part(7)), 1,
                           part(10), sums, word, found, stream});
  message_kernels().conclude(
      {0, 0, tiles, zeros, status, 1, zeros, ScalarType::kFloat32, part(3), found, word, stream});
  message_kernels().commit({0, 0, 0, found, reinterpret_cast<CommitRecord*>(part(11)),
                            reinterpret_cast<uint64_t*>(part(12)), stream});
  finish_stream_.synchronize();
}

}  // namespace gradferry
