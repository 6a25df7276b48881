#include "streamed_backend.h"

#include <ATen/ops/cat.h>
#include <c10/core/StreamGuard.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fake_device {
namespace {

class StreamedWork final : public c10d::Work {
 public:
  StreamedWork(MarkPtr end, uint32_t stream, std::vector<at::Tensor> outputs)
      : end_(std::move(end)), stream_(stream), outputs_(std::move(outputs)) {}
  bool isCompleted() override { return Machine::get().query(end_); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    Machine::get().wait(current_stream(), end_);
    return true;
  }
  // Complete at once; who waits for it waits for the stream.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const c10::Device device(kDevice, 0);
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    const c10::StreamGuard guard(
        c10::Stream(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(stream_)));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  MarkPtr end_;
  uint32_t stream_;
  std::vector<at::Tensor> outputs_;  // on the device
};

void touch(const Touched& touched, const std::vector<at::Tensor>& inputs,
           const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& input : inputs) touched.read(input.const_data_ptr(), input.nbytes());
  for (const at::Tensor& output : outputs) {
    touched.write(output.mutable_data_ptr(), output.nbytes());
  }
}

// NCCL does not promise that collectives of two communicators proceed side by side. Where a test
// takes that away, a collective begins when the one under way on its device is complete, and any
// two must be ordered, as if they wrote to one place. Only the device's thread calls it, but for
// set().
class OneAtATime {
 public:
  void set(double patience) {
    patience_ = patience;
    has_given_up_ = false;
  }
  // Whether a collective may begin now.
  bool is_free() {
    if (patience_ == 0 || has_given_up_) return true;
    others_wait_ |= is_busy_;
    return !is_busy_;
  }
  void begin(const Touched& touched) {
    touch(touched);
    is_busy_ = true;
    others_wait_ = false;
    since_ = std::chrono::steady_clock::now();
  }
  // Gives up once others have waited too long for the collective under way, which is not complete.
  void look() {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - since_;
    if (patience_ == 0 || has_given_up_ || !others_wait_ || passed.count() < patience_) return;
    has_given_up_ = must_report_ = true;
  }
  void end(const Touched& touched) {
    touch(touched);
    is_busy_ = false;
    if (!std::exchange(must_report_, false)) return;
    Machine::get().note_error("deadlock: this collective and one behind it wait for each other");
  }

 private:
  void touch(const Touched& touched) const {
    if (patience_ != 0) touched.write(this, 1);
  }

  std::atomic<double> patience_ = 0;  // seconds; 0: collectives may proceed side by side
  std::atomic<bool> has_given_up_ = false;
  bool is_busy_ = false, others_wait_ = false, must_report_ = false;
  std::chrono::steady_clock::time_point since_;
};
OneAtATime one_at_a_time;

// A collective begins when the last rank has come.
class Start {
 public:
  void post(c10d::Backend& carrier, double here) {
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    tensors_ = {at::full({1}, here, at::TensorOptions().dtype(at::kDouble))};
    work_ = carrier.allreduce(tensors_, options);
  }
  bool has_come() const { return work_->isCompleted(); }
  double wait() {
    work_->wait();
    return tensors_[0].item<double>();
  }

 private:
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10d::Work> work_;
};

// A part of an all-reduce: the carrier's own reduce-scatter does not say when it is complete.
class ScatteredWork final : public c10d::Work {
 public:
  ScatteredWork(c10d::Backend& carrier, const at::Tensor& input, at::Tensor output,
                const c10d::ReduceScatterOptions& options)
      : tensors_{input.flatten().clone()},
        output_(std::move(output)),
        offset_(carrier.getRank() * output_.numel()),
        divisor_(options.reduceOp == c10d::ReduceOp::AVG ? carrier.getSize() : 1) {
    c10d::AllreduceOptions sum;
    if (divisor_ == 1) sum.reduceOp = options.reduceOp;
    work_ = carrier.allreduce(tensors_, sum);
  }
  bool isCompleted() override { return work_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    work_->wait(timeout);
    output_.view(-1).copy_(tensors_[0].narrow(0, offset_, output_.numel()));
    if (divisor_ != 1) output_.div_(divisor_);
    return true;
  }

 private:
  std::vector<at::Tensor> tensors_;
  at::Tensor output_;
  int64_t offset_;
  int divisor_;
  c10::intrusive_ptr<c10d::Work> work_;
};

// An all-to-all of lists, through one of single tensors.
class ListedWork final : public c10d::Work {
 public:
  ListedWork(c10d::Backend& carrier, const std::vector<at::Tensor>& inputs,
             std::vector<at::Tensor> outputs, const c10d::AllToAllOptions& options)
      : outputs_(std::move(outputs)), input_(at::cat(inputs)), output_(at::cat(outputs_)) {
    std::vector<int64_t> output_sizes, input_sizes;  // which the carrier takes away
    for (const at::Tensor& output : outputs_) output_sizes.push_back(output.numel());
    for (const at::Tensor& input : inputs) input_sizes.push_back(input.numel());
    work_ = carrier.alltoall_base(output_, input_, output_sizes, input_sizes, options);
  }
  bool isCompleted() override { return work_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    work_->wait(timeout);
    int64_t begin = 0;
    for (const at::Tensor& output : outputs_) {
      output.copy_(output_.narrow(0, begin, output.numel()));
      begin += output.numel();
    }
    return true;
  }

 private:
  std::vector<at::Tensor> outputs_;
  at::Tensor input_, output_;
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace

StreamedBackend::StreamedBackend(c10::intrusive_ptr<c10d::Backend> carrier, const std::string& name,
                                 int rank, int size, std::chrono::milliseconds timeout)
    : Backend(rank, size),
      carrier_(std::move(carrier)),
      options_(c10::make_intrusive<Options>(name, timeout)),
      stream_(Machine::get().borrow_stream()) {}

void StreamedBackend::set_one_at_a_time(double patience) { one_at_a_time.set(patience); }

StreamedBackend::~StreamedBackend() { Machine::get().give_back(stream_); }

// Two operations, so that other streams run while bytes travel: a rank may be in collectives of two
// groups at once, which do not begin in one order on all ranks.
c10::intrusive_ptr<c10d::Work> StreamedBackend::run(
    const char* name, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& results, uint64_t bytes_sent, bool in_line, const Post& post) {
  Machine& machine = Machine::get();
  const uint32_t stream = in_line ? current_stream() : stream_;
  const MarkPtr first = in_line ? last_ : machine.record(current_stream());
  if (first) machine.wait(stream, first, /*counted=*/false);
  auto under_way = std::make_shared<c10::intrusive_ptr<c10d::Work>>();
  const Prices prices = machine.prices();
  const double takes =
      prices.collective + byte_share_ * prices.byte_sent * static_cast<double>(bytes_sent);
  const auto start = takes > 0 ? std::make_shared<Start>() : nullptr;
  const auto begin = [=, carrier = carrier_](const Touched& touched) {
    one_at_a_time.begin(touched);
    touch(touched, inputs, outputs);
    if (start) start->post(*carrier, touched.begin());
    *under_way = post();
  };
  machine.enqueue(stream, name, begin, /*is_kernel=*/false, [] { return one_at_a_time.is_free(); });
  Damage damage;
  if (damage_.countdown == 0) damage = damage_;
  if (damage_.countdown >= 0) --damage_.countdown;
  const auto finish = [=](const Touched& touched) {
    touch(touched, inputs, outputs);
    (*under_way)->wait();
    one_at_a_time.end(touched);
    if (start) touched.last_until(start->wait() + takes);
    if (damage.countdown < 0) return;
    static_cast<uint8_t*>(outputs[0].mutable_data_ptr())[damage.offset] = damage.value;
  };
  machine.enqueue(stream, name, finish, /*is_kernel=*/false, [=] {
    if ((*under_way)->isCompleted() && (!start || start->has_come())) return true;
    one_at_a_time.look();
    return false;
  });
  last_ = machine.record(stream);
  if (in_line) return nullptr;
  return c10::make_intrusive<StreamedWork>(last_, stream, results);
}

c10::intrusive_ptr<c10d::Work> StreamedBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                          const c10d::BroadcastOptions& options) {
  std::vector<at::Tensor> host = {on_host(tensors[0])};
  return run(
      "broadcast", {}, host, tensors, host[0].nbytes(), false,
      [carrier = carrier_, host, options]() mutable { return carrier->broadcast(host, options); });
}

c10::intrusive_ptr<c10d::Work> StreamedBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                          const c10d::AllreduceOptions& options) {
  std::vector<at::Tensor> host = {on_host(tensors[0])};
  return run(
      "all-reduce", {}, host, tensors, host[0].nbytes(), false,
      [carrier = carrier_, host, options]() mutable { return carrier->allreduce(host, options); });
}

c10::intrusive_ptr<c10d::Work> StreamedBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  std::vector<std::vector<at::Tensor>> out(1);
  for (const at::Tensor& output : outputs[0]) out[0].push_back(on_host(output));
  std::vector<at::Tensor> in = {on_host(inputs[0])};
  return run("all-gather", in, out[0], outputs[0], in[0].nbytes() * (getSize() - 1), false,
             [carrier = carrier_, out, in, options]() mutable {
               return carrier->allgather(out, in, options);
             });
}

c10::intrusive_ptr<c10d::Work> StreamedBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  at::Tensor out = on_host(output), in = on_host(input);
  const uint64_t sent = in.nbytes() * (getSize() - 1);
  return run("all-gather", {in}, {out}, {output}, sent, in_line_,
             [carrier = carrier_, out, in, options]() mutable {
               return carrier->_allgather_base(out, in, options);
             });
}

c10::intrusive_ptr<c10d::Work> StreamedBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  at::Tensor out = on_host(output), in = on_host(input);
  return run("reduce-scatter", {in}, {out}, {output}, in.nbytes() - out.nbytes(), false,
             [carrier = carrier_, out, in, options] {
               return c10::make_intrusive<ScatteredWork>(*carrier, in, out, options);
             });
}

c10::intrusive_ptr<c10d::Work> StreamedBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
    std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  at::Tensor out = on_host(output), in = on_host(input);
  if (input_sizes.empty()) ++num_equal_;
  const auto world_size = static_cast<uint64_t>(getSize());
  const uint64_t kept =
      input_sizes.empty() ? in.nbytes() / world_size : input_sizes[getRank()] * in.element_size();
  return run("all-to-all", {in}, {out}, {output}, in.nbytes() - kept, in_line_,
             [carrier = carrier_, out, in, output_sizes, input_sizes, options]() mutable {
               return carrier->alltoall_base(out, in, output_sizes, input_sizes, options);
             });
}

c10::intrusive_ptr<c10d::Work> StreamedBackend::alltoall(std::vector<at::Tensor>& outputs,
                                                         std::vector<at::Tensor>& inputs,
                                                         const c10d::AllToAllOptions& options) {
  std::vector<at::Tensor> out, in;
  uint64_t sent = 0;
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    out.push_back(on_host(outputs[rank]));
    in.push_back(on_host(inputs[rank]));
    if (static_cast<int>(rank) != getRank()) sent += in.back().nbytes();
  }
  return run("all-to-all", in, out, outputs, sent, in_line_,
             [carrier = carrier_, out, in, options] {
               return c10::make_intrusive<ListedWork>(*carrier, in, out, options);
             });
}

}  // namespace fake_device
