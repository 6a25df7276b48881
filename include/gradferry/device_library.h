// The interface of a library for one kind of device: kernels that process chunks and write records.
// Pointers are to device memory unless stated otherwise. Calls enqueue work on a stream and do not
// wait for it; nothing that they read or write may change until it is done.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gradferry/codec.h"
#include "gradferry/wire.h"

namespace gradferry {

using Stream = void*;  // a cudaStream_t

// One message within a buffer.
struct Message {
  uint32_t offset;  // bytes from the start of the buffer to the header; a multiple of 16
  uint32_t payload_bytes;
  // Received messages only:
  uint32_t rank;  // the sender
  Phase phase;
  uint16_t reserved;
};

// The first fault on this rank since the start, except that a cause replaces
// WireStatus::kPeerTrouble, the echo of another rank's error. One per engine, in device memory,
// zero at first. After a fault, every message that reduce writes carries its status.
struct Findings {
  uint32_t status;  // WireStatus
  uint32_t phase;
  uint32_t rank;  // whose message was rejected
  uint32_t reserved;
  uint64_t step;
  uint64_t chunk;
  uint64_t expected;
  uint64_t received;
  uint64_t nonfinite_tile;  // 1 + id of the first non-finite tile since the last commit; or 0
};

// --- chunks
//
// What a rank does with a chunk is one launch, or one per codec beside `exact`. Blocks take tiles
// in turn, and the last one that is done writes headers and verdicts.

// A codec of a chunk.
struct ChunkCodec {
  uint32_t row;  // row_of() the codec
  float alpha;   // as in Codec::encode and Codec::undo
  float beta;    // as in Codec::decode
  CodecOptions options;
};

struct ChunkTile {
  Tile tile;
  uint32_t codec;         // index into ChunkBatch::codecs
  uint32_t message;       // index of the message that holds it; 0 where all do
  uint32_t has_residual;  // 0 or 1: whether residual_offset means something
  // In decode: bytes from DecodeChunkCall::sent to the numbers that were encoded; 0: they are the
  // gradient's.
  uint32_t summed_offset;
};

// What the blocks of a launch tell each other. In device memory, followed by a uint64_t per message
// that is received or sent; zero before the first call, and every call leaves it zero. The calls of
// one stream can share it.
struct ChunkProgress {
  uint32_t blocks_done;
  uint32_t flags;  // kTile* bits of all tiles
  uint32_t corrupt_tiles;
  uint32_t reserved;
};

// The tiles of a chunk, as TileBatch has those of one codec.
struct ChunkBatch {
  const ChunkTile* tiles;
  uint32_t num_tiles;
  const ChunkCodec* codecs;
  uint32_t rows;  // bit r: tiles may have the codec of row r
  ScalarType dtype;
  bool hold_zero_tiles;  // as in TileBatch
  uint64_t seed;
  Envelope envelope;  // of this rank; the phase matters to encode alone
  ChunkProgress* progress;
  Stream stream;
};

// Encodes the tiles at Stage::kWorker as Codec::encode does, with the residual of those that have
// one, then writes the headers of `messages` into `out`, in the phase of chunk.envelope. Without
// messages it only encodes.
struct EncodeChunkCall {
  ChunkBatch chunk;
  const void* gradient;
  const float* gain;
  float* residual;
  const Message* messages;
  uint32_t num_messages;
  std::byte* out;
};

// Messages that were received.
struct ReceivedMessages {
  const Message* messages;
  uint32_t num_messages;
  const std::byte* buffer;
  // Becomes the WireStatus of each message. The first one that is rejected is a fault.
  uint32_t* verdicts;
};

// Checks the received messages and reduces their tiles as Codec::reduce does, those of rejected
// messages too, into one message: payload_offset and output_offset count from the end of a header.
// A tile found corrupt is a fault. Then writes the header of the message.
//
// Where nodes have several ranks it also checks the headers of `from_siblings`, whose payloads have
// no checksum, and writes the header of the message to siblings that follows, of Phase::kForward. A
// rank that has no peers does only that: of no tiles, messages and `out`.
struct ReduceChunkCall {
  ChunkBatch chunk;
  ReceivedMessages received;
  const float* gain;
  float* residual;
  uint32_t payload_bytes;  // of the message at `out`
  std::byte* out;
  Findings* findings;
  ReceivedMessages from_siblings;
  uint32_t forward_payload_bytes;  // of the message at `forward`
  std::byte* forward;              // null: there are no siblings
};

// Checks the received messages, if there are any, and decodes the tiles of their buffer as
// Codec::decode does; a message that holds no tile has no checksum. Before a tile with a residual
// is decoded, what was sent is undone, as by Codec::undo, from the rank's own payload at
// output_offset of `sent`. message_offset is that of the payload received. At last it sets tiles of
// rejected messages to NaN in `gradient`, notes a corrupt tile as a fault, and stores the first
// tile that is not finite in `findings`.
struct DecodeChunkCall {
  ChunkBatch chunk;
  ReceivedMessages received;
  const std::byte* sent;
  void* gradient;
  float* residual;
  uint32_t* flags;  // scratch memory: one entry per tile
  Findings* findings;
};

// Checks the received messages and replaces the tiles by the means of their payloads, as
// Codec::accumulate does, with a divisor of num_messages; payload_offset counts from the end of a
// header. If a message is rejected, all tiles become NaN in `gradient`. A tile found corrupt is a
// fault, and the first tile that is not finite is stored in `findings`: on request as a fault, too,
// since no other rank sees it.
struct AccumulateChunkCall {
  ChunkBatch chunk;
  ReceivedMessages received;
  void* gradient;
  uint32_t* flags;  // scratch memory: one entry per tile
  Findings* findings;
  bool nonfinite_is_fault;
};

struct ChunkKernels {
  void (*encode)(const EncodeChunkCall& call);
  void (*reduce)(const ReduceChunkCall& call);
  void (*decode)(const DecodeChunkCall& call);
  void (*accumulate)(const AccumulateChunkCall& call);
};

// --- siblings: ranks of one node, which add up their gradients

// A tile on its way to the rank that sums it.
struct ChunkPiece {
  uint64_t gradient_offset;  // elements, in the bucket
  uint32_t num_elements;
  uint32_t offset;   // elements, in the payload of the message and in the sum; a multiple of 16
  uint32_t message;  // index
  uint32_t reserved;
};

// Copies pieces of the gradient into the payloads of messages, and writes all headers, without
// checksums.
struct PackCall {
  const ChunkPiece* pieces;
  uint32_t num_pieces;
  ScalarType dtype;
  const void* gradient;
  Envelope envelope;  // of this rank
  const Message* messages;
  uint32_t num_messages;
  std::byte* out;
  Stream stream;
};

// sum = scale * (the gradients of all siblings, added in the order of their messages), in fp32, or
// in fp64 of fp64 gradients, and rounded to their dtype at last. This rank's own are taken from the
// bucket instead of its message. If a header is wrong, every piece becomes NaN: reduce reports it.
struct SumCall {
  const ChunkPiece* pieces;
  uint32_t num_pieces;
  ScalarType dtype;
  const void* gradient;
  Envelope envelope;  // of this rank
  const Message* messages;
  uint32_t num_messages;
  const std::byte* received;
  double scale;
  void* sum;
  Stream stream;
};

struct NodeKernels {
  void (*pack)(const PackCall& call);
  void (*sum)(const SumCall& call);
};

// --- steps

// Writes this rank's CommitRecord, and moves findings->nonfinite_tile to `nonfinite_tile`.
struct CommitCall {
  uint64_t step;
  uint64_t bucket;
  uint32_t rank;
  const float* loss_scale;  // of that step; null: there is no GradScaler
  Findings* findings;
  CommitRecord* record;
  uint64_t* nonfinite_tile;
  Stream stream;
};

// At the beginning of a step: *gain = *loss_scale / *residual_scale, or 1 if *residual_scale is 0
// (zero residuals have no units yet); then *residual_scale = *loss_scale. loss_scale null: 1.
struct RescaleCall {
  const float* loss_scale;
  float* residual_scale;
  float* gain;
  Stream stream;
};

// values[i] *= *factor, where that is finite.
struct ScaleCall {
  const float* factor;
  float* values;
  uint64_t num_elements;
  Stream stream;
};

struct MessageKernels {
  void (*rescale)(const RescaleCall& call);
  void (*scale)(const ScaleCall& call);
  void (*commit)(const CommitCall& call);
};

struct DeviceLibrary {
  uint32_t version;  // kDeviceLibraryVersion when it was compiled
  ChunkKernels chunks;
  NodeKernels nodes;
  MessageKernels messages;
  // Whether what is enqueued on `stream` (of the current device) goes into a graph instead.
  bool (*is_capturing)(Stream stream);
};
// Increases with every change of a type or function type in this file or in codec.h, and of the
// table of codecs.
inline constexpr uint32_t kDeviceLibraryVersion = 14;
// Name of the Python capsule that holds a library.
inline constexpr const char* kDeviceLibraryCapsule = "gradferry.DeviceLibrary";

// From now on the functions below return kernels of the library. Call it once, before other threads
// use them. Throws Error(kConfig) for a library of another version.
void use_device_library(const DeviceLibrary& library);

// Those of the library in use. Throw Error(kState) until use_device_library() was called.
const ChunkKernels& chunk_kernels();
const NodeKernels& node_kernels();
const MessageKernels& message_kernels();
bool is_capturing(Stream stream);

// The codec's row in codecs(), which holds it. Needs no library.
uint32_t row_of(const Codec& codec);

}  // namespace gradferry
