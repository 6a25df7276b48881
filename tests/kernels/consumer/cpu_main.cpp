// Encodes and decodes one tile with the default codec.
#include <gradferry/codec.h>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  const gradferry::ParsedCodec q4 = gradferry::parse_codec("q4");
  std::vector<float> gradient(100, 1.5f), decoded(100);
  alignas(16) std::byte payload[4096];
  const gradferry::Tile tile{0, 0, 0, 100, 0, 0, 0};
  const gradferry::TileBatch batch{
      &tile,       1,      gradferry::ScalarType::kFloat32, gradferry::Stage::kWorker, true, 0, 0,
      &q4.options, nullptr};
  q4.codec->encode(batch, gradient.data(), 1.0f, nullptr, nullptr, payload);
  q4.codec->decode(batch, payload, decoded.data(), 0.0f, nullptr);
  std::printf("%s: %g -> %g\n", q4.canonical.c_str(), gradient[0], decoded[0]);
  return std::fabs(decoded[0] - gradient[0]) < 0.1f ? 0 : 1;
}
