#include "peers.h"

#include <algorithm>
#include <sstream>
#include <system_error>
#include <utility>

#include "gradferry/error.h"
#include "store_text.h"
#include "threads.h"

namespace gradferry {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSilence{1000};
constexpr milliseconds kAnswer{500};
// How long the first rank that lost its connections looks for the others, and how long they wait
// for its report.
constexpr milliseconds kLook{1000};
constexpr milliseconds kWaitForLook{1500};
constexpr milliseconds kPause{10};
constexpr milliseconds kMostPause{160};
// Most questions that may wait while the store does not answer one.
constexpr int kMostQuestions = 4;
constexpr size_t kMostErrorBytes = 4000;

std::string present_key(uint32_t rank) { return "present/" + std::to_string(rank); }

// Whether `work` ends within `longest`; throws what it ended with.
bool ends_within(c10d::Work& work, milliseconds longest) {
  try {
    work.wait(longest);
    return true;
  } catch (const std::exception&) {
    // A timeout is an exception as well.
    if (!work.isCompleted()) return false;
  }
  work.wait();
  return true;
}

// What a rank has reported, behind the word for its kind; empty: nothing.
std::string read_report(c10d::Store& store) {
  const std::string error = read_text(store, "error").value_or("");
  if (error.empty()) return {};
  return (read_text(store, "kind") == "protocol" ? "protocol " : "peer ") + error;
}

Error error_of(const std::string& report) {
  const size_t space = report.find(' ');
  const bool protocol = report.compare(0, space, "protocol") == 0;
  return {protocol ? ErrorKind::kProtocol : ErrorKind::kPeer, report.substr(space + 1)};
}

// The result of look_around() as text: a report, or "missing " and ranks.
std::string look(c10d::Store& store, uint32_t rank, uint32_t world_size) {
  write_text(store, present_key(rank), "1");
  const bool first = store.add("lost", 1) == 1;
  const auto end = now() + (first ? kLook : kWaitForLook);
  for (milliseconds pause = kPause;; pause = std::min(2 * pause, kMostPause)) {
    if (std::string report = read_report(store); !report.empty()) return report;
    const bool all_but_one = first && store.add("lost", 0) >= int64_t{world_size} - 1;
    if (all_but_one || now() >= end) break;
    sleep_for(pause);
  }
  std::string answer = "missing ";
  if (!first) return answer;
  for (uint32_t r = 0; r < world_size; ++r) {
    if (r != rank && read_text(store, present_key(r)) != "1") answer += std::to_string(r) + " ";
  }
  return answer;
}

}  // namespace

Peers::Peers(c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t world_size,
             WorldRanks world_ranks)
    : store_(std::move(store)),
      rank_(rank),
      world_size_(world_size),
      world_ranks_(std::move(world_ranks)) {}

Peers::~Peers() {
  if (worker_) worker_->stop(nullptr);
}

std::optional<std::string> Peers::ask(Question question, milliseconds longest) {
  if (!store_) return std::nullopt;
  if (asked_->unanswered.fetch_add(1) >= kMostQuestions) {
    asked_->unanswered.fetch_sub(1);
    return std::nullopt;
  }
  struct Answer {
    std::mutex mutex;
    Signal given;
    bool is_given = false;
    std::optional<std::string> text;
  };
  const auto answer = std::make_shared<Answer>();
  const auto job = [store = store_, asked = asked_, answer, question = std::move(question)] {
    std::optional<std::string> text;
    try {
      text = question(*store);
    } catch (const std::exception&) {
      text.reset();  // counts as no answer
    }
    asked->unanswered.fetch_sub(1);
    asked->silent = false;
    const std::lock_guard lock(answer->mutex);
    answer->is_given = true;
    answer->text = std::move(text);
    answer->given.notify_all();
  };
  bool added = false;
  try {
    const std::lock_guard lock(mutex_);
    if (!worker_) worker_ = Worker::start("gf-peers", BackgroundThread::Role::kHelper);
    added = worker_->add(job);  // false when the process is ending
  } catch (const std::system_error&) {
    added = false;  // the process cannot start another thread
  }
  if (!added) {
    asked_->unanswered.fetch_sub(1);
    return std::nullopt;
  }
  std::unique_lock lock(answer->mutex);
  if (answer->given.wait_until(lock, now() + longest, [&] { return answer->is_given; })) {
    return answer->text;
  }
  if (longest > milliseconds(0)) asked_->silent = true;
  return std::nullopt;
}

Verdict Peers::in_world(Verdict verdict) const {
  verdict.reporter = in_world(verdict.reporter);
  verdict.fault.rank = in_world(verdict.fault.rank);
  if (verdict.fault.status == WireStatus::kBadSource) {  // its values are ranks, too
    for (uint64_t* rank : {&verdict.fault.expected, &verdict.fault.received}) {
      if (*rank < world_size_) *rank = in_world(static_cast<uint32_t>(*rank));
    }
  }
  return verdict;
}

void Peers::say_present(bool present) {
  const auto say = [key = present_key(rank_), present](c10d::Store& store) {
    write_text(store, key, present ? "1" : "0");
    return std::string();
  };
  ask(say, milliseconds(0));  // does not wait for the answer
}

void Peers::wait(c10d::Work& work) {
  if (ends_within(work, kSilence)) return;
  if (silent_waits_++ == 0) say_present(true);
  try {
    do {
      const auto report = ask(read_report, kAnswer);
      if (report && !report->empty()) {
        // An error that all ranks see themselves ends `work` a moment later, with its own type.
        if (ends_within(work, kAnswer)) break;
        throw error_of(*report);
      }
    } while (!ends_within(work, kSilence));
  } catch (...) {
    --silent_waits_;  // without say_present(false): this rank stays present
    throw;
  }
  if (--silent_waits_ == 0) say_present(false);
}

void Peers::tell(const std::string& error, ErrorKind kind) {
  if (told_.exchange(true)) return;
  with_memory([&] {
    std::string line = error.substr(0, std::min(error.find('\n'), kMostErrorBytes));
    if (!line.starts_with("rank ")) line = name_ranks({in_world(rank_)}) + " failed: " + line;
    const auto tell = [line, kind, key = present_key(rank_)](c10d::Store& store) {
      write_text(store, key, "1");
      if (store.add("told", 1) == 1) {
        if (kind == ErrorKind::kProtocol) write_text(store, "kind", "protocol");
        write_text(store, "error", line);
      }
      return std::string();
    };
    ask(tell, kAnswer);
  });
}

Error Peers::tell_or_hear(const Error& error) {
  tell(error.what(), error.kind());
  const auto hear = [](c10d::Store& store) {
    const auto end = now() + kAnswer;
    std::string report = read_report(store);
    // The rank that reports first may be about to.
    for (; report.empty() && now() < end; report = read_report(store)) {
      sleep_for(kPause);
    }
    return report;
  };
  const auto report = ask(hear, 2 * kAnswer);
  return report && !report->empty() ? error_of(*report) : error;
}

Error Peers::cause(Phase phase, uint64_t step, uint64_t number, const std::string& reason) {
  // Nobody is missing then, so there is no need to look.
  if (const auto error = other_size(in_world(rank_), phase, step, number, reason)) {
    return tell_or_hear(*error);
  }
  Loss loss = look_around();
  // Without a store nobody can say who is missing, but where there is only one other rank.
  if (!loss.store_answers && world_size_ == 2) loss.missing = {1 - rank_};
  for (uint32_t& missing : loss.missing) missing = in_world(missing);
  return lost_contact(loss, in_world(rank_), phase, step, number, reason);
}

Loss Peers::look_around() {
  const auto question = [rank = rank_, world_size = world_size_](c10d::Store& store) {
    return look(store, rank, world_size);
  };
  const auto answer = ask(question, asked_->silent ? kAnswer : kWaitForLook + kAnswer);
  Loss loss;
  if (!answer) return loss;
  loss.store_answers = true;
  std::istringstream words(*answer);
  std::string kind;
  words >> kind;
  if (kind == "missing") {
    for (uint32_t rank = 0; words >> rank;) loss.missing.push_back(rank);
  } else {
    loss.error = error_of(*answer);
  }
  return loss;
}

}  // namespace gradferry
