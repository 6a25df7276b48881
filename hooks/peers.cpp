#include "peers.h"

#include <algorithm>
#include <future>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "gradferry/error.h"

namespace gradferry {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

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

// The value of a key; empty if the key does not exist, for which Store::get() would wait.
std::string read(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return {};
  const std::vector<uint8_t> value = store.get(key);
  return {value.begin(), value.end()};
}

void write(c10d::Store& store, const std::string& key, const std::string& value) {
  store.set(key, std::vector<uint8_t>(value.begin(), value.end()));
}

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

// The result of look_around() as text: "error " and a message, or "missing " and ranks.
std::string look(c10d::Store& store, uint32_t rank, uint32_t world_size) {
  write(store, present_key(rank), "1");
  const bool first = store.add("lost", 1) == 1;
  const auto end = Clock::now() + (first ? kLook : kWaitForLook);
  for (milliseconds pause = kPause;; pause = std::min(2 * pause, kMostPause)) {
    if (const std::string error = read(store, "error"); !error.empty()) return "error " + error;
    const bool all_but_one = first && store.add("lost", 0) >= int64_t{world_size} - 1;
    if (all_but_one || Clock::now() >= end) break;
    std::this_thread::sleep_for(pause);
  }
  std::string answer = "missing ";
  if (!first) return answer;
  for (uint32_t r = 0; r < world_size; ++r) {
    if (r != rank && read(store, present_key(r)) != "1") answer += std::to_string(r) + " ";
  }
  return answer;
}

}  // namespace

Peers::Peers(c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t world_size)
    : store_(std::move(store)), rank_(rank), world_size_(world_size) {}

Peers::~Peers() {
  if (worker_) worker_->stop(nullptr);
}

std::optional<std::string> Peers::ask(Question question, milliseconds longest) {
  if (!store_) return std::nullopt;
  if (asked_->unanswered.fetch_add(1) >= kMostQuestions) {
    asked_->unanswered.fetch_sub(1);
    return std::nullopt;
  }
  const auto answer = std::make_shared<std::promise<std::optional<std::string>>>();
  auto answered = answer->get_future();
  const auto job = [store = store_, asked = asked_, answer, question = std::move(question)] {
    std::optional<std::string> text;
    try {
      text = question(*store);
    } catch (const std::exception&) {
      text.reset();  // counts as no answer
    }
    asked->unanswered.fetch_sub(1);
    asked->silent = false;
    answer->set_value(std::move(text));
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
  if (answered.wait_for(longest) == std::future_status::ready) return answered.get();
  if (longest > milliseconds(0)) asked_->silent = true;
  return std::nullopt;
}

void Peers::say_present(bool present) {
  const auto say = [key = present_key(rank_), present](c10d::Store& store) {
    write(store, key, present ? "1" : "0");
    return std::string();
  };
  ask(say, milliseconds(0));  // does not wait for the answer
}

void Peers::wait(c10d::Work& work) {
  if (ends_within(work, kSilence)) return;
  if (silent_waits_++ == 0) say_present(true);
  try {
    do {
      const auto error = ask([](c10d::Store& store) { return read(store, "error"); }, kAnswer);
      if (error && !error->empty()) {
        // An error that all ranks see themselves ends `work` a moment later, with its own type.
        if (ends_within(work, kAnswer)) break;
        throw Error(ErrorKind::kPeer, *error);
      }
    } while (!ends_within(work, kSilence));
  } catch (...) {
    --silent_waits_;  // without say_present(false): this rank stays present
    throw;
  }
  if (--silent_waits_ == 0) say_present(false);
}

void Peers::tell(const std::string& error) {
  if (told_.exchange(true)) return;
  std::string line = error.substr(0, std::min(error.find('\n'), kMostErrorBytes));
  if (!line.starts_with("rank ")) line = "rank " + std::to_string(rank_) + " failed: " + line;
  const auto tell = [line, key = present_key(rank_)](c10d::Store& store) {
    write(store, key, "1");
    if (store.add("told", 1) == 1) write(store, "error", line);
    return std::string();
  };
  ask(tell, kAnswer);
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
  if (kind == "error") {
    loss.error = answer->substr(kind.size() + 1);
  } else {
    for (uint32_t rank = 0; words >> rank;) loss.missing.push_back(rank);
  }
  return loss;
}

}  // namespace gradferry
