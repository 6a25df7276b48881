#include "host/chunk_codecs.h"

namespace gradferry {

TileBatch ChunkCodecs::make_batch(const Work& work, const PlannedBatch& planned, Stage stage) {
  if (status_.size() < planned.tiles.size()) status_.resize(planned.tiles.size());
  return {.tiles = planned.tiles.data(),
          .num_tiles = static_cast<uint32_t>(planned.tiles.size()),
          .dtype = work.plan->dtype,
          .stage = stage,
          // A tile of zeros keeps its residual, except if that carries a momentum, which must
          // continue to decay.
          .hold_zero_tiles = !options_.has_momentum(work.step),
          .seed = options_.seed,
          .step = work.step,
          .options = &codec_of(planned).options,
          .status = status_.data()};
}

void ChunkCodecs::encode(const Work& work, std::byte* messages, std::vector<uint64_t>& checksums) {
  for (const PlannedBatch& planned : work.plan->encode) {
    const TileBatch batch = make_batch(work, planned, Stage::kWorker);
    const ResolvedCodec& resolved = codec_of(planned);
    resolved.codec->encode(batch, work.summed, options_.alpha(resolved, work.step),
                           /*gain=*/nullptr,
                           planned.worker_residual ? residuals_.worker() : nullptr, messages);
    for (size_t i = 0; i < planned.tiles.size(); ++i) {
      checksums[planned.ranks[i]] += status_[i].checksum;
    }
  }
}

ChunkCodecs::Reduced ChunkCodecs::reduce(const Work& work,
                                         const std::vector<const std::byte*>& payloads,
                                         std::byte* payload) {
  Reduced reduced;
  for (const PlannedBatch& planned : work.plan->reduce) {
    const TileBatch batch = make_batch(work, planned, Stage::kOwner);
    codec_of(planned).codec->reduce(batch, payloads.data(), static_cast<uint32_t>(payloads.size()),
                                    /*gain=*/nullptr,
                                    planned.owner_residual ? residuals_.owner() : nullptr, payload);
    for (size_t i = 0; i < planned.tiles.size(); ++i) {
      reduced.checksum += status_[i].checksum;
      reduced.corrupt_tiles += (status_[i].flags & kTileCorrupt) != 0;
    }
  }
  return reduced;
}

ChunkCodecs::Reduced ChunkCodecs::accumulate(const Work& work,
                                             const std::vector<const std::byte*>& payloads) {
  const auto world_size = static_cast<uint32_t>(payloads.size());
  Reduced reduced;
  for (const PlannedBatch& planned : work.plan->reduce) {
    const TileBatch batch = make_batch(work, planned, Stage::kWorker);
    codec_of(planned).codec->accumulate(batch, payloads.data(), world_size, world_size,
                                        work.gradient);
    for (size_t i = 0; i < planned.tiles.size(); ++i) {
      const uint32_t flags = status_[i].flags;
      if ((flags & kTileNonFinite) != 0) reduced.nonfinite_tiles.push_back(planned.tiles[i].id);
      reduced.corrupt_tiles += (flags & kTileCorrupt) != 0;
    }
  }
  return reduced;
}

// The codec takes all payloads of a tile together. Decoding one by one shows which is corrupt.
std::optional<uint32_t> ChunkCodecs::sender_of_corrupt(
    const Work& work, const std::vector<const std::byte*>& payloads) {
  for (uint32_t rank = 0; rank < payloads.size(); ++rank) {
    for (const PlannedBatch& planned : work.plan->reduce) {
      const TileBatch batch = make_batch(work, planned, Stage::kWorker);
      codec_of(planned).codec->decode(batch, payloads[rank], nullptr, 0.0F, nullptr);
      for (size_t i = 0; i < planned.tiles.size(); ++i) {
        if ((status_[i].flags & kTileCorrupt) != 0) return rank;
      }
    }
  }
  return std::nullopt;
}

ChunkCodecs::DecodedTiles ChunkCodecs::decode(const Work& work, const std::byte* messages,
                                              const std::byte* sent) {
  DecodedTiles decoded;
  const auto& batches = work.plan->decode;
  for (size_t b = 0; b < batches.size(); ++b) {
    const PlannedBatch& planned = batches[b];
    decode_batch(work, b, messages, sent);
    for (size_t i = 0; i < planned.tiles.size(); ++i) {
      const uint32_t flags = status_[i].flags;
      if ((flags & kTileNonFinite) != 0) decoded.nonfinite_tiles.push_back(planned.tiles[i].id);
      if ((flags & kTileCorrupt) != 0) decoded.corrupt_sources.push_back(planned.ranks[i]);
    }
  }
  return decoded;
}

// With a worker residual it inspects the payload before it decodes: where another rank's gradient
// was not finite, what this rank sent has no effect. It must be put back into the residual while
// the bucket still holds this rank's own gradient.
void ChunkCodecs::decode_batch(const Work& work, size_t index, const std::byte* messages,
                               const std::byte* sent) {
  const PlannedBatch& planned = work.plan->decode[index];
  const ResolvedCodec& resolved = codec_of(planned);
  const Codec& codec = *resolved.codec;
  const TileBatch batch = make_batch(work, planned, Stage::kOwner);
  if (!planned.worker_residual) {
    codec.decode(batch, messages, work.gradient, 0.0F, nullptr);
    return;
  }
  codec.decode(batch, messages, nullptr, 0.0F, nullptr);
  codec.undo(make_batch(work, work.plan->encode[index], Stage::kWorker), sent, messages,
             work.summed, options_.alpha(resolved, work.step), residuals_.worker());
  codec.decode(batch, messages, work.gradient, options_.beta(resolved, work.step),
               residuals_.worker());
}

// Encodes and decodes tile by tile through a payload on the stack. All tiles use `exact`.
void ChunkCodecs::deliver_alone(const Work& work) {
  alignas(kPayloadAlignment) std::byte payload[kTileElements * sizeof(double)];
  for (const PlannedBatch& planned : work.plan->encode) {
    const ResolvedCodec& resolved = codec_of(planned);
    const Codec& codec = *resolved.codec;
    TileBatch batch = make_batch(work, planned, Stage::kWorker);
    batch.num_tiles = 1;
    for (Tile tile : planned.tiles) {
      tile.payload_offset = 0;
      batch.tiles = &tile;
      codec.encode(batch, work.gradient, options_.alpha(resolved, work.step), /*gain=*/nullptr,
                   residuals_.worker(), payload);
      codec.decode(batch, payload, work.gradient, options_.beta(resolved, work.step),
                   residuals_.worker());
    }
  }
}

}  // namespace gradferry
