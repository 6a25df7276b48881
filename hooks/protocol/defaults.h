// What options mean where nobody says otherwise, in C++ and in Python.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace gradferry {

// Parameters with at most so many dimensions, or so many elements, are sent as they are unless a
// rule names a codec for them: they are a small part of a model, and biases and norms lose most.
inline constexpr uint32_t kExemptMaxDims = 1;
inline constexpr uint64_t kExemptMaxSize = 1023;

// Most payload bytes per owner, stage and chunk, in small worlds. What waits for the last chunk of
// a bucket takes as long as that chunk does on the link: with 512 KiB an average of 17 MB of fp32
// over four hosts takes a quarter longer at 1 Gb/s. At 10 Gb/s it is then 7 % faster, or more with
// q8, where rounds scatter as much; 32 KiB costs more for each message than it saves.
inline constexpr uint32_t kChunkBytes = 128 * 1024;
// The same where collectives are enqueued on streams: a chunk costs launches and collectives, so a
// bucket should be one. Memory allows less in every world of more than two ranks.
inline constexpr uint32_t kStreamChunkBytes = 16 << 20;
// Most chunks of kChunkBytes in flight on a host. Four keep both lanes busy: one is encoded, one
// scattered, two gathered.
inline constexpr uint32_t kHostSlots = 4;
// Most memory for messages, in MiB; on streams so much that a bucket of any codec is one chunk.
inline constexpr uint32_t kWorkspaceCapMiB = 96, kStreamWorkspaceCapMiB = 512;
inline constexpr uint64_t kWorkspaceCapBytes = uint64_t{kWorkspaceCapMiB} << 20;
// The size of a bucket, in MiB: DistributedDataParallel's default.
inline constexpr uint32_t kBucketCapMiB = 25;

struct KeptResiduals {
  bool worker;
  bool owner;
};

// Which residuals parameters of a codec keep. `error_feedback`: "auto", "none", "owner", "worker"
// or "both"; with "auto" a codec of 8 bits per element or more keeps no worker residual, which
// costs 4 bytes per element: its rounding errors are less than 1 % of a block's largest element. In
// momentum mode (`momentum` not 0) every parameter has a worker residual, which carries the
// momentum. Throws Error(kConfig) for another word.
KeptResiduals kept_residuals(std::string_view codec, const std::string& error_feedback,
                             double momentum);

}  // namespace gradferry
