#include "exchanger.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "engine_errors.h"

namespace gradferry {

PendingExchange::PendingExchange(std::shared_ptr<BucketEngine> engine,
                                 std::vector<at::Tensor> on_device, std::vector<FuturePtr> futures)
    : engine_(std::move(engine)), on_device_(std::move(on_device)), futures_(std::move(futures)) {}

PendingExchange::~PendingExchange() {
  for (const at::Tensor& values : on_device_) engine_->expect_early_end(values);
}

void PendingExchange::wait() {
  // All of them first: nobody writes to the buckets of a call that has returned.
  for (const FuturePtr& future : futures_) future->wait();
  for (const FuturePtr& future : futures_) {
    if (future->hasError()) std::rethrow_exception(future->exception_ptr());
  }
  on_device_.clear();
  engine_.reset();
}

bool PendingExchange::is_completed() const {
  return std::ranges::all_of(futures_, [](const FuturePtr& each) { return each->completed(); });
}

Exchanger::Exchanger(std::shared_ptr<BucketEngine> engine)
    : engine_(std::move(engine)), process_id_(getpid()) {}

Exchanger::~Exchanger() {
  if (worker_ && getpid() == process_id_) worker_->stop(nullptr);
}

PendingExchange Exchanger::start(std::vector<HandedBucket> buckets, bool in_background) {
  if (getpid() != process_id_) throw called_after_fork(process_id_);  // the thread is not here
  std::vector<FuturePtr> futures;
  std::vector<at::Tensor> on_device;
  for (const HandedBucket& bucket : buckets) {
    futures.push_back(make_future(c10::TensorType::get(), bucket.values));
    if (!bucket.values.is_cpu()) on_device.push_back(bucket.values);
  }
  const std::shared_ptr<BucketEngine> used = on_device.empty() ? nullptr : engine_;
  // An error in one bucket is the caller's when all have been handed over: until then the engine
  // writes to the others.
  auto hand_over = [engine = engine_, buckets = std::move(buckets), futures] {
    for (size_t i = 0; i < buckets.size(); ++i) {
      const at::Tensor& values = buckets[i].values;
      try {
        engine->run(buckets[i].parameters, {}, values, futures[i], values);
      } catch (...) {
        futures[i]->setErrorIfNeeded(std::current_exception());
      }
    }
  };
  if (!in_background) {
    hand_over();
    return {used, std::move(on_device), std::move(futures)};
  }
  if (!worker_) worker_ = Worker::start("gf-calls", BackgroundThread::Role::kEngine);
  // Its last bucket may be complete before the thread has left the engine.
  const auto handed_over = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
  futures.push_back(handed_over);
  const bool added = worker_->add([hand_over = std::move(hand_over), handed_over] {
    hand_over();
    handed_over->markCompleted(c10::IValue());
  });
  if (!added) throw called_at_exit();
  return {used, std::move(on_device), std::move(futures)};
}

}  // namespace gradferry
