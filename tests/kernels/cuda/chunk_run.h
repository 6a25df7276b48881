// A chunk on all ranks, for the tests of its kernels: what a rank has in device memory, each stage
// by one library or another, and what is sent between ranks.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gradferry/wire.h"
#include "tests/kernels/contract_cases.h"
#include "tests/kernels/cuda/kernels_under_test.h"
#include "tests/kernels/host_library.h"

namespace gradferry::testing {

inline constexpr uint64_t kSeed = 7;
inline constexpr Envelope kEnvelope{.config_hash = 0x1122334455667788,
                                    .layout_hash = 0x99aabbccddeeff00,
                                    .step = 3,
                                    .chunk = uint64_t{1} << 40,
                                    .rank = 0,
                                    .phase = Phase::kScatter};

// Tiles without a residual, when not every third.
inline constexpr uint32_t kNoTile = 3, kAllTiles = 4;

struct ChunkSetup {
  std::vector<std::string> codecs = {"exact", "q4"};
  ScalarType dtype = ScalarType::kFloat32;
  std::vector<uint32_t> sizes = {4096, 77, 1030, 4096, 4095, 5, 130};  // codecs take turns
  uint32_t world_size = 3;
  bool hold_zero_tiles = false;
  bool misaligned = true;  // gradients start one element after an aligned address
  uint32_t bare = 2;       // tiles i with i % 3 == bare have no residual; or kNoTile, kAllTiles
  float alpha = 1.0f;
  float beta = 0.0f;
  float gain = 1.0f;
  Input input = Input::kGaussian;
  Input input_of_rank_0 = Input::kGaussian;
};

inline const std::vector<uint32_t> kFewSizes = {4096, 1030, 77, 4095};

inline ChunkSetup small_setup() {
  ChunkSetup setup;
  setup.sizes = kFewSizes;
  return setup;
}

// What one rank has in device memory.
struct Rank {
  Buffer gradient, worker, owner;
  Buffer sent, scattered, message, gathered;
};

// A chunk on all ranks.
class ChunkRun {
 public:
  explicit ChunkRun(ChunkSetup s, const DeviceLibrary& l = host_library())
      : setup(std::move(s)), used_library(&l) {
    for (const std::string& codec : setup.codecs) {
      const ParsedCodec parsed = parse_codec(codec);
      const auto row = static_cast<uint32_t>(parsed.codec - codecs().data());
      codecs_.push_back({row, setup.alpha, setup.beta, parsed.options});
    }
    const auto world = setup.world_size;
    std::vector<uint32_t> worker_bytes(world), owner_bytes(world);
    for (uint32_t i = 0; i < setup.sizes.size(); ++i) {
      const uint32_t n = setup.sizes[i];
      // The last rank owns nothing.
      const uint32_t owner = world < 3 ? i % world : i % (world - 1);
      const auto codec = static_cast<uint32_t>(i % codecs_.size());
      const bool keeps = setup.bare != kAllTiles && i % 3 != setup.bare;
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
      sent_.push_back({offset, worker_bytes[p], 0, Phase::kScatter, 0});
      gathered_.push_back({p * stride_, owner_bytes[p], p, Phase::kGather, 0});
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
      Rank state{Buffer(num_elements_ * item, setup.misaligned ? item : 0),
                 random_residual(50 + rank),
                 random_residual(80 + rank),
                 Buffer(offset),
                 Buffer(world * (kHeaderBytes + worker_bytes[rank])),
                 Buffer(stride_),
                 Buffer(world * stride_)};
      ranks.push_back(std::move(state));
      set_gradient(rank, make_input(rank == 0 ? setup.input_of_rank_0 : setup.input, num_elements_,
                                    10 + rank));
    }
  }

  void set_gradient(uint32_t rank, const std::vector<double>& values) {
    const uint32_t item = item_bytes(setup.dtype);
    for (size_t i = 0; i < num_elements_; ++i) {
      write_number(setup.dtype, values[i], ranks[rank].gradient.data() + i * item);
    }
  }
  // For the residuals of all ranks.
  void set_residuals(const std::vector<float>& values) {
    for (Rank& r : ranks) {
      for (Buffer* residual : {&r.worker, &r.owner}) {
        std::memcpy(residual->data(), values.data(), residual->size());
      }
    }
  }

  uint32_t num_ranks() const { return setup.world_size; }
  uint64_t num_elements() const { return num_elements_; }
  uint64_t num_residuals() const { return num_residuals_; }
  uint32_t payload_bytes(size_t i, Stage stage) const {
    return codec_of(i).payload_bytes(setup.sizes[i], setup.dtype, stage,
                                     codecs_[places_[i].codec].options);
  }

  // --- by the library

  // `sends`: writes headers.
  void encode(uint32_t rank, bool sends = true) {
    Rank& r = ranks[rank];
    used_library->chunks.encode({chunk(rank, encode_), r.gradient.data(), &setup.gain,
                                 floats(r.worker), sent_.data(), sends ? num_ranks() : 0,
                                 r.sent.data()});
    expect_clean();
  }
  void reduce(uint32_t rank) {
    Rank& r = ranks[rank];
    const std::vector<ChunkTile> tiles = reduced_by(rank);
    const std::vector<Message> messages = scattered_to(rank);
    verdicts.assign(num_ranks(), 77);
    used_library->chunks.reduce(
        {chunk(rank, tiles),
         {messages.data(), num_ranks(), r.scattered.data(), verdicts.data()},
         &setup.gain,
         floats(r.owner),
         owner_bytes_[rank],
         r.message.data(),
         &findings,
         from_siblings,
         forward == nullptr ? 0 : forward_bytes - kHeaderBytes,
         forward});
    expect_clean();
  }
  // `received`: checks headers.
  void decode(uint32_t rank, bool received = true) {
    Rank& r = ranks[rank];
    verdicts.assign(num_ranks(), 77);
    flags.assign(decode_.size(), 77);
    used_library->chunks.decode(
        {chunk(rank, decode_),
         {gathered_.data(), received ? num_ranks() : 0, r.gathered.data(), verdicts.data()},
         r.sent.data(),
         r.gradient.data(),
         floats(r.worker),
         flags.data(),
         &findings});
    expect_clean();
  }

  // In place of reduce and decode.
  void accumulate(uint32_t rank) {
    Rank& r = ranks[rank];
    const std::vector<ChunkTile> tiles = reduced_by(rank);
    const std::vector<Message> messages = scattered_to(rank);
    verdicts.assign(num_ranks(), 77);
    flags.assign(tiles.size(), 77);
    used_library->chunks.accumulate(
        {chunk(rank, tiles),
         {messages.data(), num_ranks(), r.scattered.data(), verdicts.data()},
         r.gradient.data(),
         flags.data(),
         &findings,
         nonfinite_is_fault});
    expect_clean();
  }

  // As if a sum of siblings had been encoded: moves the gradient behind the rank's messages.
  void sum_behind_messages(uint32_t rank) {
    Rank& r = ranks[rank];
    const uint32_t item = item_bytes(setup.dtype);
    const size_t begin = (r.sent.size() + 15) / 16 * 16;
    Buffer sent(begin + num_elements_ * item);
    std::memcpy(sent.data(), r.sent.data(), r.sent.size());
    std::memcpy(sent.data() + begin, r.gradient.data(), r.gradient.size());
    std::memset(r.gradient.data(), 0, r.gradient.size());
    r.sent = std::move(sent);
    for (ChunkTile& entry : decode_) {
      entry.summed_offset = static_cast<uint32_t>(begin + entry.tile.gradient_offset * item);
    }
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

  // Up to where owners reduce, and where every rank decodes.
  void until_reduce() {
    for (uint32_t rank = 0; rank < num_ranks(); ++rank) encode(rank);
    scatter();
  }
  void until_decode() {
    until_reduce();
    for (uint32_t rank = 0; rank < num_ranks(); ++rank) reduce(rank);
    gather();
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
  const DeviceLibrary* used_library;
  Phase sealed = Phase::kScatter;  // by encode
  bool nonfinite_is_fault = false;
  // Where ranks have siblings.
  ReceivedMessages from_siblings{};
  std::byte* forward = nullptr;
  uint32_t forward_bytes = 0;
  std::vector<Rank> ranks;
  std::vector<uint32_t> verdicts;
  std::vector<uint32_t> flags;  // of the tiles decoded or accumulated last
  Findings findings{};

 private:
  struct Place {
    uint32_t codec, owner, in_worker, in_owner;
  };

  const Codec& codec_of(size_t i) const { return codecs()[codecs_[places_[i].codec].row]; }
  static float* floats(Buffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }
  Buffer random_residual(uint64_t seed) const {
    Buffer residual(num_residuals_ * sizeof(float));
    const std::vector<float> values = make_residual(setup.input, num_residuals_, seed);
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
      messages.push_back(
          {r * (kHeaderBytes + worker_bytes_[rank]), worker_bytes_[rank], r, Phase::kScatter, 0});
    }
    return messages;
  }
  ChunkBatch chunk(uint32_t rank, const std::vector<ChunkTile>& tiles) {
    progress_.resize((sizeof(ChunkProgress) / sizeof(uint64_t)) + num_ranks() + 1);
    return {.tiles = tiles.data(),
            .num_tiles = static_cast<uint32_t>(tiles.size()),
            .codecs = codecs_.data(),
            .rows = rows_,
            .dtype = setup.dtype,
            .hold_zero_tiles = setup.hold_zero_tiles,
            .seed = kSeed,
            .envelope = envelope(rank, sealed),
            .progress = reinterpret_cast<ChunkProgress*>(progress_.data()),
            .stream = nullptr};
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

// Tests of what calls do, whatever codec: of the kernels, and of the host's library, with which
// other tests compare.
class LibraryTest : public ::testing::TestWithParam<const DeviceLibrary*> {
 public:
  static const DeviceLibrary& library() { return *GetParam(); }
};
inline std::vector<const DeviceLibrary*> both_libraries() {
  return {&host_library(), &kernels_under_test()};
}
inline std::string library_name(const ::testing::TestParamInfo<const DeviceLibrary*>& info) {
  return info.index == 0 ? "host" : "kernels";
}

// The same, from here on by the kernels.
inline ChunkRun by_kernels(ChunkRun run) {
  run.used_library = &kernels_under_test();
  return run;
}

// Where two buffers differ first, for a failed comparison.
inline std::string first_difference(const ChunkRun& run, const Buffer& kernels,
                                    const Buffer& host) {
  std::string said = dtype_name(run.setup.dtype);
  for (const std::string& codec : run.setup.codecs) said += ' ' + codec;
  const std::byte* end = host.data() + host.size();
  const std::byte* at = std::mismatch(host.data(), end, kernels.data()).first;
  return said + ": from byte " + std::to_string(at - host.data()) + " of " +
         std::to_string(host.size());
}

// What kernels and host left on all ranks.
inline void expect_same(const ChunkRun& kernels, const ChunkRun& host) {
  for (uint32_t rank = 0; rank < kernels.num_ranks(); ++rank) {
    const auto same = [&](const char* what, Buffer Rank::* buffer) {
      const Buffer &a = kernels.ranks[rank].*buffer, &b = host.ranks[rank].*buffer;
      EXPECT_TRUE(a == b) << what << " of rank " << rank << " differ; "
                          << first_difference(kernels, a, b);
    };
    same("messages to owners", &Rank::sent);
    same("messages to all", &Rank::message);
    same("worker residuals", &Rank::worker);
    same("owner residuals", &Rank::owner);
    same("gradients", &Rank::gradient);
  }
}

// What they found in messages, which is forgotten.
inline void expect_same_findings(ChunkRun& kernels, ChunkRun& host) {
  EXPECT_EQ(kernels.verdicts, host.verdicts);
  EXPECT_EQ(std::memcmp(&kernels.findings, &host.findings, sizeof(Findings)), 0)
      << "status " << kernels.findings.status << ", not " << host.findings.status << "; tile "
      << kernels.findings.nonfinite_tile << ", not " << host.findings.nonfinite_tile;
  EXPECT_EQ(kernels.flags, host.flags);
  for (ChunkRun* run : {&kernels, &host}) run->findings = {};
}

inline void expect_same_encode(ChunkRun& kernels, ChunkRun& host) {
  for (uint32_t rank = 0; rank < host.num_ranks(); ++rank) {
    kernels.encode(rank), host.encode(rank);
  }
  expect_same(kernels, host);
}
inline void expect_same_reduce(ChunkRun& kernels, ChunkRun& host) {
  for (uint32_t rank = 0; rank < host.num_ranks(); ++rank) {
    kernels.reduce(rank), host.reduce(rank);
    expect_same_findings(kernels, host);
  }
  expect_same(kernels, host);
}
inline void expect_same_decode(ChunkRun& kernels, ChunkRun& host) {
  for (uint32_t rank = 0; rank < host.num_ranks(); ++rank) {
    kernels.decode(rank), host.decode(rank);
    expect_same_findings(kernels, host);
  }
  expect_same(kernels, host);
}

inline void expect_same_accumulate(ChunkRun kernels, ChunkRun host) {
  for (uint32_t rank = 0; rank < host.num_ranks(); ++rank) {
    kernels.accumulate(rank), host.accumulate(rank);
    expect_same_findings(kernels, host);
  }
  expect_same(kernels, host);
}

// A chunk through all stages, those of a reduce-scatter and those of an all-reduce.
inline void expect_bytes_of_the_host(ChunkRun host) {
  ChunkRun kernels = by_kernels(host);
  expect_same_encode(kernels, host);
  kernels.scatter(), host.scatter();
  expect_same_accumulate(kernels, host);
  expect_same_reduce(kernels, host);
  EXPECT_EQ(host.verdicts, std::vector<uint32_t>(host.num_ranks(), 0));
  kernels.gather(), host.gather();
  expect_same_decode(kernels, host);
  EXPECT_EQ(host.verdicts, std::vector<uint32_t>(host.num_ranks(), 0));
}

}  // namespace gradferry::testing
