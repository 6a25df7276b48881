// Every codec of the table, or the codec strings given, on every instruction set, against the roof
// of roof_timing.h.
//
//   codec_bench [--benchmark_filter=q4/avx512] [codec ...]
//
// Columns: Time, of one call over all tiles, median; GB/s and roof, bytes read and written per
// second; ratio, roof's time over the case's, median of (roof, case, roof) triples, with minimum
// and maximum; wrong, bytes that differ from the scalar kernels. Exits with 1 if any is wrong.
#include <benchmark/benchmark.h>

#include <cstdio>
#include <map>

#include "gradferry/error.h"
#include "measure/roof_timing.h"

namespace {

using gradferry::CodecTimingOptions;
using gradferry::CodecTimingRow;

bool any_wrong = false;

struct Group {
  std::string name;  // codec/isa/dtype
  CodecTimingOptions options;
};

// All operations of a group are timed together, at the first one that Google Benchmark asks for.
const std::vector<CodecTimingRow>& rows_of(const Group& group) {
  static std::string timed;
  static std::vector<CodecTimingRow> rows;
  if (timed != group.name) {
    rows = gradferry::CodecTimer(group.options).rows();
    timed = group.name;
  }
  return rows;
}

void report(benchmark::State& state, const Group& group, const std::string& operation,
            uint32_t world_size) {
  for (const CodecTimingRow& row : rows_of(group)) {
    if (row.operation != operation || row.world_size != world_size) continue;
    for (auto _ : state) state.SetIterationTime(row.seconds);
    state.counters["GB/s"] = row.gigabytes_per_second;
    state.counters["roof"] = row.roof_gigabytes_per_second;
    state.counters["ratio"] = row.ratios.median;
    state.counters["ratio_min"] = row.ratios.minimum;
    state.counters["ratio_max"] = row.ratios.maximum;
    state.counters["ratio_of_best"] = row.ratio_of_best;
    state.counters["wrong"] = static_cast<double>(row.wrong);
    if (row.wrong != 0) {
      any_wrong = true;
      state.SkipWithError("differs from the scalar kernels");
    }
  }
}

void add(const Group& group, const std::string& operation, uint32_t world_size) {
  std::string name = group.name + "/" + operation;
  if (world_size > 1) name.append("/").append(std::to_string(world_size));
  benchmark::RegisterBenchmark(name.c_str(), report, group, operation, world_size)
      ->UseManualTime()
      ->Iterations(1)
      ->Unit(benchmark::kMillisecond);
}

void add_codec(const std::string& codec) {
  const std::map<gradferry::ScalarType, std::string> dtypes = {
      {gradferry::ScalarType::kFloat32, "float32"},
      {gradferry::ScalarType::kBFloat16, "bfloat16"},
      {gradferry::ScalarType::kFloat16, "float16"}};
  for (const gradferry::Isa isa : gradferry::available_isas()) {
    for (const auto& [dtype, dtype_name] : dtypes) {
      Group group{codec + "/" + std::string(gradferry::isa_name(isa)) + "/" + dtype_name, {}};
      group.options.codec = codec;
      group.options.isa = isa;
      group.options.dtype = dtype;
      for (const char* operation : {"encode", "encode_ef", "decode"}) add(group, operation, 1);
      for (const uint32_t w : group.options.world_sizes) add(group, "reduce", w);
    }
  }
}

// The codec strings left in argv, else every codec of the table.
void add_codecs(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    add_codec(gradferry::parse_codec(argv[i]).canonical);
  }
  if (argc > 1) return;
  for (const gradferry::Codec& codec : gradferry::codecs()) {
    add_codec(std::string(codec.name));
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  try {
    add_codecs(argc, argv);
  } catch (const gradferry::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  benchmark::AddCustomContext(
      "memcpy_GB/s", std::to_string(gradferry::memcpy_gigabytes_per_second(size_t{1} << 26, 5)));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return any_wrong ? 1 : 0;
}
