#include "streamed_backend.h"

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fake_device {
namespace {

class StreamedWork final : public c10d::Work {
 public:
  explicit StreamedWork(MarkPtr end) : end_(std::move(end)) {}
  bool isCompleted() override { return Machine::get().query(end_); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    Machine::get().wait(current_stream(), end_);
    return true;
  }

 private:
  MarkPtr end_;
};

void touch(const Touched& touched, const std::vector<at::Tensor>& inputs,
           const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& input : inputs) touched.read(input.const_data_ptr(), input.nbytes());
  for (const at::Tensor& output : outputs) {
    touched.write(output.mutable_data_ptr(), output.nbytes());
  }
}

}  // namespace

StreamedBackend::StreamedBackend(c10::intrusive_ptr<c10d::Backend> carrier, const std::string& name,
                                 int rank, int size, std::chrono::milliseconds timeout)
    : Backend(rank, size),
      carrier_(std::move(carrier)),
      options_(c10::make_intrusive<Options>(name, timeout)),
      stream_(Machine::get().new_stream()) {}

// Two operations, so that other streams may run while bytes travel.
c10::intrusive_ptr<c10d::Work> StreamedBackend::run(const char* name,
                                                    const std::vector<at::Tensor>& inputs,
                                                    const std::vector<at::Tensor>& outputs,
                                                    bool in_line, const Post& post) {
  Machine& machine = Machine::get();
  const uint32_t stream = in_line ? current_stream() : stream_;
  const MarkPtr first = in_line ? last_ : machine.record(current_stream());
  if (first) machine.wait(stream, first, /*counted=*/false);
  auto under_way = std::make_shared<c10::intrusive_ptr<c10d::Work>>();
  machine.enqueue(stream, name, [=](const Touched& touched) {
    touch(touched, inputs, outputs);
    *under_way = post();
  });
  Damage damage;
  if (damage_.countdown == 0) damage = damage_;
  if (damage_.countdown >= 0) --damage_.countdown;
  machine.enqueue(stream, name, [=](const Touched& touched) {
    touch(touched, inputs, outputs);
    (*under_way)->wait();
    if (damage.countdown < 0) return;
    static_cast<uint8_t*>(outputs[0].mutable_data_ptr())[damage.offset] = damage.value;
  });
  last_ = machine.record(stream);
  if (in_line) return nullptr;
  return c10::make_intrusive<StreamedWork>(last_);
}

c10::intrusive_ptr<c10d::Work> StreamedBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                          const c10d::BroadcastOptions& options) {
  std::vector<at::Tensor> host = {on_host(tensors[0])};
  return run("broadcast", {}, host, false, [carrier = carrier_, host, options]() mutable {
    return carrier->broadcast(host, options);
  });
}

c10::intrusive_ptr<c10d::Work> StreamedBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                          const c10d::AllreduceOptions& options) {
  std::vector<at::Tensor> host = {on_host(tensors[0])};
  return run("all-reduce", {}, host, false, [carrier = carrier_, host, options]() mutable {
    return carrier->allreduce(host, options);
  });
}

c10::intrusive_ptr<c10d::Work> StreamedBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  std::vector<std::vector<at::Tensor>> out(1);
  for (const at::Tensor& output : outputs[0]) out[0].push_back(on_host(output));
  std::vector<at::Tensor> in = {on_host(inputs[0])};
  return run("all-gather", in, out[0], false, [carrier = carrier_, out, in, options]() mutable {
    return carrier->allgather(out, in, options);
  });
}

c10::intrusive_ptr<c10d::Work> StreamedBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  at::Tensor out = on_host(output), in = on_host(input);
  return run("all-gather", {in}, {out}, in_line_, [carrier = carrier_, out, in, options]() mutable {
    return carrier->_allgather_base(out, in, options);
  });
}

c10::intrusive_ptr<c10d::Work> StreamedBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
    std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  at::Tensor out = on_host(output), in = on_host(input);
  if (input_sizes.empty()) ++num_equal_;
  return run("all-to-all", {in}, {out}, in_line_,
             [carrier = carrier_, out, in, output_sizes, input_sizes, options]() mutable {
               return carrier->alltoall_base(out, in, output_sizes, input_sizes, options);
             });
}

}  // namespace fake_device
