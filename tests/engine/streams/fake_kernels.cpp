#include "fake_kernels.h"

#include <atomic>
#include <span>
#include <utility>

#include "machine.h"
#include "tests/kernels/host_library.h"

namespace fake_device {
namespace {

using namespace gradferry;

uint32_t number_of(Stream stream) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(stream));
}

void touch_residual(const Touched& touched, const Tile& tile, float* residual) {
  if (residual == nullptr) return;
  touched.write(residual + tile.residual_offset, tile.num_elements * sizeof(float));
}

const DeviceLibrary& host() { return gradferry::testing::host_library(); }

template <typename T>
void read_table(const Touched& touched, const T* table, size_t size) {
  touched.read(table, size * sizeof(T));
}

// Runs a call on a stream: touch(touched) says what it reads and writes. It is a launch of one
// kernel, or of none where `work`, which says for how many blocks there is something to do, is 0.
template <typename Call, typename Touch>
void enqueue(Stream stream, const char* name, void (*kernel)(const Call&), const Call& call,
             uint64_t work, Touch touch) {
  Machine::get().enqueue(number_of(stream), name, [=](const Touched& touched) {
    touch(touched);
    kernel(call);
    Machine::get().count_launches(work == 0 ? 0 : 1);
  });
}

// Calls visit(tile, bytes of its payload in a stage) for the tiles of a chunk.
template <typename Visit>
void for_tiles(const Touched& touched, const ChunkBatch& chunk, Visit visit) {
  read_table(touched, chunk.tiles, chunk.num_tiles);
  for (const ChunkTile& entry : std::span(chunk.tiles, chunk.num_tiles)) {
    const ChunkCodec& used = chunk.codecs[entry.codec];
    read_table(touched, &used, 1);
    const Codec& codec = codecs()[used.row];
    visit(entry, [&](Stage stage) {
      return codec.payload_bytes(entry.tile.num_elements, chunk.dtype, stage, used.options);
    });
  }
}
void touch_progress(const Touched& touched, const ChunkBatch& chunk, size_t num_messages) {
  touched.write(chunk.progress, sizeof(ChunkProgress) + num_messages * sizeof(uint64_t));
}
void touch_received(const Touched& touched, const ReceivedMessages& received,
                    bool headers_alone = false) {
  read_table(touched, received.messages, received.num_messages);
  for (const Message& message : std::span(received.messages, received.num_messages)) {
    touched.read(received.buffer + message.offset,
                 kHeaderBytes + (headers_alone ? 0 : message.payload_bytes));
  }
  touched.write(received.verdicts, received.num_messages * sizeof(uint32_t));
}
void touch_kept(const Touched& touched, const ChunkTile& entry, float* residual) {
  if (entry.has_residual != 0) touch_residual(touched, entry.tile, residual);
}
std::pair<size_t, size_t> gradient_bytes(const ChunkBatch& chunk, const Tile& tile) {
  const size_t item = item_bytes(chunk.dtype);
  return {tile.gradient_offset * item, tile.num_elements * item};
}

void encode(const EncodeChunkCall& call) {
  enqueue(call.chunk.stream, "encode", host().chunks.encode, call, call.chunk.num_tiles,
          [=](const Touched& touched) {
            for_tiles(touched, call.chunk, [&](const ChunkTile& entry, auto size) {
              const Tile& tile = entry.tile;
              const auto [offset, bytes] = gradient_bytes(call.chunk, tile);
              touched.read(static_cast<const std::byte*>(call.gradient) + offset, bytes);
              touch_kept(touched, entry, call.residual);
              touched.write(call.out + tile.payload_offset, size(Stage::kWorker));
            });
            if (call.gain != nullptr) touched.read(call.gain, sizeof(float));
            read_table(touched, call.messages, call.num_messages);
            for (const Message& message : std::span(call.messages, call.num_messages)) {
              touched.write(call.out + message.offset, kHeaderBytes);
            }
            touch_progress(touched, call.chunk, call.num_messages);
          });
}

void reduce(const ReduceChunkCall& call) {
  enqueue(call.chunk.stream, "reduce", host().chunks.reduce, call, 1, [=](const Touched& touched) {
    touch_received(touched, call.received);
    for_tiles(touched, call.chunk, [&](const ChunkTile& entry, auto size) {
      const Tile& tile = entry.tile;
      touch_kept(touched, entry, call.residual);
      touched.write(call.out + kHeaderBytes + tile.output_offset, size(Stage::kOwner));
    });
    if (call.gain != nullptr) touched.read(call.gain, sizeof(float));
    touch_received(touched, call.from_siblings, /*headers_alone=*/true);
    if (call.forward != nullptr) touched.write(call.forward, kHeaderBytes);
    if (call.out != nullptr) touched.write(call.out, kHeaderBytes);
    touched.write(call.findings, sizeof(Findings));
    touch_progress(touched, call.chunk, call.received.num_messages + 1);
  });
}

void decode(const DecodeChunkCall& call) {
  enqueue(call.chunk.stream, "decode", host().chunks.decode, call, call.chunk.num_tiles,
          [=](const Touched& touched) {
            touch_received(touched, call.received);
            for_tiles(touched, call.chunk, [&](const ChunkTile& entry, auto size) {
              const Tile& tile = entry.tile;
              const auto [offset, bytes] = gradient_bytes(call.chunk, tile);
              if (call.received.num_messages == 0) {  // else it is part of a message
                touched.read(call.received.buffer + tile.payload_offset, size(Stage::kOwner));
              }
              touched.write(static_cast<std::byte*>(call.gradient) + offset, bytes);
              if (entry.has_residual == 0) return;
              touch_residual(touched, tile, call.residual);
              touched.read(call.sent + tile.output_offset, size(Stage::kWorker));
              if (entry.summed_offset == 0) return;
              touched.read(call.sent + entry.summed_offset, bytes);
            });
            touched.write(call.flags, call.chunk.num_tiles * sizeof(uint32_t));
            touched.write(call.findings, sizeof(Findings));
            touch_progress(touched, call.chunk, call.received.num_messages);
          });
}

void accumulate(const AccumulateChunkCall& call) {
  enqueue(call.chunk.stream, "accumulate", host().chunks.accumulate, call, 1,
          [=](const Touched& touched) {
            touch_received(touched, call.received);
            for_tiles(touched, call.chunk, [&](const ChunkTile& entry, auto /*size*/) {
              const auto [offset, bytes] = gradient_bytes(call.chunk, entry.tile);
              touched.write(static_cast<std::byte*>(call.gradient) + offset, bytes);
            });
            touched.write(call.flags, call.chunk.num_tiles * sizeof(uint32_t));
            touched.write(call.findings, sizeof(Findings));
            touch_progress(touched, call.chunk, call.received.num_messages);
          });
}

void pack(const PackCall& call) {
  enqueue(call.stream, "pack", host().nodes.pack, call, 1, [=](const Touched& touched) {
    const size_t item = item_bytes(call.dtype);
    read_table(touched, call.messages, call.num_messages);
    for (const Message& message : std::span(call.messages, call.num_messages)) {
      touched.write(call.out + message.offset, kHeaderBytes);
    }
    read_table(touched, call.pieces, call.num_pieces);
    for (const ChunkPiece& piece : std::span(call.pieces, call.num_pieces)) {
      touched.read(static_cast<const std::byte*>(call.gradient) + piece.gradient_offset * item,
                   piece.num_elements * item);
      const Message& message = call.messages[piece.message];
      touched.write(call.out + message.offset + kHeaderBytes + piece.offset * item,
                    piece.num_elements * item);
    }
  });
}

void sum(const SumCall& call) {
  enqueue(call.stream, "sum", host().nodes.sum, call, call.num_pieces, [=](const Touched& touched) {
    const size_t item = item_bytes(call.dtype);
    read_table(touched, call.messages, call.num_messages);
    read_table(touched, call.pieces, call.num_pieces);
    for (const ChunkPiece& piece : std::span(call.pieces, call.num_pieces)) {
      touched.read(static_cast<const std::byte*>(call.gradient) + piece.gradient_offset * item,
                   piece.num_elements * item);
      for (const Message& message : std::span(call.messages, call.num_messages)) {
        if (message.rank == call.envelope.rank) continue;
        const std::byte* received = call.received + message.offset;
        touched.read(received, kHeaderBytes);
        touched.read(received + kHeaderBytes + piece.offset * item, piece.num_elements * item);
      }
      touched.write(static_cast<std::byte*>(call.sum) + piece.offset * item,
                    piece.num_elements * item);
    }
  });
}

void commit(const CommitCall& call) {
  enqueue(call.stream, "commit", host().messages.commit, call, 1, [=](const Touched& touched) {
    if (call.loss_scale != nullptr) touched.read(call.loss_scale, sizeof(float));
    touched.write(call.findings, sizeof(Findings));
    touched.write(call.record, sizeof(CommitRecord));
    touched.write(call.nonfinite_tile, sizeof(uint64_t));
  });
}

void rescale(const RescaleCall& call) {
  enqueue(call.stream, "rescale", host().messages.rescale, call, 1, [=](const Touched& touched) {
    if (call.loss_scale != nullptr) touched.read(call.loss_scale, sizeof(float));
    touched.write(call.residual_scale, sizeof(float));
    touched.write(call.gain, sizeof(float));
  });
}

void scale(const ScaleCall& call) {
  enqueue(call.stream, "scale", host().messages.scale, call, call.num_elements,
          [=](const Touched& touched) {
            touched.read(call.factor, sizeof(float));
            touched.write(call.values, call.num_elements * sizeof(float));
          });
}

std::atomic<bool> capturing{false};

}  // namespace

void set_capturing(bool now) { capturing = now; }

const DeviceLibrary& device_library() {
  static const DeviceLibrary result{kDeviceLibraryVersion,
                                    {&encode, &reduce, &decode, &accumulate},
                                    {&pack, &sum},
                                    {&rescale, &scale, &commit},
                                    [](Stream /*stream*/) { return capturing.load(); }};
  return result;
}

}  // namespace fake_device
