// A c10d backend for the fake device that behaves as ProcessGroupNCCL does: collectives go to a
// stream of its own, behind what the current stream holds, in the order they were posted; a Work's
// wait() has the current stream wait. The bytes travel by gloo.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "torch_device.h"

namespace fake_device {

// Overwrites a byte of what one of the next collectives receives.
struct Damage {
  int64_t countdown = -1;  // collectives until then; -1: never
  int64_t offset = 0;
  uint8_t value = 0;
};

class StreamedBackend final : public c10d::Backend {
 public:
  // What it calls itself, as torch's backends do.
  StreamedBackend(c10::intrusive_ptr<c10d::Backend> carrier, const std::string& name, int rank,
                  int size, std::chrono::milliseconds timeout);
  ~StreamedBackend() override;

  // Of all backends of the device: one collective after the other, in the order in which the device
  // begins them. Ranks that wait for each other so are reported as a deadlock, after so many
  // seconds, and go on side by side. 0: they always do.
  static void set_one_at_a_time(double patience);
  // All-to-alls and all-gathers of single tensors on the current stream, one after the other and
  // without a Work.
  void set_in_line(bool in_line) { in_line_ = in_line; }
  void damage(const Damage& damage) { damage_ = damage; }
  // For the clock: a byte takes this share of its price, on a link that is faster than others.
  void set_byte_share(double share) { byte_share_ = share; }
  // How many all-to-alls had parts of one size.
  uint64_t num_equal() const { return num_equal_; }

  const std::string getBackendName() const override { return options_->backend; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_sizes,
                                               std::vector<int64_t>& input_sizes,
                                               const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& options) override;

 private:
  using Post = std::function<c10::intrusive_ptr<c10d::Work>()>;
  // `outputs` in host memory are `results` on the device. `bytes_sent`: to the other ranks, for the
  // clock.
  c10::intrusive_ptr<c10d::Work> run(const char* name, const std::vector<at::Tensor>& inputs,
                                     const std::vector<at::Tensor>& outputs,
                                     const std::vector<at::Tensor>& results, uint64_t bytes_sent,
                                     bool in_line, const Post& post);

  c10::intrusive_ptr<c10d::Backend> carrier_;
  c10::intrusive_ptr<Options> options_;
  uint32_t stream_;
  bool in_line_ = false;
  MarkPtr last_;  // end of the last collective
  Damage damage_;
  double byte_share_ = 1;
  uint64_t num_equal_ = 0;
};

}  // namespace fake_device
