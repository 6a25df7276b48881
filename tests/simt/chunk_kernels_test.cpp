// The kernels of chunks, run by the emulator or by a GPU: a chunk goes through all ranks, and every
// byte is compared with what the CPU codecs and the law of headers give, tile by tile.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "gradferry/wire.h"
#include "tests/cpp/contract_cases.h"
#include "tests/simt/kernel_codecs.h"

namespace gradferry::testing {
namespace {

constexpr uint64_t kSeed = 7;
constexpr Envelope kEnvelope{.config_hash = 0x1122334455667788,
                             .layout_hash = 0x99aabbccddeeff00,
                             .step = 3,
                             .chunk = uint64_t{1} << 40,
                             .rank = 0,
                             .phase = Phase::kScatter};

struct ChunkSetup {
  std::vector<std::string> codecs = {"exact", "q4"};
  ScalarType dtype = ScalarType::kFloat32;
  std::vector<uint32_t> sizes = {4096, 77, 1030, 4096, 4095, 5, 130};  // codecs take turns
  uint32_t world_size = 3;
  bool hold_zero_tiles = false;
  bool residuals = true;
  float alpha = 1.0f;
  float beta = 0.0f;
  float gain = 1.0f;
  Input input = Input::kGaussian;
  Input input_of_rank_0 = Input::kGaussian;
};

// What one rank has in device memory.
struct Rank {
  Buffer gradient, worker, owner;
  Buffer sent, scattered, message, gathered;
};

// A chunk on all ranks; every third tile has no residual.
class ChunkRun {
 public:
  explicit ChunkRun(ChunkSetup s) : setup(std::move(s)) {
    for (const std::string& codec : setup.codecs) {
      const ParsedCodec parsed = parse_codec(codec, Device::kCpu);
      const auto row = static_cast<uint32_t>(parsed.codec - codecs(Device::kCpu).data());
      codecs_.push_back({row, setup.alpha, setup.beta, parsed.options});
    }
    const auto world = setup.world_size;
    std::vector<uint32_t> worker_bytes(world), owner_bytes(world);
    for (uint32_t i = 0; i < setup.sizes.size(); ++i) {
      const uint32_t n = setup.sizes[i];
      // The last rank owns nothing.
      const uint32_t owner = world < 3 ? i % world : i % (world - 1);
      const auto codec = static_cast<uint32_t>(i % codecs_.size());
      const bool keeps = setup.residuals && i % 3 != 2;
      places_.push_back({codec, owner, worker_bytes[owner], owner_bytes[owner]});
      encode_.push_back({{100 + i, num_elements_, num_residuals_, n, 0, 0, worker_bytes[owner]},
                         codec,
                         owner,
                         keeps ? 1u : 0u,
                         0});
      rows_ |= 1u << codecs_[codec].row;
      num_elements_ += n;
      num_residuals_ += keeps ? (n + 15) / 16 * 16 : 0;
      worker_bytes[owner] += payload_bytes(i, Stage::kWorker);
      owner_bytes[owner] += payload_bytes(i, Stage::kOwner);
    }
    worker_bytes_ = worker_bytes;
    owner_bytes_ = owner_bytes;
    stride_ = kHeaderBytes + *std::max_element(owner_bytes.begin(), owner_bytes.end());
    uint32_t offset = 0;
    for (uint32_t p = 0; p < world; ++p) {
      sent_.push_back({offset, worker_bytes[p]});
      gathered_.push_back({p * stride_, owner_bytes[p]});
      offset += kHeaderBytes + worker_bytes[p];
    }
    decode_ = encode_;
    for (uint32_t i = 0; i < encode_.size(); ++i) {
      const Place& place = places_[i];
      encode_[i].tile.payload_offset = sent_[place.owner].offset + kHeaderBytes + place.in_worker;
      decode_[i].tile.payload_offset = place.owner * stride_ + kHeaderBytes + place.in_owner;
      decode_[i].tile.output_offset = encode_[i].tile.payload_offset;
      decode_[i].tile.message_offset = place.in_owner;
    }
    const uint32_t item = item_bytes(setup.dtype);
    for (uint32_t rank = 0; rank < world; ++rank) {
      Rank state{Buffer(num_elements_ * item, item),
                 random_residual(50 + rank),
                 random_residual(80 + rank),
                 Buffer(offset),
                 Buffer(world * (kHeaderBytes + worker_bytes[rank])),
                 Buffer(stride_),
                 Buffer(world * stride_)};
      const std::vector<double> values =
          make_input(rank == 0 ? setup.input_of_rank_0 : setup.input, num_elements_, 10 + rank);
      for (size_t i = 0; i < num_elements_; ++i) {
        write_number(setup.dtype, values[i], state.gradient.data() + i * item);
      }
      ranks.push_back(std::move(state));
    }
  }

  uint32_t num_ranks() const { return setup.world_size; }
  uint32_t payload_bytes(size_t i, Stage stage) const {
    return codec_of(i).payload_bytes(setup.sizes[i], setup.dtype, stage,
                                     codecs_[places_[i].codec].options);
  }

  // --- by the kernels

  void encode(uint32_t rank) {
    Rank& r = ranks[rank];
    chunk_kernels_on_host().encode({chunk(rank, encode_), r.gradient.data(), &setup.gain,
                                    floats(r.worker), sent_.data(), num_ranks(), r.sent.data()});
    expect_clean();
  }
  void reduce(uint32_t rank) {
    Rank& r = ranks[rank];
    const std::vector<ChunkTile> tiles = reduced_by(rank);
    const std::vector<Message> messages = scattered_to(rank);
    verdicts.assign(num_ranks(), 77);
    chunk_kernels_on_host().reduce(
        {chunk(rank, tiles),
         {messages.data(), num_ranks(), r.scattered.data(), verdicts.data()},
         &setup.gain,
         floats(r.owner),
         owner_bytes_[rank],
         r.message.data(),
         &findings});
    expect_clean();
  }
  void decode(uint32_t rank) {
    Rank& r = ranks[rank];
    verdicts.assign(num_ranks(), 77);
    std::vector<uint32_t> flags(decode_.size());
    chunk_kernels_on_host().decode(
        {chunk(rank, decode_),
         {gathered_.data(), num_ranks(), r.gathered.data(), verdicts.data()},
         r.sent.data(),
         r.gradient.data(),
         floats(r.worker),
         flags.data(),
         &findings,
         &step_nonfinite});
    expect_clean();
  }

  // --- by the CPU, one tile at a time

  void encode_on_cpu(uint32_t rank) {
    Rank& r = ranks[rank];
    for (size_t i = 0; i < encode_.size(); ++i) {
      TileStatus status{};
      codec_of(i).encode(batch(encode_[i], Stage::kWorker, status), r.gradient.data(), setup.alpha,
                         &setup.gain, residual_of(encode_[i], r.worker), r.sent.data());
    }
    for (uint32_t p = 0; p < num_ranks(); ++p) {
      seal(r.sent, sent_[p], envelope(rank, Phase::kScatter), 0);
    }
  }
  void reduce_on_cpu(uint32_t rank) {
    Rank& r = ranks[rank];
    std::vector<const std::byte*> payloads;
    for (const Message& message : scattered_to(rank)) {
      payloads.push_back(r.scattered.data() + message.offset + kHeaderBytes);
    }
    const std::vector<ChunkTile> tiles = reduced_by(rank);
    for (const ChunkTile& entry : tiles) {
      TileStatus status{};
      const size_t i = entry.tile.id - 100;
      codec_of(i).reduce(batch(entry, Stage::kOwner, status), payloads.data(), num_ranks(),
                         &setup.gain, residual_of(entry, r.owner), r.message.data() + kHeaderBytes);
    }
    seal(r.message, {0, owner_bytes_[rank]}, envelope(rank, Phase::kGather), findings.status);
  }
  // Gives the first tile that is not finite, as Findings has it.
  uint64_t decode_on_cpu(uint32_t rank) {
    Rank& r = ranks[rank];
    uint64_t first = 0;
    for (size_t i = 0; i < decode_.size(); ++i) {
      const Codec& codec = codec_of(i);
      TileStatus status{};
      const TileBatch arrived = batch(decode_[i], Stage::kOwner, status);
      float* residual = residual_of(decode_[i], r.worker);
      if (residual != nullptr) {
        codec.decode(arrived, r.gathered.data(), nullptr, 0.0f, nullptr);
        ChunkTile own = encode_[i];
        own.tile.output_offset = decode_[i].tile.payload_offset;
        codec.undo(batch(own, Stage::kWorker, status), r.sent.data(), r.gathered.data(),
                   r.gradient.data(), setup.alpha, residual);
      }
      codec.decode(arrived, r.gathered.data(), r.gradient.data(), setup.beta, residual);
      if (first == 0 && (status.flags & kTileNonFinite) != 0) first = 1 + decode_[i].tile.id;
    }
    return first;
  }

  // --- between ranks

  void scatter() {
    for (uint32_t p = 0; p < num_ranks(); ++p) {
      const uint32_t size = kHeaderBytes + worker_bytes_[p];
      for (uint32_t rank = 0; rank < num_ranks(); ++rank) {
        std::memcpy(ranks[p].scattered.data() + rank * size,
                    ranks[rank].sent.data() + sent_[p].offset, size);
      }
    }
  }
  void gather() {
    for (Rank& to : ranks) {
      for (uint32_t rank = 0; rank < num_ranks(); ++rank) {
        std::memcpy(to.gathered.data() + rank * stride_, ranks[rank].message.data(), stride_);
      }
    }
  }

  // Writes a header that is right, but for `status`.
  static void seal(Buffer& buffer, const Message& message, const Envelope& envelope,
                   uint32_t status) {
    std::byte* start = buffer.data() + message.offset;
    const uint64_t checksum = word_sum(start + kHeaderBytes, message.payload_bytes);
    const MessageHeader header = make_header(envelope, message.payload_bytes, checksum, status);
    std::memcpy(start, &header, sizeof(header));
  }
  Envelope envelope(uint32_t rank, Phase phase) const {
    Envelope result = kEnvelope;
    result.rank = rank;
    result.phase = phase;
    return result;
  }
  const ChunkTile& decoded(size_t i) const { return decode_[i]; }
  const Message& gathered(uint32_t rank) const { return gathered_[rank]; }
  const Message scattered(uint32_t to, uint32_t from) const { return scattered_to(to)[from]; }

  ChunkSetup setup;
  std::vector<Rank> ranks;
  std::vector<uint32_t> verdicts;
  Findings findings{};
  uint32_t step_nonfinite = 0;

 private:
  struct Place {
    uint32_t codec, owner, in_worker, in_owner;
  };

  const Codec& codec_of(size_t i) const {
    return codecs(Device::kCpu)[codecs_[places_[i].codec].row];
  }
  static float* floats(Buffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }
  static float* residual_of(const ChunkTile& entry, Buffer& residual) {
    return entry.has_residual == 0 ? nullptr : floats(residual);
  }
  Buffer random_residual(uint64_t seed) const {
    Buffer residual(num_residuals_ * sizeof(float));
    const std::vector<float> values = make_residual(Input::kGaussian, num_residuals_, seed);
    if (!values.empty()) std::memcpy(residual.data(), values.data(), residual.size());
    return residual;
  }
  std::vector<ChunkTile> reduced_by(uint32_t rank) const {
    std::vector<ChunkTile> tiles;
    for (size_t i = 0; i < places_.size(); ++i) {
      const Place& place = places_[i];
      if (place.owner != rank) continue;
      ChunkTile entry = encode_[i];
      entry.tile.payload_offset = place.in_worker;
      entry.tile.output_offset = entry.tile.message_offset = place.in_owner;
      entry.message = 0;
      tiles.push_back(entry);
    }
    return tiles;
  }
  std::vector<Message> scattered_to(uint32_t rank) const {
    std::vector<Message> messages;
    for (uint32_t r = 0; r < num_ranks(); ++r) {
      messages.push_back({r * (kHeaderBytes + worker_bytes_[rank]), worker_bytes_[rank]});
    }
    return messages;
  }
  Chunk chunk(uint32_t rank, const std::vector<ChunkTile>& tiles) {
    progress_.resize((sizeof(ChunkProgress) / sizeof(uint64_t)) + num_ranks() + 1);
    return {.tiles = tiles.data(),
            .num_tiles = static_cast<uint32_t>(tiles.size()),
            .codecs = codecs_.data(),
            .rows = rows_,
            .dtype = setup.dtype,
            .hold_zero_tiles = setup.hold_zero_tiles,
            .seed = kSeed,
            .envelope = envelope(rank, Phase::kScatter),
            .progress = reinterpret_cast<ChunkProgress*>(progress_.data()),
            .stream = nullptr};
  }
  TileBatch batch(const ChunkTile& entry, Stage stage, TileStatus& status) const {
    return {&entry.tile,
            1,
            setup.dtype,
            stage,
            setup.hold_zero_tiles,
            kSeed,
            kEnvelope.step,
            &codecs_[entry.codec].options,
            &status,
            nullptr};
  }
  // Every launch leaves everything as the next one needs it.
  void expect_clean() const {
    for (const uint64_t word : progress_) EXPECT_EQ(word, 0u);
    for (const Rank& r : ranks) {
      EXPECT_TRUE(r.gradient.guards_intact() && r.worker.guards_intact() &&
                  r.owner.guards_intact() && r.sent.guards_intact() && r.message.guards_intact());
    }
  }

  std::vector<ChunkCodec> codecs_;
  std::vector<Place> places_;
  std::vector<ChunkTile> encode_, decode_;
  std::vector<Message> sent_, gathered_;
  std::vector<uint32_t> worker_bytes_, owner_bytes_;
  std::vector<uint64_t> progress_;
  uint32_t rows_ = 0;
  uint32_t stride_ = 0;
  uint64_t num_elements_ = 0;
  uint64_t num_residuals_ = 0;
};

void expect_same(const ChunkRun& kernels, const ChunkRun& cpu) {
  for (uint32_t rank = 0; rank < kernels.num_ranks(); ++rank) {
    const Rank &a = kernels.ranks[rank], &b = cpu.ranks[rank];
    EXPECT_TRUE(a.sent == b.sent) << "messages of rank " << rank << " to the owners differ";
    EXPECT_TRUE(a.message == b.message) << "the message of rank " << rank << " to all differs";
    EXPECT_TRUE(a.worker == b.worker) << "worker residuals of rank " << rank << " differ";
    EXPECT_TRUE(a.owner == b.owner) << "owner residuals of rank " << rank << " differ";
    EXPECT_TRUE(a.gradient == b.gradient) << "gradients of rank " << rank << " differ";
  }
}

// A chunk through all stages.
void expect_bytes_of_the_cpu(const ChunkSetup& setup) {
  ChunkRun kernels(setup), cpu(setup);
  const uint32_t world = setup.world_size;
  for (uint32_t rank = 0; rank < world; ++rank) kernels.encode(rank), cpu.encode_on_cpu(rank);
  expect_same(kernels, cpu);
  kernels.scatter(), cpu.scatter();
  for (uint32_t rank = 0; rank < world; ++rank) {
    kernels.reduce(rank), cpu.reduce_on_cpu(rank);
    EXPECT_EQ(kernels.verdicts, std::vector<uint32_t>(world, 0));
  }
  expect_same(kernels, cpu);
  kernels.gather(), cpu.gather();
  for (uint32_t rank = 0; rank < world; ++rank) {
    kernels.findings = {};
    kernels.step_nonfinite = 0;
    kernels.decode(rank);
    const uint64_t nonfinite = cpu.decode_on_cpu(rank);
    EXPECT_EQ(kernels.verdicts, std::vector<uint32_t>(world, 0));
    EXPECT_EQ(kernels.findings.status, 0u);
    EXPECT_EQ(kernels.findings.nonfinite_tile, nonfinite);
    EXPECT_EQ(kernels.step_nonfinite, nonfinite != 0 ? 1u : 0u);
  }
  expect_same(kernels, cpu);
}

#if defined(SIMT_SANITIZED)
constexpr uint64_t kSeeds = 1;
#else
constexpr uint64_t kSeeds = 5;
#endif
const std::vector<uint32_t> kFewSizes = {4096, 1030, 77, 4095};

// Those that have kernels, with all of their options.
std::vector<std::string> all_codecs() {
  std::vector<std::string> all;
  for (const Codec& codec : cpu_codecs(Isa::kScalar)) {
    if (find_kernels(codec.name) == nullptr) continue;
    for (const std::string& text : option_sets(codec)) all.push_back(text);
  }
  return all;
}

TEST(Chunks, GiveTheBytesOfTheCpuUnderEverySeed) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    set_schedule(seed);
    ChunkSetup setup;
    setup.gain = 0.5f;
    expect_bytes_of_the_cpu(setup);
  }
}

TEST(Chunks, HoldEveryCodecBesideExact) {
  for (const Codec& codec : cpu_codecs(Isa::kScalar)) {
    if (find_kernels(codec.name) == nullptr) continue;
    for (const ScalarType dtype :
         {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16}) {
      SCOPED_TRACE(std::string(codec.name) + " " + dtype_name(dtype));
      ChunkSetup setup;
      setup.codecs = {std::string(codec.name), "exact"};
      setup.dtype = dtype;
      setup.sizes = kFewSizes;
      setup.world_size = 2;
      // Rank 0 makes elements of all ranks non-finite, which the others undo.
      setup.input_of_rank_0 = Input::kNonFinite;
      setup.alpha = 0.25f;
      setup.beta = 0.75f;
      expect_bytes_of_the_cpu(setup);
    }
  }
}

TEST(Chunks, HoldEveryMixture) {
  ChunkSetup setup;
  setup.codecs = all_codecs();
  setup.sizes.clear();
  for (size_t i = 0; i < 2 * setup.codecs.size(); ++i) {
    setup.sizes.push_back(i % 4 == 0 ? 4096u : static_cast<uint32_t>(1000 + 37 * i));
  }
  for (const ScalarType dtype :
       {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16}) {
    SCOPED_TRACE(dtype_name(dtype));
    set_schedule(1 + static_cast<uint64_t>(dtype));
    setup.dtype = dtype;
    setup.input_of_rank_0 = dtype == ScalarType::kFloat32 ? Input::kNonFinite : Input::kHeavyTail;
    expect_bytes_of_the_cpu(setup);
  }
}

TEST(Chunks, HoldFloat64) {
  for (const Input input : {Input::kGaussian, Input::kNonFinite, Input::kSparse}) {
    ChunkSetup setup;
    setup.codecs = {"exact"};
    setup.dtype = ScalarType::kFloat64;
    setup.input_of_rank_0 = input;
    setup.beta = 0.9f;
    expect_bytes_of_the_cpu(setup);
  }
}

TEST(Chunks, HoldZeroTiles) {
  for (const char* codec : {"q4", "sign1", "topk"}) {
    ChunkSetup setup;
    setup.codecs = {codec, "exact"};
    setup.sizes = kFewSizes;
    setup.hold_zero_tiles = true;
    setup.gain = 2.0f;
    ChunkRun kernels(setup), cpu(setup);
    for (ChunkRun* run : {&kernels, &cpu}) {
      for (Rank& r : run->ranks) std::memset(r.gradient.data(), 0, r.gradient.size() / 2);
    }
    for (uint32_t rank = 0; rank < 3; ++rank) kernels.encode(rank), cpu.encode_on_cpu(rank);
    kernels.scatter(), cpu.scatter();
    for (uint32_t rank = 0; rank < 3; ++rank) kernels.reduce(rank), cpu.reduce_on_cpu(rank);
    expect_same(kernels, cpu);
  }
}

TEST(Chunks, WithoutMessagesAreOnlyEncodedAndDecoded) {
  ChunkSetup setup;
  setup.codecs = {"exact"};
  setup.world_size = 1;
  ChunkRun run(setup);
  const Buffer before = run.ranks[0].sent;
  run.encode(0);
  EXPECT_FALSE(run.ranks[0].sent == before);
}

// --- what is wrong with messages -----------------------------------------------------------------

ChunkSetup small_setup() {
  ChunkSetup setup;
  setup.sizes = kFewSizes;
  return setup;
}

TEST(Chunks, ReduceRefusesADamagedMessageAndStillSends) {
  ChunkRun run(small_setup());
  for (uint32_t rank = 0; rank < 3; ++rank) run.encode(rank);
  run.scatter();
  run.ranks[0].scattered.data()[run.scattered(0, 1).offset + kHeaderBytes + 9] ^= std::byte{4};
  run.reduce(0);
  const auto refused = static_cast<uint32_t>(WireStatus::kBadChecksum);
  EXPECT_EQ(run.verdicts, (std::vector<uint32_t>{0, refused, 0}));
  EXPECT_EQ(run.findings.status, refused);
  EXPECT_EQ(run.findings.phase, static_cast<uint32_t>(Phase::kScatter));
  EXPECT_EQ(run.findings.rank, 1u);
  MessageHeader header;
  std::memcpy(&header, run.ranks[0].message.data(), sizeof(header));
  EXPECT_EQ(header.status, refused);
  EXPECT_EQ(header.phase, static_cast<uint8_t>(Phase::kGather));
  EXPECT_EQ(header.checksum,
            word_sum(run.ranks[0].message.data() + kHeaderBytes, header.payload_bytes));
}

TEST(Chunks, ReduceCountsCorruptTiles) {
  ChunkSetup setup = small_setup();
  setup.codecs = {"q4"};
  ChunkRun run(setup);
  for (uint32_t rank = 0; rank < 3; ++rank) run.encode(rank);
  run.scatter();
  // Scales that no encoder writes, in a message that is otherwise right.
  const Message message = run.scattered(0, 2);
  std::memset(run.ranks[0].scattered.data() + message.offset + kHeaderBytes, 0xff,
              message.payload_bytes);
  ChunkRun::seal(run.ranks[0].scattered, message, run.envelope(2, Phase::kScatter), 0);
  run.reduce(0);
  EXPECT_EQ(run.verdicts, std::vector<uint32_t>(3, 0));
  EXPECT_EQ(run.findings.status, static_cast<uint32_t>(WireStatus::kCorruptPayload));
  EXPECT_EQ(run.findings.phase, static_cast<uint32_t>(Phase::kScatter));
  EXPECT_EQ(run.findings.rank, 0u);
  EXPECT_EQ(run.findings.received, 2u);  // tiles that rank 0 owns
}

TEST(Chunks, DecodeMakesTilesOfRefusedMessagesNaN) {
  for (const ScalarType dtype :
       {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16, ScalarType::kFloat64}) {
    ChunkSetup setup = small_setup();
    setup.dtype = dtype;
    setup.residuals = false;
    if (dtype == ScalarType::kFloat64) setup.codecs = {"exact"};
    ChunkRun run(setup), cpu(setup);
    for (ChunkRun* r : {&run, &cpu}) {
      for (uint32_t rank = 0; rank < 3; ++rank) r->encode_on_cpu(rank);
      r->scatter();
      for (uint32_t rank = 0; rank < 3; ++rank) r->reduce_on_cpu(rank);
      r->gather();
    }
    cpu.decode_on_cpu(1);
    run.ranks[1].gathered.data()[run.gathered(0).offset + 32] ^= std::byte{1};  // the step
    run.decode(1);
    const auto refused = static_cast<uint32_t>(WireStatus::kBadStep);
    EXPECT_EQ(run.verdicts, (std::vector<uint32_t>{refused, 0, 0}));
    EXPECT_EQ(run.findings.status, refused);
    EXPECT_EQ(run.findings.phase, static_cast<uint32_t>(Phase::kGather));
    EXPECT_EQ(run.findings.rank, 0u);
    EXPECT_EQ(run.findings.nonfinite_tile, 101u);  // the first tile, whose id is 100
    EXPECT_EQ(run.step_nonfinite, 1u);
    const uint32_t item = item_bytes(dtype);
    for (size_t i = 0; i < setup.sizes.size(); ++i) {
      const ChunkTile& entry = run.decoded(i);
      for (uint32_t e = 0; e < setup.sizes[i]; ++e) {
        const size_t at = (entry.tile.gradient_offset + e) * item;
        if (entry.message == 0) {
          const double value = read_number(dtype, run.ranks[1].gradient.data() + at);
          ASSERT_TRUE(std::isnan(value)) << i << " " << e;
        } else {
          ASSERT_EQ(std::memcmp(run.ranks[1].gradient.data() + at,
                                cpu.ranks[1].gradient.data() + at, item),
                    0);
        }
      }
    }
  }
}

TEST(Chunks, DecodeNotesTheFirstCorruptTile) {
  ChunkSetup setup = small_setup();
  setup.codecs = {"q4"};
  setup.residuals = false;
  ChunkRun run(setup);
  for (uint32_t rank = 0; rank < 3; ++rank) run.encode_on_cpu(rank);
  run.scatter();
  for (uint32_t rank = 0; rank < 3; ++rank) run.reduce_on_cpu(rank);
  run.gather();
  const Message message = run.gathered(1);
  Buffer& gathered = run.ranks[2].gathered;
  std::memset(gathered.data() + message.offset + kHeaderBytes, 0xff, message.payload_bytes);
  ChunkRun::seal(gathered, message, run.envelope(1, Phase::kGather), 0);
  run.decode(2);
  EXPECT_EQ(run.verdicts, std::vector<uint32_t>(3, 0));
  EXPECT_EQ(run.findings.status, static_cast<uint32_t>(WireStatus::kCorruptPayload));
  EXPECT_EQ(run.findings.phase, static_cast<uint32_t>(Phase::kGather));
  EXPECT_EQ(run.findings.rank, 1u);
  EXPECT_EQ(run.findings.received, 1u);
  EXPECT_EQ(run.findings.nonfinite_tile, 102u);  // the second tile
}

}  // namespace
}  // namespace gradferry::testing
