// The CUDA kernels, called with host memory: every call copies what it needs to the device and
// back.
#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "gradferry/cuda_codecs.h"
#include "tests/kernels/cuda/gpu_copy.h"
#include "tests/kernels/cuda/kernels_under_test.h"

namespace gradferry::testing {
namespace {

const std::byte* as_bytes(const void* memory) { return static_cast<const std::byte*>(memory); }

const MessageKernels& kernels() { return cuda_library().messages; }

size_t end_of(const Message* messages, uint32_t num_messages) {
  size_t end = 0;
  for (const Message& m : std::span(messages, num_messages)) {
    end = std::max<size_t>(end, m.offset + sizeof(MessageHeader) + m.payload_bytes);
  }
  return end;
}

void rescale(const RescaleCall& call) {
  const GpuCopy loss(call.loss_scale, 1);
  const GpuCopy residual(call.residual_scale, 1);
  const GpuCopy gain(call.gain, 1);
  kernels().rescale({loss.get(), residual.get(), gain.get(), nullptr});
}

void scale(const ScaleCall& call) {
  const GpuCopy factor(call.factor, 1);
  const GpuCopy values(call.values, call.num_elements);
  kernels().scale({factor.get(), values.get(), call.num_elements, nullptr});
}

// Where offsets are far, tables have these more, and arrays begin so much earlier.
uint64_t far_elements() { return offsets_are_far() ? (uint64_t{1} << 33) + 64 : 0; }
uint32_t far_bytes() { return offsets_are_far() ? 0xfff00000u : 0; }

template <typename T>
T* earlier(T* array, uint64_t num_bytes) {
  if (array == nullptr) return nullptr;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): it points to nothing
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(array) - num_bytes);
}
template <typename Byte>
Byte* gradient_of(const GpuCopy<Byte>& gradient, ScalarType dtype) {
  return earlier(gradient.get(), far_elements() * item_bytes(dtype));
}
float* residual_of(const GpuCopy<float>& residual) {
  return earlier(residual.get(), far_elements() * sizeof(float));
}

std::vector<Message> far_messages(const Message* messages, uint32_t num_messages) {
  std::vector<Message> result(messages, messages + num_messages);
  for (Message& message : result) message.offset += far_bytes();
  return result;
}
// `messages_hold`: its payloads count from where messages begin, and not within them.
std::vector<ChunkTile> far_tiles(const ChunkBatch& chunk, bool messages_hold) {
  std::vector<ChunkTile> result(chunk.tiles, chunk.tiles + chunk.num_tiles);
  for (ChunkTile& entry : result) {
    entry.tile.gradient_offset += far_elements();
    entry.tile.residual_offset += far_elements();
    if (!messages_hold) continue;
    entry.tile.payload_offset += far_bytes();
    entry.tile.output_offset += far_bytes();
    if (entry.summed_offset != 0) entry.summed_offset += far_bytes();
  }
  return result;
}

// How far the arrays of a chunk reach.
struct Extents {
  size_t gradient = 0;  // bytes
  size_t residual = 0;  // elements
  size_t payload = 0;   // bytes, in the format of the stage
  size_t output = 0;    // bytes, in the other one's
};

Extents extents_of(const ChunkBatch& chunk, Stage stage) {
  Extents extents;
  const size_t item = item_bytes(chunk.dtype);
  const auto reach = [](size_t& extent, size_t end) { extent = std::max(extent, end); };
  for (const ChunkTile& entry : std::span(chunk.tiles, chunk.num_tiles)) {
    const Tile& tile = entry.tile;
    const ChunkCodec& used = chunk.codecs[entry.codec];
    const auto bytes = [&](Stage of) {
      return codecs()[used.row].payload_bytes(tile.num_elements, chunk.dtype, of, used.options);
    };
    reach(extents.gradient, (tile.gradient_offset + tile.num_elements) * item);
    if (entry.has_residual != 0) {
      reach(extents.residual, tile.residual_offset + tile.num_elements);
    }
    reach(extents.payload, tile.payload_offset + bytes(stage));
    const Stage other = stage == Stage::kWorker ? Stage::kOwner : Stage::kWorker;
    reach(extents.output, tile.output_offset + bytes(other));
  }
  return extents;
}

// The tables of a chunk on the GPU; `num_sums`: of messages received and sent.
struct GpuChunk {
  GpuChunk(const ChunkBatch& of, size_t num_sums, bool messages_hold)
      : shifted(far_tiles(of, messages_hold)),
        tiles(shifted.data(), shifted.size()),
        codecs(of.codecs, num_codecs(of)),
        progress(reinterpret_cast<uint64_t*>(of.progress),
                 sizeof(ChunkProgress) / sizeof(uint64_t) + num_sums),
        chunk(of) {
    chunk.tiles = tiles.get();
    chunk.codecs = codecs.get();
    chunk.progress = reinterpret_cast<ChunkProgress*>(progress.get());
  }
  static size_t num_codecs(const ChunkBatch& of) {
    size_t num = 0;
    for (const ChunkTile& entry : std::span(of.tiles, of.num_tiles)) {
      num = std::max<size_t>(num, entry.codec + 1);
    }
    return num;
  }
  std::vector<ChunkTile> shifted;
  GpuCopy<ChunkTile> tiles;
  GpuCopy<const ChunkCodec> codecs;
  GpuCopy<uint64_t> progress;
  ChunkBatch chunk;
};

struct GpuReceived {
  GpuReceived(const ReceivedMessages& of, size_t num_bytes)
      : shifted(far_messages(of.messages, of.num_messages)),
        messages(shifted.data(), shifted.size()),
        buffer(of.buffer, num_bytes),
        verdicts(of.verdicts, of.num_messages),
        received{messages.get(), of.num_messages, earlier(buffer.get(), far_bytes()),
                 verdicts.get()} {}
  std::vector<Message> shifted;
  GpuCopy<Message> messages;
  GpuCopy<const std::byte> buffer;
  GpuCopy<uint32_t> verdicts;
  ReceivedMessages received;
};

void encode_chunk(const EncodeChunkCall& call) {
  const Extents extents = extents_of(call.chunk, Stage::kWorker);
  const GpuChunk chunk(call.chunk, call.num_messages, true);
  const GpuCopy gradient(as_bytes(call.gradient), extents.gradient);
  const GpuCopy gain(call.gain, 1);
  const GpuCopy residual(call.residual, extents.residual);
  std::vector<Message> shifted = far_messages(call.messages, call.num_messages);
  const GpuCopy messages(shifted.data(), shifted.size());
  const GpuCopy out(call.out, std::max(extents.payload, end_of(call.messages, call.num_messages)));
  cuda_library().chunks.encode({chunk.chunk, gradient_of(gradient, call.chunk.dtype), gain.get(),
                                residual_of(residual), messages.get(), call.num_messages,
                                earlier(out.get(), far_bytes())});
}

void reduce_chunk(const ReduceChunkCall& call) {
  const Extents extents = extents_of(call.chunk, Stage::kWorker);
  const GpuChunk chunk(call.chunk, call.received.num_messages + 1, false);
  const GpuReceived received(call.received,
                             end_of(call.received.messages, call.received.num_messages));
  const GpuCopy gain(call.gain, 1);
  const GpuCopy residual(call.residual, extents.residual);
  const GpuCopy out(call.out, sizeof(MessageHeader) + call.payload_bytes);
  const GpuCopy findings(call.findings, 1);
  const ReceivedMessages& siblings = call.from_siblings;
  const GpuReceived from_siblings(siblings, end_of(siblings.messages, siblings.num_messages));
  const GpuCopy forward(call.forward, sizeof(MessageHeader));
  cuda_library().chunks.reduce({chunk.chunk, received.received, gain.get(), residual_of(residual),
                                call.payload_bytes, out.get(), findings.get(),
                                from_siblings.received, call.forward_payload_bytes, forward.get()});
}

void accumulate_chunk(const AccumulateChunkCall& call) {
  const Extents extents = extents_of(call.chunk, Stage::kWorker);
  const GpuChunk chunk(call.chunk, call.received.num_messages, false);
  const GpuReceived received(call.received,
                             end_of(call.received.messages, call.received.num_messages));
  const GpuCopy gradient(static_cast<std::byte*>(call.gradient), extents.gradient);
  const GpuCopy flags(call.flags, call.chunk.num_tiles);
  const GpuCopy findings(call.findings, 1);
  cuda_library().chunks.accumulate({chunk.chunk, received.received,
                                    gradient_of(gradient, call.chunk.dtype), flags.get(),
                                    findings.get(), call.nonfinite_is_fault});
}

// What calls for siblings share, on the GPU. `Call`: PackCall or SumCall.
template <typename Call>
struct GpuPieces {
  explicit GpuPieces(const Call& of)
      : pieces(of.pieces, of.num_pieces),
        gradient(as_bytes(of.gradient), end_of_pieces(of, true) * item_bytes(of.dtype)),
        messages(of.messages, of.num_messages),
        call(of) {
    call.pieces = pieces.get();
    call.gradient = gradient.get();
    call.messages = messages.get();
  }
  // How far they reach in the bucket or in the sum, in elements.
  static size_t end_of_pieces(const Call& of, bool in_bucket) {
    size_t end = 0;
    for (const ChunkPiece& piece : std::span(of.pieces, of.num_pieces)) {
      const size_t begin = in_bucket ? piece.gradient_offset : piece.offset;
      end = std::max(end, begin + piece.num_elements);
    }
    return end;
  }
  GpuCopy<const ChunkPiece> pieces;
  GpuCopy<const std::byte> gradient;
  GpuCopy<const Message> messages;
  Call call;
};

void pack(const PackCall& call) {
  GpuPieces gpu(call);
  const GpuCopy out(call.out, end_of(call.messages, call.num_messages));
  gpu.call.out = out.get();
  cuda_library().nodes.pack(gpu.call);
}

void sum(const SumCall& call) {
  GpuPieces gpu(call);
  const size_t sum_bytes = gpu.end_of_pieces(call, false) * item_bytes(call.dtype);
  const GpuCopy received(call.received, end_of(call.messages, call.num_messages));
  const GpuCopy sum(static_cast<std::byte*>(call.sum), sum_bytes);
  gpu.call.received = received.get();
  gpu.call.sum = sum.get();
  cuda_library().nodes.sum(gpu.call);
}

void decode_chunk(const DecodeChunkCall& call) {
  Extents extents = extents_of(call.chunk, Stage::kOwner);
  const GpuChunk chunk(call.chunk, call.received.num_messages, true);
  const GpuReceived received(
      call.received,
      std::max(extents.payload, end_of(call.received.messages, call.received.num_messages)));
  for (const ChunkTile& entry : std::span(call.chunk.tiles, call.chunk.num_tiles)) {
    if (entry.summed_offset == 0) continue;
    const size_t bytes = entry.tile.num_elements * item_bytes(call.chunk.dtype);
    extents.output = std::max<size_t>(extents.output, entry.summed_offset + bytes);
  }
  const GpuCopy sent(call.sent, call.residual == nullptr ? 0 : extents.output);
  const GpuCopy gradient(static_cast<std::byte*>(call.gradient), extents.gradient);
  const GpuCopy residual(call.residual, extents.residual);
  const GpuCopy flags(call.flags, call.chunk.num_tiles);
  const GpuCopy findings(call.findings, 1);
  cuda_library().chunks.decode({chunk.chunk, received.received, earlier(sent.get(), far_bytes()),
                                gradient_of(gradient, call.chunk.dtype), residual_of(residual),
                                flags.get(), findings.get()});
}

void commit(const CommitCall& call) {
  CommitCall on_gpu = call;
  const GpuCopy loss_scale(call.loss_scale, 1);
  const GpuCopy findings(call.findings, 1);
  const GpuCopy record(call.record, 1);
  const GpuCopy tile(call.nonfinite_tile, 1);
  on_gpu.loss_scale = loss_scale.get();
  on_gpu.findings = findings.get();
  on_gpu.record = record.get();
  on_gpu.nonfinite_tile = tile.get();
  kernels().commit(on_gpu);
}

}  // namespace

const DeviceLibrary& kernels_under_test() {
  static const DeviceLibrary library{
      kDeviceLibraryVersion,
      {&encode_chunk, &reduce_chunk, &decode_chunk, &accumulate_chunk},
      {&pack, &sum},
      {&rescale, &scale, &commit},
      cuda_library().is_capturing};
  return library;
}

}  // namespace gradferry::testing
