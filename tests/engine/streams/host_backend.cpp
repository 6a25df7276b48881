#include "host_backend.h"

#include <utility>

namespace fake_device {
namespace {

class HostWork final : public c10d::Work {
 public:
  HostWork(c10::intrusive_ptr<c10d::Work> work, MarkPtr end)
      : work_(std::move(work)), end_(std::move(end)) {}
  bool isCompleted() override { return work_->isCompleted(); }
  // Counts once, however often it is called in vain.
  bool wait(std::chrono::milliseconds timeout) override {
    if (!std::exchange(counted_, true)) omitted_ = Machine::get().omits_wait();
    work_->wait(timeout);
    if (!omitted_) Machine::get().synchronize(end_, /*counted=*/false);
    return true;
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  MarkPtr end_;  // of its accesses
  bool counted_ = false, omitted_ = false;
};

}  // namespace

// Behind the thread's knowledge and the backend's collective before.
MarkPtr HostBackend::note_accesses(const char* name, const at::Tensor& output,
                                   const at::Tensor& input) const {
  Machine& machine = Machine::get();
  const bool is_pinned = input.is_pinned();
  machine.enqueue(
      stream_, name,
      [=](const Touched& touched) {
        // A lane's own copies have no place that others know.
        if (is_pinned) touched.read(input.const_data_ptr(), input.nbytes());
        touched.write(output.mutable_data_ptr(), output.nbytes());
      },
      /*is_kernel=*/false);
  return machine.record(stream_);
}

c10::intrusive_ptr<c10d::Work> HostBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& options) {
  MarkPtr end = note_accesses("all-gather on the host", output, input);
  return c10::make_intrusive<HostWork>(carrier_->_allgather_base(output, input, options),
                                       std::move(end));
}

c10::intrusive_ptr<c10d::Work> HostBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                          std::vector<int64_t>& output_sizes,
                                                          std::vector<int64_t>& input_sizes,
                                                          const c10d::AllToAllOptions& options) {
  MarkPtr end = note_accesses("all-to-all on the host", output, input);
  return c10::make_intrusive<HostWork>(
      carrier_->alltoall_base(output, input, output_sizes, input_sizes, options), std::move(end));
}

}  // namespace fake_device
