// What a device's own library brings: codecs, and the work on messages that a CPU does in place. As
// in cuda_codecs.h, pointers are to device memory unless said otherwise, work is enqueued on a
// stream, and nothing waits for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gradferry/codec.h"
#include "gradferry/wire.h"

namespace gradferry {

// One message within a buffer. Its tiles are `num_tiles` entries of the call's table.
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

// What went wrong on this rank since the start: the first fault, except that an echo of another
// rank's trouble (WireStatus::kPeerTrouble) gives way to a cause. One per engine, in device memory,
// zero at first. Once there is a fault, every message of Phase::kGather carries its status.
struct Findings {
  uint32_t status;  // WireStatus
  uint32_t phase;
  uint32_t rank;  // whose message was refused
  uint32_t reserved;
  uint64_t step;
  uint64_t chunk;
  uint64_t expected;
  uint64_t received;
  uint64_t nonfinite_tile;  // 1 + the first that decoded non-finite since the last commit; or 0
};

// Writes the headers of `messages`, as `envelope` says, into `buffer`, before their payloads. The
// tiles of a message are status[order[first_tile ...]]. Phase::kGather: a tile that reduce found
// corrupt is a fault. Phase::kScatter does not look at `findings`, so that it may run beside what
// changes it.
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

// Looks at every message of `buffer`; message r came from rank r. verdicts[r] becomes its
// WireStatus, and the first refused message a fault. `sums` is scratch of 8 bytes per message,
// zero before the first call and after every one.
struct CheckCall {
  Envelope envelope;  // of any of them: rank r takes the place of its rank
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

// After decode: tiles of refused messages become NaN in `gradient`, corrupt ones are a fault, and
// the first that is not finite is remembered; then *step_nonfinite becomes 1, unless it is null.
// `tiles`, `sources` (message of each) and `status` run in parallel.
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

// At the beginning of a step: *gain = *loss_scale / *residual_scale, or 1 where that is 0
// (residuals that are zero have no units yet); then *residual_scale = *loss_scale. loss_scale
// null: 1. *step_nonfinite becomes 0, unless it is null.
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
  uint32_t version;  // kDeviceLibraryVersion of the headers it was built with
  std::span<const Codec> codecs;
  MessageKernels messages;
};
// Rises with every change to this file or to codec.h.
inline constexpr uint32_t kDeviceLibraryVersion = 5;
// Names the Python capsule in which a library comes.
inline constexpr const char* kDeviceLibraryCapsule = "gradferry.DeviceLibrary";

// From now on codecs(Device::kCuda) and message_kernels() give what the library brings. Call it
// once, before other threads ask. Throws Error(kConfig) for a library of another version.
void use_device_library(const DeviceLibrary& library);

// Throws Error(kState) until use_device_library() was called.
const MessageKernels& message_kernels();

}  // namespace gradferry
