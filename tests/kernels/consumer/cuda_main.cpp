// Takes the CUDA kernels into use, which needs no GPU.
#include <gradferry/cuda_codecs.h>

int main() {
  gradferry::use_cuda_codecs();
  return gradferry::chunk_kernels().encode != nullptr ? 0 : 1;
}
