#include "measure/roof_timing.h"

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <thread>

#include "gradferry/error.h"
#include "measure/core_rate.h"
#include "measure/pass_times.h"
#include "measure/roof.h"

namespace gradferry {

// One per instruction set, from roof_loops.cpp.
#define GRADFERRY_DECLARE_ROOF(isa)                                                   \
  namespace isa {                                                                     \
  void roof(RoofShape shape, std::span<const RoofStream> streams, size_t num_slices); \
  }
GRADFERRY_DECLARE_ROOF(scalar)
#if defined(GRADFERRY_X86_KERNELS)
GRADFERRY_DECLARE_ROOF(avx2)
GRADFERRY_DECLARE_ROOF(avx512)
#endif

void run_roof(Isa isa, RoofShape shape, std::span<const RoofStream> streams, size_t num_slices) {
  switch (isa) {
#if defined(GRADFERRY_X86_KERNELS)
    case Isa::kAvx512: return avx512::roof(shape, streams, num_slices);
    case Isa::kAvx2: return avx2::roof(shape, streams, num_slices);
#endif
    default: return scalar::roof(shape, streams, num_slices);
  }
}

namespace {

constexpr int kCoreWindows = 25;  // of the core's rate, before each pass of a case

struct Free {
  void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(4096)); }
};
using Bytes = std::unique_ptr<std::byte[], Free>;

// Touched, so that the pages exist. Room for prefetching and misalignment at the end.
Bytes allocate(size_t num_bytes) {
  Bytes bytes(new (std::align_val_t(4096)) std::byte[num_bytes + 4096]);
  std::memset(bytes.get(), 0, num_bytes + 4096);
  return bytes;
}

}  // namespace

class CodecTimer::Passes {
 public:
  explicit Passes(const CodecTimingOptions& options)
      : options_(options), parsed_(parse_codec(options.codec)) {
    for (const Codec& codec : cpu_codecs(options.isa)) {
      if (codec.name == parsed_.codec->name) codec_ = &codec;
    }
    for (const Codec& codec : cpu_codecs(Isa::kScalar)) {
      if (codec.name == parsed_.codec->name) oracle_ = &codec;
    }
    GRADFERRY_EXPECTS(options.dtype != ScalarType::kFloat64, kConfig,
                      "codec timing takes float32, bfloat16 or float16, not float64");
    GRADFERRY_EXPECTS(options.threads >= 1 && options.rounds >= 1, kConfig,
                      "threads and rounds are at least 1, not " + std::to_string(options.threads) +
                          " and " + std::to_string(options.rounds));
    num_tiles_ = options.num_elements / kTileElements;
    // A shorter pass has no section per thread to time; a longer one overflows payload offsets.
    const size_t fewest = kSectionTiles * options.threads, most = size_t{1} << 16;
    GRADFERRY_EXPECTS(num_tiles_ >= fewest && num_tiles_ <= most, kConfig,
                      "codec timing with " + std::to_string(options.threads) + " threads takes " +
                          std::to_string(fewest * kTileElements) + " to " +
                          std::to_string(most * kTileElements) + " elements, not " +
                          std::to_string(options.num_elements));
    num_elements_ = num_tiles_ * kTileElements;
    worker_bytes_ =
        codec_->payload_bytes(kTileElements, options.dtype, Stage::kWorker, parsed_.options);
    owner_bytes_ =
        codec_->payload_bytes(kTileElements, options.dtype, Stage::kOwner, parsed_.options);
    for (uint32_t i = 0; i < num_tiles_; ++i) {
      const uint64_t first = uint64_t{i} * kTileElements;
      tiles_.push_back({i, first, first, kTileElements, i * worker_bytes_, i * owner_bytes_, 0});
      gather_tiles_.push_back(
          {i, first, first, kTileElements, i * owner_bytes_, i * owner_bytes_, 0});
    }
    status_.resize(num_tiles_);
    item_ = item_bytes(options.dtype);
    gradient_storage_ = allocate(num_elements_ * item_ + item_);
    gradient_ = gradient_storage_.get() + (options.misaligned ? item_ : 0);
    residual_ = allocate(num_elements_ * sizeof(float));
    payload_ = allocate(num_tiles_ * worker_bytes_);
    reduced_ = allocate(num_tiles_ * owner_bytes_);
    fill_inputs();
  }

  std::span<std::byte> gradient() { return {gradient_, num_elements_ * item_}; }

  double encode_pass() {
    return total(timed([&](size_t first, size_t count) { encode_ef(first, count); }));
  }
  double decode_pass() {
    return total(timed([&](size_t first, size_t count) {
      codec_->decode(batch(tiles_, Stage::kWorker, first, count), payload_.get(), gradient_, 0.0f,
                     nullptr);
    }));
  }

  std::vector<CodecTimingRow> rows() {
    using Kind = RoofStream::Kind;
    const uint64_t wrong = validate();
    nmse_ = measure_nmse();
    const RoofStream gradient_in{Kind::kRead, gradient_storage_.get(), kTileElements * item_};
    const RoofStream gradient_out{Kind::kWrite, gradient_storage_.get(), kTileElements * item_};
    const RoofStream residual{Kind::kUpdate, residual_.get(), kTileElements * sizeof(float)};
    const RoofStream sent{Kind::kWrite, payload_.get(), worker_bytes_ / 64 * 64};
    const RoofStream received{Kind::kRead, reduced_.get(), owner_bytes_ / 64 * 64};
    std::vector<CodecTimingRow> rows;
    rows.push_back(time("encode", 1, {gradient_in, sent}, wrong, [&](size_t first, size_t count) {
      codec_->encode(batch(tiles_, Stage::kWorker, first, count), gradient_, 1.0f, nullptr, nullptr,
                     payload_.get());
    }));
    rows.push_back(time("encode_ef", 1, {gradient_in, residual, sent}, wrong,
                        [&](size_t first, size_t count) { encode_ef(first, count); }));
    for (const uint32_t world_size : options_.world_sizes) {
      rows.push_back(time_reduce(world_size, residual, wrong));
    }
    // Last: it overwrites the gradient.
    rows.push_back(
        time("decode", 1, {received, gradient_out}, wrong, [&](size_t first, size_t count) {
          codec_->decode(batch(gather_tiles_, Stage::kOwner, first, count), reduced_.get(),
                         gradient_, 0.0f, nullptr);
        }));
    return rows;
  }

 private:
  float* residuals() { return reinterpret_cast<float*>(residual_.get()); }

  void encode_ef(size_t first, size_t count) {
    codec_->encode(batch(tiles_, Stage::kWorker, first, count), gradient_, 1.0f, nullptr,
                   residuals(), payload_.get());
  }

  TileBatch batch(const std::vector<Tile>& tiles, Stage stage, size_t first, size_t count) {
    TileBatch result = {};
    result.tiles = tiles.data() + first;
    result.num_tiles = static_cast<uint32_t>(count);
    result.dtype = options_.dtype;
    result.stage = stage;
    result.hold_zero_tiles = true;
    result.options = &parsed_.options;
    result.status = status_.data() + first;
    return result;
  }

  // Gaussian numbers of the size of gradients, and residuals a tenth of that. 2^16 of them repeat
  // at an odd stride: drawing them all would take longer than timing.
  void fill_inputs() {
    std::mt19937_64 random(1);
    std::normal_distribution<float> gaussian(0.0f, 1e-3f);
    std::vector<float>& pool = gaussian_;
    pool.resize(size_t{1} << 16);
    for (float& x : pool) x = gaussian(random);
    std::vector<float> tile(kTileElements);
    const ParsedCodec bf16 = parse_codec("bf16");
    for (size_t i = 0; i < num_tiles_; ++i) {
      for (uint32_t j = 0; j < kTileElements; ++j) tile[j] = pool[(i * 4097 + j * 3) % pool.size()];
      float* r = residuals() + i * kTileElements;
      for (uint32_t j = 0; j < kTileElements; ++j)
        r[j] = 0.1f * pool[(i * 8191 + j * 5) % pool.size()];
      std::byte* g = gradient_ + i * kTileElements * item_;
      if (options_.dtype == ScalarType::kFloat32) {
        std::memcpy(g, tile.data(), kTileElements * sizeof(float));
        continue;
      }
      // The bf16 codec makes a gradient of 16 bits: encode from fp32, decode to the dtype.
      const Tile whole{0, 0, 0, kTileElements, 0, 0, 0};
      alignas(16) std::byte cast[2 * kTileElements];
      TileBatch one = batch({whole}, Stage::kWorker, 0, 1);
      one.tiles = &whole;
      one.options = &bf16.options;
      one.dtype = ScalarType::kFloat32;
      bf16.codec->encode(one, tile.data(), 1.0f, nullptr, nullptr, cast);
      one.dtype = options_.dtype;
      bf16.codec->decode(one, cast, g, 0.0f, nullptr);
    }
  }

  // Bytes that differ from the scalar kernels over the first tiles; leaves valid payloads behind.
  uint64_t validate() {
    const size_t checked = std::min<size_t>(num_tiles_, 64);
    const size_t in_bytes = checked * worker_bytes_, out_bytes = checked * owner_bytes_;
    std::vector<std::byte> expected(in_bytes + out_bytes);
    std::vector<float> saved(residuals(), residuals() + checked * kTileElements);
    const TileBatch few = batch(tiles_, Stage::kWorker, 0, checked);
    const TileBatch all = batch(tiles_, Stage::kWorker, 0, num_tiles_);
    oracle_->encode(few, gradient_, 1.0f, nullptr, saved.data(), expected.data());
    codec_->encode(all, gradient_, 1.0f, nullptr, residuals(), payload_.get());
    uint64_t wrong = differences(expected.data(), payload_.get(), in_bytes);
    wrong += differences(reinterpret_cast<std::byte*>(saved.data()), residual_.get(),
                         saved.size() * sizeof(float));
    const std::byte* payloads[2] = {payload_.get(), payload_.get()};
    oracle_->reduce(few, payloads, 2, nullptr, saved.data(), expected.data());
    codec_->reduce(all, payloads, 2, nullptr, residuals(), reduced_.get());
    wrong += differences(expected.data(), reduced_.get(), out_bytes);
    std::vector<std::byte> decoded(checked * kTileElements * item_), oracles(decoded.size());
    const TileBatch gathered = batch(gather_tiles_, Stage::kOwner, 0, checked);
    oracle_->decode(gathered, reduced_.get(), oracles.data(), 0.0f, nullptr);
    codec_->decode(gathered, reduced_.get(), decoded.data(), 0.0f, nullptr);
    return wrong + differences(oracles.data(), decoded.data(), decoded.size());
  }

  double measure_nmse() {
    const size_t num_tiles = gaussian_.size() / kTileElements;
    std::vector<std::byte> payload(num_tiles * worker_bytes_ * 2);  // fp32 where dtype has 16 bits
    std::vector<float> decoded(gaussian_.size());
    std::vector<Tile> tiles(tiles_.begin(), tiles_.begin() + static_cast<ptrdiff_t>(num_tiles));
    for (Tile& tile : tiles) {
      tile.payload_offset =
          static_cast<uint32_t>(tile.id * codec_->payload_bytes(kTileElements, ScalarType::kFloat32,
                                                                Stage::kWorker, parsed_.options));
    }
    TileBatch all = batch(tiles, Stage::kWorker, 0, num_tiles);
    all.dtype = ScalarType::kFloat32;
    codec_->encode(all, gaussian_.data(), 1.0f, nullptr, nullptr, payload.data());
    codec_->decode(all, payload.data(), decoded.data(), 0.0f, nullptr);
    double error = 0, power = 0;
    for (size_t i = 0; i < decoded.size(); ++i) {
      const double x = gaussian_[i], difference = x - decoded[i];
      error += difference * difference;
      power += x * x;
    }
    return error / power;
  }

  static uint64_t differences(const std::byte* a, const std::byte* b, size_t num_bytes) {
    uint64_t count = 0;
    for (size_t i = 0; i < num_bytes; ++i) count += a[i] != b[i] ? 1 : 0;
    return count;
  }

  CodecTimingRow time_reduce(uint32_t world_size, const RoofStream& residual, uint64_t wrong) {
    using Kind = RoofStream::Kind;
    std::vector<Bytes> copies;
    std::vector<const std::byte*> payloads;
    std::vector<RoofStream> streams;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      copies.push_back(allocate(num_tiles_ * worker_bytes_));
      std::memcpy(copies.back().get(), payload_.get(), num_tiles_ * worker_bytes_);
      payloads.push_back(copies.back().get());
      streams.push_back({Kind::kRead, copies.back().get(), worker_bytes_ / 64 * 64});
    }
    streams.push_back(residual);
    streams.push_back({Kind::kWrite, reduced_.get(), owner_bytes_ / 64 * 64});
    return time("reduce", world_size, streams, wrong, [&](size_t first, size_t count) {
      codec_->reduce(batch(tiles_, Stage::kWorker, first, count), payloads.data(), world_size,
                     nullptr, residuals(), reduced_.get());
    });
  }

  Pass timed(const Work& work) const {
    Pass pass(options_.threads);
    std::barrier start(options_.threads);
    const auto walk = [&](uint32_t thread) {
      const size_t end = num_tiles_ * (thread + 1) / options_.threads;
      start.arrive_and_wait();
      for (size_t first = num_tiles_ * thread / options_.threads; first < end;) {
        const size_t count = std::min(kSectionTiles, end - first);
        pass[thread].push_back(seconds_of([&] { work(first, count); }));
        first += count;
      }
    };
    std::vector<std::thread> others;
    for (uint32_t thread = 1; thread < options_.threads; ++thread)
      others.emplace_back(walk, thread);
    walk(0);
    for (std::thread& thread : others) thread.join();
    return pass;
  }

  Pass timed_roof(RoofShape shape, const std::vector<RoofStream>& streams) const {
    return timed([&](size_t first, size_t count) {
      std::vector<RoofStream> section = streams;
      for (RoofStream& s : section) s.data += first * s.bytes_per_slice;
      run_roof(options_.isa, shape, section, count);
    });
  }

  RoofShape fastest_roof(const std::vector<RoofStream>& streams) const {
    RoofShape best = RoofShape::kPhased;
    double best_seconds = INFINITY;
    for (const RoofShape shape : kRoofShapes) {
      std::vector<Pass> passes;
      for (int round = 0; round < 3; ++round) passes.push_back(timed_roof(shape, streams));
      const double seconds = typical_seconds(passes, minimum);
      if (seconds < best_seconds) {
        best_seconds = seconds;
        best = shape;
      }
    }
    return best;
  }

  // The roof scribbles over residuals and outputs: residuals are put back before each case, and the
  // case runs once more at the end to leave its outputs behind.
  CodecTimingRow time(std::string operation, uint32_t world_size, std::vector<RoofStream> streams,
                      uint64_t wrong, const Work& work) {
    CodecTimingRow row{};
    row.operation = std::move(operation);
    row.world_size = world_size;
    row.num_elements = num_elements_;
    row.nmse = nmse_;
    row.bits_per_element = 8.0 * (row.operation == "decode" ? owner_bytes_ : worker_bytes_) /
                           static_cast<double>(kTileElements);
    row.wrong = wrong;
    if (wrong != 0) return row;
    double bytes = 0;
    std::vector<Bytes> saved;
    for (const RoofStream& s : streams) {
      bytes +=
          static_cast<double>(s.bytes_per_slice) * (s.kind == RoofStream::Kind::kUpdate ? 2 : 1);
      saved.push_back(s.kind == RoofStream::Kind::kUpdate ? allocate(num_tiles_ * s.bytes_per_slice)
                                                          : nullptr);
      if (saved.back()) std::memcpy(saved.back().get(), s.data, num_tiles_ * s.bytes_per_slice);
    }
    bytes *= static_cast<double>(num_tiles_);
    const auto restore = [&] {
      for (size_t i = 0; i < streams.size(); ++i) {
        if (!saved[i]) continue;
        std::memcpy(streams[i].data, saved[i].get(), num_tiles_ * streams[i].bytes_per_slice);
      }
    };
    const RoofShape shape = fastest_roof(streams);
    std::vector<Pass> cases, roofs;
    std::vector<double> core_rates;
    for (int round = 0; round < options_.rounds; ++round) {
      roofs.push_back(timed_roof(shape, streams));
      restore();
      for (int i = 0; i < kCoreWindows; ++i) core_rates.push_back(multiply_adds_per_second());
      cases.push_back(timed(work));
      roofs.push_back(timed_roof(shape, streams));
    }
    restore();
    work(0, num_tiles_);
    const double roof_seconds = typical_seconds(roofs, median);
    row.bytes_per_element = bytes / static_cast<double>(num_elements_);
    row.seconds = typical_seconds(cases, median);
    row.gigabytes_per_second = bytes / row.seconds / 1e9;
    row.roof_gigabytes_per_second = bytes / roof_seconds / 1e9;
    row.ratios = ratios_of_rounds(roofs, cases);
    row.core_rate = median(core_rates);
    row.best_core_rate = *std::max_element(core_rates.begin(), core_rates.end());
    row.ratio_of_best = typical_seconds(roofs, minimum) / typical_seconds(cases, minimum);
    return row;
  }

  CodecTimingOptions options_;
  ParsedCodec parsed_;
  const Codec* codec_ = nullptr;
  const Codec* oracle_ = nullptr;
  size_t num_tiles_, num_elements_;
  uint32_t worker_bytes_, owner_bytes_, item_;
  std::vector<Tile> tiles_, gather_tiles_;
  std::vector<TileStatus> status_;
  Bytes gradient_storage_, residual_, payload_, reduced_;
  std::byte* gradient_;
  std::vector<float> gaussian_;
  double nmse_ = 0;
};

CodecTimer::CodecTimer(const CodecTimingOptions& options)
    : passes_(std::make_unique<Passes>(options)) {}
CodecTimer::~CodecTimer() = default;
std::vector<CodecTimingRow> CodecTimer::rows() { return passes_->rows(); }
double CodecTimer::encode_pass() { return passes_->encode_pass(); }
double CodecTimer::decode_pass() { return passes_->decode_pass(); }
std::span<std::byte> CodecTimer::gradient() { return passes_->gradient(); }

double memcpy_gigabytes_per_second(size_t num_bytes, int rounds) {
  const Bytes from = allocate(num_bytes), to = allocate(num_bytes);
  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) {
    seconds.push_back(seconds_of([&] { std::memcpy(to.get(), from.get(), num_bytes); }));
  }
  return 2.0 * static_cast<double>(num_bytes) / median(seconds) / 1e9;
}

}  // namespace gradferry
