#include "device/load_kernels.h"

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "device/device_bytes.h"
#include "messages.h"

namespace gradferry {
namespace {

// Codecs, by index, and the dtypes they take.
using UsedCodecs = std::set<std::pair<uint32_t, ScalarType>>;

UsedCodecs used_codecs(const Layout& layout) {
  UsedCodecs used;
  for (const Parameter& parameter : layout.parameters()) {
    for (const CodecChoice choice :
         {CodecChoice::kOwn, CodecChoice::kWarmup, CodecChoice::kExact}) {
      used.emplace(Layout::codec_index(parameter, choice), parameter.dtype);
    }
  }
  return used;
}

// Device memory in parts, each large enough for anything that follows.
class Scratch {
 public:
  Scratch(const DeviceContext& context, const UsedCodecs& used) {
    for (const auto& [index, dtype] : used) {
      const auto& [codec, options] = context.layout.codecs()[index];
      for (const Stage stage : {Stage::kWorker, Stage::kOwner}) {
        part_bytes_ =
            std::max<uint64_t>(part_bytes_, codec->payload_bytes(1, dtype, stage, options));
      }
    }
    memory_ = context.make_tensor(kParts * part_bytes_);
  }

  std::byte* part(uint64_t i) const { return bytes(memory_) + i * part_bytes_; }
  template <typename T>
  T* as(uint64_t i) const {
    return reinterpret_cast<T*>(part(i));
  }
  // Part i becomes `value`, in the order of the current stream.
  template <typename T>
  void set(uint64_t i, const T& value) const {
    const at::Tensor staging =
        at::zeros({static_cast<int64_t>(sizeof(T))}, at::TensorOptions().dtype(at::kByte));
    std::memcpy(bytes(staging), static_cast<const void*>(&value), sizeof(T));
    memory_.narrow(0, static_cast<int64_t>(i * part_bytes_), sizeof(T)).copy_(staging);
  }

 private:
  static constexpr uint64_t kParts = 16;
  uint64_t part_bytes_ = sizeof(MessageHeader);
  at::Tensor memory_;
};

void load_codec(const DeviceContext& context, const Scratch& scratch, const ResolvedCodec& codec,
                ScalarType dtype) {
  const TileBatch batch{.tiles = scratch.as<Tile>(0),
                        .num_tiles = 1,
                        .dtype = dtype,
                        .stage = Stage::kWorker,
                        .hold_zero_tiles = true,
                        .seed = 0,
                        .step = 0,
                        .options = &codec.options,
                        .status = scratch.as<TileStatus>(4),
                        .stream = context.finish_stream.native_handle()};
  const float* gain = context.residuals->gain();
  auto* residual = scratch.as<float>(5);
  std::byte* payload = scratch.part(2);
  std::byte* gradient = scratch.part(3);
  for (float* kept : {static_cast<float*>(nullptr), residual}) {
    codec.codec->encode(batch, gradient, 1.0F, gain, kept, payload);
    codec.codec->reduce(batch, scratch.as<const std::byte* const>(1), 1, gain, kept,
                        scratch.part(6));
  }
  codec.codec->decode(batch, payload, gradient, 0.0F, nullptr);
  codec.codec->undo(batch, payload, payload, gradient, 1.0F, residual);
}

void load_message_kernels(const DeviceContext& context, const Scratch& scratch) {
  const Stream stream = context.finish_stream.native_handle();
  const auto* tiles = scratch.as<const Tile>(0);
  auto* status = scratch.as<TileStatus>(4);
  auto* residual = scratch.as<float>(5);
  const auto* messages = scratch.as<const Message>(7);
  const auto* zeros = scratch.as<const uint32_t>(7);
  auto* found = scratch.as<Findings>(8);
  auto* word = scratch.as<uint32_t>(13);
  const Envelope envelope{0, 0, 0, 0, 0, Phase::kScatter};
  const MessageKernels& kernels = message_kernels();
  kernels.take_back({word, residual, residual, 1, stream});
  kernels.rescale({nullptr, residual, residual, word, stream});
  kernels.seal({envelope, messages, 1, zeros, status, found, scratch.part(10), stream});
  kernels.check({envelope, messages, 1, scratch.as<const ReceivedTile>(7), 1, scratch.part(10),
                 scratch.as<uint64_t>(9), word, found, stream});
  kernels.conclude({0, 0, tiles, zeros, status, 1, zeros, ScalarType::kFloat32, scratch.part(3),
                    found, word, stream});
  kernels.commit({0, 0, 0, found, scratch.as<CommitRecord>(11), scratch.as<uint64_t>(12), stream});
}

}  // namespace

void load_kernels(const DeviceContext& context) {
  const c10::StreamGuard guard(context.finish_stream);
  const UsedCodecs used = used_codecs(context.layout);
  const Scratch scratch(context, used);
  Tile tile{};
  tile.num_elements = 1;
  scratch.set(0, tile);
  scratch.set<const std::byte*>(1, scratch.part(2));
  for (const auto& [index, dtype] : used) {
    load_codec(context, scratch, context.layout.codecs()[index], dtype);
  }
  load_message_kernels(context, scratch);
  context.finish_stream.synchronize();
}

}  // namespace gradferry
