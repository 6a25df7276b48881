// gradferry._cuda: the CUDA kernels, for _native.use_device_library().
#include <Python.h>

#include "gradferry/cuda_codecs.h"

namespace {

PyObject* device_library(PyObject* /*module*/, PyObject* /*arguments*/) {
  // Capsules take a mutable pointer; who uses this one only reads.
  return PyCapsule_New(const_cast<gradferry::DeviceLibrary*>(&gradferry::cuda_library()),
                       gradferry::kDeviceLibraryCapsule, nullptr);
}

PyMethodDef methods[] = {
    {"device_library", &device_library, METH_NOARGS, "The kernels, as a capsule."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_cuda",
                          "gradferry's CUDA kernels. Private: use the gradferry package.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

// NOLINTNEXTLINE(bugprone-reserved-identifier): the name that Python looks for
PyMODINIT_FUNC PyInit__cuda() { return PyModule_Create(&definition); }
