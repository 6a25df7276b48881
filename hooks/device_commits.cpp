// The device engine's third part: how a step begins. What the last ones found travels to all ranks,
// and parameters are compared.
#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>

#include "device_bytes.h"
#include "device_engine.h"

namespace gradferry {

void DeviceEngine::begin_step(BucketJob& job) {
  read_last_commit();
  if (uncommitted_step_) post_commit(job, *uncommitted_step_);
  if (options_.check_is_due(job.step) && !job.plan->chunks().empty()) check_parameters(job);
  if (job.begins_optimizer_step) residuals_->begin_step(encode_stream_);
  if (options_.in_warmup(job.step)) return;  // without residuals
  residuals_->begin_pass(options_.loss_scale, job.begins_optimizer_step, encode_stream_);
}

// Of `step`, before the first bucket of the next one.
void DeviceEngine::post_commit(BucketJob& job, uint64_t step) {
  const auto records = static_cast<int64_t>(sizeof(CommitRecord)) * options_.world_size;
  message_kernels().commit(
      {.step = step,
       .bucket = job.number,
       .rank = options_.rank,
       .findings = findings(),
       .record = reinterpret_cast<CommitRecord*>(bytes(commit_send_)),
       .nonfinite_tile = reinterpret_cast<uint64_t*>(bytes(commit_receive_) + records),
       .stream = finish_stream_.native_handle()});
  Transfer transfer =
      transport_->all_gather(commit_receive_, commit_send_, sizeof(CommitRecord), finish_stream_);
  wait(job, transfer, Phase::kCommit, job.number);
  const c10::StreamGuard guard(finish_stream_);
  commit_result_.copy_(commit_receive_.device, /*non_blocking=*/true);
  commit_done_.record(finish_stream_);
  commit_ = PostedCommit{step, job.number};
}

// The commit was enqueued a whole step ago. Where it is not done yet the host is that far ahead of
// the device, and waits: an error must come up at the same bucket on every rank.
void DeviceEngine::read_last_commit() {
  if (!commit_) return;
  const auto [step, bucket] = *commit_;
  if (!commit_done_.query()) {
    commit_done_.synchronize();
    const std::lock_guard lock(mutex_);
    ++stats_.host_waits;
  }
  uint32_t reporter = 0;
  const Fault fault = read_commit({options_.rank, options_.world_size, 0, 0}, commit_result_, step,
                                  bucket, &reporter);
  if (fault) throw Error(ErrorKind::kProtocol, describe(fault, reporter, step));
  uint64_t nonfinite_tile = 0;
  std::memcpy(&nonfinite_tile, bytes(commit_result_) + sizeof(CommitRecord) * options_.world_size,
              sizeof(nonfinite_tile));
  GRADFERRY_EXPECTS(!options_.raise_nonfinite || nonfinite_tile == 0, kState,
                    "the averaged gradient of '" + parameter_of(nonfinite_tile - 1) +
                        "' was not finite at step " + std::to_string(step) +
                        "; lower the learning rate or the loss scale, or attach with "
                        "nonfinite='propagate' to see it in .grad");
}

std::string DeviceEngine::parameter_of(uint64_t tile) const {
  const auto& parameters = layout_.parameters();
  const auto after = std::upper_bound(
      parameters.begin(), parameters.end(), tile,
      [](uint64_t id, const Parameter& parameter) { return id < parameter.first_tile; });
  return std::prev(after)->name;
}

// The host waits here, for the parameters and then for all ranks. All of them see the same hashes,
// so all of them throw, or none.
void DeviceEngine::check_parameters(BucketJob& job) {
  const auto num_parameters = layout_.parameters().size();
  const auto size = static_cast<int64_t>(hash_message_bytes(num_parameters));
  const Agreement agreement{options_.rank, options_.world_size, options_.config_hash,
                            options_.layout_hash};
  uint64_t next_chunk = 0;
  {
    const std::lock_guard lock(mutex_);
    next_chunk = stats_.chunks;
  }
  std::vector<uint64_t> own;
  {
    const c10::StreamGuard guard(encode_stream_);  // behind the last update
    own = hashes_.compute();
  }
  const c10::StreamGuard guard(finish_stream_);
  const at::Tensor message = at::zeros({size}, at::TensorOptions().dtype(at::kByte));
  write_hashes(agreement, job.step, next_chunk, own, bytes(message));
  hashes_send_.device.copy_(message);
  Transfer transfer = transport_->all_gather(hashes_receive_, hashes_send_, size, finish_stream_);
  wait(job, transfer, Phase::kParameters, next_chunk);
  const at::Tensor received = hashes_receive_.device.cpu();
  std::vector<std::vector<uint64_t>> by_rank;
  const Fault fault =
      read_hashes(agreement, job.step, next_chunk, bytes(received), num_parameters, by_rank);
  if (fault) return note_fault(fault, job.step);
  expect_equal_hashes(by_rank, layout_, job.step);
}

// What the host found, as if a kernel had: the next commits tell the others.
void DeviceEngine::note_fault(const Fault& fault, uint64_t step) {
  const at::Tensor kept = findings_.cpu();
  auto* findings = static_cast<Findings*>(kept.mutable_data_ptr());
  if (static_cast<WireStatus>(findings->status) != WireStatus::kOk) return;
  findings->status = static_cast<uint32_t>(fault.status);
  findings->phase = static_cast<uint32_t>(fault.phase);
  findings->rank = fault.rank;
  findings->step = step;
  findings->chunk = fault.chunk;
  findings->expected = fault.expected;
  findings->received = fault.received;
  findings_.copy_(kept);
}

}  // namespace gradferry
