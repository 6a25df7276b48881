// One tensor as one message, without an exchange: for parameter servers, tests and experiments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gradferry/codec.h"
#include "gradferry/wire.h"

namespace gradferry {

// config_hash identifies the codec; layout_hash dtype and size (docs/reference/wire_format.md,
// section 2).
struct TensorMessageOptions {
  std::string codec;
  uint64_t config_hash;
  uint64_t layout_hash;
};

// The messages of tensors of one codec, dtype and size: header and worker payloads
// (docs/reference/wire_format.md, section 2). Numbers are contiguous, in host memory.
class TensorMessages {
 public:
  // Stores fp32 numbers in the dtype, rounded to nearest; a NaN becomes the canonical one.
  using Round = void (*)(std::span<const float> numbers, void* rounded);

  // Throws Error(kConfig) for an unknown codec, a dtype that it does not take, no elements, or too
  // many.
  TensorMessages(const TensorMessageOptions& options, ScalarType dtype, uint64_t num_elements);

  uint64_t message_bytes() const;

  // Writes message_bytes() to `message`.
  void encode(const void* numbers, uint64_t seed, uint64_t step, std::byte* message) const;

  // Throws Error(kProtocol) for bytes that are not such a message. Seed and step come from the
  // header.
  void decode(std::span<const std::byte> message, void* numbers) const;

  // Writes the sum of messages, in their order and in fp32 (float64 in fp64), times 1 / divisor and
  // rounded once. At least one message; seeds and steps may differ. Errors as of decode, with the
  // number of the message, from 0.
  void accumulate(std::span<const std::span<const std::byte>> messages, uint32_t divisor,
                  Round round, void* numbers) const;

 private:
  struct Received;

  MessageHeader header(uint64_t seed, uint64_t step) const;
  TileBatch batch(const MessageHeader& header, std::vector<TileStatus>& status) const;
  Received receive(std::span<const std::byte> message, const std::string& name) const;
  void expect_valid_tiles(const std::vector<TileStatus>& status, const std::string& name) const;
  bool accumulate_at_once(const std::vector<Received>& received, uint32_t divisor,
                          void* numbers) const;
  bool accumulate_by_tile(const std::vector<Received>& received, uint32_t divisor, Round round,
                          void* numbers) const;

  TensorMessageOptions options_;
  ParsedCodec codec_;
  ScalarType dtype_;
  std::vector<Tile> tiles_;
  uint32_t payload_bytes_ = 0;
};

}  // namespace gradferry
