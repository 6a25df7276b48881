// Trains a small convolutional network on all ranks that are started, without Python. It learns to
// read digits that are drawn in a box of 12x12 pixels, somewhere, with noise.
//
//   ./train --rank 0 --world-size 2 &
//   ./train --rank 1 --world-size 2
//
// What gradferry adds are the lines that name it.
#include <gradferry/reducer.h>
#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <limits>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace {

constexpr const char* kHelp =
    R"(Trains a digit reader on several ranks; each is a process of this program.

  --rank R          of this process, from 0 to world size - 1
  --world-size W    how many ranks there are (1)
  --store PLACE     where ranks meet: host:port, which rank 0 serves (127.0.0.1:29500), or the path
                    of a new file that all ranks can open
  --codec NAME      what gradients travel with (q4); "exact" sends them as they are
  --steps N         optimizer steps (300)
  --save PATH, --load PATH
                    the state of this rank at the end, and that to begin with: PATH.model,
                    PATH.optimizer and PATH.reducer
)";

constexpr int64_t kMostRanks = std::numeric_limits<uint32_t>::max();  // as Reducer counts them
constexpr int64_t kMostPort = std::numeric_limits<uint16_t>::max();

struct Options {
  int64_t rank = 0, world_size = 1, steps = 300;
  std::string store = "127.0.0.1:29500", codec = "q4", save, load;
};

int64_t whole_number(const std::string& name, const std::string& text,
                     int64_t most = std::numeric_limits<int64_t>::max()) {
  size_t used = 0;
  int64_t number = -1;
  try {
    number = std::stoll(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (text.empty() || used != text.size() || number < 0 || number > most) {
    throw std::invalid_argument(name + ": " + text + " is no whole number from 0 to " +
                                std::to_string(most));
  }
  return number;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc) throw std::invalid_argument(name + " needs a value");
    const std::string value = argv[i + 1];
    if (name == "--rank") {
      options.rank = whole_number(name, value, kMostRanks);
    } else if (name == "--world-size") {
      options.world_size = whole_number(name, value, kMostRanks);
    } else if (name == "--steps") {
      options.steps = whole_number(name, value);
    } else if (name == "--store") {
      options.store = value;
    } else if (name == "--codec") {
      options.codec = value;
    } else if (name == "--save") {
      options.save = value;
    } else if (name == "--load") {
      options.load = value;
    } else {
      throw std::invalid_argument("there is no option " + name);
    }
  }
  if (options.rank >= options.world_size) {
    throw std::invalid_argument("--rank must be less than --world-size");
  }
  if (!options.save.empty()) {
    const auto folder = std::filesystem::absolute(options.save).parent_path();
    if (!std::filesystem::is_directory(folder)) {
      throw std::invalid_argument("--save: there is no folder " + folder.string());
    }
  }
  return options;
}

c10::intrusive_ptr<c10d::Store> meet(const Options& options) {
  const size_t colon = options.store.rfind(':');
  if (options.store.find('/') != std::string::npos || colon == std::string::npos) {
    return c10::make_intrusive<c10d::FileStore>(options.store,
                                                static_cast<int>(options.world_size));
  }
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(
      whole_number("the port of --store", options.store.substr(colon + 1), kMostPort));
  tcp.isServer = options.rank == 0;
  tcp.numWorkers = options.world_size;
  return c10::make_intrusive<c10d::TCPStore>(options.store.substr(0, colon), tcp);
}

// --- the task ---

constexpr int64_t kSide = 12, kHeight = 7, kWidth = 5;
constexpr std::array<const char*, 10> kDigits = {
    ".###.#...##..###.#.###..##...#.###.", "..#...##....#....#....#....#...###.",
    ".###.#...#....#...#...#...#...#####", ".###.#...#....#..##.....##...#.###.",
    "...#...##..#.#.#..#.#####...#....#.", "######....####.....#....##...#.###.",
    ".###.#....#....####.#...##...#.###.", "#####....#...#...#...#....#....#...",
    ".###.#...##...#.###.#...##...#.###.", ".###.#...##...#.####....#....#.###."};

struct Batch {
  torch::Tensor images, labels;
};

Batch draw(int64_t size, torch::Generator& generator) {
  Batch batch{torch::randn({size, 1, kSide, kSide}, generator) * 0.3,
              torch::randint(10, {size}, generator, torch::kLong)};
  const auto tops = torch::randint(kSide - kHeight + 1, {size}, generator, torch::kLong);
  const auto lefts = torch::randint(kSide - kWidth + 1, {size}, generator, torch::kLong);
  auto pixels = batch.images.accessor<float, 4>();
  for (int64_t i = 0; i < size; ++i) {
    const char* digit = kDigits[static_cast<size_t>(batch.labels[i].item<int64_t>())];
    const int64_t top = tops[i].item<int64_t>(), left = lefts[i].item<int64_t>();
    for (int64_t p = 0; p < kHeight * kWidth; ++p) {
      if (digit[p] == '#') pixels[i][0][top + p / kWidth][left + p % kWidth] += 1.0F;
    }
  }
  return batch;
}

torch::nn::Sequential make_model() {
  using torch::nn::Conv2dOptions;
  return torch::nn::Sequential(
      torch::nn::Conv2d(Conv2dOptions(1, 16, 3).padding(1)), torch::nn::ReLU(),
      torch::nn::Conv2d(Conv2dOptions(16, 32, 3).padding(1).stride(2)), torch::nn::ReLU(),
      torch::nn::Flatten(), torch::nn::Linear(32 * 6 * 6, 64), torch::nn::ReLU(),
      torch::nn::Linear(64, 10));
}

// Of all bits of all parameters: equal on ranks that have one model.
uint64_t hash_of(torch::nn::Sequential& model) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const auto& parameter : model->parameters()) {
    const auto values = parameter.detach().contiguous();
    const auto* bytes = static_cast<const unsigned char*>(values.const_data_ptr());
    for (size_t i = 0; i < values.nbytes(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  }
  return hash;
}

// --- the training ---

void train(const Options& options) {
  torch::set_num_threads(1);  // so that ranks on one machine do not wait for each other's threads
  const auto store = options.world_size > 1 ? meet(options) : nullptr;
  torch::manual_seed(1);  // all ranks begin with one model
  auto model = make_model();
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(5e-3));

  gradferry::Reducer reducer(model->named_parameters().pairs(), {.codec = options.codec}, store,
                             static_cast<uint32_t>(options.rank),
                             static_cast<uint32_t>(options.world_size));
  reducer.average_in_backward();
  if (!options.load.empty()) {
    torch::load(model, options.load + ".model");
    torch::load(optimizer, options.load + ".optimizer");
    torch::load(reducer, options.load + ".reducer");
  }

  // Every rank draws digits of its own, and goes on with others when it has loaded a state.
  auto own = torch::make_generator<torch::CPUGeneratorImpl>(1000 * (1 + reducer.stats().steps) +
                                                            static_cast<uint64_t>(options.rank));
  double first_loss = 0, loss_now = 0;
  for (int64_t step = 0; step < options.steps; ++step) {
    const Batch batch = draw(32, own);
    optimizer.zero_grad();
    auto loss = torch::nn::functional::cross_entropy(model->forward(batch.images), batch.labels);
    loss.backward();  // gradients travel as soon as they are there
    reducer.wait();   // each .grad is the average over all ranks
    optimizer.step();
    loss_now = loss.item<double>();
    if (step == 0) first_loss = loss_now;
    if (options.rank == 0 && step % 25 == 0) {
      std::printf("step %lld loss %.4f\n", static_cast<long long>(step), loss_now);
    }
  }

  auto same = torch::make_generator<torch::CPUGeneratorImpl>(7);
  const Batch test = draw(500, same);
  const torch::NoGradGuard no_grad;
  const auto read = model->forward(test.images).argmax(1) == test.labels;
  const gradferry::ReducerStats stats = reducer.stats();
  // What a dense all-reduce of fp32 sends at least.
  const auto ranks = static_cast<double>(options.world_size);
  const double dense_bytes = 2 * (ranks - 1) / ranks * static_cast<double>(stats.gradient_bytes);
  std::printf("rank %lld: loss %.4f -> %.4f, reads %.1f %% of new digits\n",
              static_cast<long long>(options.rank), first_loss, loss_now,
              100 * read.to(torch::kFloat).mean().item<double>());
  if (options.world_size > 1) {
    std::printf("rank %lld: sent %.2f MB, %.1f times less than uncompressed\n",
                static_cast<long long>(options.rank), static_cast<double>(stats.wire_bytes) / 1e6,
                dense_bytes / static_cast<double>(stats.wire_bytes));
  }
  std::printf("rank %lld: parameters %016llx\n", static_cast<long long>(options.rank),
              static_cast<unsigned long long>(hash_of(model)));
  if (!options.save.empty()) {
    torch::save(model, options.save + ".model");
    torch::save(optimizer, options.save + ".optimizer");
    torch::save(reducer, options.save + ".reducer");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--help") == 0) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a step is seen when it is done, in a file, too
  try {
    train(parse(argc, argv));
    return 0;
  } catch (const c10::Error& error) {  // torch's own, which has its stack in what()
    std::fprintf(stderr, "train: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train: %s\n", error.what());
  }
  return 1;
}
