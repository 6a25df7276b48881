// Headers, checksums and verdicts of messages on a device: what hooks/messages.cpp does in
// host memory, to the bit. The contract is include/gradferry/device_library.h.
//
// The only work that grows with the payload is the checksum of received tiles: one block per tile
// reads it once, 16 bytes per thread. Everything else looks at a few bytes per tile or message, in
// one block, so that "first" has a meaning.
#include <bit>

#include "gradferry/device_library.h"
#include "kernels/common/block_collectives.h"
#include "kernels/common/conversions.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

constexpr uint32_t kThreads = 128;
constexpr uint32_t kNone = 0xffffffffu;

// --- device helpers
// --------------------------------------------------------------------------------

struct Fault {
  WireStatus status;
  Phase phase;
  uint32_t rank;
  uint64_t step;
  uint64_t chunk;
  uint64_t expected;
  uint64_t received;
};

// Only one thread of a kernel may call it, and only kernels of one stream.
GRADFERRY_DEVICE void note(Findings* findings, const Fault& fault) {
  const auto kept = static_cast<WireStatus>(findings->status);
  const bool echo = kept == WireStatus::kPeerTrouble && fault.status != WireStatus::kPeerTrouble;
  if (kept != WireStatus::kOk && !echo) return;
  findings->status = static_cast<uint32_t>(fault.status);
  findings->phase = static_cast<uint32_t>(fault.phase);
  findings->rank = fault.rank;
  findings->step = fault.step;
  findings->chunk = fault.chunk;
  findings->expected = fault.expected;
  findings->received = fault.received;
}

struct Minima {
  uint32_t of_warp[kThreads / kWarpLanes];
};
// The minimum over the block, valid in thread 0 only.
GRADFERRY_DEVICE uint32_t block_minimum(Minima& shared, uint32_t value) {
  const uint32_t least = __reduce_min_sync(kAllLanes, value);
  if (threadIdx.x % kWarpLanes == 0) shared.of_warp[threadIdx.x / kWarpLanes] = least;
  __syncthreads();
  uint32_t result = least;
  if (threadIdx.x == 0) {
    for (const uint32_t other : shared.of_warp) result = other < result ? other : result;
  }
  return result;
}

// The only unsigned 64-bit type of CUDA's atomicAdd.
GRADFERRY_DEVICE void add_to(uint64_t* sum, uint64_t value) {
  static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), value);
}

constexpr uint32_t kHeaderParts = sizeof(MessageHeader) / sizeof(Bytes16);
struct HeaderParts {
  Bytes16 part[kHeaderParts];
};

GRADFERRY_DEVICE void write_header(std::byte* message, const MessageHeader& header) {
  const auto parts = std::bit_cast<HeaderParts>(header);
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kHeaderParts; ++i) write(message + 16 * i, parts.part[i]);
}

// The first wrong field of a header; status kOk if there is none.
GRADFERRY_DEVICE Fault judge(const std::byte* message, Envelope envelope, uint32_t rank,
                             uint32_t payload_bytes, uint64_t checksum) {
  envelope.rank = rank;
  HeaderParts received;
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kHeaderParts; ++i) received.part[i] = read<Bytes16>(message + 16 * i);
  const HeaderMismatch found = first_mismatch(make_header(envelope, payload_bytes, checksum),
                                              std::bit_cast<HeaderWords>(received));
  return {found.status,   envelope.phase, rank,          envelope.step,
          envelope.chunk, found.expected, found.received};
}

// --- kernels
// ---------------------------------------------------------------------------------------

// One block per message.
__global__ void __launch_bounds__(kThreads) seal_kernel(SealCall call) {
  GRADFERRY_SHARED(StatusStorage<kThreads>, sum_storage);
  GRADFERRY_SHARED(ScanStorage<kThreads>, count_storage);
  const Message message = call.messages[blockIdx.x];
  StatusPart part{0, 0};
  uint32_t corrupt = 0;
  for (uint32_t i = threadIdx.x; i < message.num_tiles; i += kThreads) {
    const TileStatus status = call.status[call.order[message.first_tile + i]];
    part.checksum += status.checksum;
    corrupt += (status.flags & kTileCorrupt) != 0 ? 1 : 0;
  }
  const uint32_t all_corrupt = exclusive_sum<kThreads>(count_storage, corrupt).total;
  const StatusPart all = combine_status<kThreads>(sum_storage, part);
  if (threadIdx.x != 0) return;
  uint32_t status = 0;
  if (call.findings != nullptr) {
    const Envelope& envelope = call.envelope;
    if (all_corrupt != 0) {
      note(call.findings, {WireStatus::kCorruptPayload, Phase::kScatter, envelope.rank,
                           envelope.step, envelope.chunk, 0, all_corrupt});
    }
    status = call.findings->status;
  }
  write_header(call.buffer + message.offset,
               make_header(call.envelope, message.payload_bytes, all.checksum, status));
}

// One block per tile: adds its share to its message's checksum.
__global__ void __launch_bounds__(kThreads) sum_kernel(CheckCall call) {
  GRADFERRY_SHARED(StatusStorage<kThreads>, storage);
  const ReceivedTile tile = call.tiles[blockIdx.x];
  const uint32_t first_weight = tile.message_offset / 2 + kFirstWeight;
  StatusPart part{0, 0};
  for (uint32_t i = 16 * threadIdx.x; i < tile.num_bytes; i += 16 * kThreads) {
    const Bytes16 words = read<Bytes16>(call.buffer + tile.offset + i);
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < 4; ++j) {
      part.checksum += uint64_t{words.word[j]} * (first_weight + 2 * (i / 4 + j));
    }
  }
  const StatusPart all = combine_status<kThreads>(storage, part);
  if (threadIdx.x == 0) add_to(call.sums + tile.message, all.checksum);
}

// One block.
__global__ void __launch_bounds__(kThreads) judge_kernel(CheckCall call) {
  const auto judged = [&](uint32_t rank) {
    const Message message = call.messages[rank];
    return judge(call.buffer + message.offset, call.envelope, rank, message.payload_bytes,
                 call.sums[rank]);
  };
  for (uint32_t rank = threadIdx.x; rank < call.num_messages; rank += kThreads) {
    call.verdicts[rank] = static_cast<uint32_t>(judged(rank).status);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (uint32_t rank = 0; rank < call.num_messages; ++rank) {
      if (call.verdicts[rank] != 0) note(call.findings, judged(rank));
    }
  }
  __syncthreads();
  for (uint32_t rank = threadIdx.x; rank < call.num_messages; rank += kThreads) call.sums[rank] = 0;
}

GRADFERRY_DEVICE void fill_nan(void* gradient, const Tile& tile, ScalarType dtype) {
  const uint32_t item = item_bytes(dtype);
  std::byte* first = static_cast<std::byte*>(gradient) + tile.gradient_offset * item;
  for (uint32_t i = 0; i < tile.num_elements; ++i) {
    std::byte* element = first + uint64_t{i} * item;
    switch (dtype) {
      case ScalarType::kFloat32: write(element, kNanBits); break;
      case ScalarType::kBFloat16: write(element, uint16_t{0x7fc0}); break;
      case ScalarType::kFloat16: write(element, uint16_t{0x7e00}); break;
      case ScalarType::kFloat64: write(element, uint64_t{0x7ff8000000000000}); break;
    }
  }
}

// One block; a thread per tile. Refused messages are rare, so their tiles may take long.
__global__ void __launch_bounds__(kThreads) conclude_kernel(ConcludeCall call) {
  GRADFERRY_SHARED(Minima, corrupt_minima);
  GRADFERRY_SHARED(Minima, nonfinite_minima);
  uint32_t corrupt = kNone, nonfinite = kNone;
  for (uint32_t i = threadIdx.x; i < call.num_tiles; i += kThreads) {
    const bool refused = call.verdicts[call.sources[i]] != 0;
    const uint32_t flags = call.status[i].flags;
    if (refused) fill_nan(call.gradient, call.tiles[i], call.dtype);
    if (!refused && (flags & kTileCorrupt) != 0 && i < corrupt) corrupt = i;
    if ((refused || (flags & kTileNonFinite) != 0) && i < nonfinite) nonfinite = i;
  }
  corrupt = block_minimum(corrupt_minima, corrupt);
  nonfinite = block_minimum(nonfinite_minima, nonfinite);
  if (threadIdx.x != 0) return;
  if (corrupt != kNone) {
    note(call.findings, {WireStatus::kCorruptPayload, Phase::kGather, call.sources[corrupt],
                         call.step, call.chunk, 0, 1});
  }
  if (nonfinite == kNone) return;
  if (call.findings->nonfinite_tile == 0) {
    call.findings->nonfinite_tile = call.tiles[nonfinite].id + 1;
  }
  if (call.step_nonfinite != nullptr) *call.step_nonfinite = 1;
}

struct CommitWords {
  uint32_t word[sizeof(CommitRecord) / 4];
};

// One thread.
__global__ void commit_kernel(CommitCall call) {
  const Findings& findings = *call.findings;
  CommitRecord record = make_commit(call.rank, call.step, call.bucket, findings);
  const auto words = std::bit_cast<CommitWords>(record);
  for (uint32_t i = 0; i < offsetof(CommitRecord, checksum) / 4; ++i) {
    record.checksum += uint64_t{words.word[i]} * (2 * i + kFirstWeight);
  }
  *call.record = record;
  *call.nonfinite_tile = findings.nonfinite_tile;
  call.findings->nonfinite_tile = 0;
}

// One thread.
__global__ void rescale_kernel(RescaleCall call) {
  const float scale = call.loss_scale == nullptr ? 1.0f : *call.loss_scale;
  const float before = *call.residual_scale;
  *call.gain = before == 0.0f ? 1.0f : scale / before;
  *call.residual_scale = scale;
  if (call.step_nonfinite != nullptr) *call.step_nonfinite = 0;
}

// A block per kBlockElements of them.
constexpr uint32_t kBlockElements = 4096;
__global__ void __launch_bounds__(kThreads) take_back_kernel(TakeBackCall call) {
  if (*call.step_nonfinite == 0) return;
  const uint64_t first = uint64_t{blockIdx.x} * kBlockElements;
  for (uint32_t i = threadIdx.x; i < kBlockElements; i += kThreads) {
    if (first + i < call.num_elements) call.values[first + i] = call.before[first + i];
  }
}

// --- launchers
// -------------------------------------------------------------------------------------

void seal(const SealCall& call) {
  launch<seal_kernel>(call.num_messages, kThreads, call.stream, call);
}
void check(const CheckCall& call) {
  launch<sum_kernel>(call.num_tiles, kThreads, call.stream, call);
  launch<judge_kernel>(1, kThreads, call.stream, call);
}
void conclude(const ConcludeCall& call) { launch<conclude_kernel>(1, kThreads, call.stream, call); }
void commit(const CommitCall& call) { launch<commit_kernel>(1, 1, call.stream, call); }

void rescale(const RescaleCall& call) { launch<rescale_kernel>(1, 1, call.stream, call); }

void take_back(const TakeBackCall& call) {
  const auto num_blocks = (call.num_elements + kBlockElements - 1) / kBlockElements;
  launch<take_back_kernel>(static_cast<uint32_t>(num_blocks), kThreads, call.stream, call);
}

}  // namespace

extern const MessageKernels message_kernels;
const MessageKernels message_kernels{&take_back, &rescale, &seal, &check, &conclude, &commit};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
