// Gradients and residuals of any bits: the law of encode holds.
#include "tests/fuzz/codec_calls.h"

namespace gradferry::fuzzing {

void run(Bytes input) {
  const Laws laws(take_setup(input));
  const Buffer gradient = take_gradient(input, laws.run());
  laws.encode(gradient, input.flip() ? take_residual(input, laws.run()) : Buffer());
}

}  // namespace gradferry::fuzzing
