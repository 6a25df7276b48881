#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "measure/roof_timing.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

Isa isa_of(const std::string& name) {
  std::string known;
  for (const Isa isa : available_isas()) {
    if (isa_name(isa) == name) return isa;
    known.append(known.empty() ? "" : ", ").append(isa_name(isa));
  }
  throw Error(ErrorKind::kConfig,
              "instruction set '" + name + "' is none that this machine can run: " + known);
}

CodecTimingOptions timing_options(const std::string& codec, at::ScalarType dtype,
                                  const std::string& isa, size_t num_elements,
                                  const std::vector<uint32_t>& world_sizes, int rounds,
                                  uint32_t threads) {
  CodecTimingOptions options;
  options.codec = codec;
  options.dtype = to_scalar_type(dtype);
  options.isa = isa_of(isa);
  options.num_elements = num_elements;
  options.world_sizes = world_sizes;
  options.rounds = rounds;
  options.threads = threads;
  return options;
}

py::dict describe_row(const CodecTimingRow& row) {
  return py::dict(
      py::arg("op") = row.operation, py::arg("num_elements") = row.num_elements,
      py::arg("world_size") = row.world_size, py::arg("gbps") = row.gigabytes_per_second,
      py::arg("roof_gbps") = row.roof_gigabytes_per_second,
      py::arg("roof_ratio") = row.ratios.median, py::arg("roof_ratio_min") = row.ratios.minimum,
      py::arg("roof_ratio_max") = row.ratios.maximum,
      py::arg("roof_ratio_best") = row.ratio_of_best, py::arg("seconds") = row.seconds,
      py::arg("bytes_per_element") = row.bytes_per_element,
      py::arg("bits_per_element") = row.bits_per_element, py::arg("nmse") = row.nmse,
      py::arg("core_rate") = row.core_rate, py::arg("best_core_rate") = row.best_core_rate,
      py::arg("wrong") = row.wrong);
}

py::list rows(CodecTimer& timer) {
  std::vector<CodecTimingRow> timed;
  {
    const py::gil_scoped_release released;
    timed = timer.rows();
  }
  py::list result;
  for (const CodecTimingRow& row : timed) result.append(describe_row(row));
  return result;
}

}  // namespace

void bind_roof_timing(py::module_& module) {
  py::class_<CodecTimer>(module, "CodecTimer")
      .def(py::init([](const std::string& codec, at::ScalarType dtype, const std::string& isa,
                       size_t num_elements, const std::vector<uint32_t>& world_sizes, int rounds,
                       uint32_t threads) {
             return std::make_unique<CodecTimer>(
                 timing_options(codec, dtype, isa, num_elements, world_sizes, rounds, threads));
           }),
           py::kw_only(), py::arg("codec"), py::arg("dtype"), py::arg("isa"),
           py::arg("num_elements"), py::arg("world_sizes"), py::arg("rounds"), py::arg("threads"))
      .def("rows", &rows)
      .def("encode_pass", &CodecTimer::encode_pass, py::call_guard<py::gil_scoped_release>())
      .def("decode_pass", &CodecTimer::decode_pass, py::call_guard<py::gil_scoped_release>())
      .def("gradient", [](py::object self) {
        const std::span<std::byte> bytes = self.cast<CodecTimer&>().gradient();
        // A view of the timer's own memory, which lives as long as the view.
        return at::from_blob(
            bytes.data(), {static_cast<int64_t>(bytes.size())},
            [self](void*) mutable {
              const py::gil_scoped_acquire acquired;
              self.release().dec_ref();
            },
            at::TensorOptions().dtype(at::kByte));
      });
  module.def("memcpy_gbps", &memcpy_gigabytes_per_second, py::arg("num_bytes"), py::arg("rounds"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace gradferry
