// Every codec of the table, or the codec strings given, on every instruction set, against a roof:
// the fastest of several plain loops (roof.h) that read and write as many bytes.
//
//   codec_bench [--benchmark_filter=q4/avx512] [codec ...]
//
// Columns: Time, of one call over all tiles, mean; GB/s and roof, bytes read and written per
// second, medians; ratio, roof's time over the case's in the same round, (roof, case, roof), median
// of the rounds, with minimum and maximum; wrong, bytes that differ from the scalar kernels. Exits
// with 1 if any is wrong.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/roof.h"
#include "gradferry/codec.h"
#include "gradferry/error.h"

namespace gradferry {
namespace {

using Kind = RoofStream::Kind;

constexpr uint32_t kTiles = 4096;  // 64 MB of fp32: arrays must not fit the caches
constexpr uint32_t kCheckedTiles = 64;
constexpr int kRounds = 15;
constexpr uint32_t kMostRanks = 8;

// `ranks`: payloads that reduce sums. encode_ef has a residual, error feedback.
struct Operation {
  std::string_view name;
  uint32_t ranks;
};
constexpr Operation kOperations[] = {
    {"encode", 1}, {"encode_ef", 1}, {"reduce", 2}, {"reduce", kMostRanks}, {"decode", 1}};

struct alignas(64) Line {
  std::byte bytes[64];
};
using Array = std::vector<Line>;

Array zeros(size_t num_bytes) { return Array(num_bytes / sizeof(Line) + 1); }
std::byte* bytes(Array& array) { return array.front().bytes; }

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

template <typename Work>
double seconds_of(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void run_roof(Isa isa, RoofShape shape, std::span<const RoofStream> streams) {
  switch (isa) {
#if defined(GRADFERRY_X86_KERNELS)
    case Isa::kAvx512: return avx512::roof(shape, streams, kTiles);
    case Isa::kAvx2: return avx2::roof(shape, streams, kTiles);
#endif
    default: return scalar::roof(shape, streams, kTiles);
  }
}

// A codec with arrays of its own: Gaussian gradients and residuals, valid payloads.
class Subject {
 public:
  Subject(const std::string& codec, Isa isa, ScalarType dtype)
      : parsed_(parse_codec(codec)), isa_(isa), dtype_(dtype) {
    worker_bytes_ = payload_bytes(Stage::kWorker);
    owner_bytes_ = payload_bytes(Stage::kOwner);
    worker_tiles_ = tiles(worker_bytes_);
    owner_tiles_ = tiles(owner_bytes_);
    gradient_ = zeros(kTiles * gradient_bytes());
    decoded_ = zeros(kTiles * gradient_bytes());
    residual_ = zeros(kTiles * kTileElements * sizeof(float));
    sent_ = zeros(kTiles * worker_bytes_);
    reduced_ = zeros(kTiles * owner_bytes_);
    fill();
    run({"encode", 1}, row(isa_), kTiles);
    received_.assign(kMostRanks, sent_);
    run({"reduce", 2}, row(isa_), kTiles);
    payload_ = reduced_;
  }

  // Bytes of the first tiles that differ from what the scalar kernels write.
  uint64_t wrong(const Operation& operation) {
    std::vector<std::vector<std::byte>> expected;
    restore();
    run(operation, row(Isa::kScalar), kCheckedTiles);
    for (const RoofStream& s : streams(operation)) {
      expected.emplace_back(s.data, s.data + kCheckedTiles * s.bytes_per_slice);
    }
    restore();
    run(operation, row(isa_), kCheckedTiles);
    uint64_t count = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const std::byte* got = streams(operation)[i].data;
      for (size_t b = 0; b < expected[i].size(); ++b) count += got[b] != expected[i][b] ? 1 : 0;
    }
    return count;
  }

  // Seconds. The roof scribbles over what the case would read and write: the residual is put back.
  double time(const Operation& operation) {
    restore();
    return seconds_of([&] { run(operation, row(isa_), kTiles); });
  }
  double time_roof(const Operation& operation, RoofShape shape) {
    std::vector<RoofStream> lines = streams(operation);
    for (RoofStream& s : lines) s.bytes_per_slice = s.bytes_per_slice / 64 * 64;
    return seconds_of([&] { run_roof(isa_, shape, lines); });
  }

  RoofShape fastest_roof(const Operation& operation) {
    RoofShape best = RoofShape::kPlain;
    double best_seconds = 1e9;
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i <= static_cast<int>(RoofShape::kAheadNonTemporal); ++i) {
        const auto shape = static_cast<RoofShape>(i);
        const double seconds = time_roof(operation, shape);
        if (seconds < best_seconds) best = shape;
        best_seconds = std::min(best_seconds, seconds);
      }
    }
    return best;
  }

  // Read plus written by one call.
  double bytes_moved(const Operation& operation) {
    size_t of_tile = 0;
    for (const RoofStream& s : streams(operation)) {
      of_tile += s.bytes_per_slice * (s.kind == Kind::kUpdate ? 2 : 1);
    }
    return static_cast<double>(of_tile) * kTiles;
  }

 private:
  // The codec's row of an instruction set: tables have one order.
  const Codec& row(Isa isa) const {
    return cpu_codecs(isa)[static_cast<size_t>(parsed_.codec - codecs().data())];
  }
  uint32_t payload_bytes(Stage stage) const {
    return parsed_.codec->payload_bytes(kTileElements, dtype_, stage, parsed_.options);
  }
  size_t gradient_bytes() const { return size_t{kTileElements} * item_bytes(dtype_); }
  float* residual() { return reinterpret_cast<float*>(bytes(residual_)); }
  void restore() { residual_ = residual_before_; }

  static std::vector<Tile> tiles(uint32_t payload_bytes) {
    std::vector<Tile> table;
    for (uint32_t i = 0; i < kTiles; ++i) {
      const uint64_t first = uint64_t{i} * kTileElements;
      table.push_back({i, first, first, kTileElements, i * payload_bytes, 0, 0});
    }
    return table;
  }
  static TileBatch batch(const std::vector<Tile>& tiles, uint32_t num_tiles, ScalarType dtype,
                         const CodecOptions& options) {
    return {.tiles = tiles.data(),
            .num_tiles = num_tiles,
            .dtype = dtype,
            .stage = Stage::kWorker,
            .hold_zero_tiles = true,
            .seed = 0,
            .step = 0,
            .options = &options,
            .status = nullptr};
  }

  // Gaussian numbers of the size of gradients, and residuals a tenth of that. 2^16 of them repeat:
  // drawing them all would take longer than timing.
  void fill() {
    std::mt19937_64 random(1);
    std::normal_distribution<float> gaussian(0.0F, 1e-3F);
    std::vector<float> pool(size_t{1} << 16);
    for (float& x : pool) x = gaussian(random);
    constexpr size_t kElements = size_t{kTiles} * kTileElements;
    for (size_t i = 0; i < kElements; ++i) residual()[i] = pool[3 * i % pool.size()];
    if (dtype_ == ScalarType::kFloat32) {
      gradient_ = residual_;
    } else {  // the codec bf16 rounds to 16 bits, and decodes to either dtype
      const ParsedCodec bf16 = parse_codec("bf16");
      const std::vector<Tile> table = tiles(2 * kTileElements);
      Array rounded = zeros(2 * kElements);
      bf16.codec->encode(batch(table, kTiles, ScalarType::kFloat32, bf16.options), residual(), 1.0F,
                         nullptr, nullptr, bytes(rounded));
      bf16.codec->decode(batch(table, kTiles, dtype_, bf16.options), bytes(rounded),
                         bytes(gradient_), 0.0F, nullptr);
    }
    for (size_t i = 0; i < kElements; ++i) residual()[i] = 0.1F * pool[(5 * i + 1) % pool.size()];
    residual_before_ = residual_;
  }

  void run(const Operation& operation, const Codec& codec, uint32_t num_tiles) {
    TileBatch call = batch(worker_tiles_, num_tiles, dtype_, parsed_.options);
    if (operation.name == "encode" || operation.name == "encode_ef") {
      float* kept = operation.name == "encode" ? nullptr : residual();
      codec.encode(call, bytes(gradient_), 1.0F, nullptr, kept, bytes(sent_));
    } else if (operation.name == "reduce") {
      std::vector<const std::byte*> payloads;
      for (Array& payload : received_) payloads.push_back(bytes(payload));
      codec.reduce(call, payloads.data(), operation.ranks, nullptr, residual(), bytes(reduced_));
    } else {
      call.tiles = owner_tiles_.data();
      call.stage = Stage::kOwner;
      codec.decode(call, bytes(payload_), bytes(decoded_), 0.0F, nullptr);
    }
  }

  // What a call reads and writes.
  std::vector<RoofStream> streams(const Operation& operation) {
    const RoofStream kept{Kind::kUpdate, bytes(residual_), kTileElements * sizeof(float)};
    if (operation.name == "decode") {
      return {{Kind::kRead, bytes(payload_), owner_bytes_},
              {Kind::kWrite, bytes(decoded_), gradient_bytes()}};
    }
    std::vector<RoofStream> all;
    if (operation.name == "reduce") {
      for (uint32_t rank = 0; rank < operation.ranks; ++rank) {
        all.push_back({Kind::kRead, bytes(received_[rank]), worker_bytes_});
      }
    } else {
      all.push_back({Kind::kRead, bytes(gradient_), gradient_bytes()});
    }
    if (operation.name != "encode") all.push_back(kept);
    all.push_back(operation.name == "reduce"
                      ? RoofStream{Kind::kWrite, bytes(reduced_), owner_bytes_}
                      : RoofStream{Kind::kWrite, bytes(sent_), worker_bytes_});
    return all;
  }

  const ParsedCodec parsed_;
  const Isa isa_;
  const ScalarType dtype_;
  uint32_t worker_bytes_ = 0, owner_bytes_ = 0;  // of a tile
  std::vector<Tile> worker_tiles_, owner_tiles_;
  Array gradient_, residual_, residual_before_, sent_, reduced_, payload_, decoded_;
  std::vector<Array> received_;
};

struct Group {
  std::string name, codec;
  Isa isa;
  ScalarType dtype;
};

bool any_wrong = false;

void report(benchmark::State& state, const Group& group, const Operation& operation) {
  static std::string made;  // one at a time: they are large
  static std::unique_ptr<Subject> subject;
  if (made != group.name) {
    subject.reset();
    subject = std::make_unique<Subject>(group.codec, group.isa, group.dtype);
    made = group.name;
  }
  const uint64_t wrong = subject->wrong(operation);
  state.counters["wrong"] = static_cast<double>(wrong);
  if (wrong != 0) {
    any_wrong = true;
    return state.SkipWithError("differs from the scalar kernels");
  }
  const RoofShape shape = subject->fastest_roof(operation);
  std::vector<double> cases, roofs, ratios;
  for (auto _ : state) {
    const double before = subject->time_roof(operation, shape);
    cases.push_back(subject->time(operation));
    state.SetIterationTime(cases.back());
    roofs.push_back(0.5 * (before + subject->time_roof(operation, shape)));
    ratios.push_back(roofs.back() / cases.back());
  }
  const double gigabytes = subject->bytes_moved(operation) / 1e9;
  state.counters["GB/s"] = gigabytes / median(cases);
  state.counters["roof"] = gigabytes / median(roofs);
  state.counters["ratio"] = median(ratios);
  state.counters["ratio_min"] = *std::min_element(ratios.begin(), ratios.end());
  state.counters["ratio_max"] = *std::max_element(ratios.begin(), ratios.end());
}

void add_codec(const std::string& codec) {
  const std::pair<ScalarType, const char*> dtypes[] = {{ScalarType::kFloat32, "float32"},
                                                       {ScalarType::kBFloat16, "bfloat16"},
                                                       {ScalarType::kFloat16, "float16"}};
  for (const Isa isa : available_isas()) {
    for (const auto& [dtype, dtype_name] : dtypes) {
      const std::string name = codec + "/" + std::string(isa_name(isa)) + "/" + dtype_name;
      for (const Operation& operation : kOperations) {
        std::string full = name + "/" + std::string(operation.name);
        if (operation.ranks > 1) full.append("/").append(std::to_string(operation.ranks));
        benchmark::RegisterBenchmark(full.c_str(), report, Group{name, codec, isa, dtype},
                                     operation)
            ->UseManualTime()
            ->Iterations(kRounds)
            ->Unit(benchmark::kMillisecond);
      }
    }
  }
}

int run(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  for (int i = 1; i < argc; ++i) add_codec(parse_codec(argv[i]).canonical);
  if (argc <= 1) {
    for (const Codec& codec : codecs()) add_codec(std::string(codec.name));
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return any_wrong ? 1 : 0;
}

}  // namespace
}  // namespace gradferry

int main(int argc, char** argv) {
  try {
    return gradferry::run(argc, argv);
  } catch (const gradferry::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
