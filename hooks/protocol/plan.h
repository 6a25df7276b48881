// The plan of one bucket: its tiles, cut into chunks, each with the tile tables for the codecs.
// A plan depends only on the bucket's parameters, the layout and its options; it is built once per
// list of parameters and never changed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gradferry/codec.h"
#include "protocol/layout.h"

namespace gradferry {

enum class Collective : uint8_t {
  kAllReduce,      // every rank gets the mean of the bucket
  kReduceScatter,  // every rank gets the mean of the parameters that it owns; nothing is gathered
  kAllGather,      // every rank gets the parameters that each rank owns; nothing is averaged
};

constexpr bool scatters(Collective collective) { return collective != Collective::kAllGather; }
constexpr bool gathers(Collective collective) { return collective != Collective::kReduceScatter; }

// The tiles of one codec in a chunk. `tiles` and `ranks` run in parallel.
struct PlannedBatch {
  uint32_t codec_index;
  bool worker_residual;  // this rank has one for the batch's tiles
  bool owner_residual;   // the batch's parameters have one
  std::vector<Tile> tiles;
  // encode: node of the message's receiver, 0 in an all-gather; decode: the sender's rank.
  std::vector<uint32_t> ranks;
};

// A message of a chunk.
struct PlannedMessage {
  uint32_t payload_bytes;
  uint32_t message_bytes;  // header, payload, padding; 0: there is no message
  uint32_t start;          // in the send buffer; of what arrives, in what decode reads
};

std::vector<int64_t> sizes_of(std::span<const PlannedMessage> messages);
// Of messages that follow each other.
int64_t total_bytes(std::span<const PlannedMessage> messages);

// A tile on its way to its leader.
struct Piece {
  uint64_t gradient_offset;  // elements, in the bucket
  uint32_t num_elements;
  uint32_t offset;  // elements, in the message to the leader
};

// The tiles of a rail in a chunk.
struct Rail {
  std::vector<Piece> pieces;             // empty with one rank per node
  uint32_t num_elements = 0;             // of the message to the leader, with gaps
  std::vector<PlannedMessage> gathered;  // from every peer to the others, by node
};

struct ChunkPlan {
  ScalarType dtype;  // of the bucket, and of a node's sums
  // The hash of its tiles' numbers, in the order in which they lie in messages. Messages carry it:
  // two buckets may have messages of the same sizes.
  uint64_t tiles_hash;
  std::vector<Rail> rails;
  std::vector<PlannedMessage> scattered;  // to this rank's peers, by node
  // To and from every sibling of the largest node: gradients of its rail, and what that has
  // gathered. Empty with one rank per node.
  std::vector<PlannedMessage> dense, forwarded;
  // The tiles of this rank's rail. gradient_offset counts in the bucket, or in the sum of the
  // node. payload_offset counts from the start of the send buffer, headers included; output_offset,
  // for undo, as payload_offset in `decode`. In an all-gather: the tiles that this rank owns, in
  // its one message, without residuals.
  std::vector<PlannedBatch> encode;
  // Tiles that this rank owns. payload_offset and output_offset count from the end of the message's
  // header; gradient_offset counts in the bucket. Empty in an all-gather.
  std::vector<PlannedBatch> reduce;
  // First the batches and tiles of `encode`, in the same order, then those of other rails; in an
  // all-gather those of all ranks, this one's included. payload_offset counts from the start of the
  // receive buffer, headers included. Empty in a reduce-scatter.
  std::vector<PlannedBatch> decode;
};

struct BucketPlan {
  std::vector<uint32_t> parameters;  // indices into Layout::parameters(), in bucket order
  uint64_t num_elements = 0;
  ScalarType dtype = ScalarType::kFloat32;
  std::vector<ChunkPlan> chunks;
};

// Padding of messages to one size is at most one part in this many of their bytes.
inline constexpr uint64_t kPaddingPart = 32;
// To or from so many owners without tiles a message is a header, which tells ranks that do
// different things; if there are more, such messages are not sent.
inline constexpr uint64_t kMostWithoutTiles = 8;

// Most bytes of gradient in a chunk that one rail has, where nodes have several ranks: what a
// rank sends to a sibling. Less where memory is short, more on streams (dense_bytes_within()).
inline constexpr uint64_t kMostDenseBytes = uint64_t{2} << 20;

struct PlanOptions {
  uint32_t rank;
  uint32_t chunk_bytes;  // most payload bytes per owner and stage in one chunk, but for one tile
  bool equal_scatter;    // pads the scatter messages of a chunk to one size where that costs little
  CodecChoice codecs;
  bool residuals;                          // false: none is touched
  uint64_t dense_bytes = kMostDenseBytes;  // most bytes of gradient per rail in one chunk
  uint64_t rail_bytes = ~uint64_t{0};      // most bytes of messages with tiles, per rail and stage
  Collective collective = Collective::kAllReduce;
};

// `parameters` in bucket order, all of one dtype. A reduce-scatter and an all-gather take one tile
// of every owner in turn, so that every chunk has some of each; they have one rank per node. An
// all-gather needs codecs whose payload is the same in both stages.
BucketPlan make_plan(const Layout& layout, const std::vector<uint32_t>& parameters,
                     const PlanOptions& options);

}  // namespace gradferry
