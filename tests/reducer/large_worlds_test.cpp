// Worlds of up to 4,096 ranks in one thread: each plans and exchanges a few buckets as the engine
// for hosts does, chunk by chunk, on lanes that copy once all of their ranks have posted.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "host/chunk_codecs.h"
#include "host/exchange.h"
#include "protocol/planned_bytes.h"

namespace gradferry {
namespace {

class Arrived final : public c10d::Work {
 public:
  Arrived() { finish(); }
};

struct Post {
  at::Tensor receive, send;
  std::vector<int64_t> receive_bytes, send_bytes;  // the latter empty: the whole to everybody
};

// Where the ranks of a lane post, each its next collective.
struct Meeting {
  explicit Meeting(size_t num_ranks) : posts(num_ranks) {}

  void deliver() {
    std::vector<std::byte*> places;
    for (const Post& post : posts) places.push_back(bytes(post.receive));
    for (size_t from = 0; from < posts.size(); ++from) {
      const std::vector<int64_t>& sizes = posts[from].send_bytes;
      const std::byte* message = bytes(posts[from].send);
      for (size_t to = 0; to < posts.size(); ++to) {
        const int64_t size = sizes.empty() ? posts[from].send.numel() : sizes[to];
        ASSERT_EQ(size, posts[to].receive_bytes[from]);
        if (to != from && size != 0) std::memcpy(places[to], message, size);
        places[to] += size;
        if (!sizes.empty()) message += size;
      }
    }
    num_posted = 0;
  }

  std::vector<Post> posts;
  size_t num_posted = 0;
};

class CopyingLane final : public Lane {
 public:
  CopyingLane(Meeting& meeting, uint32_t rank) : meeting_(meeting), rank_(rank) {}
  Pending all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes, at::Tensor send,
                     std::vector<int64_t> send_bytes) override {
    meeting_.posts[rank_] = {receive, send, std::move(receive_bytes), std::move(send_bytes)};
    if (++meeting_.num_posted == meeting_.posts.size()) meeting_.deliver();
    return c10::make_intrusive<Arrived>();
  }
  Pending all_gather(at::Tensor receive, std::vector<int64_t> receive_bytes,
                     at::Tensor send) override {
    return all_to_all(receive, std::move(receive_bytes), send, {});
  }
  uint32_t rank() const override { return rank_; }
  uint32_t world_size() const override { return static_cast<uint32_t>(meeting_.posts.size()); }

 private:
  Meeting& meeting_;
  uint32_t rank_;
};

std::vector<std::vector<uint32_t>> members_of(uint32_t num_nodes, uint32_t siblings) {
  std::vector<std::vector<uint32_t>> members(num_nodes, std::vector<uint32_t>(siblings));
  for (uint32_t node = 0; node < num_nodes; ++node) {
    std::iota(members[node].begin(), members[node].end(), node * siblings);
  }
  return members;
}

struct Rank {
  uint32_t number, node, index;
  std::unique_ptr<Exchange> exchange;
  BucketPlan plan{};
  at::Tensor gradient{};
  Slot slot{};
  Chunk chunk{};
};

// With a node's number of ranks.
class LargeWorld : public testing::TestWithParam<std::pair<uint32_t, uint32_t>> {
 protected:
  LargeWorld() {
    options_.world_size = nodes_.world_size();
    options_.nodes = nodes_;
    add(0, 3 * kTileElements, "q4");  // most ranks own nothing of the first bucket
    add(0, kTileElements, "exact");
    for (uint32_t i = 0; i < 400; ++i) add(1, 64, i % 2 == 0 ? "exact" : "q4");
    for (uint32_t rank = 0; rank < nodes_.world_size(); ++rank) {
      const uint32_t node = nodes_.node_of(rank), index = nodes_.local_index(rank);
      ExchangeLanes lanes;
      lanes.scatter = lanes.gather = std::make_shared<CopyingLane>(rails_[index], node);
      lanes.local_scatter = lanes.forward = std::make_shared<CopyingLane>(hosts_[node], index);
      Agreement agreement = options_.agreement();
      agreement.rank = rank;
      ranks_.push_back({rank, node, index,
                        std::make_unique<Exchange>(agreement, nodes_, alone_, std::move(lanes))});
    }
  }

  void add(size_t bucket, uint64_t num_elements, const char* codec) {
    buckets_[bucket].push_back(static_cast<uint32_t>(options_.parameters.size()));
    options_.parameters.push_back({.name = "weight",
                                   .num_elements = num_elements,
                                   .dtype = ScalarType::kFloat32,
                                   .codec = codec,
                                   .warmup = "exact",
                                   .worker_residual = false,
                                   .owner_residual = false});
  }

  // Whole numbers whose sums over 4,096 ranks are below 2^24, so that means are exact.
  at::Tensor gradient(double of_rank) const {
    return at::arange(num_elements_, at::kFloat).remainder(89).mul(of_rank);
  }
  static uint32_t number_of(const Rank& rank) { return rank.number % 37; }

  // Memory for its chunk, and no more.
  void begin(Rank& rank, size_t c) const {
    const ChunkPlan& plan = rank.plan.chunks[c];
    const bool flat = nodes_.is_flat();
    Workspace space;
    space.send_bytes = total_bytes(plan.scattered);
    space.receive_bytes = uint64_t{plan.scattered[rank.node].message_bytes} * nodes_.num_nodes();
    space.gathered_bytes = total_bytes(flat ? plan.rails[0].gathered : plan.forwarded);
    if (!flat) {
      space.dense_send_bytes = total_bytes(plan.dense);
      space.dense_receive_bytes = plan.dense.size() * plan.dense[rank.index].message_bytes;
      space.sum_bytes = plan.dense[rank.index].payload_bytes;
    }
    rank.slot = make_slot(space, nullptr, 0);
    rank.chunk = {};
    rank.chunk.plan = &plan;
    rank.chunk.slot = &rank.slot;
    rank.chunk.gathered = rank.slot.gathered;
  }

  ChunkCodecs::Work work_of(const Rank& rank) const {
    void* gradient = rank.gradient.mutable_data_ptr();
    return {rank.chunk.plan, 0, gradient,
            nodes_.is_flat() ? gradient : rank.slot.sum.const_data_ptr()};
  }

  void exchange(const Layout& layout, size_t c) {
    const Residuals none(at::kCPU);
    ChunkCodecs codecs(options_, layout, none);
    for (Rank& rank : ranks_) begin(rank, c);
    for (Rank& rank : ranks_) {
      if (nodes_.is_flat()) break;
      for (uint32_t rail = 0; rail < nodes_.num_rails(); ++rail) {
        if (rail == rank.index) continue;
        pack_rail(*rank.chunk.plan, rail, rank.gradient.const_data_ptr(),
                  rank.exchange->dense_message(rank.chunk, rail));
      }
      rank.exchange->post_local_scatter(rank.chunk, WireStatus::kOk);
    }
    for (Rank& rank : ranks_) {
      if (!nodes_.is_flat()) sum(rank);
      std::vector<uint64_t> checksums(nodes_.num_nodes(), 0);
      codecs.encode(work_of(rank), bytes(rank.slot.scatter_send), checksums);
      rank.exchange->post_scatter(rank.chunk, WireStatus::kOk, checksums);
    }
    for (Rank& rank : ranks_) {
      EXPECT_FALSE(rank.exchange->wait_scatter(rank.chunk));
      std::vector<const std::byte*> payloads;
      for (uint32_t node = 0; node < nodes_.num_nodes(); ++node) {
        payloads.push_back(rank.exchange->scattered_payload(rank.chunk, node));
      }
      std::byte* payload = rank.exchange->gather_message(rank.chunk) + kHeaderBytes;
      const uint64_t checksum = codecs.reduce(work_of(rank), payloads, payload).checksum;
      rank.exchange->post_gather(rank.chunk, WireStatus::kOk, checksum);
    }
    for (Rank& rank : ranks_) {
      EXPECT_FALSE(rank.exchange->wait_gather(rank.chunk));
      if (!nodes_.is_flat()) rank.exchange->post_forward(rank.chunk, WireStatus::kOk);
    }
    for (Rank& rank : ranks_) {
      EXPECT_FALSE(nodes_.is_flat() ? Fault() : rank.exchange->wait_forward(rank.chunk));
      codecs.decode(work_of(rank), bytes(rank.chunk.gathered), bytes(rank.slot.scatter_send));
    }
  }

  void sum(Rank& rank) const {
    EXPECT_FALSE(rank.exchange->wait_local_scatter(rank.chunk));
    std::vector<const std::byte*> gradients;
    for (uint32_t i = 0; i < nodes_.most_siblings(); ++i) {
      const bool own = i == rank.index;
      gradients.push_back(own ? nullptr : rank.exchange->scattered_gradients(rank.chunk, i));
    }
    sum_rail(*rank.chunk.plan, rank.index, gradients, rank.gradient.const_data_ptr(),
             1.0 / nodes_.most_siblings(), rank.slot.sum.mutable_data_ptr());
  }

  // Every rank has what the first has, and where it was sent as it is, the mean.
  void expect_means() {
    double sum = 0;
    for (const Rank& rank : ranks_) sum += number_of(rank);
    const at::Tensor& first = ranks_[0].gradient;
    for (const Rank& rank : ranks_) EXPECT_TRUE(at::equal(rank.gradient, first)) << rank.number;
    const at::Tensor means = gradient(sum / nodes_.world_size());
    for (const ChunkPlan& chunk : ranks_[0].plan.chunks) {
      for (const PlannedBatch& batch : chunk.decode) {
        // q4 rounds twice, at most by half of a seventh of a block's largest number.
        const double most = batch.codec_index == 0 ? 0 : 88.0 * 36 / 7;
        for (const Tile& tile : batch.tiles) {
          const auto begin = static_cast<int64_t>(tile.gradient_offset);
          const at::Tensor error = (first - means).narrow(0, begin, tile.num_elements).abs();
          EXPECT_LE(error.max().item<double>(), most);
        }
      }
    }
  }

  PlanOptions planning(uint32_t rank) {
    options_.rank = rank;
    return options_.planning(CodecChoice::kOwn, /*residuals=*/false);
  }

  const Nodes nodes_{members_of(GetParam().first, GetParam().second)};
  EngineOptions options_{};
  std::vector<std::vector<uint32_t>> buckets_{2};
  int64_t num_elements_ = 0;  // of the bucket
  Peers alone_{nullptr, 0, 1};
  std::vector<Meeting> rails_{nodes_.num_rails(), Meeting(nodes_.num_nodes())};
  std::vector<Meeting> hosts_{nodes_.num_nodes(), Meeting(nodes_.most_siblings())};
  std::vector<Rank> ranks_{};
};

TEST_P(LargeWorld, AllRanksGetTheMeansAndSendWhatIsPlanned) {
  const Layout layout(options_.parameters, 0, nodes_);  // apart from residuals, everyone's
  for (const std::vector<uint32_t>& bucket : buckets_) {
    for (Rank& rank : ranks_) {
      rank.plan = make_plan(layout, bucket, planning(rank.number));
      num_elements_ = static_cast<int64_t>(rank.plan.num_elements);
      rank.gradient = gradient(number_of(rank));
    }
    for (size_t c = 0; c < ranks_[0].plan.chunks.size(); ++c) exchange(layout, c);
    expect_means();
  }
  std::vector<uint32_t> hosts;
  for (const Rank& rank : ranks_) hosts.push_back(rank.node);
  const auto planned = planned_bytes(layout, planning(0), false, buckets_, hosts);
  const uint64_t commits = buckets_.size() * sizeof(CommitRecord);
  const uint64_t siblings = nodes_.most_siblings(), others = ranks_.size() - siblings;
  for (const Rank& rank : ranks_) {
    const StepBytes& sent = planned[rank.number];
    EXPECT_EQ(rank.exchange->sent_bytes() + others * commits, sent.to_other_hosts);
    EXPECT_EQ(rank.exchange->local_bytes() + (siblings - 1) * commits, sent.on_host);
  }
}

using Worlds = std::vector<std::pair<uint32_t, uint32_t>>;
INSTANTIATE_TEST_SUITE_P(Fast, LargeWorld, testing::ValuesIn(Worlds{{64, 1}, {16, 4}}));
INSTANTIATE_TEST_SUITE_P(Slow, LargeWorld,
                         testing::ValuesIn(Worlds{{1024, 1}, {128, 8}, {4096, 1}, {512, 8}}));

}  // namespace
}  // namespace gradferry
