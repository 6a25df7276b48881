// The beginning of a Reducer: ranks compare what they average and how, connect, and start engines.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "gradferry/reducer.h"
#include "host/host_engine.h"

namespace gradferry {

struct StartedReducer {
  std::shared_ptr<HostEngine> engine;
  std::string layout;  // a line for each thing that a saved state depends on
};

// Does what the constructor of Reducer promises. `allocate`: called when ranks agree, for what else
// this rank needs; what it throws is an error of all ranks.
StartedReducer start_reducer(const Reducer::NamedTensors& tensors, const ReducerOptions& options,
                             c10::intrusive_ptr<c10d::Store> store, uint32_t rank,
                             uint32_t world_size, const std::function<void()>& allocate);

// "[3, 4] Float"
std::string shape_and_dtype(const at::Tensor& tensor);

}  // namespace gradferry
