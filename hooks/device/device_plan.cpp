#include "device/device_plan.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <span>

namespace gradferry {
namespace {

constexpr uint64_t kTableAlignment = 16;

class TableWriter {
 public:
  template <typename T>
  Table<T> add(const std::vector<T>& entries) {
    const uint64_t offset = bytes_.size();
    const uint64_t num_bytes = entries.size() * sizeof(T);
    bytes_.resize((offset + num_bytes + kTableAlignment - 1) / kTableAlignment * kTableAlignment);
    if (num_bytes != 0) {
      std::memcpy(bytes_.data() + offset, static_cast<const void*>(entries.data()), num_bytes);
    }
    return {offset, static_cast<uint32_t>(entries.size())};
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

// The tiles of a stage: change(tile, rank) completes them.
template <typename Change>
DeviceStage add_stage(TableWriter& writer, const std::vector<PlannedBatch>& planned,
                      const std::vector<ChunkCodec>& codecs, bool PlannedBatch::* has_residual,
                      Change change) {
  DeviceStage stage;
  std::vector<ChunkTile> tiles;
  for (const PlannedBatch& batch : planned) {
    stage.rows |= 1U << codecs[batch.codec_index].row;
    for (size_t i = 0; i < batch.tiles.size(); ++i) {
      ChunkTile& added = tiles.emplace_back(
          ChunkTile{batch.tiles[i], batch.codec_index, 0, batch.*has_residual ? 1U : 0U, 0});
      change(added, batch.ranks[i]);
    }
  }
  stage.tiles = writer.add(tiles);
  return stage;
}

// Builds the tables of a chunk, as rank `rank` of a world uses them.
class ChunkTables {
 public:
  ChunkTables(TableWriter& writer, const ChunkPlan& plan, const Layout& layout, uint32_t sum_begin,
              Collective collective)
      : writer_(writer),
        plan_(plan),
        nodes_(layout.nodes()),
        rank_(layout.rank()),
        node_(nodes_.node_of(rank_)),
        rail_(nodes_.local_index(rank_)),
        sum_begin_(sum_begin),
        averages_(scatters(collective)),
        gathers_(gathers(collective)) {
    chunk_.plan = &plan;
  }

  DeviceChunk add(const std::vector<ChunkCodec>& codecs) {
    if (!nodes_.is_flat()) add_siblings();
    if (averages_ && nodes_.is_leader(rank_)) add_peers();
    if (gathers_) add_gathered();
    add_stages(codecs);
    return std::move(chunk_);
  }

 private:
  void add_siblings() {
    const std::vector<uint32_t>& ranks = nodes_.siblings(rank_);
    const std::span sent = std::span(plan_.dense).first(ranks.size());
    add_all_to_all(chunk_.siblings.scatter, sent, rail_, ranks, Phase::kLocalScatter);
    std::vector<PlannedMessage> received = side_by_side(sent[rail_], ranks.size());
    received[rail_] = {};
    std::vector<Message> from_others;
    add_messages(from_others, received, ranks, Phase::kLocalScatter);
    std::vector<ChunkPiece> to_others, own;
    for (uint32_t c = 0; c < plan_.rails.size(); ++c) {
      for (const Piece& piece : plan_.rails[c].pieces) {
        (c == rail_ ? own : to_others)
            .push_back({piece.gradient_offset, piece.num_elements, piece.offset, c, 0});
      }
    }
    chunk_.siblings.from_others = writer_.add(from_others);
    chunk_.siblings.sent = writer_.add(to_others);
    chunk_.siblings.own = writer_.add(own);
  }

  void add_peers() {
    sent_as_ = add_all_to_all(chunk_.scatter, plan_.scattered, node_, nodes_.peers(rail_),
                              Phase::kScatter);
  }

  // What this rank, at `place` among `ranks`, sends to each of them; all send it the same size.
  std::vector<uint32_t> add_all_to_all(DeviceScatter& scatter,
                                       std::span<const PlannedMessage> messages, uint32_t place,
                                       const std::vector<uint32_t>& ranks, Phase phase) {
    const std::vector<PlannedMessage> arriving = side_by_side(messages[place], ranks.size());
    std::vector<Message> sent, received;
    std::vector<uint32_t> sent_as =
        add_messages(sent, messages, std::vector<uint32_t>(ranks.size(), rank_), phase);
    add_messages(received, arriving, ranks, phase);
    scatter = {writer_.add(sent), writer_.add(received), sizes_of(messages), sizes_of(arriving)};
    return sent_as;
  }

  static std::vector<PlannedMessage> side_by_side(const PlannedMessage& message, size_t number) {
    std::vector<PlannedMessage> messages(number, message);
    for (uint32_t i = 0; i < number; ++i) messages[i].start = i * message.message_bytes;
    return messages;
  }

  // Adds the messages of `ranks`, but those of no bytes. Returns where in `to` each one's stands.
  static std::vector<uint32_t> add_messages(std::vector<Message>& to,
                                            std::span<const PlannedMessage> messages,
                                            const std::vector<uint32_t>& ranks, Phase phase) {
    std::vector<uint32_t> numbers;
    for (size_t i = 0; i < messages.size(); ++i) {
      numbers.push_back(static_cast<uint32_t>(to.size()));
      const auto& [payload_bytes, message_bytes, start] = messages[i];
      if (message_bytes != 0) to.push_back({start, payload_bytes, ranks[i], phase, 0});
    }
    return numbers;
  }

  void add_gathered() {
    for (uint32_t c = 0; c < plan_.rails.size(); ++c) {
      gathered_as_.push_back(
          add_messages(gathered_, plan_.rails[c].gathered, nodes_.peers(c), Phase::kGather));
    }
    if (!averages_) {
      std::vector<Message> to_all;
      sent_as_ = add_messages(to_all, side_by_side(plan_.rails[rail_].gathered[node_], 1), {rank_},
                              Phase::kGather);
      chunk_.scatter.sent = writer_.add(to_all);
    }
    std::vector<Message> all = gathered_;
    const std::vector<uint32_t>& siblings = nodes_.siblings(rank_);
    const size_t forwarding = nodes_.is_flat() ? 0 : siblings.size();
    add_messages(all, std::span(plan_.forwarded).first(forwarding), siblings, Phase::kForward);
    chunk_.gathered = writer_.add(all);
  }

  void add_stages(const std::vector<ChunkCodec>& codecs) {
    std::vector<Tile> own;  // in the send buffer
    chunk_.encode = add_stage(writer_, plan_.encode, codecs, &PlannedBatch::worker_residual,
                              [&](ChunkTile& tile, uint32_t node) {
                                tile.message = sent_as_[node];
                                if (averages_) own.push_back(tile.tile);
                              });
    chunk_.reduce = add_stage(writer_, plan_.reduce, codecs, &PlannedBatch::owner_residual,
                              [](ChunkTile&, uint32_t) {});
    const uint32_t item = item_bytes(plan_.dtype);
    size_t next = 0;
    chunk_.decode = add_stage(
        writer_, plan_.decode, codecs, &PlannedBatch::worker_residual,
        [&](ChunkTile& tile, uint32_t owner) {
          tile.message = gathered_as_[nodes_.local_index(owner)][nodes_.node_of(owner)];
          tile.tile.message_offset =
              tile.tile.payload_offset - gathered_[tile.message].offset - kHeaderBytes;
          if (next == own.size()) return;  // of other rails
          const Tile& sent = own[next++];
          tile.tile.output_offset = sent.payload_offset;
          if (nodes_.is_flat()) return;
          tile.summed_offset = sum_begin_ + static_cast<uint32_t>(sent.gradient_offset) * item;
        });
    for (const PlannedBatch& batch : plan_.decode) chunk_.worker_residual |= batch.worker_residual;
  }

  TableWriter& writer_;
  const ChunkPlan& plan_;
  const Nodes& nodes_;
  const uint32_t rank_, node_, rail_, sum_begin_;
  const bool averages_;                             // not an all-gather
  const bool gathers_;                              // not a reduce-scatter
  std::vector<Message> gathered_;                   // of owners
  std::vector<std::vector<uint32_t>> gathered_as_;  // which is an owner's, by rail and node
  std::vector<uint32_t> sent_as_;                   // which of scatter.sent is for a peer, by node
  DeviceChunk chunk_{};
};

}  // namespace

DevicePlan::DevicePlan(const BucketPlan& plan, const Layout& layout,
                       const std::vector<ChunkCodec>& codecs, uint32_t sum_begin,
                       Collective collective, c10::Device device)
    : plan_(plan) {
  TableWriter writer;
  codecs_ = writer.add(codecs);
  for (const ChunkPlan& chunk : plan_.chunks) {
    chunks_.push_back(ChunkTables(writer, chunk, layout, sum_begin, collective).add(codecs));
    const DeviceChunk& added = chunks_.back();
    most_tiles_ = std::max(
        {most_tiles_, added.encode.tiles.size, added.reduce.tiles.size, added.decode.tiles.size});
  }
  if (chunks_.empty()) return;
  const auto num_bytes = static_cast<int64_t>(writer.bytes().size());
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  staging_ = at::empty({num_bytes}, bytes.pinned_memory(true));
  std::memcpy(staging_.mutable_data_ptr(), writer.bytes().data(), writer.bytes().size());
  tables_ = at::empty({num_bytes}, bytes.device(device));
  tables_.copy_(staging_, /*non_blocking=*/true);
  base_ = static_cast<const std::byte*>(tables_.const_data_ptr());
}

void DevicePlan::use_on(const c10::Stream& stream) const {
  if (!tables_.defined()) return;
  c10::impl::VirtualGuardImpl(stream.device_type())
      .recordDataPtrOnStream(tables_.storage().data_ptr(), stream);
}

}  // namespace gradferry
