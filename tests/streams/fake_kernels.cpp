#include "fake_kernels.h"

#include <atomic>
#include <utility>

#include "machine.h"

namespace gradferry::emulated {
extern const MessageKernels message_kernels;
}

namespace fake_device {
namespace {

using gradferry::Codec;
using gradferry::CodecOptions;
using gradferry::Stage;
using gradferry::Stream;
using gradferry::Tile;
using gradferry::TileBatch;

uint32_t number_of(Stream stream) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(stream));
}

// --- codecs --------------------------------------------------------------------------------------

// What a launch copies; the rest is read when it runs.
struct Launch {
  const Codec* codec;
  TileBatch batch;
  CodecOptions options;
};

// Calls run(batch, touched, bytes of a tile's payload) on the batch's stream.
template <typename Run>
void launch(const Codec& codec, const char* name, const TileBatch& batch, Run run) {
  const Launch launched{&codec, batch, *batch.options};
  Machine::get().enqueue(number_of(batch.stream), name, [=](const Touched& touched) {
    TileBatch now = launched.batch;
    now.options = &launched.options;
    now.stream = nullptr;
    touched.read(now.tiles, now.num_tiles * sizeof(Tile));
    const auto payload_bytes = [&](const Tile& tile, Stage stage) {
      return launched.codec->payload_bytes(tile.num_elements, now.dtype, stage, launched.options);
    };
    run(now, touched, payload_bytes);
    if (now.status != nullptr) {
      touched.write(now.status, now.num_tiles * sizeof(gradferry::TileStatus));
    }
  });
}

void touch_residual(const Touched& touched, const Tile& tile, float* residual) {
  if (residual == nullptr) return;
  touched.write(residual + tile.residual_offset, tile.num_elements * sizeof(float));
}
std::pair<size_t, size_t> gradient_bytes(const TileBatch& batch, const Tile& tile) {
  const size_t item = gradferry::item_bytes(batch.dtype);
  return {tile.gradient_offset * item, tile.num_elements * item};
}

// One set of functions per codec, since the contract has no room for a closure.
template <size_t kIndex>
struct OnStream {
  static const Codec& codec() { return gradferry::codecs(gradferry::Device::kCpu)[kIndex]; }

  static void encode(const TileBatch& batch, const void* gradient, float alpha, const float* gain,
                     float* residual, std::byte* out) {
    launch(codec(), "encode", batch, [=](const TileBatch& now, const Touched& touched, auto size) {
      for (const Tile& tile : std::span(now.tiles, now.num_tiles)) {
        const auto [offset, bytes] = gradient_bytes(now, tile);
        touched.read(static_cast<const std::byte*>(gradient) + offset, bytes);
        touch_residual(touched, tile, residual);
        touched.write(out + tile.payload_offset, size(tile, now.stage));
      }
      if (gain != nullptr) touched.read(gain, sizeof(float));
      codec().encode(now, gradient, alpha, gain, residual, out);
    });
  }

  static void decode(const TileBatch& batch, const std::byte* in, void* gradient, float beta,
                     float* residual) {
    launch(codec(), "decode", batch, [=](const TileBatch& now, const Touched& touched, auto size) {
      for (const Tile& tile : std::span(now.tiles, now.num_tiles)) {
        const auto [offset, bytes] = gradient_bytes(now, tile);
        touched.read(in + tile.payload_offset, size(tile, now.stage));
        if (gradient == nullptr) continue;
        touch_residual(touched, tile, residual);
        touched.write(static_cast<std::byte*>(gradient) + offset, bytes);
      }
      codec().decode(now, in, gradient, beta, residual);
    });
  }

  static void reduce(const TileBatch& batch, const std::byte* const* payload_by_rank,
                     uint32_t world_size, const float* gain, float* owner_residual,
                     std::byte* out) {
    launch(codec(), "reduce", batch, [=](const TileBatch& now, const Touched& touched, auto size) {
      touched.read(static_cast<const void*>(payload_by_rank),
                   world_size * sizeof(*payload_by_rank));
      for (const Tile& tile : std::span(now.tiles, now.num_tiles)) {
        for (const std::byte* payloads : std::span(payload_by_rank, world_size)) {
          touched.read(payloads + tile.payload_offset, size(tile, Stage::kWorker));
        }
        touch_residual(touched, tile, owner_residual);
        touched.write(out + tile.output_offset, size(tile, Stage::kOwner));
      }
      if (gain != nullptr) touched.read(gain, sizeof(float));
      codec().reduce(now, payload_by_rank, world_size, gain, owner_residual, out);
    });
  }

  static void undo(const TileBatch& batch, const std::byte* own_payload, const std::byte* in,
                   const void* gradient, float alpha, float* residual) {
    launch(codec(), "undo", batch, [=](const TileBatch& now, const Touched& touched, auto size) {
      for (const Tile& tile : std::span(now.tiles, now.num_tiles)) {
        const auto [offset, bytes] = gradient_bytes(now, tile);
        touched.read(own_payload + tile.payload_offset, size(tile, Stage::kWorker));
        touched.read(in + tile.output_offset, size(tile, Stage::kOwner));
        touched.read(static_cast<const std::byte*>(gradient) + offset, bytes);
        touch_residual(touched, tile, residual);
      }
      codec().undo(now, own_payload, in, gradient, alpha, residual);
    });
  }
};

template <size_t... kIndices>
std::span<const Codec> codecs_on_streams(std::index_sequence<kIndices...> /*all*/) {
  static std::array<Codec, sizeof...(kIndices)> table;
  const std::span<const Codec> cpu = gradferry::codecs(gradferry::Device::kCpu);
  if (cpu.size() != table.size()) throw std::runtime_error("fake device: kCodecs is out of date");
  const auto put = [&]<size_t kIndex>() {
    Codec& row = table[kIndex];
    row = cpu[kIndex];
    row.encode = &OnStream<kIndex>::encode;
    row.decode = &OnStream<kIndex>::decode;
    row.reduce = &OnStream<kIndex>::reduce;
    row.undo = &OnStream<kIndex>::undo;
  };
  (put.template operator()<kIndices>(), ...);
  return table;
}

// --- messages ------------------------------------------------------------------------------------

using namespace gradferry;

// The emulator runs one launch at a time, and so does the machine's thread.
const MessageKernels& kernels() { return emulated::message_kernels; }

template <typename T>
void read_table(const Touched& touched, const T* table, size_t size) {
  touched.read(table, size * sizeof(T));
}

void seal(const SealCall& call) {
  Machine::get().enqueue(number_of(call.stream), "seal", [=](const Touched& touched) {
    read_table(touched, call.messages, call.num_messages);
    for (const Message& message : std::span(call.messages, call.num_messages)) {
      touched.write(call.buffer + message.offset, sizeof(MessageHeader));
      const uint32_t* order = call.order + message.first_tile;
      read_table(touched, order, message.num_tiles);
      for (const uint32_t tile : std::span(order, message.num_tiles)) {
        read_table(touched, call.status + tile, 1);
      }
    }
    if (call.findings != nullptr) touched.write(call.findings, sizeof(Findings));
    kernels().seal(call);
  });
}

void check(const CheckCall& call) {
  Machine::get().enqueue(number_of(call.stream), "check", [=](const Touched& touched) {
    read_table(touched, call.messages, call.num_messages);
    read_table(touched, call.tiles, call.num_tiles);
    for (const Message& message : std::span(call.messages, call.num_messages)) {
      touched.read(call.buffer + message.offset, sizeof(MessageHeader) + message.payload_bytes);
    }
    touched.write(call.sums, call.num_messages * sizeof(uint64_t));
    touched.write(call.verdicts, call.num_messages * sizeof(uint32_t));
    touched.write(call.findings, sizeof(Findings));
    kernels().check(call);
  });
}

void conclude(const ConcludeCall& call) {
  Machine::get().enqueue(number_of(call.stream), "conclude", [=](const Touched& touched) {
    read_table(touched, call.tiles, call.num_tiles);
    read_table(touched, call.sources, call.num_tiles);
    read_table(touched, call.status, call.num_tiles);
    for (const Tile& tile : std::span(call.tiles, call.num_tiles)) {
      const size_t item = item_bytes(call.dtype);
      touched.write(static_cast<std::byte*>(call.gradient) + tile.gradient_offset * item,
                    tile.num_elements * item);
    }
    touched.write(call.findings, sizeof(Findings));
    if (call.step_nonfinite != nullptr) touched.write(call.step_nonfinite, sizeof(uint32_t));
    kernels().conclude(call);
  });
}

void commit(const CommitCall& call) {
  Machine::get().enqueue(number_of(call.stream), "commit", [=](const Touched& touched) {
    touched.write(call.findings, sizeof(Findings));
    touched.write(call.record, sizeof(CommitRecord));
    touched.write(call.nonfinite_tile, sizeof(uint64_t));
    kernels().commit(call);
  });
}

void rescale(const RescaleCall& call) {
  Machine::get().enqueue(number_of(call.stream), "rescale", [=](const Touched& touched) {
    if (call.loss_scale != nullptr) touched.read(call.loss_scale, sizeof(float));
    touched.write(call.residual_scale, sizeof(float));
    touched.write(call.gain, sizeof(float));
    if (call.step_nonfinite != nullptr) touched.write(call.step_nonfinite, sizeof(uint32_t));
    kernels().rescale(call);
  });
}

void take_back(const TakeBackCall& call) {
  Machine::get().enqueue(number_of(call.stream), "take back", [=](const Touched& touched) {
    touched.read(call.step_nonfinite, sizeof(uint32_t));
    touched.read(call.before, call.num_elements * sizeof(float));
    touched.write(call.values, call.num_elements * sizeof(float));
    kernels().take_back(call);
  });
}

constexpr size_t kCodecs = 7;
std::atomic<bool> capturing{false};

}  // namespace

void set_capturing(bool now) { capturing = now; }

const DeviceLibrary& device_library() {
  static const DeviceLibrary result{kDeviceLibraryVersion,
                                    codecs_on_streams(std::make_index_sequence<kCodecs>()),
                                    {&take_back, &rescale, &seal, &check, &conclude, &commit},
                                    [](Stream /*stream*/) { return capturing.load(); }};
  return result;
}

}  // namespace fake_device
