// gradferry_fake_device: the fake device, its backend and its kernels, for tests.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "fake_kernels.h"
#include "host_backend.h"
#include "streamed_backend.h"
#include "torch_device.h"

namespace py = pybind11;

namespace fake_device {
namespace {

py::capsule library_capsule() {
  return py::capsule(&device_library(), gradferry::kDeviceLibraryCapsule);
}

py::dict counters() {
  const Counters now = Machine::get().counters();
  return py::dict(py::arg("allocations") = now.allocations, py::arg("held_bytes") = now.held_bytes,
                  py::arg("host_waits") = now.host_waits, py::arg("waits") = now.waits,
                  py::arg("held_back") = now.held_back, py::arg("launches") = now.launches);
}

// By reference: torch registers some backends under another holder type.
c10::intrusive_ptr<StreamedBackend> make_backend(c10d::Backend& carrier, const std::string& name,
                                                 int rank, int size,
                                                 std::chrono::milliseconds timeout) {
  return c10::make_intrusive<StreamedBackend>(
      c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&carrier), name, rank, size, timeout);
}

}  // namespace
}  // namespace fake_device

PYBIND11_MODULE(gradferry_fake_device, module) {
  using namespace fake_device;
  py::module_::import("torch._C._distributed_c10d");
  register_device();
  py::class_<StreamedBackend, c10::intrusive_ptr<StreamedBackend>, c10d::Backend>(module,
                                                                                  "StreamedBackend")
      .def(py::init(&make_backend), py::arg("carrier"), py::arg("name"), py::arg("rank"),
           py::arg("size"), py::arg("timeout"))
      // Which newer versions of torch give every backend.
      .def_property_readonly("options", &StreamedBackend::getBackendOptions)
      .def_property_readonly("num_equal", &StreamedBackend::num_equal)
      .def("set_in_line", &StreamedBackend::set_in_line, py::arg("in_line"))
      .def("set_byte_share", &StreamedBackend::set_byte_share, py::arg("share"))
      .def(
          "damage",
          [](StreamedBackend& backend, int64_t countdown, int64_t offset, uint8_t value) {
            backend.damage({countdown, offset, value});
          },
          py::arg("countdown"), py::arg("offset"), py::arg("value"));
  py::class_<HostBackend, c10::intrusive_ptr<HostBackend>, c10d::Backend>(module, "HostBackend")
      .def(py::init([](c10d::Backend& carrier) {
             return c10::make_intrusive<HostBackend>(
                 c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&carrier));
           }),
           py::arg("carrier"));
  module.def("device_library", &library_capsule);
  module.def("set_capturing", &set_capturing, py::arg("now"));
  module.def("counters", &counters);
  module.def("set_seed", [](uint64_t seed) { Machine::get().set_seed(seed); }, py::arg("seed"));
  module.def("set_one_at_a_time", &StreamedBackend::set_one_at_a_time, py::arg("patience"));
  // The clock's prices in seconds: of a kernel and each byte it touches, of a collective and each
  // byte it sends.
  module.def(
      "set_prices",
      [](double launch, double byte, double collective, double byte_sent) {
        Machine::get().set_prices({launch, byte, collective, byte_sent});
      },
      py::kw_only(), py::arg("launch"), py::arg("byte"), py::arg("collective"),
      py::arg("byte_sent"));
  module.def(
      "compute",
      [](double seconds) {
        const auto work = [=](const Touched& touched) {
          touched.last_until(touched.begin() + seconds);
        };
        Machine::get().enqueue(current_stream(), "compute", work, /*is_kernel=*/false);
      },
      py::arg("seconds"));
  module.def(
      "omit_wait", [](int64_t number) { Machine::get().omit_wait(number); }, py::arg("number"));
  module.def("synchronize", [] {
    const pybind11::gil_scoped_release released;
    Machine::get().finish();
  });
  module.def("races", [] { return Machine::get().races(); });
}
