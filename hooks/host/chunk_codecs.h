// Runs the codecs on one chunk in host memory: encodes payloads to send, reduces received payloads,
// decodes the mean; in a reduce-scatter, makes the mean of received payloads. Does not know message
// headers, and waits for nothing. Not thread-safe: each thread has its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine_options.h"
#include "host/host_residuals.h"
#include "protocol/layout.h"
#include "protocol/plan.h"

namespace gradferry {

class ChunkCodecs {
 public:
  ChunkCodecs(const EngineOptions& options, const Layout& layout, const HostResiduals& residuals)
      : options_(options), layout_(layout), residuals_(residuals) {}

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

 private:
  TileBatch make_batch(const Work& work, const PlannedBatch& planned, Stage stage);
  void decode_batch(const Work& work, size_t index, const std::byte* messages,
                    const std::byte* sent);
  const ResolvedCodec& codec_of(const PlannedBatch& planned) const {
    return layout_.codecs()[planned.codec_index];
  }

  const EngineOptions& options_;
  const Layout& layout_;
  const HostResiduals& residuals_;
  std::vector<TileStatus> status_;  // of the last call of a codec
};

}  // namespace gradferry
