#include "tests/kernels/host_library.h"

#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "tests/kernels/numbers.h"

namespace gradferry::testing {
namespace {

// --- messages ------------------------------------------------------------------------------------

Envelope with_phase(Envelope envelope, Phase phase) {
  envelope.phase = phase;
  return envelope;
}

void write_header(std::byte* message, const MessageHeader& header) {
  std::memcpy(message, &header, sizeof(header));
}

// Keeps the first fault, unless that is the echo of another rank's.
void note(Findings& findings, const Envelope& envelope, uint32_t rank,
          const HeaderMismatch& mismatch) {
  const auto kept = static_cast<WireStatus>(findings.status);
  const bool is_echo = kept == WireStatus::kPeerTrouble && mismatch.status != kept;
  if (kept != WireStatus::kOk && !is_echo) return;
  findings = {.status = static_cast<uint32_t>(mismatch.status),
              .phase = static_cast<uint32_t>(envelope.phase),
              .rank = rank,
              .reserved = findings.reserved,
              .step = envelope.step,
              .chunk = envelope.chunk,
              .expected = mismatch.expected,
              .received = mismatch.received,
              .nonfinite_tile = findings.nonfinite_tile};
}

HeaderMismatch judge(const std::byte* message, Envelope envelope, uint32_t rank,
                     uint32_t payload_bytes, uint64_t checksum) {
  envelope.rank = rank;
  HeaderWords received;
  std::memcpy(&received, message, sizeof(received));
  return first_mismatch(make_header(envelope, payload_bytes, checksum), received);
}

// Fills in the verdicts, by the checksum of every message.
void judge_all(const ReceivedMessages& received, const Envelope& own,
               const std::vector<uint64_t>& checksums, Findings& findings) {
  for (uint32_t m = 0; m < received.num_messages; ++m) {
    const Message& message = received.messages[m];
    const Envelope envelope = with_phase(own, message.phase);
    const HeaderMismatch found = judge(received.buffer + message.offset, envelope, message.rank,
                                       message.payload_bytes, checksums[m]);
    received.verdicts[m] = static_cast<uint32_t>(found.status);
    if (found.status != WireStatus::kOk) note(findings, envelope, message.rank, found);
  }
}

// --- chunks --------------------------------------------------------------------------------------

// One tile of a chunk, as a codec takes it.
struct OneTile {
  OneTile(const ChunkBatch& chunk, const ChunkTile& entry, Stage stage)
      : tile(entry.tile),
        used(chunk.codecs[entry.codec]),
        codec(codecs()[used.row]),
        batch{&tile,
              1,
              chunk.dtype,
              stage,
              chunk.hold_zero_tiles,
              chunk.seed,
              chunk.envelope.step,
              &used.options,
              &status} {}
  OneTile(const OneTile&) = delete;
  OneTile& operator=(const OneTile&) = delete;

  uint32_t payload_bytes() const {
    return codec.payload_bytes(tile.num_elements, batch.dtype, batch.stage, used.options);
  }

  Tile tile;
  const ChunkCodec& used;
  const Codec& codec;
  TileStatus status{};
  TileBatch batch;
};

std::span<const ChunkTile> tiles_of(const ChunkBatch& chunk) {
  return {chunk.tiles, chunk.num_tiles};
}
float* residual_of(const ChunkTile& entry, float* residual) {
  return entry.has_residual == 0 ? nullptr : residual;
}

void encode(const EncodeChunkCall& call) {
  if (call.chunk.num_tiles == 0) return;
  std::vector<uint64_t> checksums(call.num_messages);
  for (const ChunkTile& entry : tiles_of(call.chunk)) {
    OneTile one(call.chunk, entry, Stage::kWorker);
    one.codec.encode(one.batch, call.gradient, one.used.alpha, call.gain,
                     residual_of(entry, call.residual), call.out);
    if (call.num_messages == 0) continue;
    checksums[entry.message] +=
        word_sum(call.out + one.tile.payload_offset, one.payload_bytes(), one.tile.message_offset);
  }
  for (uint32_t m = 0; m < call.num_messages; ++m) {
    const Message& message = call.messages[m];
    write_header(call.out + message.offset,
                 make_header(call.chunk.envelope, message.payload_bytes, checksums[m]));
  }
}

// The payloads of all ranks, and their checksums so far.
struct Payloads {
  explicit Payloads(const ReceivedMessages& received) : checksums(received.num_messages) {
    for (const Message& message : std::span(received.messages, received.num_messages)) {
      by_rank.push_back(received.buffer + message.offset + kHeaderBytes);
    }
  }
  void add(const OneTile& one) {
    for (size_t m = 0; m < by_rank.size(); ++m) {
      checksums[m] += word_sum(by_rank[m] + one.tile.payload_offset, one.payload_bytes(),
                               one.tile.payload_offset);
    }
  }
  std::vector<const std::byte*> by_rank;
  std::vector<uint64_t> checksums;
};

void note_corrupt(Findings& findings, const Envelope& own, uint64_t num_tiles) {
  if (num_tiles == 0) return;
  note(findings, with_phase(own, Phase::kScatter), own.rank,
       {WireStatus::kCorruptPayload, 0, num_tiles});
}

void reduce(const ReduceChunkCall& call) {
  const ReceivedMessages& received = call.received;
  Payloads payloads(received);
  uint64_t sent = 0, corrupt = 0;
  for (const ChunkTile& entry : tiles_of(call.chunk)) {
    OneTile one(call.chunk, entry, Stage::kWorker);
    const Tile& tile = one.tile;
    payloads.add(one);
    one.batch.stage = Stage::kOwner;
    std::byte* out = call.out + kHeaderBytes;
    one.codec.reduce(one.batch, payloads.by_rank.data(), received.num_messages, call.gain,
                     residual_of(entry, call.residual), out);
    sent += word_sum(out + tile.output_offset, one.payload_bytes(), tile.message_offset);
    corrupt += (one.status.flags & kTileCorrupt) != 0 ? 1 : 0;
  }

  const Envelope& own = call.chunk.envelope;
  if (call.forward != nullptr) {
    const std::vector<uint64_t> none(call.from_siblings.num_messages);
    judge_all(call.from_siblings, own, none, *call.findings);
  }
  judge_all(received, own, payloads.checksums, *call.findings);
  note_corrupt(*call.findings, own, corrupt);
  const uint32_t status = call.findings->status;
  if (call.forward != nullptr) {
    write_header(call.forward, make_header(with_phase(own, Phase::kForward),
                                           call.forward_payload_bytes, 0, status));
  }
  if (call.out == nullptr) return;
  write_header(call.out,
               make_header(with_phase(own, Phase::kGather), call.payload_bytes, sent, status));
}

// Returns the tile's flags.
uint32_t decode_tile(const DecodeChunkCall& call, const ChunkTile& entry) {
  OneTile one(call.chunk, entry, Stage::kOwner);
  float* residual = residual_of(entry, call.residual);
  if (residual != nullptr) {
    one.codec.decode(one.batch, call.received.buffer, nullptr, 0.0f, nullptr);
    Tile sent = one.tile;
    sent.payload_offset = one.tile.output_offset;
    sent.output_offset = one.tile.payload_offset;
    const void* encoded = call.gradient;
    if (entry.summed_offset != 0) {
      encoded = call.sent + entry.summed_offset;
      sent.gradient_offset = 0;
    }
    TileBatch undone = one.batch;
    undone.tiles = &sent;
    undone.stage = Stage::kWorker;
    one.codec.undo(undone, call.sent, call.received.buffer, encoded, one.used.alpha, residual);
  }
  one.codec.decode(one.batch, call.received.buffer, call.gradient, one.used.beta, residual);
  return one.status.flags;
}

void fill_nan(void* gradient, const Tile& tile, ScalarType dtype) {
  const uint32_t item = item_bytes(dtype);
  auto* first = static_cast<std::byte*>(gradient) + tile.gradient_offset * item;
  for (uint32_t i = 0; i < tile.num_elements; ++i) {
    write_number(dtype, double(NAN), first + uint64_t{i} * item);
  }
}

void decode(const DecodeChunkCall& call) {
  const ReceivedMessages& received = call.received;
  const ChunkBatch& chunk = call.chunk;
  if (chunk.num_tiles == 0) return;
  std::vector<uint64_t> checksums(received.num_messages);
  for (uint32_t i = 0; i < chunk.num_tiles; ++i) {
    const ChunkTile& entry = chunk.tiles[i];
    if (received.num_messages != 0) {
      const OneTile one(chunk, entry, Stage::kOwner);
      checksums[entry.message] += word_sum(received.buffer + one.tile.payload_offset,
                                           one.payload_bytes(), one.tile.message_offset);
    }
    call.flags[i] = decode_tile(call, entry);
  }

  judge_all(received, chunk.envelope, checksums, *call.findings);
  bool has_corrupt = false;
  for (uint32_t i = 0; i < chunk.num_tiles; ++i) {
    const ChunkTile& entry = chunk.tiles[i];
    const bool refused = received.num_messages != 0 && received.verdicts[entry.message] != 0;
    if (!refused && (call.flags[i] & kTileCorrupt) != 0 && !has_corrupt) {
      has_corrupt = true;
      const uint32_t sender =
          received.num_messages == 0 ? chunk.envelope.rank : received.messages[entry.message].rank;
      note(*call.findings, with_phase(chunk.envelope, Phase::kGather), sender,
           {WireStatus::kCorruptPayload, 0, 1});
    }
    if (refused) fill_nan(call.gradient, entry.tile, chunk.dtype);
    if (!refused && (call.flags[i] & kTileNonFinite) == 0) continue;
    if (call.findings->nonfinite_tile == 0) call.findings->nonfinite_tile = 1 + entry.tile.id;
  }
}

void accumulate(const AccumulateChunkCall& call) {
  const ReceivedMessages& received = call.received;
  const ChunkBatch& chunk = call.chunk;
  Payloads payloads(received);
  uint64_t corrupt = 0;
  for (uint32_t i = 0; i < chunk.num_tiles; ++i) {
    const OneTile one(chunk, chunk.tiles[i], Stage::kWorker);
    payloads.add(one);
    one.codec.accumulate(one.batch, payloads.by_rank.data(), received.num_messages,
                         received.num_messages, call.gradient);
    call.flags[i] = one.status.flags;
    corrupt += (one.status.flags & kTileCorrupt) != 0 ? 1 : 0;
  }

  judge_all(received, chunk.envelope, payloads.checksums, *call.findings);
  note_corrupt(*call.findings, chunk.envelope, corrupt);
  bool refused = false;
  for (uint32_t m = 0; m < received.num_messages; ++m) refused |= received.verdicts[m] != 0;
  for (uint32_t i = 0; i < chunk.num_tiles; ++i) {
    const Tile& tile = chunk.tiles[i].tile;
    if (refused) fill_nan(call.gradient, tile, chunk.dtype);
    if (!refused && (call.flags[i] & kTileNonFinite) == 0) continue;
    if (call.findings->nonfinite_tile == 0) call.findings->nonfinite_tile = 1 + tile.id;
    if (!call.nonfinite_is_fault) continue;
    note(*call.findings, with_phase(chunk.envelope, Phase::kScatter), chunk.envelope.rank,
         {WireStatus::kNonFiniteMean, 0, tile.id});
  }
}

// --- siblings ------------------------------------------------------------------------------------

void pack(const PackCall& call) {
  for (const Message& message : std::span(call.messages, call.num_messages)) {
    write_header(call.out + message.offset, make_header(call.envelope, message.payload_bytes, 0));
  }
  const size_t item = item_bytes(call.dtype);
  for (const ChunkPiece& piece : std::span(call.pieces, call.num_pieces)) {
    std::memcpy(call.out + call.messages[piece.message].offset + kHeaderBytes + piece.offset * item,
                static_cast<const std::byte*>(call.gradient) + piece.gradient_offset * item,
                piece.num_elements * item);
  }
}

// Number: what is added in, float or double.
template <typename Number>
void sum_piece(const SumCall& call, const ChunkPiece& piece, bool refused) {
  const size_t item = item_bytes(call.dtype);
  for (uint64_t i = 0; i < piece.num_elements; ++i) {
    Number total = 0;
    for (uint32_t m = 0; m < call.num_messages; ++m) {
      const Message& message = call.messages[m];
      const std::byte* x =
          message.rank == call.envelope.rank
              ? static_cast<const std::byte*>(call.gradient) + (piece.gradient_offset + i) * item
              : call.received + message.offset + kHeaderBytes + (piece.offset + i) * item;
      const auto value = static_cast<Number>(read_number(call.dtype, x));
      total = m == 0 ? value : total + value;
    }
    write_number(call.dtype, refused ? double(NAN) : total * static_cast<Number>(call.scale),
                 static_cast<std::byte*>(call.sum) + (piece.offset + i) * item);
  }
}

void sum(const SumCall& call) {
  bool refused = false;
  for (const Message& message : std::span(call.messages, call.num_messages)) {
    if (message.rank == call.envelope.rank) continue;
    refused |=
        judge(call.received + message.offset, call.envelope, message.rank, message.payload_bytes, 0)
            .status != WireStatus::kOk;
  }
  for (const ChunkPiece& piece : std::span(call.pieces, call.num_pieces)) {
    if (call.dtype == ScalarType::kFloat64) {
      sum_piece<double>(call, piece, refused);
    } else {
      sum_piece<float>(call, piece, refused);
    }
  }
}

// --- steps ---------------------------------------------------------------------------------------

void rescale(const RescaleCall& call) {
  const float scale = call.loss_scale == nullptr ? 1.0f : *call.loss_scale;
  *call.gain = *call.residual_scale == 0.0f ? 1.0f : scale / *call.residual_scale;
  *call.residual_scale = scale;
}

void scale(const ScaleCall& call) {
  for (float& value : std::span(call.values, call.num_elements)) {
    const float scaled = *call.factor * value;
    if (std::isfinite(scaled)) value = scaled;
  }
}

void commit(const CommitCall& call) {
  const float loss_scale = call.loss_scale == nullptr ? 0.0f : *call.loss_scale;
  CommitRecord record = make_commit(call.rank, call.step, call.bucket, *call.findings, loss_scale);
  record.checksum =
      word_sum(reinterpret_cast<const std::byte*>(&record), offsetof(CommitRecord, checksum));
  *call.record = record;
  *call.nonfinite_tile = call.findings->nonfinite_tile;
  call.findings->nonfinite_tile = 0;
}

}  // namespace

const DeviceLibrary& host_library() {
  static const DeviceLibrary library{kDeviceLibraryVersion,
                                     {&encode, &reduce, &decode, &accumulate},
                                     {&pack, &sum},
                                     {&rescale, &scale, &commit},
                                     [](Stream /*stream*/) { return false; }};
  return library;
}

}  // namespace gradferry::testing
