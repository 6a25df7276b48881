#include <pybind11/stl.h>

#include <map>
#include <numeric>
#include <optional>
#include <type_traits>

#include "background_thread.h"
#include "bindings.h"
#include "ddp_hook.h"
#include "device/device_engine.h"
#include "exchanger.h"
#include "gradferry/device_library.h"
#include "holders.h"
#include "host/host_engine.h"
#include "host/shared_memory.h"
#include "host/sockets.h"
#include "protocol/defaults.h"
#include "protocol/planned_bytes.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

std::unique_ptr<ParameterSpec> make_parameter(const std::string& name, uint64_t num_elements,
                                              at::ScalarType dtype, const std::string& codec,
                                              const std::string& warmup, bool worker_residual,
                                              bool owner_residual, std::optional<uint32_t> owner) {
  return std::make_unique<ParameterSpec>(ParameterSpec{name, num_elements, to_scalar_type(dtype),
                                                       codec, warmup, worker_residual,
                                                       owner_residual, owner});
}

Collective to_collective(const std::string& name) {
  if (name == "all_reduce") return Collective::kAllReduce;
  if (name == "all_gather") return Collective::kAllGather;
  GRADFERRY_EXPECTS(
      name == "reduce_scatter", kConfig,
      "collective is 'all_reduce', 'reduce_scatter' or 'all_gather', not '" + name + "'");
  return Collective::kReduceScatter;
}

// By reference: torch registers some classes under another holder type.
c10::intrusive_ptr<c10d::Backend> to_backend(const py::handle& backend) {
  return c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&backend.cast<c10d::Backend&>());
}

template <auto kField>
void set_field(EngineOptions& options, const py::handle& value) {
  auto& field = options.*kField;
  field = value.cast<std::remove_reference_t<decltype(field)>>();
}

// The fields that Python gives, by name. A new one has a row here and nothing else in this file.
const std::map<std::string, void (*)(EngineOptions&, const py::handle&)> kFields = {
    {"parameters", &set_field<&EngineOptions::parameters>},
    {"rank", &set_field<&EngineOptions::rank>},
    {"nodes",
     [](EngineOptions& options, const py::handle& members) {
       options.nodes = Nodes(members.cast<std::vector<std::vector<uint32_t>>>());
       options.world_size = options.nodes.world_size();
     }},
    {"config_hash", &set_field<&EngineOptions::config_hash>},
    {"layout_hash", &set_field<&EngineOptions::layout_hash>},
    {"seed", &set_field<&EngineOptions::seed>},
    {"warmup_steps", &set_field<&EngineOptions::warmup_steps>},
    {"compressed_warmup", &set_field<&EngineOptions::compressed_warmup>},
    {"momentum", &set_field<&EngineOptions::momentum>},
    {"raise_nonfinite", &set_field<&EngineOptions::raise_nonfinite>},
    {"loss_scale",
     [](EngineOptions& options, const py::handle& scale) {
       if (!scale.is_none()) options.loss_scale = scale.cast<at::Tensor>();
     }},
    {"check_every", &set_field<&EngineOptions::check_every>},
    {"chunk_bytes", &set_field<&EngineOptions::chunk_bytes>},
    {"most_slots", &set_field<&EngineOptions::most_slots>},
    {"on_streams", &set_field<&EngineOptions::on_streams>},
    {"collective",
     [](EngineOptions& options, const py::handle& name) {
       options.collective = to_collective(name.cast<std::string>());
     }},
    {"keep_gathered", &set_field<&EngineOptions::keep_gathered>},
    {"workspace_cap_bytes", &set_field<&EngineOptions::workspace_cap_bytes>},
    {"find_unused_parameters", &set_field<&EngineOptions::find_unused_parameters>},
    {"recovery_hint", &set_field<&EngineOptions::recovery_hint>},
};

std::unique_ptr<EngineOptions> make_options(const py::object& store, WorldRanks world_ranks,
                                            const py::kwargs& fields) {
  auto options = std::make_unique<EngineOptions>();
  for (const auto& [key, value] : fields) {
    const auto name = key.cast<std::string>();
    const auto field = kFields.find(name);
    if (field == kFields.end()) throw py::type_error("EngineOptions has no field " + name);
    try {
      field->second(*options, value);
    } catch (const py::cast_error&) {
      throw py::type_error("EngineOptions cannot have " + name + "=" +
                           py::repr(value).cast<std::string>());
    }
  }
  options->make_exception = &make_torch_exception;
  c10::intrusive_ptr<c10d::Store> peers_store;
  if (!store.is_none()) peers_store = to_store(store);
  options->peers = std::make_shared<Peers>(std::move(peers_store), options->rank,
                                           options->world_size, std::move(world_ranks));
  return options;
}

// Of every rank: bytes to other hosts, and to other ranks of its host; messages with tiles to other
// hosts, and the bytes of the shortest. Throws what an engine would for lack of memory.
py::list planned_bytes_list(const EngineOptions& options,
                            const std::vector<std::vector<uint32_t>>& buckets,
                            const std::vector<uint32_t>& hosts, bool in_warmup) {
  const PlanOptions planning =
      options.planning(in_warmup ? CodecChoice::kWarmup : CodecChoice::kOwn, /*residuals=*/false);
  const Layout layout(options.parameters, options.rank, options.nodes);
  plan_workspace(layout, planning,
                 {.cap_bytes = options.workspace_cap_bytes,
                  .other_bytes = 0,
                  .most_slots = 1,
                  .gathers_in_place = !options.on_streams,
                  .keeps_gathered = options.keep_gathered});
  py::list result;
  for (const StepBytes& sent :
       planned_bytes(layout, planning, options.find_unused_parameters, buckets, hosts)) {
    result.append(py::make_tuple(sent.to_other_hosts, sent.on_host, sent.num_messages,
                                 sent.shortest_message));
  }
  return result;
}

// Torch has Python know its Work under a holder of its own. Without one, the collective runs on the
// stream from which it was posted.
struct PostedCollective {
  Pending work;
};

std::shared_ptr<Lane> make_backend_lane(const py::handle& backend) {
  auto held = to_backend(backend);
  const py::gil_scoped_release released;
  return std::make_shared<CarrierLane>(
      std::move(held), std::make_shared<const at::ThreadLocalState>(thread_state_without_python()));
}

std::shared_ptr<SharedMemory> map_shared_memory(int descriptor, uint64_t num_bytes) {
  const py::gil_scoped_release released;
  return std::make_shared<SharedMemory>(descriptor, num_bytes);
}

// `lanes`: by purpose.
std::shared_ptr<HostEngine> start_host_engine(EngineOptions options,
                                              const std::vector<at::Tensor>& tensors,
                                              std::map<std::string, std::shared_ptr<Lane>> lanes,
                                              const std::shared_ptr<SharedMemory>& memory,
                                              std::string local_stage) {
  const py::gil_scoped_release released;
  ExchangeLanes used{.scatter = lanes["scatter"],
                     .gather = lanes["gather"],
                     .commit = lanes["commit"],
                     .local_scatter = lanes["local_scatter"],
                     .forward = lanes["forward"],
                     .hashes = lanes["hashes"]};
  lanes.clear();
  return HostEngine::start(std::move(options), ParameterHashes(tensors), std::move(used), memory,
                           std::move(local_stage));
}

// `lanes`: by purpose. With "staged" bytes are staged in host memory, for all of them. Else
// `group_name`: the group's operations send them from the device. Neither: nothing is exchanged.
// `chained`: as StreamTransport has it.
std::shared_ptr<DeviceEngine> start_device_engine(
    EngineOptions options, const at::Device& device, const std::vector<at::Tensor>& tensors,
    std::map<std::string, std::shared_ptr<Lane>> lanes,
    const std::optional<std::string>& group_name, bool chained) {
  const py::gil_scoped_release released;
  std::unique_ptr<DeviceTransport> transport;
  NodeLanes nodes{.siblings = lanes["siblings"], .peers = lanes["peers"]};
  if (const auto staged = lanes["staged"]) {
    transport = std::make_unique<StagedTransport>(staged, std::move(nodes), options.peers);
  } else if (group_name) {
    transport = std::make_unique<StreamTransport>(
        [name = *group_name] { return c10d::resolve_process_group(name); }, std::move(nodes),
        chained ? std::optional(device) : std::nullopt);
  }
  lanes.clear();
  return DeviceEngine::start(std::move(options), device, ParameterHashes(tensors),
                             std::move(transport));
}

std::unique_ptr<Exchanger> make_exchanger(std::shared_ptr<BucketEngine> engine) {
  return std::make_unique<Exchanger>(std::move(engine));
}

// `capsule` holds a DeviceLibrary, in a module that stays loaded.
void use_library(const py::capsule& capsule) {
  GRADFERRY_EXPECTS(std::string_view(capsule.name()) == kDeviceLibraryCapsule, kConfig,
                    "not a device library: a capsule named '" + std::string(capsule.name()) + "'");
  use_device_library(*capsule.get_pointer<const DeviceLibrary>());
}

// For benchmarks: the engine's one bucket of all its parameters, without DDP around it. Blocks.
void exchange_all(std::shared_ptr<BucketEngine> engine, const at::Tensor& values) {
  const py::gil_scoped_release released;
  std::vector<uint32_t> parameters(engine->layout().parameters().size());
  std::iota(parameters.begin(), parameters.end(), 0);
  Exchanger(std::move(engine)).start({{parameters, values}}, /*in_background=*/false).wait();
}

using BucketPair = std::pair<std::vector<uint32_t>, at::Tensor>;

PendingExchange start_exchange(Exchanger& exchanger, std::vector<BucketPair> pairs,
                               bool in_background) {
  std::vector<Exchanger::HandedBucket> buckets;
  for (auto& [parameters, values] : pairs) {
    buckets.push_back({std::move(parameters), std::move(values)});
  }
  return exchanger.start(std::move(buckets), in_background);
}

double milliseconds(int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e6; }

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
  result["local_bytes"] = stats.local_bytes;
  result["residual_bytes"] = stats.residual_bytes;
  result["workspace_bytes"] = stats.workspace_bytes;
  result["workspace_allocations"] = stats.workspace_allocations;
  result["in_flight"] = stats.in_flight;
  result["host_waits"] = stats.host_waits;
  result["step_buckets"] = stats.step_buckets;
  result["encode_ms"] = milliseconds(stats.times.encode_ns);
  result["network_ms"] = milliseconds(stats.times.network_ns);
  result["reduce_ms"] = milliseconds(stats.times.reduce_ns);
  result["decode_ms"] = milliseconds(stats.times.decode_ns);
  result["exposed_ms"] = milliseconds(stats.times.exposed_ns);
  result["worker_residual_ratio"] = stats.times.worker.ratio();
  result["owner_residual_ratio"] = stats.times.owner.ratio();
  return result;
}

// The memory of chunks in flight.
py::dict workspace_dict(const BucketEngine& engine) {
  const Workspace workspace = [&] {
    const py::gil_scoped_release released;
    return engine.stats().workspace;
  }();
  py::dict result;
  result["slots"] = workspace.slots;
  result["message_bytes"] = workspace.message_bytes;
  result["send_bytes"] = workspace.send_bytes;
  result["receive_bytes"] = workspace.receive_bytes;
  result["own_message_bytes"] = workspace.own_message_bytes;
  result["siblings_share"] = workspace.shared_bytes != 0;
  result["gathered_bytes"] = workspace.gathered_part();
  result["dense_bytes"] = workspace.dense_bytes();
  return result;
}

py::list event_list(const BucketEngine& engine) {
  py::list result;
  for (const BucketEvent& event : engine.events()) {
    py::dict row;
    row["step"] = event.step;
    row["bucket"] = event.bucket;
    row["chunks"] = event.chunks;
    row["gradient_bytes"] = event.gradient_bytes;
    row["begin_ms"] = milliseconds(event.begin_ns);
    row["encoded_ms"] = milliseconds(event.encoded_ns);
    row["complete_ms"] = milliseconds(event.complete_ns);
    row["encode_ms"] = milliseconds(event.encode_ns);
    row["network_ms"] = milliseconds(event.network_ns);
    row["reduce_ms"] = milliseconds(event.reduce_ns);
    row["decode_ms"] = milliseconds(event.decode_ns);
    result.append(row);
  }
  return result;
}

// (id, elements, offset in the worker residual, offset in the owner residual) of every tile; offset
// -1: this rank has none.
py::list tiles_list(const BucketEngine& engine) {
  const auto offset = [](uint64_t residual) {
    return residual == kNoResidual ? int64_t{-1} : static_cast<int64_t>(residual);
  };
  const Layout& layout = engine.layout();
  py::list result;
  for (const Parameter& parameter : layout.parameters()) {
    for (uint32_t t = 0; t < parameter.num_tiles; ++t) {
      const uint64_t id = parameter.first_tile + t;
      result.append(py::make_tuple(id, layout.tile_elements(parameter, t),
                                   offset(layout.worker_residual_offset(id)),
                                   offset(layout.owner_residual_offset(id))));
    }
  }
  return result;
}

void bind_defaults(py::module_& module) {
  module.attr("EXEMPT_MAX_DIMS") = kExemptMaxDims;
  module.attr("EXEMPT_MAX_SIZE") = kExemptMaxSize;
  module.attr("CHUNK_BYTES") = kChunkBytes;
  module.attr("STREAM_CHUNK_BYTES") = kStreamChunkBytes;
  module.attr("HOST_SLOTS") = kHostSlots;
  module.attr("WORKSPACE_CAPS_MB") = py::make_tuple(kWorkspaceCapMiB, kStreamWorkspaceCapMiB);
  module.attr("BUCKET_CAP_MB") = kBucketCapMiB;
  module.attr("MOST_RANKS") = kMostRanks;
  module.def(
      "kept_residuals",
      [](const std::string& codec, const std::string& error_feedback, double momentum) {
        const KeptResiduals kept = kept_residuals(codec, error_feedback, momentum);
        return std::make_pair(kept.worker, kept.owner);
      },
      py::arg("codec"), py::arg("error_feedback"), py::arg("momentum"));
}

void bind_options(py::module_& module) {
  module.def("chunk_bytes_within", &chunk_bytes_within, py::arg("workspace_cap_bytes"),
             py::arg("world_size"), py::arg("most"));
  module.attr("RESIDUAL_ALIGNMENT") = kResidualAlignment;
  py::class_<PostedCollective>(module, "Collective")
      .def(
          "wait",
          [](const PostedCollective& collective) {
            if (collective.work) collective.work->wait();
          },
          py::call_guard<py::gil_scoped_release>())
      .def("is_completed", [](const PostedCollective& collective) {
        return !collective.work || collective.work->isCompleted();
      });
  py::class_<Lane, std::shared_ptr<Lane>> lane_class(module, "Lane");
  def_init(lane_class, &make_backend_lane, py::arg("backend"));
  lane_class
      .def(
          "all_to_all",
          [](Lane& lane, const at::Tensor& receive, const std::vector<int64_t>& receive_bytes,
             const at::Tensor& send, const std::vector<int64_t>& send_bytes) {
            return PostedCollective{lane.all_to_all(receive, receive_bytes, send, send_bytes)};
          },
          py::arg("receive"), py::arg("receive_bytes"), py::arg("send"), py::arg("send_bytes"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "all_gather",
          [](Lane& lane, const at::Tensor& receive, const at::Tensor& send) {
            const std::vector<int64_t> sizes(lane.world_size(), send.numel());
            return PostedCollective{lane.all_gather(receive, sizes, send)};
          },
          py::arg("receive"), py::arg("send"), py::call_guard<py::gil_scoped_release>())
      .def("descriptors",
           [](const Lane& lane) { return dynamic_cast<const SocketLane&>(lane).descriptors(); });
  py::class_<SharedMemory, std::shared_ptr<SharedMemory>> memory_class(module, "SharedMemory");
  def_init(memory_class, &map_shared_memory, py::arg("descriptor"), py::arg("num_bytes"));
  memory_class.def("part", &SharedMemory::part, py::arg("offset"), py::arg("num_bytes"));
  py::class_<ParameterSpec> parameter_class(module, "ParameterSpec");
  def_init(parameter_class, &make_parameter, py::kw_only(), py::arg("name"),
           py::arg("num_elements"), py::arg("dtype"), py::arg("codec"), py::arg("warmup"),
           py::arg("worker_residual"), py::arg("owner_residual"), py::arg("owner").none(true));
  py::class_<EngineOptions> options_class(module, "EngineOptions");
  def_init(options_class, &make_options, py::kw_only(), py::arg("store").none(true) = py::none(),
           py::arg("world_ranks") = WorldRanks());
  module.def("planned_bytes", &planned_bytes_list, py::arg("options"), py::kw_only(),
             py::arg("buckets"), py::arg("hosts"), py::arg("in_warmup"));
  module.def("shared_memory_bytes", &shared_memory_bytes, py::arg("options"),
             py::call_guard<py::gil_scoped_release>());
}

py::tuple saved_state(BucketEngine& engine, const std::optional<at::Tensor>& worker,
                      const std::optional<at::Tensor>& owner) {
  const SavedResiduals kept{worker.value_or(at::Tensor()), owner.value_or(at::Tensor())};
  EngineState state = [&] {
    const py::gil_scoped_release released;
    return engine.state(kept);
  }();
  const SavedResiduals& saved = state.residuals;
  return py::make_tuple(state.steps, saved.worker, saved.owner, saved.loss_scale);
}

}  // namespace

void bind_engine(py::module_& module) {
  bind_defaults(module);
  bind_options(module);
  py::class_<BucketEngine, std::shared_ptr<BucketEngine>>(module, "BucketEngine")
      .def("stats", &stats_dict)
      .def("workspace", &workspace_dict)
      .def("current_step", &BucketEngine::current_step, py::call_guard<py::gil_scoped_release>())
      .def("events", &event_list)
      .def("exchange", &exchange_all, py::arg("values"))
      .def(
          "fail",
          [](BucketEngine& engine, const std::string& message) {
            engine.fail(Error(ErrorKind::kState, message));
          },
          py::arg("message"), py::call_guard<py::gil_scoped_release>())
      .def("expect_alive", &BucketEngine::expect_alive, py::call_guard<py::gil_scoped_release>())
      .def("settle", &BucketEngine::settle, py::call_guard<py::gil_scoped_release>())
      .def("decode_kept",
           py::overload_cast<const std::vector<uint32_t>&, const at::Tensor&>(
               &BucketEngine::decode_kept),
           py::arg("parameters"), py::arg("gradient"), py::call_guard<py::gil_scoped_release>())
      .def("state", &saved_state, py::kw_only(), py::arg("kept_worker") = py::none(),
           py::arg("kept_owner") = py::none())
      .def(
          "load_state",
          [](BucketEngine& engine, uint64_t steps, const at::Tensor& worker,
             const at::Tensor& owner, float loss_scale) {
            const py::gil_scoped_release released;
            engine.load_state({steps, {worker, owner, loss_scale}});
          },
          py::arg("steps"), py::arg("worker_residual"), py::arg("owner_residual"),
          py::arg("loss_scale"))
      .def("residual_sizes",
           [](const BucketEngine& engine) {
             return py::make_tuple(engine.layout().worker_residual_elements(),
                                   engine.layout().owner_residual_elements());
           })
      .def("tiles", &tiles_list)
      .def("note_passed", &BucketEngine::pass, py::arg("parameters"))
      .def("compare", &BucketEngine::compare, py::arg("parameters"))
      .def("add_to_worker_residual", &BucketEngine::add_to_worker_residual, py::arg("parameter"),
           py::arg("values"), py::arg("factor"), py::call_guard<py::gil_scoped_release>())
      .def("scale_residuals", &BucketEngine::scale_residuals, py::arg("factor"),
           py::call_guard<py::gil_scoped_release>());
  py::class_<PendingExchange>(module, "PendingExchange")
      .def("wait", &PendingExchange::wait, py::call_guard<py::gil_scoped_release>())
      .def("is_completed", &PendingExchange::is_completed);
  py::class_<Exchanger> exchanger_class(module, "Exchanger");
  def_init(exchanger_class, &make_exchanger, py::arg("engine"));
  exchanger_class.def("start", &start_exchange, py::arg("buckets"), py::kw_only(),
                      py::arg("in_background"), py::call_guard<py::gil_scoped_release>());
  py::class_<HostEngine, BucketEngine, std::shared_ptr<HostEngine>> host_class(module,
                                                                               "HostEngine");
  def_init(host_class, &start_host_engine, py::arg("options"), py::kw_only(), py::arg("tensors"),
           py::arg("lanes"), py::arg("memory").none(true), py::arg("local_stage"));
  host_class.def("local_stage", &HostEngine::local_stage);
  py::class_<DeviceEngine, BucketEngine, std::shared_ptr<DeviceEngine>> device_class(
      module, "DeviceEngine");
  def_init(device_class, &start_device_engine, py::arg("options"), py::kw_only(), py::arg("device"),
           py::arg("tensors"), py::arg("lanes"), py::arg("group_name"), py::arg("chained"));
  module.def(
      "parameter_hashes",
      [](const std::vector<at::Tensor>& parameters) {
        const py::gil_scoped_release released;
        return ParameterHashes(parameters).compute();
      },
      py::arg("parameters"));
  module.def("use_device_library", &use_library, py::arg("library"));
  module.def(
      "shutdown",
      [](double timeout_seconds) {
        const py::gil_scoped_release released;
        BackgroundThread::stop_all(to_milliseconds(timeout_seconds));
        process_is_ending = true;
      },
      py::arg("timeout_seconds"));
}

}  // namespace gradferry
