// Payloads of peers, whatever their bytes: the laws of decode, reduce, accumulate and undo hold.
#include <vector>

#include "tests/fuzz/codec_calls.h"

namespace gradferry::fuzzing {
namespace {

// The input's own bytes, or what an encoder writes with some bytes changed.
Buffer take_payload(Bytes& input, const Runner& run, Stage stage) {
  const bool own = input.flip();
  const Buffer gradient = own ? run.new_gradient() : take_gradient(input, run);
  Buffer payload = run.encode(Isa::kScalar, gradient, Buffer()).payload;
  if (stage == Stage::kOwner) payload = run.reduce(Isa::kScalar, {payload}, Buffer()).payload;
  if (own) {
    fill(input, payload.data(), payload.size());
  } else {
    input.damage(payload.data(), payload.size());
  }
  return payload;
}

}  // namespace

void run(Bytes input) {
  const Laws laws(take_setup(input));
  const uint32_t world_size = 1 + input.below(3), divisor = 1 + input.below(5);
  const Buffer residual = take_residual(input, laws.run());
  std::vector<Buffer> payloads;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    payloads.push_back(take_payload(input, laws.run(), Stage::kWorker));
    laws.decode(payloads.back(), residual, Stage::kWorker);
  }
  laws.accumulate(payloads, divisor);
  laws.reduce(payloads, residual);
  laws.reduce(payloads, Buffer());
  const Buffer in = take_payload(input, laws.run(), Stage::kOwner);
  laws.decode(in, residual, Stage::kOwner);
  laws.undo(payloads[0], in, take_gradient(input, laws.run()), residual);
}

}  // namespace gradferry::fuzzing
