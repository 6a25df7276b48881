// Several ranks of one world as threads of this process, for benchmarks/growth.py: what attaching
// and averaging cost the C++ Reducer.
//
//   growth_ranks WORLD FIRST COUNT ELEMENTS PORT
//
// The ranks FIRST to FIRST + COUNT - 1 of WORLD average ELEMENTS fp32 numbers with q4. FIRST 0
// serves the store. Prints for this process: seconds of attaching, then per rank the milliseconds
// of processor time in a step, MiB and sockets that attaching added.
#include <gradferry/reducer.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

namespace {

constexpr int kSteps = 5, kTensors = 4, kColumns = 256;
constexpr double kMiB = 1024;  // in KiB

struct Options {
  uint32_t world, first, count;
  int64_t elements;
  uint16_t port;
};

struct Cost {
  double cpu_s = 0, memory_mib = 0, sockets = 0;
};

Cost cost_of_process() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  Cost cost;
  cost.cpu_s = seconds(used.ru_utime) + seconds(used.ru_stime);
  std::ifstream memory("/proc/self/smaps_rollup");
  for (std::string word; memory >> word;) {
    double kib = 0;
    if ((word == "Pss_Anon:" || word == "Pss_Shmem:") && memory >> kib) {
      cost.memory_mib += kib / kMiB;
    }
  }
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;
    const std::string target = std::filesystem::read_symlink(file.path(), closed).string();
    cost.sockets += target.starts_with("socket:") ? 1 : 0;
  }
  return cost;
}

c10::intrusive_ptr<c10d::TCPStore> meet(const Options& options, bool serves) {
  c10d::TCPStoreOptions tcp;
  tcp.port = options.port;
  tcp.isServer = serves;
  tcp.numWorkers = options.world;
  tcp.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", tcp);
}

// Waits until every process of the world has come here.
void wait_for_all(c10d::TCPStore& store, const Options& options, const std::string& where) {
  store.set(where + std::to_string(options.first), std::vector<uint8_t>{1});
  for (uint32_t first = 0; first < options.world; first += options.count) {
    store.wait({where + std::to_string(first)});
  }
}

void run(const Options& options) {
  at::set_num_threads(1);
  const auto served = meet(options, options.first == 0);
  std::barrier together(static_cast<std::ptrdiff_t>(options.count));
  Cost before, attached, after;
  double attach_s = 0;
  const auto rank_main = [&](uint32_t number) {
    const bool speaks = number == 0;  // for this process
    const auto store = meet(options, false);
    std::vector<at::Tensor> tensors;
    gradferry::Reducer::NamedTensors named;
    for (int k = 0; k < kTensors; ++k) {
      tensors.push_back(torch::randn({options.elements / kTensors / kColumns, kColumns}));
      named.emplace_back("tensor" + std::to_string(k), tensors.back());
    }
    together.arrive_and_wait();
    if (speaks) {
      before = cost_of_process();
      wait_for_all(*store, options, "ready");
    }
    together.arrive_and_wait();
    const auto started = std::chrono::steady_clock::now();
    gradferry::Reducer reducer(named, {.codec = "q4", .timeout = std::chrono::minutes(10)}, store,
                               options.first + number, options.world);
    together.arrive_and_wait();
    if (speaks) {
      attach_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
      attached = cost_of_process();
    }
    together.arrive_and_wait();  // no rank begins a step before that was read
    for (int step = 0; step < kSteps; ++step) reducer.all_reduce(tensors);
    together.arrive_and_wait();
    if (speaks) {
      after = cost_of_process();
      wait_for_all(*store, options, "done");
    }
    together.arrive_and_wait();
  };
  std::vector<std::thread> ranks;
  for (uint32_t number = 0; number < options.count; ++number) {
    ranks.emplace_back([&, number] {
      try {
        rank_main(number);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %u: %s\n", options.first + number, error.what());
        std::_Exit(1);  // the other threads wait for this one
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  const auto count = static_cast<double>(options.count);
  std::printf(
      "%.3f %.3f %.3f %.1f\n", attach_s, 1e3 * (after.cpu_s - attached.cpu_s) / count / kSteps,
      (after.memory_mib - before.memory_mib) / count, (attached.sockets - before.sockets) / count);
  std::fflush(stdout);
  // The process that serves the store leaves last.
  if (options.first != 0) {
    served->set("left" + std::to_string(options.first), std::vector<uint8_t>{1});
    return;
  }
  for (uint32_t first = options.count; first < options.world; first += options.count) {
    served->wait({"left" + std::to_string(first)});
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fputs("growth_ranks WORLD FIRST COUNT ELEMENTS PORT\n", stderr);
    return 2;
  }
  try {
    const auto number = [&](int which) { return std::stoul(argv[which]); };
    run({.world = static_cast<uint32_t>(number(1)),
         .first = static_cast<uint32_t>(number(2)),
         .count = static_cast<uint32_t>(number(3)),
         .elements = static_cast<int64_t>(number(4)),
         .port = static_cast<uint16_t>(number(5))});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "growth_ranks: %s\n", error.what());
    return 1;
  }
}
