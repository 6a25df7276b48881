#include <pybind11/stl.h>

#include "bindings.h"
#include "device_engine.h"
#include "engine.h"
#include "gradferry/device_library.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

ParameterSpec make_parameter(const std::string& name, uint64_t num_elements, at::ScalarType dtype,
                             const std::string& codec, bool worker_residual, bool owner_residual) {
  return {name, num_elements, to_scalar_type(dtype), codec, worker_residual, owner_residual};
}

EngineOptions make_options(std::vector<ParameterSpec> parameters, uint32_t rank,
                           uint32_t world_size, uint64_t config_hash, uint64_t layout_hash,
                           uint64_t seed, uint64_t warmup_steps, bool raise_nonfinite,
                           uint32_t chunk_bytes) {
  return {.parameters = std::move(parameters),
          .rank = rank,
          .world_size = world_size,
          .config_hash = config_hash,
          .layout_hash = layout_hash,
          .seed = seed,
          .warmup_steps = warmup_steps,
          .raise_nonfinite = raise_nonfinite,
          .chunk_bytes = chunk_bytes,
          .make_exception = &make_torch_exception};
}

// By reference: torch registers some backends under another holder type.
c10::intrusive_ptr<c10d::Backend> to_backend(const py::handle& lane) {
  return c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&lane.cast<c10d::Backend&>());
}

std::shared_ptr<Engine> start_engine(EngineOptions options, const py::list& lanes) {
  std::vector<c10::intrusive_ptr<c10d::Backend>> backends;
  for (const py::handle lane : lanes) backends.push_back(to_backend(lane));
  const py::gil_scoped_release released;
  return Engine::start(std::move(options), std::move(backends));
}

// `lane`: bytes are staged in host memory for this backend of our own. Else `group_name`: they go
// through the group's backend for the device. Neither: nothing is exchanged.
std::shared_ptr<DeviceEngine> start_device_engine(EngineOptions options, const at::Device& device,
                                                  const py::object& lane,
                                                  const std::optional<std::string>& group_name) {
  std::unique_ptr<DeviceTransport> transport;
  if (!lane.is_none()) {
    transport = std::make_unique<StagedTransport>(to_backend(lane), options.world_size);
  } else if (group_name) {
    transport = std::make_unique<StreamTransport>(
        [name = *group_name, type = device.type()] {
          return c10d::resolve_process_group(name)->getBackend(type);
        },
        options.world_size);
  }
  const py::gil_scoped_release released;
  return DeviceEngine::start(std::move(options), device, std::move(transport));
}

// `capsule` holds a DeviceLibrary, in a module that stays loaded.
void use_library(const py::capsule& capsule) {
  GRADFERRY_EXPECTS(std::string_view(capsule.name()) == kDeviceLibraryCapsule, kConfig,
                    "not a device library: a capsule named '" + std::string(capsule.name()) + "'");
  use_device_library(*capsule.get_pointer<const DeviceLibrary>());
}

py::dict stats_dict(const BucketEngine& engine) {
  const EngineStats stats = [&] {
    const py::gil_scoped_release released;
    return engine.stats();
  }();
  py::dict result;
  result["steps"] = stats.steps;
  result["buckets"] = stats.buckets;
  result["chunks"] = stats.chunks;
  result["gradient_bytes"] = stats.gradient_bytes;
  result["wire_bytes"] = stats.wire_bytes;
  result["residual_bytes"] = stats.residual_bytes;
  result["workspace_bytes"] = stats.workspace_bytes;
  result["workspace_allocations"] = stats.workspace_allocations;
  result["in_flight"] = stats.in_flight;
  result["host_waits"] = stats.host_waits;
  result["step_buckets"] = stats.step_buckets;
  return result;
}

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<ParameterSpec>(module, "ParameterSpec")
      .def(py::init(&make_parameter), py::kw_only(), py::arg("name"), py::arg("num_elements"),
           py::arg("dtype"), py::arg("codec"), py::arg("worker_residual"),
           py::arg("owner_residual"));
  py::class_<EngineOptions>(module, "EngineOptions")
      .def(py::init(&make_options), py::kw_only(), py::arg("parameters"), py::arg("rank"),
           py::arg("world_size"), py::arg("config_hash"), py::arg("layout_hash"), py::arg("seed"),
           py::arg("warmup_steps"), py::arg("raise_nonfinite"), py::arg("chunk_bytes"));
  py::class_<BucketEngine, std::shared_ptr<BucketEngine>>(module, "BucketEngine")
      .def("stats", &stats_dict)
      .def("state",
           [](const BucketEngine& engine) {
             EngineState state = [&] {
               const py::gil_scoped_release released;
               return engine.state();
             }();
             return py::make_tuple(state.steps, state.worker_residual, state.owner_residual);
           })
      .def(
          "load_state",
          [](BucketEngine& engine, uint64_t steps, const at::Tensor& worker, const at::Tensor& owner) {
            const py::gil_scoped_release released;
            engine.load_state({steps, worker, owner});
          },
          py::arg("steps"), py::arg("worker_residual"), py::arg("owner_residual"));
  py::class_<Engine, BucketEngine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init(&start_engine), py::arg("options"), py::kw_only(), py::arg("lanes"));
  py::class_<DeviceEngine, BucketEngine, std::shared_ptr<DeviceEngine>>(module, "DeviceEngine")
      .def(py::init(&start_device_engine), py::arg("options"), py::kw_only(), py::arg("device"),
           py::arg("lane"), py::arg("group_name"));
  module.def("use_device_library", &use_library, py::arg("library"));
  module.def(
      "shutdown",
      [](double timeout_seconds) {
        const py::gil_scoped_release released;
        const std::chrono::milliseconds timeout(static_cast<int64_t>(timeout_seconds * 1000));
        Engine::shutdown_all(timeout);
        Worker::stop_all(timeout);
        process_is_ending = true;
      },
      py::arg("timeout_seconds"));
}

}  // namespace gradferry
