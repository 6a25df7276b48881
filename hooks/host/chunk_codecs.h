// The arithmetic on one chunk in host memory. Knows no message headers, and waits for nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine_options.h"
#include "events.h"
#include "protocol/layout.h"
#include "protocol/plan.h"
#include "residuals.h"

namespace gradferry {

// With several ranks per node. Copies the tiles of a rail from the bucket to a message.
void pack_rail(const ChunkPlan& plan, uint32_t rail, const void* gradient, std::byte* message);

// sum = scale * (the gradients of all siblings, added in rank order), of this rank's `rail`.
// Computed in fp32 (fp64 for fp64) and rounded once, to the bucket's dtype, as the mean is.
// `gradients`: messages of siblings; null: this rank's own are taken from the bucket.
void sum_rail(const ChunkPlan& plan, uint32_t rail, const std::vector<const std::byte*>& gradients,
              const void* own, double scale, void* sum);

// Runs the codecs: encodes payloads to send, reduces received payloads, decodes the mean; in a
// reduce-scatter, makes the mean of received payloads. Not thread-safe: each thread has its own.
class ChunkCodecs {
 public:
  ChunkCodecs(const EngineOptions& options, const Layout& layout, const Residuals& residuals);

  // A chunk and its bucket.
  struct Work {
    const ChunkPlan* plan;
    uint64_t step;
    void* gradient;      // of the bucket, in host memory
    const void* summed;  // what is encoded, of the same dtype: the gradient, or a node's sum
  };
  struct Reduced {
    uint64_t checksum = 0;  // of the payload, if there is one
    uint64_t corrupt_tiles = 0;
    std::vector<uint64_t> nonfinite_tiles;  // of accumulate(): ids, in the order of the plan
  };
  struct DecodedTiles {
    std::vector<uint64_t> nonfinite_tiles;  // ids, in the order of the plan
    std::vector<uint32_t> corrupt_sources;  // ranks of tiles that are corrupt, in that order
  };

  // Encodes `summed` into the payloads of `messages`; writes no headers. Adds the checksum of the
  // payload for node k to checksums[k].
  void encode(const Work& work, std::byte* messages, std::vector<uint64_t>& checksums);
  // Reduces the payloads of all peers, by node, to the payload of their mean.
  Reduced reduce(const Work& work, const std::vector<const std::byte*>& payloads,
                 std::byte* payload);
  // Writes the mean of the payloads of all ranks to where the gradient has this owner's tiles.
  Reduced accumulate(const Work& work, const std::vector<const std::byte*>& payloads);
  // The first node whose payload is corrupt; none: each payload decodes by itself.
  std::optional<uint32_t> sender_of_corrupt(const Work& work,
                                            const std::vector<const std::byte*>& payloads);
  // Decodes the `messages` of all ranks into the gradient. `sent`: the output of encode().
  DecodedTiles decode(const Work& work, const std::byte* messages, const std::byte* sent);
  // In a world of one, where nothing is sent: in momentum mode the gradient becomes momentum, else
  // the residual of a larger world is added.
  void deliver_alone(const Work& work);

  // The squares of residuals and gradients on a sample of tiles; to read all of them would cost as
  // much as encoding. After encode(): of worker residuals and of what was encoded.
  ResidualSquares sample_worker(const Work& work) const;
  // After decode(): of this owner's residuals, and of the mean.
  ResidualSquares sample_owner(const Work& work) const;

 private:
  bool is_sampled(const Tile& tile) const { return tile.id % sample_stride_ == 0; }
  TileBatch make_batch(const Work& work, const PlannedBatch& planned, Stage stage);
  void decode_batch(const Work& work, size_t index, const std::byte* messages,
                    const std::byte* sent);
  const ResolvedCodec& codec_of(const PlannedBatch& planned) const {
    return layout_.codecs()[planned.codec_index];
  }

  const EngineOptions& options_;
  const Layout& layout_;
  const Residuals& residuals_;
  const uint64_t sample_stride_;
  std::vector<TileStatus> status_;  // of the last call of a codec
};

}  // namespace gradferry
