// What codecs do with one chunk in host memory: encode what goes out, reduce what came in, decode
// the mean. Knows numbers, not messages, and waits for nothing. Not safe for two threads: each has
// its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine_options.h"
#include "host/host_residuals.h"
#include "layout.h"
#include "plan.h"

namespace gradferry {

class ChunkCodecs {
 public:
  ChunkCodecs(const EngineOptions& options, const Layout& layout, const HostResiduals& residuals)
      : options_(options), layout_(layout), residuals_(residuals) {}

  // A chunk, and what its bucket says of it.
  struct Work {
    const ChunkPlan* plan;
    uint64_t step;
    float gain;      // to the residuals
    void* gradient;  // of the bucket
  };
  struct Reduced {
    uint64_t checksum = 0;  // of the payload
    uint64_t corrupt_tiles = 0;
  };
  struct Decoded {
    std::vector<uint64_t> nonfinite_tiles;  // ids, in the order of the plan
    std::vector<uint32_t> corrupt_sources;  // whose tiles could not be decoded, in that order
  };

  // The gradient into `messages`, headers left out; checksums[p] += that of the payload for rank p.
  void encode(const Work& work, std::byte* messages, std::vector<uint64_t>& checksums);
  // The payloads of all ranks, by rank, into one of their mean.
  Reduced reduce(const Work& work, const std::vector<const std::byte*>& payloads,
                 std::byte* payload);
  // Whose payload the codec cannot decode; none: all are fine one by one.
  std::optional<uint32_t> sender_of_corrupt(const Work& work,
                                            const std::vector<const std::byte*>& payloads);
  // `messages` of all ranks into the gradient; `sent`: what encode() wrote.
  Decoded decode(const Work& work, const std::byte* messages, const std::byte* sent);
  // Nothing travels, but there is the momentum.
  void add_momentum(const Work& work);

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
