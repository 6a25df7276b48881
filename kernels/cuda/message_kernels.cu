// What a step needs beside its chunks: the commit record and the units of residuals. The contract
// is include/gradferry/device_library.h.
#include <bit>

#include "gradferry/device_library.h"
#include "kernels/cuda/cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

constexpr uint32_t kThreads = 128;

struct CommitWords {
  uint32_t word[sizeof(CommitRecord) / 4];
};

// One thread.
__global__ void commit_kernel(CommitCall call) {
  const Findings& findings = *call.findings;
  const float loss_scale = call.loss_scale == nullptr ? 0.0f : *call.loss_scale;
  CommitRecord record = make_commit(call.rank, call.step, call.bucket, findings, loss_scale);
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
}

// Mostly the factor is 1, and nothing is to be done: few blocks, each for many elements.
constexpr uint32_t kMostScaleBlocks = 2048;
__global__ void __launch_bounds__(kThreads) scale_kernel(ScaleCall call) {
  const float factor = *call.factor;
  if (factor == 1.0f) return;
  const uint64_t first = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (uint64_t i = first; i < call.num_elements; i += uint64_t{gridDim.x} * kThreads) {
    const float scaled = factor * call.values[i];
    if ((bits(scaled) & kMagnitudeBits) < kInfinityBits) call.values[i] = scaled;
  }
}

// --- launchers
// -------------------------------------------------------------------------------------

void commit(const CommitCall& call) { launch<commit_kernel>(1, 1, call.stream, call); }

void rescale(const RescaleCall& call) { launch<rescale_kernel>(1, 1, call.stream, call); }

void scale(const ScaleCall& call) {
  const auto num_blocks = (call.num_elements + kThreads - 1) / kThreads;
  launch<scale_kernel>(
      static_cast<uint32_t>(num_blocks < kMostScaleBlocks ? num_blocks : kMostScaleBlocks),
      kThreads, call.stream, call);
}

}  // namespace

extern const MessageKernels message_kernels;
const MessageKernels message_kernels{&rescale, &scale, &commit};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
