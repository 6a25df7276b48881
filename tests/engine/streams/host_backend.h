// A c10d backend in host memory, such as gloo, beside the fake device: what a collective reads and
// writes there is known to the machine. It may access its tensors from when it is posted until a
// thread has waited for it, and comes after what the posting thread knows of, and nothing else.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "machine.h"

namespace fake_device {

class HostBackend final : public c10d::Backend {
 public:
  // `carrier` sends the bytes, in the order of the calls.
  explicit HostBackend(c10::intrusive_ptr<c10d::Backend> carrier)
      : Backend(carrier->getRank(), carrier->getSize()),
        carrier_(std::move(carrier)),
        stream_(Machine::get().borrow_stream()) {}
  ~HostBackend() override { Machine::get().give_back(stream_); }

  const std::string getBackendName() const override { return carrier_->getBackendName(); }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_sizes,
                                               std::vector<int64_t>& input_sizes,
                                               const c10d::AllToAllOptions& options) override;

 private:
  MarkPtr note_accesses(const char* name, const at::Tensor& output, const at::Tensor& input) const;

  c10::intrusive_ptr<c10d::Backend> carrier_;
  uint32_t stream_;  // of its accesses
};

}  // namespace fake_device
