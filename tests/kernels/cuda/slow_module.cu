// gradferry_slow_cuda: gradferry's CUDA kernels, each behind a delay drawn from a seed, so that
// streams run in other orders than usual. For tests/kernels/cuda/check_hook.py.
#include <Python.h>
#include <cuda_runtime.h>

#include <random>

#include "gradferry/cuda_codecs.h"

namespace gradferry {
namespace {

constexpr long long kMostCycles = 2'000'000;  // about a millisecond

__global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

std::mt19937_64& random_numbers() {
  static std::mt19937_64 numbers;
  return numbers;
}

// Every second launch is delayed, so that some run far ahead of others.
void delay(Stream stream) {
  const auto cycles = static_cast<long long>(random_numbers()() % (2 * kMostCycles));
  if (cycles < kMostCycles) spin<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(cycles);
}

const ChunkKernels& chunks() { return cuda_library().chunks; }
const NodeKernels& nodes() { return cuda_library().nodes; }
const MessageKernels& kernels() { return cuda_library().messages; }

const DeviceLibrary& slow_library() {
  static const DeviceLibrary library{
      kDeviceLibraryVersion,
      {[](const EncodeChunkCall& call) { delay(call.chunk.stream), chunks().encode(call); },
       [](const ReduceChunkCall& call) { delay(call.chunk.stream), chunks().reduce(call); },
       [](const DecodeChunkCall& call) { delay(call.chunk.stream), chunks().decode(call); },
       [](const AccumulateChunkCall& call) {
         delay(call.chunk.stream), chunks().accumulate(call);
       }},
      {[](const PackCall& call) { delay(call.stream), nodes().pack(call); },
       [](const SumCall& call) { delay(call.stream), nodes().sum(call); }},
      {[](const RescaleCall& call) { delay(call.stream), kernels().rescale(call); },
       [](const ScaleCall& call) { delay(call.stream), kernels().scale(call); },
       [](const CommitCall& call) { delay(call.stream), kernels().commit(call); }},
      cuda_library().is_capturing};
  return library;
}

PyObject* device_library(PyObject* /*module*/, PyObject* seed) {
  random_numbers().seed(PyLong_AsUnsignedLongLong(seed));
  if (PyErr_Occurred() != nullptr) return nullptr;
  return PyCapsule_New(const_cast<DeviceLibrary*>(&slow_library()), kDeviceLibraryCapsule, nullptr);
}

PyMethodDef methods[] = {
    {"device_library", &device_library, METH_O, "device_library(seed): the kernels, as a capsule."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "gradferry_slow_cuda",
                          nullptr,
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace
}  // namespace gradferry

PyMODINIT_FUNC PyInit_gradferry_slow_cuda() { return PyModule_Create(&gradferry::definition); }
