// The plan of one bucket: its tiles, cut into chunks, each with the tile tables for the codecs.
// A plan depends only on the bucket's parameters, the layout and its options; it is built once per
// list of parameters and never changed.
#pragma once

#include <cstdint>
#include <vector>

#include "gradferry/codec.h"
#include "layout.h"

namespace gradferry {

// The tiles of one codec in a chunk. `tiles` and `ranks` run in parallel.
struct PlannedBatch {
  uint32_t codec_index;
  bool worker_residual;  // the batch's parameters have one
  bool owner_residual;
  std::vector<Tile> tiles;
  std::vector<uint32_t> ranks;  // encode: receiver of the message; decode: its sender
};

// One rank's share of a chunk.
struct Shard {
  uint32_t worker_bytes = 0;   // payload of the scatter message to this rank
  uint32_t scatter_bytes = 0;  // of that message: header, payload, padding
  uint32_t owner_bytes = 0;    // payload of the gather message from this rank
};

struct ChunkPlan {
  ScalarType dtype;
  std::vector<Shard> shards;      // by owner
  uint32_t gather_message_bytes;  // header + the largest owner_bytes: all_gather wants one size
  // The same batches and tiles in `encode` and `decode`, in the same order.
  // payload_offset counts from the start of the send buffer, headers included; output_offset, for
  // undo, as payload_offset in `decode`.
  std::vector<PlannedBatch> encode;
  // payload_offset and output_offset count from the end of the message's header.
  std::vector<PlannedBatch> reduce;
  // payload_offset counts from the start of the receive buffer, headers included.
  std::vector<PlannedBatch> decode;
};

struct BucketPlan {
  std::vector<uint32_t> parameters;  // indices into Layout::parameters(), in bucket order
  uint64_t num_elements = 0;
  ScalarType dtype = ScalarType::kFloat32;
  std::vector<ChunkPlan> chunks;
};

// Padding of scatter messages to one size is at most one part in this many of their bytes.
inline constexpr uint64_t kScatterPaddingPart = 32;

struct PlanOptions {
  uint32_t rank;
  uint32_t chunk_bytes;  // most payload bytes per owner and stage in one chunk
  bool equal_scatter;    // pads the scatter messages of a chunk to one size where that costs little
  CodecChoice codecs;
  bool residuals;  // false: none is touched
};

// `parameters` in bucket order, all of one dtype.
BucketPlan make_plan(const Layout& layout, const std::vector<uint32_t>& parameters,
                     const PlanOptions& options);

}  // namespace gradferry
