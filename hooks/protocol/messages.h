// Messages in host memory: headers before payloads, the commit after a bucket, hashes of
// parameters. The bytes are those of docs/reference/wire_format.md;
// kernels/cuda/message_kernels.cu does the same in device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gradferry/wire.h"
#include "protocol/faults.h"

namespace gradferry {

// One byte per parameter of a bucket, in bucket order: not 0 if it was used.
using UsedMap = std::vector<uint8_t>;

// Bytes of a map in a message: one for each parameter, and zeros up to a multiple of 8.
constexpr uint64_t used_map_bytes(size_t num_parameters) { return (num_parameters + 7) / 8 * 8; }

// The fields that all messages of an engine share on this rank.
struct Agreement {
  uint32_t rank;
  uint32_t world_size;
  uint64_t config_hash;
  uint64_t layout_hash;
  bool has_loss_scale = false;

  // The envelope of a message from this rank. `tiles_hash`: of the chunk's plan, if it is of one.
  // Without it two buckets of one size, such as those of equal layers, could be mixed up.
  Envelope envelope(uint64_t step, uint64_t chunk, Phase phase, uint64_t tiles_hash = 0) const {
    return {config_hash, layout_hash ^ tiles_hash, step, chunk, rank, phase};
  }
};

void write_header(std::byte* message, const Envelope& envelope, WireStatus status,
                  uint32_t payload_bytes, uint64_t checksum);
// The fault of a message from rank `source`, which must have a payload of `payload_bytes`.
Fault check_message(const std::byte* message, Envelope envelope, uint32_t source,
                    uint32_t payload_bytes);

// The same of a message between ranks of one node, whose payload has no checksum: to sum
// uncompressed gradients would be a pass over memory, to guard memory that never leaves the
// machine.
Fault check_unsummed_message(const std::byte* message, Envelope envelope, uint32_t source,
                             uint32_t payload_bytes);

// Throws Error(kConfig) unless 32-bit offsets suffice for the messages of a chunk: one per rank, of
// up to `message_bytes`.
void expect_offsets_fit(uint64_t message_bytes, uint32_t world_size);

// Bytes of a CommitRecord and its map of used parameters; for 0 parameters there is no map.
uint64_t commit_bytes(size_t num_used);
// `place` has commit_bytes(used.size()). `loss_scale`: of the pass; 0: there is none.
void write_commit(std::byte* place, uint32_t rank, uint64_t step, uint64_t bucket,
                  const Fault& fault, const UsedMap& used, float loss_scale);
// The outcome of a bucket, equal on all ranks: the fault of the lowest rank that reports one; else
// kBadLossScale if the ranks' loss scales are not one positive finite number.
// `received` begins with the commits of all ranks, each with a map of `num_used` parameters.
Verdict read_commit(const Agreement& agreement, const std::byte* received, uint64_t step,
                    uint64_t bucket, size_t num_used = 0);
// Which parameters at least one rank used, from commits in which read_commit() found no fault.
UsedMap read_used(const std::byte* received, uint32_t world_size, size_t num_used);

// A check of parameters: one message per rank, of this many bytes, with its hashes.
// `next_chunk` is the number of the chunk that follows.
uint64_t hash_message_bytes(size_t num_parameters);
void write_hashes(const Agreement& agreement, uint64_t step, uint64_t next_chunk,
                  const std::vector<uint64_t>& hashes, std::byte* message);
// Returns the fault of the first message that cannot be trusted; `by_rank` is then unspecified.
Fault read_hashes(const Agreement& agreement, uint64_t step, uint64_t next_chunk,
                  const std::byte* received, size_t num_parameters,
                  std::vector<std::vector<uint64_t>>& by_rank);

}  // namespace gradferry
