// Lists the codecs on CUDA, which needs no GPU.
#include <gradferry/codec.h>
#include <gradferry/cuda_codecs.h>

#include <cstdio>

int main() {
  gradferry::use_cuda_codecs();
  for (const gradferry::Codec& codec : gradferry::codecs(gradferry::Device::kCuda)) {
    std::printf("%.*s\n", static_cast<int>(codec.name.size()), codec.name.data());
  }
  return gradferry::codecs(gradferry::Device::kCuda).empty() ? 1 : 0;
}
