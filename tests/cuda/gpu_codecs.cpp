// The CUDA kernels on a GPU, called with host memory: every call copies what it needs there and
// back.
#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "gradferry/cuda_codecs.h"
#include "tests/cuda/gpu_copy.h"
#include "tests/simt/kernel_codecs.h"

namespace gradferry::testing {
namespace {

// How far the arrays of a call reach, from its table of tiles.
struct Extents {
  size_t gradient = 0;  // bytes
  size_t residual = 0;  // elements
  size_t payload = 0;   // bytes, in the format of the batch
  size_t output = 0;    // bytes, in the owner's
};

Extents extents_of(const Codec& codec, const TileBatch& batch) {
  Extents extents;
  const size_t item = item_bytes(batch.dtype);
  for (const Tile& tile : std::span(batch.tiles, batch.num_tiles)) {
    const auto reach = [](size_t& extent, size_t end) { extent = std::max(extent, end); };
    const auto bytes = [&](Stage stage) {
      return codec.payload_bytes(tile.num_elements, batch.dtype, stage, *batch.options);
    };
    reach(extents.gradient, (tile.gradient_offset + tile.num_elements) * item);
    reach(extents.residual, tile.residual_offset + tile.num_elements);
    reach(extents.payload, tile.payload_offset + bytes(batch.stage));
    reach(extents.output, tile.output_offset + bytes(Stage::kOwner));
  }
  return extents;
}

// The table and the statuses of a batch on the GPU.
struct GpuBatch {
  explicit GpuBatch(const TileBatch& of)
      : tiles(of.tiles, of.num_tiles), status(of.status, of.num_tiles), batch(of) {
    batch.tiles = tiles.get();
    batch.status = status.get();
  }
  GpuCopy<const Tile> tiles;
  GpuCopy<TileStatus> status;
  TileBatch batch;
};

const std::byte* as_bytes(const void* memory) { return static_cast<const std::byte*>(memory); }

template <size_t kIndex>
struct OnGpu {
  static const Codec& codec() { return cuda_library().codecs[kIndex]; }

  static void encode(const TileBatch& batch, const void* gradient, float alpha, const float* gain,
                     float* residual, std::byte* out) {
    const Extents extents = extents_of(codec(), batch);
    const GpuBatch on_gpu(batch);
    const GpuCopy g(as_bytes(gradient), extents.gradient);
    const GpuCopy k(gain, 1);
    const GpuCopy r(residual, extents.residual);
    const GpuCopy o(out, extents.payload);
    codec().encode(on_gpu.batch, g.get(), alpha, k.get(), r.get(), o.get());
  }

  static void decode(const TileBatch& batch, const std::byte* in, void* gradient, float beta,
                     float* residual) {
    const Extents extents = extents_of(codec(), batch);
    const GpuBatch on_gpu(batch);
    const GpuCopy i(in, extents.payload);
    const GpuCopy g(static_cast<std::byte*>(gradient), extents.gradient);
    const GpuCopy r(residual, extents.residual);
    codec().decode(on_gpu.batch, i.get(), g.get(), beta, r.get());
  }

  static void reduce(const TileBatch& batch, const std::byte* const* payload_by_rank,
                     uint32_t world_size, const float* gain, float* owner_residual,
                     std::byte* out) {
    const Extents extents = extents_of(codec(), batch);
    const GpuBatch on_gpu(batch);
    std::vector<std::unique_ptr<GpuCopy<const std::byte>>> payloads;
    std::vector<const std::byte*> pointers;
    for (const std::byte* payload : std::span(payload_by_rank, world_size)) {
      payloads.push_back(std::make_unique<GpuCopy<const std::byte>>(payload, extents.payload));
      pointers.push_back(payloads.back()->get());
    }
    const GpuCopy<const std::byte* const> p(pointers.data(), pointers.size());
    const GpuCopy k(gain, 1);
    const GpuCopy r(owner_residual, extents.residual);
    const GpuCopy o(out, extents.output);
    codec().reduce(on_gpu.batch, p.get(), world_size, k.get(), r.get(), o.get());
  }

  static void undo(const TileBatch& batch, const std::byte* own_payload, const std::byte* in,
                   const void* gradient, float alpha, float* residual) {
    const Extents extents = extents_of(codec(), batch);
    const GpuBatch on_gpu(batch);
    const GpuCopy o(own_payload, extents.payload);
    const GpuCopy i(in, extents.output);
    const GpuCopy g(as_bytes(gradient), extents.gradient);
    const GpuCopy r(residual, extents.residual);
    codec().undo(on_gpu.batch, o.get(), i.get(), g.get(), alpha, r.get());
  }
};

constexpr size_t kCodecs = 7;

template <size_t... kIndices>
std::array<Codec, kCodecs> codecs_on_gpu(std::index_sequence<kIndices...> /*all*/) {
  std::array<Codec, kCodecs> table;
  if (cuda_library().codecs.size() != kCodecs) throw std::logic_error("kCodecs is out of date");
  const auto put = [&]<size_t kIndex>() {
    Codec& row = table[kIndex];
    row = OnGpu<kIndex>::codec();
    row.encode = &OnGpu<kIndex>::encode;
    row.decode = &OnGpu<kIndex>::decode;
    row.reduce = &OnGpu<kIndex>::reduce;
    row.undo = &OnGpu<kIndex>::undo;
  };
  (put.template operator()<kIndices>(), ...);
  return table;
}

// --- messages
// ----------------------------------------------------------------------------------------

const MessageKernels& kernels() { return cuda_library().messages; }

size_t end_of(const Message* messages, uint32_t num_messages) {
  size_t end = 0;
  for (const Message& m : std::span(messages, num_messages)) {
    end = std::max<size_t>(end, m.offset + sizeof(MessageHeader) + m.payload_bytes);
  }
  return end;
}

void rescale(const RescaleCall& call) {
  const GpuCopy loss(call.loss_scale, 1);
  const GpuCopy residual(call.residual_scale, 1);
  const GpuCopy gain(call.gain, 1);
  const GpuCopy step_nonfinite(call.step_nonfinite, 1);
  kernels().rescale({loss.get(), residual.get(), gain.get(), step_nonfinite.get(), nullptr});
}

void take_back(const TakeBackCall& call) {
  const GpuCopy step_nonfinite(call.step_nonfinite, 1);
  const GpuCopy values(call.values, call.num_elements);
  const GpuCopy before(call.before, call.num_elements);
  kernels().take_back(
      {step_nonfinite.get(), values.get(), before.get(), call.num_elements, nullptr});
}

void seal(const SealCall& call) {
  size_t num_order = 0, num_status = 0, end = 0;
  for (const Message& m : std::span(call.messages, call.num_messages)) {
    num_order = std::max<size_t>(num_order, m.first_tile + m.num_tiles);
    end = std::max<size_t>(end, m.offset + sizeof(MessageHeader));
  }
  for (const uint32_t tile : std::span(call.order, num_order)) {
    num_status = std::max<size_t>(num_status, tile + 1);
  }
  SealCall on_gpu = call;
  const GpuCopy messages(call.messages, call.num_messages);
  const GpuCopy order(call.order, num_order);
  const GpuCopy status(call.status, num_status);
  const GpuCopy findings(call.findings, 1);
  const GpuCopy buffer(call.buffer, end);
  on_gpu.messages = messages.get();
  on_gpu.order = order.get();
  on_gpu.status = status.get();
  on_gpu.findings = findings.get();
  on_gpu.buffer = buffer.get();
  kernels().seal(on_gpu);
}

void check(const CheckCall& call) {
  CheckCall on_gpu = call;
  const GpuCopy messages(call.messages, call.num_messages);
  const GpuCopy tiles(call.tiles, call.num_tiles);
  const GpuCopy buffer(call.buffer, end_of(call.messages, call.num_messages));
  const GpuCopy sums(call.sums, call.num_messages);
  const GpuCopy verdicts(call.verdicts, call.num_messages);
  const GpuCopy findings(call.findings, 1);
  on_gpu.messages = messages.get();
  on_gpu.tiles = tiles.get();
  on_gpu.buffer = buffer.get();
  on_gpu.sums = sums.get();
  on_gpu.verdicts = verdicts.get();
  on_gpu.findings = findings.get();
  kernels().check(on_gpu);
}

void conclude(const ConcludeCall& call) {
  size_t gradient_bytes = 0, num_verdicts = 0;
  for (uint32_t i = 0; i < call.num_tiles; ++i) {
    const size_t end = call.tiles[i].gradient_offset + call.tiles[i].num_elements;
    gradient_bytes = std::max(gradient_bytes, end * item_bytes(call.dtype));
    num_verdicts = std::max<size_t>(num_verdicts, call.sources[i] + 1);
  }
  ConcludeCall on_gpu = call;
  const GpuCopy tiles(call.tiles, call.num_tiles);
  const GpuCopy sources(call.sources, call.num_tiles);
  const GpuCopy status(call.status, call.num_tiles);
  const GpuCopy verdicts(call.verdicts, num_verdicts);
  const GpuCopy gradient(static_cast<std::byte*>(call.gradient), gradient_bytes);
  const GpuCopy findings(call.findings, 1);
  on_gpu.tiles = tiles.get();
  on_gpu.sources = sources.get();
  on_gpu.status = status.get();
  on_gpu.verdicts = verdicts.get();
  on_gpu.gradient = gradient.get();
  const GpuCopy step_nonfinite(call.step_nonfinite, 1);
  on_gpu.findings = findings.get();
  on_gpu.step_nonfinite = step_nonfinite.get();
  kernels().conclude(on_gpu);
}

void commit(const CommitCall& call) {
  CommitCall on_gpu = call;
  const GpuCopy findings(call.findings, 1);
  const GpuCopy record(call.record, 1);
  const GpuCopy tile(call.nonfinite_tile, 1);
  on_gpu.findings = findings.get();
  on_gpu.record = record.get();
  on_gpu.nonfinite_tile = tile.get();
  kernels().commit(on_gpu);
}

}  // namespace

const Codec* find_kernels(std::string_view name) {
  static const auto table = codecs_on_gpu(std::make_index_sequence<kCodecs>());
  for (const Codec& codec : table) {
    if (codec.name == name) return &codec;
  }
  return nullptr;
}

const MessageKernels& message_kernels_on_host() {
  static const MessageKernels on_host{&take_back, &rescale, &seal, &check, &conclude, &commit};
  return on_host;
}

void set_schedule(uint64_t /*seed*/) {}  // a GPU has its own

}  // namespace gradferry::testing
