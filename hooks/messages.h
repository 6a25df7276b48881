// Messages in host memory: headers before payloads, the commit after a bucket, hashes of
// parameters. The bytes are those of docs/wire_format.md; kernels/common/message_kernels.cu does
// the same in device memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "faults.h"
#include "gradferry/wire.h"
#include "used_parameters.h"

namespace gradferry {

// What all messages of an engine have in common on this rank.
struct Agreement {
  uint32_t rank;
  uint32_t world_size;
  uint64_t config_hash;
  uint64_t layout_hash;

  // Of a message of this rank.
  Envelope envelope(uint64_t step, uint64_t chunk, Phase phase) const {
    return {config_hash, layout_hash, step, chunk, rank, phase};
  }
};

void write_header(std::byte* message, const Envelope& envelope, WireStatus status,
                  uint32_t payload_bytes, uint64_t checksum);
// The fault of a message from rank `source`, whose payload has `payload_bytes` where there is none.
Fault check_message(const std::byte* message, Envelope envelope, uint32_t source,
                    uint32_t payload_bytes);

// Offsets into the messages of a chunk, one of up to `message_bytes` per rank, have 32 bits. Throws
// Error(kConfig).
void expect_offsets_fit(uint64_t message_bytes, uint32_t world_size);

// A CommitRecord and a map of used parameters; no map of none.
uint64_t commit_bytes(size_t num_used);
// `place` has commit_bytes(used.size()).
void write_commit(std::byte* place, uint32_t rank, uint64_t step, uint64_t bucket,
                  const Fault& fault, const UsedMap& used);
// Every rank's verdict, equal on all ranks: the fault of the lowest rank that reports one.
// `reporter` is set to that rank. `received` begins with the commits of all ranks, with a map of
// `num_used` parameters each.
Fault read_commit(const Agreement& agreement, const at::Tensor& received, uint64_t step,
                  uint64_t bucket, uint32_t* reporter, size_t num_used = 0);
// Which parameters some rank used, from commits that read_commit() found no fault in.
UsedMap read_used(const at::Tensor& received, uint32_t world_size, size_t num_used);

// A check of parameters: one message per rank, of this many bytes, with its hashes.
// `next_chunk` is the number of the chunk that follows.
uint64_t hash_message_bytes(size_t num_parameters);
void write_hashes(const Agreement& agreement, uint64_t step, uint64_t next_chunk,
                  const std::vector<uint64_t>& hashes, std::byte* message);
// Returns the first message that cannot be trusted; `by_rank` is not to be read then.
Fault read_hashes(const Agreement& agreement, uint64_t step, uint64_t next_chunk,
                  const std::byte* received, size_t num_parameters,
                  std::vector<std::vector<uint64_t>>& by_rank);

}  // namespace gradferry
