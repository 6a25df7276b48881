// The codec contract: functions between a tile's numbers and a fixed number of bytes.
//
// A codec does not depend on transport, torch or buckets. Every function processes a table of
// tiles, is stateless, runs on the caller's thread, allocates nothing and never throws on data.
// Payload sizes follow from num_elements, stage and options alone: never from data.
// The byte format and the arithmetic of each codec are defined in docs/reference/wire_format.md;
// every instruction set and device produces the same bytes and the same numbers, to the bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace gradferry {

inline constexpr uint32_t kTileElements = 4096;    // most elements in one tile
inline constexpr uint32_t kPayloadAlignment = 16;  // payloads start at, and are padded to, this

enum class ScalarType : uint8_t { kFloat32, kBFloat16, kFloat16, kFloat64 };

constexpr uint32_t item_bytes(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat32: return 4;
    case ScalarType::kFloat64: return 8;
    default: return 2;
  }
}

// kWorker: what a rank sends to the owner. kOwner: what the owner sends to every rank.
enum class Stage : uint8_t { kWorker, kOwner };

// Up to kTileElements consecutive elements of one parameter.
struct Tile {
  uint64_t id;               // number of the tile in the model; keys random numbers
  uint64_t gradient_offset;  // elements from the start of `gradient`
  uint64_t residual_offset;  // elements from the start of the residual passed to the call
  uint32_t num_elements;     // 1 .. kTileElements
  uint32_t payload_offset;   // bytes from the start of the payload the call reads or writes
  uint32_t output_offset;    // reduce: bytes from the start of `out`; undo: of `in`
  uint32_t message_offset;   // encode, reduce: bytes before the payload written, in its message
};

// Result of a call, one entry per tile of the batch.
struct TileStatus {
  uint64_t checksum;  // encode, reduce: word_sum() of the payload written, at message_offset
  uint32_t flags;     // kTile* bits
};
inline constexpr uint32_t kTileNonFinite = 1;  // the decoded tile holds a NaN or an infinity
inline constexpr uint32_t kTileCorrupt = 2;    // the payload breaks the format; output is NaN there

// Options of one codec, parsed: trivially copyable, so that it can travel to a device.
struct CodecOptions {
  alignas(8) std::byte storage[32] = {};

  template <typename T>
  static CodecOptions from(const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(storage));
    CodecOptions result;
    std::memcpy(result.storage, &value, sizeof(T));
    return result;
  }
  template <typename T>
  T as() const {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(storage));
    T value;
    std::memcpy(&value, storage, sizeof(T));
    return value;
  }
};

struct TileBatch {
  const Tile* tiles;
  uint32_t num_tiles;
  ScalarType dtype;  // of the gradient
  Stage stage;       // format of the payload that encode writes or decode and undo read
  // If true, encode writes the zero payload for a tile whose gradient is all zero, and keeps its
  // residual (see encode); reduce keeps the owner residual of a tile if every payload is the zero
  // payload. False in momentum mode.
  bool hold_zero_tiles;
  uint64_t seed;
  uint64_t step;
  const CodecOptions* options;
  TileStatus* status;  // num_tiles entries, or null
};

// One option of a codec string such as "topk:ratio=0.01". `choices` empty: a number in
// [minimum, maximum]. default_value empty: derived by the codec from its other options.
struct OptionSpec {
  std::string_view name;
  std::string_view default_value;
  std::string_view help;
  double minimum;
  double maximum;
  std::span<const std::string_view> choices;
};

struct Codec {
  std::string_view name;
  std::string_view summary;  // one line for humans: method, and its paper where there is one
  bool lossy;                // false: decode(encode(x)) == x, no residual is kept
  bool supports_float64;
  bool seeded;  // what a payload decodes to depends on the batch's seed and step
  std::span<const OptionSpec> options;

  // Values in the order of `options`, each already checked against its spec (or empty: derive it).
  // Throws Error(kConfig) when they contradict each other.
  CodecOptions (*parse)(std::span<const std::string_view> values);

  // Bytes of a tile's payload, a multiple of kPayloadAlignment. num_elements in 1..kTileElements;
  // dtype of the gradient (only `exact` depends on it).
  uint32_t (*payload_bytes)(uint32_t num_elements, ScalarType dtype, Stage stage,
                            const CodecOptions& options);

  // Share of a tile's elements that a worker's payload carries, in (0, 1]. null: all of them.
  double (*sent_share)(const CodecOptions& options);

  // v = alpha * gradient + gain * residual;  out = C(v);  residual = v - D(out)
  // residual null: v = alpha * gradient, nothing is stored. gain null: 1. A residual is kept where
  // v is not finite (the whole unit), where v - D(out) is not, and in a held zero tile. A kept
  // residual is multiplied by gain, which converts it to the units of this gradient, or unchanged
  // if the product is not finite. `gradient` needs only the alignment of one element; `out` and
  // `residual` are 16-byte aligned and overlap nothing.
  // alpha: in (0, 1]: 1, or 1 - the codec's momentum. Codecs compute with any other float as
  // it is: 0 sends the residual alone; where a large one, an infinity or NaN makes v not finite,
  // that counts as a gradient that is not finite. undo needs the alpha of encode.
  void (*encode)(const TileBatch& batch, const void* gradient, float alpha, const float* gain,
                 float* residual, std::byte* out);

  // gradient = D(in);  residual += beta * D(in)   (residual null or beta 0: not changed)
  // The residual of an element whose gradient is not finite does not change. gradient null: writes
  // only the statuses, which is cheap.
  void (*decode)(const TileBatch& batch, const std::byte* in, void* gradient, float beta,
                 float* residual);

  // v = (sum over ranks in rank order of D(payload)) * (1 / world_size) + gain * owner_residual
  // out = C(v);  owner_residual = v - D(out)
  // Reads Stage::kWorker payloads at payload_offset from payload_by_rank[r] and writes the
  // Stage::kOwner payload at output_offset of `out`. owner_residual is kept where, and as, encode
  // keeps its residual.
  void (*reduce)(const TileBatch& batch, const std::byte* const* payload_by_rank,
                 uint32_t world_size, const float* gain, float* owner_residual, std::byte* out);

  // gradient = (sum over ranks in rank order of D(payload)) * (1 / divisor), rounded once to dtype
  // For an owner that wants the numbers and sends nothing on: what reduce encodes without a
  // residual, unencoded. divisor, at least 1: 1 for the sum, world_size for the mean. Reads
  // Stage::kWorker payloads at payload_offset from payload_by_rank[r]; batch.stage is kWorker, and
  // hold_zero_tiles makes no difference. `gradient` needs only the alignment of one element and
  // overlaps nothing. Statuses hold flags alone, of the result, as decode's do.
  void (*accumulate)(const TileBatch& batch, const std::byte* const* payload_by_rank,
                     uint32_t world_size, uint32_t divisor, void* gradient);

  // residual += D(own_payload) - alpha * gradient   for elements that another rank made non-finite
  // Call it between decode(in, null), which fills batch.status, and decode(in, gradient). It
  // processes only tiles with kTileNonFinite, and in them the elements whose decoded gradient is
  // not finite. `in` holds the Stage::kOwner payloads, own_payload the output of encode. Statuses
  // are read, not written; null: it processes all tiles.
  void (*undo)(const TileBatch& batch, const std::byte* own_payload, const std::byte* in,
               const void* gradient, float alpha, float* residual);
};

// All codecs, in the order of kernels/codec_rows.h, with functions for the CPU; a device has
// kernels for the same codecs (device_library.h). The instruction set is chosen once, at the first
// call: the best one the processor has, or what GRADFERRY_ISA=scalar|avx2|avx512 names (an
// impossible value throws Error(kConfig)).
std::span<const Codec> codecs();

enum class Isa : uint8_t { kScalar, kAvx2, kAvx512 };
std::string_view isa_name(Isa isa);
std::span<const Isa> available_isas();       // supported by build and processor, best last
Isa active_isa();                            // what codecs() uses
std::span<const Codec> cpu_codecs(Isa isa);  // one instruction set; throws Error(kConfig) if absent

// A codec string such as "q4" or "topk:ratio=0.01,values=q4", resolved against the table.
struct ParsedCodec {
  const Codec* codec;
  CodecOptions options;
  std::string canonical;  // every option written out, in table order
};
// Throws Error(kConfig) naming the closest match of a misspelt codec or option.
ParsedCodec parse_codec(std::string_view text);

}  // namespace gradferry
