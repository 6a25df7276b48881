// Writing and reading a tile's payload: each word also adds to the thread's part of the checksum.
// The checksum (word_sum() of wire.h) is linear in the payload's bytes, so that no thread needs a
// whole word. word * weight, both of 32 bits, added to 64: one instruction.
#pragma once

#include "gradferry/wire.h"
#include "kernels/cuda/cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

struct PayloadSum {
  uint64_t checksum = 0;
  uint32_t seen = 0;  // 0: so far all bytes were
  uint32_t first_weight;

  // message_offset: of the payload, in its message.
  GRADFERRY_DEVICE explicit PayloadSum(uint32_t message_offset)
      : first_weight(fresh(message_offset / 2 + kFirstWeight)) {}

  // A byte or halfword at an offset that is a multiple of its size.
  GRADFERRY_DEVICE void add(uint32_t offset, uint32_t value) {
    add_word(offset / 4 * 4, value << (8 * (offset % 4)));
  }
  // At offset + further, multiples of 4: what a thread's offsets have in common is computed once.
  GRADFERRY_DEVICE void add_word(uint32_t offset, uint32_t value, uint32_t further = 0) {
    checksum += uint64_t{value} * (first_weight + offset / 2 + further / 2);
    seen |= value;
  }
  template <typename Words>
  GRADFERRY_DEVICE void add_words(uint32_t offset, const Words& value, uint32_t further = 0) {
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < sizeof(Words) / 4; ++i) {
      add_word(offset, value.word[i], further + 4 * i);
    }
  }
};

struct PayloadWriter : PayloadSum {
  std::byte* payload;

  GRADFERRY_DEVICE PayloadWriter(std::byte* start, uint32_t message_offset)
      : PayloadSum(message_offset), payload(start) {}

  GRADFERRY_DEVICE void word(uint32_t offset, uint32_t value, uint32_t further = 0) {
    write(payload + offset + further, value);
    add_word(offset, value, further);
  }
  GRADFERRY_DEVICE void halfword(uint32_t offset, uint32_t value) {
    write(payload + offset, static_cast<uint16_t>(value));
    add(offset, value);
  }
  GRADFERRY_DEVICE void byte(uint32_t offset, uint32_t value) {
    write(payload + offset, static_cast<uint8_t>(value));
    add(offset, value);
  }
  template <typename Words>
  GRADFERRY_DEVICE void words(uint32_t offset, const Words& value, uint32_t further = 0) {
    write(payload + offset + further, value);
    add_words(offset, value, further);
  }
  // Bytes [begin, end), fewer than threads in the block.
  GRADFERRY_DEVICE void zeros(uint32_t begin, uint32_t end) const {
    if (begin + threadIdx.x < end) {
      write(payload + begin + threadIdx.x, static_cast<uint8_t>(0));
    }
  }
};

// The byte at `begin` + the thread's number, or 0 from `end` on: of padding, fewer than threads.
GRADFERRY_DEVICE uint32_t read_padding(const std::byte* payload, uint32_t begin, uint32_t end) {
  const uint32_t offset = begin + threadIdx.x;
  return offset < end ? read<uint8_t>(payload + offset) : 0;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
