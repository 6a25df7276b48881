// Writing a tile's payload: each store also adds to the thread's part of the checksum. The checksum
// (word_sum() of wire.h) is linear in the payload's bytes, so that no thread needs a whole word.
// word * weight, both of 32 bits, added to 64: one instruction.
#pragma once

#include "gradferry/wire.h"
#include "kernels/cuda/cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

struct PayloadWriter {
  std::byte* payload;
  uint64_t checksum = 0;
  uint32_t first_weight;

  // message_offset: Tile's.
  GRADFERRY_DEVICE PayloadWriter(std::byte* start, uint32_t message_offset)
      : payload(start), first_weight(message_offset / 2 + kFirstWeight) {}

  // At an offset that is a multiple of the size.
  GRADFERRY_DEVICE void word(uint32_t offset, uint32_t value) {
    write(payload + offset, value);
    add(offset, value);
  }
  GRADFERRY_DEVICE void halfword(uint32_t offset, uint32_t value) {
    write(payload + offset, static_cast<uint16_t>(value));
    add(offset, value);
  }
  GRADFERRY_DEVICE void byte(uint32_t offset, uint32_t value) {
    write(payload + offset, static_cast<uint8_t>(value));
    add(offset, value);
  }
  GRADFERRY_DEVICE void words(uint32_t offset, Bytes8 value) {
    write(payload + offset, value);
    add(offset, value.word[0]), add(offset + 4, value.word[1]);
  }
  GRADFERRY_DEVICE void words(uint32_t offset, Bytes16 value) {
    write(payload + offset, value);
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < 4; ++i) add(offset + 4 * i, value.word[i]);
  }
  // Bytes [begin, end), fewer than threads in the block.
  GRADFERRY_DEVICE void zeros(uint32_t begin, uint32_t end) const {
    if (begin + threadIdx.x < end) {
      write(payload + begin + threadIdx.x, static_cast<uint8_t>(0));
    }
  }

 private:
  GRADFERRY_DEVICE void add(uint32_t offset, uint32_t value) {
    checksum += uint64_t{value << (8 * (offset % 4))} * (first_weight + 2 * (offset / 4));
  }
};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
