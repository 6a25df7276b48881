// Runs the functions of one codec over buffers that end exactly where the contract says, between
// guard bytes, so that a byte written or (under a sanitizer) read outside of them is found.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "gradferry/codec.h"
#include "tests/kernels/numbers.h"

// How clang says it.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GRADFERRY_ADDRESS_SANITIZER 1
#endif
#endif

namespace gradferry::testing {

// `size` bytes at a 64-byte boundary plus `shift`, with guard bytes before and after. Under
// AddressSanitizer the allocation ends with the buffer, so that its own guard catches reads too.
class Buffer {
 public:
  explicit Buffer(size_t size = 0, size_t shift = 0, uint8_t fill = 0xa5)
      : size_(size), shift_(shift), bytes_(allocate(total())) {
    std::memset(bytes_.get(), kGuardByte, total());
    if (size != 0) std::memset(data(), fill, size);
  }
  Buffer(const Buffer& other) : Buffer(other.size_, other.shift_) {
    if (size_ != 0) std::memcpy(data(), other.data(), size_);
  }
  Buffer(Buffer&&) = default;
  Buffer& operator=(Buffer&&) = default;

  std::byte* data() { return bytes_.get() + kGuard + shift_; }
  const std::byte* data() const { return bytes_.get() + kGuard + shift_; }
  size_t size() const { return size_; }
  template <typename T>
  std::vector<T> as() const {
    std::vector<T> result(size_ / sizeof(T));
    if (size_ != 0) std::memcpy(result.data(), data(), size_);
    return result;
  }
  bool guards_intact() const {
    for (size_t i = 0; i < total(); ++i) {
      const bool inside = i >= kGuard + shift_ && i < kGuard + shift_ + size_;
      if (!inside && bytes_[i] != std::byte(kGuardByte)) return false;
    }
    return true;
  }
  friend bool operator==(const Buffer& a, const Buffer& b) {
    return a.size_ == b.size_ && std::memcmp(a.data(), b.data(), a.size_) == 0;
  }

 private:
  static constexpr uint8_t kGuardByte = 0xc3;
  static constexpr size_t kGuard = 128;
#if defined(__SANITIZE_ADDRESS__) || defined(GRADFERRY_ADDRESS_SANITIZER)
  static constexpr size_t kEndGuard = 0;
#else
  static constexpr size_t kEndGuard = 128;
#endif
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  using Bytes = std::unique_ptr<std::byte[], Free>;
  static Bytes allocate(size_t size) { return Bytes(new (std::align_val_t(64)) std::byte[size]); }
  size_t total() const { return kGuard + shift_ + size_ + kEndGuard; }

  size_t size_, shift_;
  Bytes bytes_;
};

// Near the end of the longest message, so that weights of its words have all of their bits.
inline constexpr uint32_t kFirstMessageOffset = 0xf0000000;

// A codec, a dtype, a choice of tiles, and the scalars of the calls.
struct CallSetup {
  std::string codec = "q4";
  ScalarType dtype = ScalarType::kFloat32;
  std::vector<uint32_t> sizes;
  bool hold_zero_tiles = false;
  bool misaligned = false;  // the gradient starts one element after an aligned address
  float alpha = 1.0f;
  float gain = 1.0f;
  float beta = 0.0f;
  uint64_t seed = 7;
  uint64_t step = 3;
};

struct Result {
  Buffer payload;
  Buffer gradient;
  Buffer residual;  // empty: no error feedback
  std::vector<TileStatus> status;
};

class Runner {
 public:
  explicit Runner(const CallSetup& setup) : setup_(setup), parsed_(parse_codec(setup.codec)) {
    uint64_t id = 40;
    for (const uint32_t n : setup_.sizes) {
      tiles_.push_back({id++, num_elements_, num_elements_, n, worker_bytes_, owner_bytes_,
                        kFirstMessageOffset + worker_bytes_});
      num_elements_ += n;
      worker_bytes_ += payload_bytes(n, Stage::kWorker);
      owner_bytes_ += payload_bytes(n, Stage::kOwner);
    }
  }

  uint32_t payload_bytes(uint32_t n, Stage stage) const {
    return parsed_.codec->payload_bytes(n, setup_.dtype, stage, parsed_.options);
  }
  size_t num_elements() const { return num_elements_; }
  const std::vector<Tile>& tiles() const { return tiles_; }
  Buffer new_gradient() const {
    const uint32_t item = item_bytes(setup_.dtype);
    return Buffer(num_elements_ * item, setup_.misaligned ? item : 0);
  }
  Buffer gradient_from(std::span<const double> values) const {
    Buffer gradient = new_gradient();
    const uint32_t item = item_bytes(setup_.dtype);
    for (size_t i = 0; i < num_elements_; ++i) {
      write_number(setup_.dtype, values[i], gradient.data() + i * item);
    }
    return gradient;
  }
  static Buffer residual_from(std::span<const float> values) {
    Buffer residual(values.size_bytes());
    if (!values.empty()) std::memcpy(residual.data(), values.data(), values.size_bytes());
    return residual;
  }

  Result encode(Isa isa, const Buffer& gradient, const Buffer& residual,
                uint8_t fill = 0xa5) const {
    Result r{Buffer(worker_bytes_, 0, fill), gradient, residual, new_status()};
    codec(isa).encode(batch(Stage::kWorker, r), r.gradient.data(), setup_.alpha, &setup_.gain,
                      residual_pointer(r.residual), r.payload.data());
    EXPECT_TRUE(r.payload.guards_intact() && r.residual.guards_intact()) << describe(isa);
    return r;
  }
  Result decode(Isa isa, const Buffer& payload, const Buffer& residual, Stage stage) const {
    Result r{payload, new_gradient(), residual, new_status()};
    std::vector<Tile> tiles = tiles_;
    if (stage == Stage::kOwner) {
      for (Tile& tile : tiles) tile.payload_offset = tile.output_offset;
    }
    TileBatch b = batch(stage, r);
    b.tiles = tiles.data();
    codec(isa).decode(b, r.payload.data(), r.gradient.data(), setup_.beta,
                      residual_pointer(r.residual));
    EXPECT_TRUE(r.gradient.guards_intact() && r.residual.guards_intact()) << describe(isa);
    // Without a gradient, decode finds the same and writes nothing else.
    Result seen{payload, Buffer(), residual, new_status()};
    b.status = seen.status.data();
    codec(isa).decode(b, payload.data(), nullptr, setup_.beta, residual_pointer(seen.residual));
    EXPECT_TRUE(seen.residual == residual);
    for (size_t i = 0; i < tiles.size(); ++i) EXPECT_EQ(seen.status[i].flags, r.status[i].flags);
    return r;
  }
  Result reduce(Isa isa, const std::vector<Buffer>& payloads, const Buffer& residual) const {
    Result r{Buffer(owner_bytes_), Buffer(), residual, new_status()};
    const std::vector<const std::byte*> pointers = pointers_to(payloads);
    codec(isa).reduce(batch(Stage::kWorker, r), pointers.data(),
                      static_cast<uint32_t>(pointers.size()), &setup_.gain,
                      residual_pointer(r.residual), r.payload.data());
    EXPECT_TRUE(r.payload.guards_intact() && r.residual.guards_intact()) << describe(isa);
    return r;
  }
  Result accumulate(Isa isa, const std::vector<Buffer>& payloads, uint32_t divisor) const {
    Result r{Buffer(), new_gradient(), Buffer(), new_status()};
    const std::vector<const std::byte*> pointers = pointers_to(payloads);
    codec(isa).accumulate(batch(Stage::kWorker, r), pointers.data(),
                          static_cast<uint32_t>(pointers.size()), divisor, r.gradient.data());
    EXPECT_TRUE(r.gradient.guards_intact()) << describe(isa);
    return r;
  }
  // `in`: what came back. With `status` as a decode of it leaves them, or without.
  Result undo(Isa isa, const Buffer& payload, const Buffer& in, const Buffer& gradient,
              const Buffer& residual, bool with_status = true) const {
    Result r{payload, gradient, residual, decode(isa, in, Buffer(), Stage::kOwner).status};
    TileBatch b = batch(Stage::kWorker, r);
    if (!with_status) b.status = nullptr;
    codec(isa).undo(b, payload.data(), in.data(), gradient.data(), setup_.alpha,
                    residual_pointer(r.residual));
    EXPECT_TRUE(r.residual.guards_intact()) << describe(isa);
    return r;
  }

  // The implementation under test.
  const Codec& codec(Isa isa) const {
    for (const Codec& codec : cpu_codecs(isa)) {
      if (codec.name == parsed_.codec->name) return codec;
    }
    throw std::logic_error("codec is missing from a table");
  }
  const CodecOptions& options() const { return parsed_.options; }

 private:
  std::vector<TileStatus> new_status() const {
    return std::vector<TileStatus>(tiles_.size(), TileStatus{0xdeadbeef, 0xdeadbeef});
  }
  TileBatch batch(Stage stage, Result& r) const {
    return {tiles_.data(),
            static_cast<uint32_t>(tiles_.size()),
            setup_.dtype,
            stage,
            setup_.hold_zero_tiles,
            setup_.seed,
            setup_.step,
            &parsed_.options,
            r.status.data()};
  }
  static std::vector<const std::byte*> pointers_to(const std::vector<Buffer>& payloads) {
    std::vector<const std::byte*> pointers;
    for (const Buffer& payload : payloads) pointers.push_back(payload.data());
    return pointers;
  }
  static float* residual_pointer(Buffer& residual) {
    return residual.size() == 0 ? nullptr : reinterpret_cast<float*>(residual.data());
  }
  std::string describe(Isa isa) const {
    return setup_.codec + " on " + std::string(isa_name(isa)) + " wrote outside of a buffer";
  }

  CallSetup setup_;
  ParsedCodec parsed_;
  std::vector<Tile> tiles_;
  uint64_t num_elements_ = 0;
  uint32_t worker_bytes_ = 0;
  uint32_t owner_bytes_ = 0;
};

inline std::vector<double> numbers(ScalarType dtype, const Buffer& gradient) {
  const uint32_t item = item_bytes(dtype);
  std::vector<double> result(gradient.size() / item);
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = read_number(dtype, gradient.data() + i * item);
  }
  return result;
}

// D(payload) of every element, unrounded: lossy codecs decode to fp32 whatever the gradient is.
inline std::vector<double> values(CallSetup s, const Buffer& payload, Stage stage) {
  if (parse_codec(s.codec).codec->lossy) s.dtype = ScalarType::kFloat32;
  s.beta = 0;
  return numbers(s.dtype, Runner(s).decode(Isa::kScalar, payload, Buffer(), stage).gradient);
}

}  // namespace gradferry::testing
