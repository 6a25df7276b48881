#include "events.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace gradferry {
namespace {

double in_ms(int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e6; }

std::string line_of(const BucketEvent& event, int64_t start_ns) {
  char text[256];
  std::snprintf(text, sizeof(text),
                "\n  step %llu, bucket %llu: %.2f MB in %llu chunks, begun %.1f, encoded %.1f, ",
                static_cast<unsigned long long>(event.step),
                static_cast<unsigned long long>(event.bucket),
                static_cast<double>(event.gradient_bytes) / 1e6,
                static_cast<unsigned long long>(event.chunks), in_ms(event.begin_ns - start_ns),
                in_ms(event.encoded_ns - start_ns));
  std::string line = text;
  if (event.complete_ns == 0) {
    line += "never complete";
  } else {
    std::snprintf(text, sizeof(text), "complete %.1f", in_ms(event.complete_ns - start_ns));
    line += text;
  }
  std::snprintf(text, sizeof(text), "; encode %.2f, network %.2f, reduce %.2f, decode %.2f",
                in_ms(event.encode_ns), in_ms(event.network_ns), in_ms(event.reduce_ns),
                in_ms(event.decode_ns));
  return line + text;
}

}  // namespace

double ResidualSquares::ratio() const {
  return gradient > 0 ? std::sqrt(residual / gradient) : 0.0;
}

int64_t EventLog::now() {
  const auto since_epoch = Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since_epoch).count();
}

int64_t EventLog::CurrentStep::exposed_ns() const {
  return held_ns + std::max<int64_t>(0, last_complete_ns - last_encoded_ns);
}

void EventLog::add(const BucketEvent& event) {
  const std::lock_guard lock(mutex_);
  if (event.step != current_.step) {
    totals_.exposed_ns += current_.exposed_ns();
    current_ = {};
    current_.step = event.step;
  }
  current_.held_ns += std::max<int64_t>(0, event.encoded_ns - event.begin_ns);
  current_.last_encoded_ns = std::max(current_.last_encoded_ns, event.encoded_ns);
  current_.last_complete_ns = std::max(current_.last_complete_ns, event.complete_ns);
  current_.worker += event.worker;
  current_.owner += event.owner;
  totals_.encode_ns += event.encode_ns;
  totals_.network_ns += event.network_ns;
  totals_.reduce_ns += event.reduce_ns;
  totals_.decode_ns += event.decode_ns;
  if (events_.size() == kCapacity) events_.pop_front();
  events_.push_back(event);
}

StepTimes EventLog::totals() const {
  const std::lock_guard lock(mutex_);
  StepTimes totals = totals_;
  totals.exposed_ns += current_.exposed_ns();
  totals.worker = current_.worker;
  totals.owner = current_.owner;
  return totals;
}

std::vector<BucketEvent> EventLog::events() const {
  const std::lock_guard lock(mutex_);
  return {events_.begin(), events_.end()};
}

std::string EventLog::text(uint32_t rank) const {
  const std::lock_guard lock(mutex_);
  if (events_.empty()) return {};
  std::string text = "\nlast buckets of rank " + std::to_string(rank) +
                     ", instants in ms since attach, then what each part took in ms:";
  const size_t left_out = events_.size() - std::min(events_.size(), kInErrors);
  for (size_t i = left_out; i < events_.size(); ++i) text += line_of(events_[i], start_ns_);
  if (left_out != 0) {
    text += "\n  (and " + std::to_string(left_out) + " earlier ones)";
  }
  return text;
}

TimedRange::TimedRange(const char* name, int64_t& sum)
    : range_(at::RecordScope::USER_SCOPE), sum_(sum), start_(std::chrono::steady_clock::now()) {
  if (range_.isActive()) range_.before(name);
}

TimedRange::~TimedRange() {
  const auto passed = std::chrono::steady_clock::now() - start_;
  sum_ += std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
}

ProfilerContext::ProfilerContext()
    : info_(c10::ThreadLocalDebugInfo::current()), record_(at::get_record_function_tls_()) {}

void ProfilerContext::clear() {
  info_.reset();
  record_ = {};
}

ProfilerContext::Guard::Guard(const ProfilerContext& context)
    : info_before_(c10::ThreadLocalDebugInfo::current()),
      record_before_(at::get_record_function_tls_()) {
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(context.info_);
  at::set_record_function_tls_(context.record_);
}

ProfilerContext::Guard::~Guard() {
  at::set_record_function_tls_(record_before_);
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(info_before_);
}

}  // namespace gradferry
