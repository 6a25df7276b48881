#include "rendezvous.h"

#include <algorithm>
#include <charconv>
#include <exception>
#include <new>
#include <sstream>
#include <utility>

#include "store_text.h"
#include "threads.h"

namespace gradferry {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kShortestPause{1}, kLongestPause{100};
// Grace period for slower ranks to read why they do not go on.
constexpr milliseconds kLongestForOthers{2000};
constexpr const char* kUnreadable = "a rank wrote something unreadable to the store";

// Texts as one, and back.
std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += part + '\0';
  return text;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, '\0');) parts.push_back(part);
  return parts;
}

std::string text_of(const Error& error) {
  return joined({std::to_string(static_cast<int>(error.kind())), error.what()});
}

// The error in parts [begin, begin + 2).
Error error_from(const std::vector<std::string>& parts, size_t begin) {
  Error unreadable(ErrorKind::kPeer, kUnreadable);
  if (parts.size() < begin + 2) return unreadable;
  const std::string& text = parts[begin];
  int kind = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), kind);
  const bool is_kind = read.ec == std::errc() && read.ptr == text.data() + text.size() &&
                       kind >= 0 && kind <= static_cast<int>(ErrorKind::kDiverged);
  return is_kind ? Error(static_cast<ErrorKind>(kind), parts[begin + 1]) : unreadable;
}

std::string text_of(const Brought& brought) {
  if (brought.error) return joined({brought.is_echo ? "echo" : "error"}) + text_of(*brought.error);
  std::vector<std::string> parts{"fields"};
  for (const auto& [name, value] : brought.fields) {
    parts.push_back(name);
    parts.push_back(value);
  }
  return joined(parts);
}

Brought brought_from(const std::string& text) {
  const std::vector<std::string> parts = split(text);
  Brought brought;
  if (parts.empty() || parts[0] != "fields") {
    brought.error = error_from(parts, 1);
    brought.is_echo = !parts.empty() && parts[0] == "echo";
    return brought;
  }
  for (size_t i = 1; i + 1 < parts.size(); i += 2) {
    brought.fields.emplace_back(parts[i], parts[i + 1]);
  }
  return brought;
}

std::string name_of(uint64_t rank) { return "rank " + std::to_string(rank); }

std::string seconds(milliseconds duration) {
  std::ostringstream text;
  text << std::chrono::duration<double>(duration).count() << " s";
  return text.str();
}

// `rank`, `first`: their names.
Error mismatch(const std::string& rank, const std::string& first, const std::string& field,
               const std::string& value, const std::string& expected) {
  return {ErrorKind::kRankMismatch,
          rank + " differs from " + first + " in " + field + ": '" + value + "' instead of '" +
              expected + "'; start every rank with the same program, options and model"};
}

std::optional<Error> first_difference(const Brought& expected, uint64_t first,
                                      const Brought& brought, uint64_t rank) {
  const size_t common = std::min(expected.fields.size(), brought.fields.size());
  for (size_t i = 0; i < common; ++i) {
    const auto& [name, value] = brought.fields[i];
    if (brought.fields[i] != expected.fields[i]) {
      return mismatch(name_of(rank), name_of(first), expected.fields[i].first, value,
                      expected.fields[i].second);
    }
  }
  if (brought.fields.size() == expected.fields.size()) return std::nullopt;
  return mismatch(name_of(rank), name_of(first), "number of fields",
                  std::to_string(brought.fields.size()), std::to_string(expected.fields.size()));
}

// Others count on a rank that has arrived, so what it does in the store is done again, a few times,
// where memory was short. A store asks for memory before it sends; when it reads a text it asks in
// the middle, and is of no use afterwards, so that nothing is read on the way to a good outcome.
template <typename Act>
auto despite_little_memory(const Act& act) {
  for (milliseconds pause = kShortestPause;; pause *= 2) {
    try {
      return act();
    } catch (const std::bad_alloc&) {
      if (pause > kLongestPause) throw;
      sleep_for(pause);
    }
  }
}

// What was thrown between polls; exceptions of the store mean something else.
struct Interruption final : std::exception {
  explicit Interruption(std::exception_ptr what_was_thrown) : thrown(std::move(what_was_thrown)) {}
  std::exception_ptr thrown;
};

// What is wrong with what ranks brought, by rank; missing ranks brought nothing.
std::optional<Error> first_problem(const std::vector<std::optional<Brought>>& brought) {
  for (const bool is_echo : {false, true}) {
    for (size_t rank = 0; rank < brought.size(); ++rank) {
      if (!brought[rank] || !brought[rank]->error || brought[rank]->is_echo != is_echo) continue;
      const Error& error = *brought[rank]->error;
      return Error(error.kind(), name_of(rank) + ": " + error.what());
    }
  }
  std::optional<size_t> first;
  for (size_t rank = 0; rank < brought.size(); ++rank) {
    if (!brought[rank]) continue;
    if (!first) first = rank;
    if (auto found = first_difference(*brought[*first], *first, *brought[rank], rank)) return found;
  }
  return std::nullopt;
}

}  // namespace

Rendezvous::Rendezvous(c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t world_size,
                       milliseconds longest, WorldRanks world_ranks)
    : store_(std::move(store)),
      rank_(rank),
      world_size_(world_size),
      longest_(longest),
      world_ranks_(std::move(world_ranks)) {}

uint64_t Rendezvous::meet(const Visit& visit) {
  uint64_t number = 0;
  Brought outcome;
  try {
    number = static_cast<uint64_t>(despite_little_memory([&] { return store_->add("number", 0); }));
    come(number, visit);
    outcome = wait(number, visit);
    if (outcome.error) let_others_read(number);
  } catch (const Interruption& interruption) {
    std::rethrow_exception(interruption.thrown);
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::kPeer,
                name_of(rank_) + ": out of memory at the rendezvous of the ranks");
  } catch (const std::exception& error) {
    const std::string reason = error.what();
    throw Error(ErrorKind::kPeer, "the store does not answer (" +
                                      reason.substr(0, reason.find('\n')) +
                                      "); the process that serves it, usually rank 0, may have "
                                      "ended: look at its error first");
  }
  if (outcome.error && outcome.is_echo) throw EchoError(outcome.error->what());
  if (outcome.error) throw Error(*outcome.error);
  return number;
}

void Rendezvous::come(uint64_t number, const Visit& visit) {
  const std::string prefix = std::to_string(number) + "/", own = std::to_string(rank_);
  const auto add_one = [&](const std::string& key) {
    return despite_little_memory([&] { return store_->add(prefix + key, 1); });
  };
  if (visit.brought != nullptr) {
    despite_little_memory(
        [&] { write_text(*store_, prefix + "brought/" + own, text_of(*visit.brought)); });
    if (visit.brought->error) {
      despite_little_memory([&] { write_text(*store_, prefix + "failed", "1"); });
    }
  }
  // Without `brought` a rank that was interrupted may come twice, but is counted once.
  const bool is_new = add_one("rank/" + own) == 1;
  const bool is_last = is_new && add_one("came") == world_size_;
  if (visit.brought != nullptr) {
    if (!is_new) {
      decide(number, Error(ErrorKind::kConfig, "two processes say that they are " + name_of(rank_) +
                                                   ", or an earlier run left its keys in the "
                                                   "store; give every process a rank of its own, "
                                                   "and every run a new store"));
    } else if (const auto other = despite_little_memory([&] { return other_world_size(number); })) {
      decide(number, *other);
    }
  }
  if (!is_last) return;
  decide(number, visit.brought == nullptr ? Brought{} : despite_little_memory([&] {
           return outcome_of(number, visit);
         }));
}

bool Rendezvous::has_failed(uint64_t number) {
  return store_->check({std::to_string(number) + "/failed"});
}

// What is wrong if this rank and the first one to arrive wait for different numbers of ranks: then
// there may be no last one to arrive.
std::optional<Error> Rendezvous::other_world_size(uint64_t number) {
  const std::string size = std::to_string(world_size_), own = joined({size, name_of(rank_)});
  const std::vector<uint8_t> found = store_->compareSet(
      std::to_string(number) + "/size", {}, std::vector<uint8_t>(own.begin(), own.end()));
  const auto first = split(std::string(found.begin(), found.end()));
  if (first.size() != 2) return Error(ErrorKind::kPeer, kUnreadable);
  if (first[0] == size) return std::nullopt;
  return mismatch(name_of(rank_), first[1], "world size", size, first[0]);
}

// Returns the outcome; decides when it does not come in time.
Brought Rendezvous::wait(uint64_t number, const Visit& visit) {
  const std::string outcome = std::to_string(number) + "/outcome";
  const std::string wrong = std::to_string(number) + "/error";
  const TimePoint deadline = now() + longest_;
  bool decides = false;
  for (milliseconds pause = kShortestPause;; pause = std::min(2 * pause, kLongestPause)) {
    if (despite_little_memory([&] { return store_->check({outcome}); })) {
      const auto text = despite_little_memory([&] { return read_text(*store_, wrong); });
      return text ? brought_from(*text) : Brought{};
    }
    if (now() > deadline && !decides) {
      decide(number, despite_little_memory([&] { return outcome_of(number, visit); }));
      decides = true;
    } else if (now() > deadline + longest_) {
      throw Error(ErrorKind::kPeer,
                  "a rank ended during the rendezvous; look at the errors of all");
    }
    if (visit.between_polls) {
      try {
        visit.between_polls();
      } catch (const EchoError& error) {
        decide(number, {.fields = {}, .error = error, .is_echo = true});
        continue;
      } catch (...) {
        const Interruption interruption(std::current_exception());
        decide(number, Error(ErrorKind::kPeer,
                             name_of(rank_) + " was interrupted while it waited for others"));
        store_->add(std::to_string(number) + "/read", 1);
        throw interruption;
      }
    }
    sleep_for(pause);
  }
}

// The process of this rank may serve the store, and end with the error.
void Rendezvous::let_others_read(uint64_t number) {
  const std::string prefix = std::to_string(number) + "/";
  const TimePoint deadline = now() + kLongestForOthers;
  try {
    const int64_t came = store_->add(prefix + "came", 0);
    int64_t have_read = store_->add(prefix + "read", 1);
    for (milliseconds pause = kShortestPause; have_read < came && now() < deadline;
         pause = std::min(2 * pause, kLongestPause)) {
      sleep_for(pause);
      have_read = store_->add(prefix + "read", 0);
    }
  } catch (const std::exception&) {
    return;  // its server has ended: this rank knows the outcome already
  }
}

// What the ranks that have arrived so far make of it.
Brought Rendezvous::outcome_of(uint64_t number, const Visit& visit) {
  const std::string prefix = std::to_string(number) + "/";
  std::vector<std::optional<Brought>> brought(world_size_);
  std::vector<uint32_t> missing;
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    const char* key = visit.brought != nullptr ? "brought/" : "rank/";
    const auto text = read_text(*store_, prefix + key + std::to_string(rank));
    if (!text) {
      missing.push_back(in_world(world_ranks_, rank));
    } else if (visit.brought != nullptr) {
      brought[rank] = brought_from(*text);
    }
  }
  Brought outcome;
  outcome.error = first_problem(brought);
  if (!outcome.error && !missing.empty()) {
    outcome.error.emplace(
        ErrorKind::kPeer,
        name_ranks(missing) + " did not " + visit.purpose + " within " + seconds(longest_) +
            "; check that every rank makes this call, and look first at the errors "
            "of those that did not. Nothing was changed, and all ranks can try "
            "again");
  }
  return outcome;
}

void Rendezvous::decide(uint64_t number, const Error& error) {
  decide(number, {.fields = {}, .error = error, .is_echo = false});
}

// Unless another rank has decided.
void Rendezvous::decide(uint64_t number, const Brought& outcome) {
  const std::string prefix = std::to_string(number) + "/";
  if (despite_little_memory([&] { return store_->add(prefix + "decided", 1); }) != 1) return;
  despite_little_memory([&] { return store_->add("number", 1); });
  if (outcome.error) {
    despite_little_memory([&] { write_text(*store_, prefix + "error", text_of(outcome)); });
  }
  despite_little_memory([&] { write_text(*store_, prefix + "outcome", "1"); });
  if (outcome.error) return;
  try {
    forget_before(number);
  } catch (const std::bad_alloc&) {
    return;  // the next rendezvous removes them
  }
}

// Removes what nobody reads any more: all ranks have left those rendezvous.
void Rendezvous::forget_before(uint64_t number) {
  while (number-- > 0) {
    const std::string prefix = std::to_string(number) + "/";
    if (!store_->check({prefix + "decided"})) return;  // removed before
    std::vector<std::string> keys;
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      for (const char* key : {"brought/", "rank/", ""})
        keys.push_back(prefix + key + std::to_string(rank));
    }
    for (const char* key : {"failed", "size", "came", "outcome", "error", "read", "decided"}) {
      keys.push_back(prefix + key);
    }
    forget_keys(*store_, keys);
  }
}

}  // namespace gradferry
