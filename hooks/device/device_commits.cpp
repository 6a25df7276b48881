#include "device/device_commits.h"

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

#include <cstring>
#include <utility>
#include <vector>

#include "engine_errors.h"
#include "protocol/messages.h"

namespace gradferry {
namespace {

// The findings as a Fault. `found`: a copy in host memory.
Fault fault_of(const Findings& found) {
  return {static_cast<WireStatus>(found.status),
          static_cast<Phase>(found.phase),
          found.rank,
          found.chunk,
          found.expected,
          found.received};
}

}  // namespace

uint64_t DeviceCommits::workspace_bytes(const EngineOptions& options, const Layout& layout) {
  const uint64_t senders = uint64_t{options.world_size} + 1;
  const uint64_t commits = sizeof(CommitRecord) * senders + sizeof(uint64_t);
  const uint64_t hashes = hash_message_bytes(layout.parameters().size()) * senders;
  const uint64_t scales = options.loss_scale.defined() ? 2 * sizeof(float) : 0;
  return commits + scales + (options.check_every == 0 ? 0 : hashes);
}

DeviceCommits::DeviceCommits(DeviceContext& context, const ParameterHashes& hashes)
    : context_(context), options_(context.options), hashes_(hashes), done_(context.device.type()) {
  const c10::StreamGuard guard(context_.finish_stream);
  const uint64_t records = sizeof(CommitRecord) * options_.world_size;
  send_ = context_.make_buffer(sizeof(CommitRecord));
  receive_ = context_.make_buffer(records + sizeof(uint64_t));
  result_ = at::zeros({static_cast<int64_t>(records + sizeof(uint64_t))},
                      at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  EngineStats& stats = context_.life.stats;
  stats.workspace_bytes += workspace_bytes(options_, context_.layout);
  ++stats.workspace_allocations;
  if (options_.loss_scale.defined()) {
    scale_ = context_.make_tensor(sizeof(float)).view(at::kFloat);
    scale_before_ = context_.make_tensor(sizeof(float)).view(at::kFloat);
  }
  if (options_.check_every == 0) return;
  const uint64_t hash_bytes = hash_message_bytes(context_.layout.parameters().size());
  hashes_send_ = context_.make_buffer(hash_bytes);
  hashes_receive_ = context_.make_buffer(hash_bytes * options_.world_size);
  ++stats.workspace_allocations;
}

void DeviceCommits::begin_step(DeviceJob& job) {
  read_last();
  if (uncommitted_step_) post(job, *uncommitted_step_);
  if (scale_.defined()) note_loss_scale();
  if (job.begins_check && !job.plan->chunks().empty()) check_parameters(job);
}

// On E, before an update() that follows the pass can change it.
void DeviceCommits::note_loss_scale() {
  std::swap(scale_, scale_before_);
  const c10::StreamGuard guard(context_.encode_stream);
  scale_.copy_(options_.loss_scale.view({1}), /*non_blocking=*/true);
}

void DeviceCommits::forget() {
  posted_.reset();
  uncommitted_step_.reset();
}

// Posts the commit of `step`, before the first bucket of the next step.
void DeviceCommits::post(DeviceJob& job, uint64_t step) {
  const c10::Stream& stream = context_.finish_stream;
  const auto records = static_cast<int64_t>(sizeof(CommitRecord)) * options_.world_size;
  message_kernels().commit(
      {.step = step,
       .bucket = job.event.bucket,
       .rank = options_.rank,
       .loss_scale = scale_.defined() ? scale_.const_data_ptr<float>() : nullptr,
       .findings = context_.findings_on_device(),
       .record = reinterpret_cast<CommitRecord*>(bytes(send_)),
       .nonfinite_tile = reinterpret_cast<uint64_t*>(bytes(receive_) + records),
       .stream = stream.native_handle()});
  const std::vector<int64_t> sizes(options_.world_size, sizeof(CommitRecord));
  Transfer transfer = context_.transport->all_gather(Among::kAll, receive_, sizes, send_, stream);
  context_.wait(job, transfer, Phase::kCommit, job.event.bucket, stream);
  const c10::StreamGuard guard(stream);
  result_.copy_(receive_.device, /*non_blocking=*/true);
  done_.record(stream);
  posted_ = PostedCommit{step, job.event.bucket};
}

// The commit was enqueued a whole step ago. If it is not done yet, the host is that far ahead of
// the device, and waits: every rank must raise an error at the same bucket.
void DeviceCommits::read_last() {
  if (!posted_) return;
  const auto [step, bucket] = *posted_;
  if (!done_.query()) {
    done_.synchronize();
    const std::lock_guard lock(context_.life.mutex);
    ++context_.life.stats.host_waits;
  }
  const Verdict verdict = read_commit(options_.agreement(), bytes(result_), step, bucket);
  if (verdict.fault) throw error_of(verdict, step);
  uint64_t nonfinite_tile = 0;  // 1 + its id
  std::memcpy(&nonfinite_tile, bytes(result_) + sizeof(CommitRecord) * options_.world_size,
              sizeof(nonfinite_tile));
  if (options_.raise_nonfinite && nonfinite_tile != 0) {
    throw nonfinite_mean(context_.layout, nonfinite_tile - 1, step, "was");
  }
}

// The host waits here, for the parameters and then for all ranks. All of them see the same hashes,
// so all of them throw, or none.
void DeviceCommits::check_parameters(DeviceJob& job) {
  const auto num_parameters = context_.layout.parameters().size();
  const auto size = static_cast<int64_t>(hash_message_bytes(num_parameters));
  const Agreement agreement = options_.agreement();
  uint64_t next_chunk = 0;
  {
    const std::lock_guard lock(context_.life.mutex);
    next_chunk = context_.life.stats.chunks;
  }
  std::vector<uint64_t> hashes;
  {
    const c10::StreamGuard guard(context_.encode_stream);  // behind the last update
    hashes = hashes_.compute();
  }
  const c10::StreamGuard guard(context_.finish_stream);
  const at::Tensor message = at::zeros({size}, at::TensorOptions().dtype(at::kByte));
  write_hashes(agreement, job.step, next_chunk, hashes, bytes(message));
  hashes_send_.device.copy_(message);
  const std::vector<int64_t> sizes(options_.world_size, size);
  Transfer transfer = context_.transport->all_gather(Among::kAll, hashes_receive_, sizes,
                                                     hashes_send_, context_.finish_stream);
  context_.wait(job, transfer, Phase::kParameters, next_chunk, context_.finish_stream);
  const at::Tensor received = hashes_receive_.device.cpu();
  std::vector<std::vector<uint64_t>> by_rank;
  const Fault fault =
      read_hashes(agreement, job.step, next_chunk, bytes(received), num_parameters, by_rank);
  if (fault) return note_fault(fault, job.step);
  expect_equal_hashes(by_rank, context_.layout, job.step, *options_.peers);
}

// Stores a fault that the host found as if a kernel had found it; the next commit sends it.
void DeviceCommits::note_fault(const Fault& fault, uint64_t step) const {
  const at::Tensor kept = context_.findings.cpu();
  auto* findings = static_cast<Findings*>(kept.mutable_data_ptr());
  if (fault_of(*findings)) return;
  findings->status = static_cast<uint32_t>(fault.status);
  findings->phase = static_cast<uint32_t>(fault.phase);
  findings->rank = fault.rank;
  findings->step = step;
  findings->chunk = fault.chunk;
  findings->expected = fault.expected;
  findings->received = fault.received;
  context_.findings.copy_(kept);
}

void DeviceCommits::expect_no_fault() const {
  const at::Tensor kept = context_.findings.cpu();
  const auto& found = *static_cast<const Findings*>(kept.const_data_ptr());
  if (const Fault fault = fault_of(found)) {
    throw error_of({fault, options_.rank, found.step}, found.step);
  }
}

Error DeviceCommits::error_of(const Verdict& verdict, uint64_t step) const {
  const Fault& fault = verdict.fault;
  if (fault.status == WireStatus::kNonFiniteMean) {
    return nonfinite_mean(context_.layout, fault.received, step, "was");
  }
  return {kind_of(fault), describe(options_.peers->in_world(verdict))};
}

}  // namespace gradferry
