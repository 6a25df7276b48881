#include "all_reduce.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "engine_errors.h"

namespace gradferry {

void PendingAllReduce::wait() const {
  // All of them first: nobody writes to the gradients of a call that has returned.
  for (const FuturePtr& future : futures_) future->wait();
  for (const FuturePtr& future : futures_) {
    if (future->hasError()) std::rethrow_exception(future->exception_ptr());
  }
}

bool PendingAllReduce::is_completed() const {
  return std::ranges::all_of(futures_, [](const FuturePtr& each) { return each->completed(); });
}

AllReducer::AllReducer(std::shared_ptr<BucketEngine> engine)
    : engine_(std::move(engine)), process_id_(getpid()) {}

AllReducer::~AllReducer() {
  if (worker_ && getpid() == process_id_) worker_->stop(nullptr);
}

PendingAllReduce AllReducer::start(std::vector<Bucket> buckets, bool in_background) {
  if (getpid() != process_id_) throw called_after_fork(process_id_);  // the thread is not here
  std::vector<FuturePtr> futures;
  for (const Bucket& bucket : buckets) {
    futures.push_back(make_future(c10::TensorType::get(), bucket.gradient));
  }
  if (!in_background) {
    for (size_t i = 0; i < buckets.size(); ++i) {
      engine_->run(buckets[i].parameters, {}, buckets[i].gradient, futures[i], buckets[i].gradient);
    }
    return PendingAllReduce(std::move(futures));
  }
  if (!worker_) worker_ = Worker::start("gf-calls", BackgroundThread::Role::kEngine);
  // Its last bucket may be complete before the thread has left the engine.
  const auto handed_over = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
  const auto job = [engine = engine_, buckets = std::move(buckets), futures, handed_over] {
    for (size_t i = 0; i < buckets.size(); ++i) {
      const at::Tensor& gradient = buckets[i].gradient;
      try {
        engine->run(buckets[i].parameters, {}, gradient, futures[i], gradient);
      } catch (...) {
        futures[i]->setErrorIfNeeded(std::current_exception());
      }
    }
    handed_over->markCompleted(c10::IValue());
  };
  const bool added = worker_->add(job);
  futures.push_back(handed_over);
  if (!added) throw called_at_exit();
  return PendingAllReduce(std::move(futures));
}

}  // namespace gradferry
