// The interface of a library for one kind of device: codecs, and kernels that write and check
// messages. As in cuda_codecs.h, pointers are to device memory unless stated otherwise; calls
// enqueue work on a stream and do not wait for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gradferry/codec.h"
#include "gradferry/wire.h"

namespace gradferry {

// One message within a buffer. Its tiles are `num_tiles` entries of the call's table, from
// `first_tile` on.
struct Message {
  uint32_t offset;  // bytes from the start of the buffer to the header; a multiple of 16
  uint32_t payload_bytes;
  uint32_t first_tile;
  uint32_t num_tiles;
};

// A tile of a message that was received.
struct ReceivedTile {
  uint32_t offset;     // bytes from the start of the buffer to its payload
  uint32_t num_bytes;  // of its payload
  uint32_t message;
  uint32_t message_offset;  // bytes before it in the message's payload
};

// The first fault on this rank since the start, except that a cause replaces
// WireStatus::kPeerTrouble, the echo of another rank's error. One per engine, in device memory,
// zero at first. After a fault, every message of Phase::kGather carries its status.
struct Findings {
  uint32_t status;  // WireStatus
  uint32_t phase;
  uint32_t rank;  // whose message was refused
  uint32_t reserved;
  uint64_t step;
  uint64_t chunk;
  uint64_t expected;
  uint64_t received;
  uint64_t nonfinite_tile;  // 1 + id of the first non-finite tile since the last commit; or 0
};

// Writes the headers of `messages`, with the fields of `envelope`, into `buffer`, before their
// payloads. The tiles of a message are status[order[first_tile ...]]. Phase::kGather: a tile that
// reduce found corrupt is a fault. Phase::kScatter does not read `findings`, so that it may run
// while another stream writes it.
struct SealCall {
  Envelope envelope;  // of this rank
  const Message* messages;
  uint32_t num_messages;
  const uint32_t* order;
  const TileStatus* status;
  Findings* findings;  // null in Phase::kScatter
  std::byte* buffer;
  Stream stream;
};

// Checks every message of `buffer`; message r came from rank r. verdicts[r] becomes its WireStatus,
// and the first refused message a fault. `sums` is scratch memory of 8 bytes per message; it must
// be zero before the first call, and every call leaves it zero.
struct CheckCall {
  Envelope envelope;  // of all messages; `rank` is replaced by r
  const Message* messages;
  uint32_t num_messages;
  const ReceivedTile* tiles;
  uint32_t num_tiles;  // of all messages
  const std::byte* buffer;
  uint64_t* sums;
  uint32_t* verdicts;
  Findings* findings;
  Stream stream;
};

// After decode: sets tiles of refused messages to NaN in `gradient`, notes a corrupt tile as a
// fault, and stores the first tile that is not finite in `findings`; in that case it also sets
// *step_nonfinite to 1, unless the pointer is null. `tiles`, `sources` (message of each tile) and
// `status` are parallel arrays.
struct ConcludeCall {
  uint64_t step;
  uint64_t chunk;
  const Tile* tiles;
  const uint32_t* sources;
  const TileStatus* status;
  uint32_t num_tiles;
  const uint32_t* verdicts;
  ScalarType dtype;
  void* gradient;
  Findings* findings;
  uint32_t* step_nonfinite;
  Stream stream;
};

// Writes this rank's CommitRecord, and moves findings->nonfinite_tile to `nonfinite_tile`.
struct CommitCall {
  uint64_t step;
  uint64_t bucket;
  uint32_t rank;
  Findings* findings;
  CommitRecord* record;
  uint64_t* nonfinite_tile;
  Stream stream;
};

// At the beginning of a step: *gain = *loss_scale / *residual_scale, or 1 if *residual_scale is 0
// (zero residuals have no units yet); then *residual_scale = *loss_scale. loss_scale null: 1. Sets
// *step_nonfinite to 0, unless the pointer is null.
struct RescaleCall {
  const float* loss_scale;
  float* residual_scale;
  float* gain;
  uint32_t* step_nonfinite;
  Stream stream;
};

// values[i] = before[i], unless *step_nonfinite is 0.
struct TakeBackCall {
  const uint32_t* step_nonfinite;
  float* values;
  const float* before;
  uint64_t num_elements;
  Stream stream;
};

struct MessageKernels {
  void (*take_back)(const TakeBackCall& call);
  void (*rescale)(const RescaleCall& call);
  void (*seal)(const SealCall& call);
  void (*check)(const CheckCall& call);
  void (*conclude)(const ConcludeCall& call);
  void (*commit)(const CommitCall& call);
};

struct DeviceLibrary {
  uint32_t version;  // kDeviceLibraryVersion when it was compiled
  std::span<const Codec> codecs;
  MessageKernels messages;
  // Whether what is enqueued on `stream` (of the current device) goes into a graph instead.
  bool (*is_capturing)(Stream stream);
};
// Increases with every change of a type or function type in this file or in codec.h.
inline constexpr uint32_t kDeviceLibraryVersion = 6;
// Name of the Python capsule that holds a library.
inline constexpr const char* kDeviceLibraryCapsule = "gradferry.DeviceLibrary";

// From now on codecs(Device::kCuda) and message_kernels() return those of the library. Call it
// once, before other threads use them. Throws Error(kConfig) for a library of another version.
void use_device_library(const DeviceLibrary& library);

// Those of the library in use. Throw Error(kState) until use_device_library() was called.
const MessageKernels& message_kernels();
bool is_capturing(Stream stream);

}  // namespace gradferry
