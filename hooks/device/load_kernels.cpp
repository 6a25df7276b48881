#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "device/device_context.h"

namespace gradferry {
namespace {

// Codecs, by index, with the dtypes for which they are used.
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

// Device memory in parts, each large enough for any argument below.
class Scratch {
 public:
  Scratch(const DeviceContext& context, const UsedCodecs& used) {
    for (const auto& [index, dtype] : used) {
      const auto& [codec, options] = context.layout.codecs()[index];
      for (const Stage stage : {Stage::kWorker, Stage::kOwner}) {
        part_bytes_ = std::max<uint64_t>(
            part_bytes_, 2 * kHeaderBytes + codec->payload_bytes(1, dtype, stage, options));
      }
    }
    memory_ = context.make_tensor(kParts * part_bytes_);
  }

  std::byte* part(uint64_t i) const { return bytes(memory_) + i * part_bytes_; }
  template <typename T>
  T* as(uint64_t i) const {
    return reinterpret_cast<T*>(part(i));
  }
  // Writes `value` to part i, on the current stream.
  template <typename T>
  void set(uint64_t i, const T& value) const {
    const at::Tensor staging =
        at::zeros({static_cast<int64_t>(sizeof(T))}, at::TensorOptions().dtype(at::kByte));
    std::memcpy(bytes(staging), static_cast<const void*>(&value), sizeof(T));
    memory_.narrow(0, static_cast<int64_t>(i * part_bytes_), sizeof(T)).copy_(staging);
  }

 private:
  static constexpr uint64_t kParts = 16;
  uint64_t part_bytes_ = sizeof(ChunkTile) + sizeof(ChunkCodec);
  at::Tensor memory_;
};

// Runs the kernels that the collective uses for chunks whose tiles have the codec of this row.
void load_chunk_kernels(const DeviceContext& context, const Scratch& scratch, uint32_t row,
                        ScalarType dtype) {
  const ChunkBatch chunk{.tiles = scratch.as<ChunkTile>(0),
                         .num_tiles = 1,
                         .codecs = scratch.as<ChunkCodec>(1),
                         .rows = 1U << row,
                         .dtype = dtype,
                         .hold_zero_tiles = true,
                         .seed = 0,
                         .envelope = {0, 0, 0, 0, 0, Phase::kScatter},
                         .progress = scratch.as<ChunkProgress>(4),
                         .stream = context.finish_stream.native_handle()};
  auto* findings = scratch.as<Findings>(8);
  const auto* messages = scratch.as<const Message>(7);
  const ReceivedMessages received{messages, 1, scratch.part(2), scratch.as<uint32_t>(9)};
  auto* residual = scratch.as<float>(5);
  const ChunkKernels& kernels = chunk_kernels();
  kernels.encode({chunk, scratch.part(3), nullptr, residual, messages, 1, scratch.part(2)});
  auto* flags = scratch.as<uint32_t>(10);
  if (!gathers(context.options.collective)) {
    kernels.accumulate({chunk, received, scratch.part(3), flags, findings, false});
    return;
  }
  kernels.reduce(
      {chunk, received, nullptr, residual, 0, scratch.part(6), findings, {}, 0, nullptr});
  kernels.decode({chunk, received, scratch.part(6), scratch.part(3), residual, flags, findings});
}

void load_node_kernels(const DeviceContext& context, const Scratch& scratch) {
  const Stream stream = context.finish_stream.native_handle();
  const Envelope envelope{0, 0, 0, 0, 0, Phase::kLocalScatter};
  const auto* pieces = scratch.as<const ChunkPiece>(13);
  const auto* messages = scratch.as<const Message>(7);
  const NodeKernels& kernels = node_kernels();
  for (const Parameter& parameter : context.layout.parameters()) {
    kernels.pack({pieces, 1, parameter.dtype, scratch.part(3), envelope, messages, 1,
                  scratch.part(2), stream});
    kernels.sum({pieces, 1, parameter.dtype, scratch.part(3), envelope, messages, 1,
                 scratch.part(2), 1.0, scratch.part(6), stream});
  }
}

void load_message_kernels(const DeviceContext& context, const Scratch& scratch) {
  const Stream stream = context.finish_stream.native_handle();
  auto* residual = scratch.as<float>(5);
  auto* found = scratch.as<Findings>(8);
  const MessageKernels& kernels = message_kernels();
  kernels.rescale({nullptr, residual, residual, stream});
  kernels.scale({residual, residual, 1, stream});
  kernels.commit(
      {0, 0, 0, residual, found, scratch.as<CommitRecord>(11), scratch.as<uint64_t>(12), stream});
}

}  // namespace

void load_kernels(const DeviceContext& context) {
  const c10::StreamGuard guard(context.finish_stream);
  const UsedCodecs used = used_codecs(context.layout);
  const Scratch scratch(context, used);
  ChunkTile tile{};
  tile.tile.num_elements = 1;
  tile.tile.payload_offset = tile.tile.output_offset = kHeaderBytes;
  scratch.set(0, tile);
  for (const auto& [index, dtype] : used) {
    const ResolvedCodec& resolved = context.layout.codecs()[index];
    const uint32_t row = row_of(*resolved.codec);
    scratch.set(1, ChunkCodec{row, 1.0F, 0.0F, resolved.options});
    load_chunk_kernels(context, scratch, row, dtype);
  }
  if (context.transport && !context.layout.nodes().is_flat()) load_node_kernels(context, scratch);
  load_message_kernels(context, scratch);
  context.finish_stream.synchronize();
}

}  // namespace gradferry
