// Headers and commits from peers: a message is accepted if and only if every byte that has one
// right value has it, and any fault has a text.
#include <cstring>
#include <string>
#include <vector>

#include "hooks/protocol/messages.h"
#include "tests/fuzz/target.h"

namespace gradferry::fuzzing {
namespace {

bool equal(const Fault& a, const Fault& b) {
  return a.status == b.status && a.phase == b.phase && a.rank == b.rank && a.chunk == b.chunk &&
         a.expected == b.expected && a.received == b.received;
}

void expect_text(const Verdict& verdict) {
  const std::string text = describe(verdict);
  EXPECT_NE(text.find("rank " + std::to_string(verdict.reporter)), std::string::npos) << text;
  EXPECT_NE(text.find("step " + std::to_string(verdict.step)), std::string::npos) << text;
}

// Bytes of a message, of the right size: the input's own, or `right` with some of them changed.
std::vector<std::byte> received(Bytes& input, std::vector<std::byte> right) {
  if (input.flip()) {
    input.take(right.data(), right.size());
  } else {
    input.damage(right.data(), right.size());
  }
  return right;
}

void check_headers(Bytes& input, const Agreement& agreement) {
  const auto phase = static_cast<Phase>(1 + input.below(7));
  const uint32_t source = input.below(agreement.world_size);
  const uint64_t step = input.below(3), chunk = input.below(3);
  const uint32_t payload_bytes = 16 * input.below(9);
  const bool summed = input.flip();
  std::vector<std::byte> right(kHeaderBytes + payload_bytes);
  Envelope envelope = agreement.envelope(step, chunk, phase);
  envelope.rank = source;
  input.take(right.data() + kHeaderBytes, payload_bytes);
  const auto sum = [&](const std::byte* payload) {
    return summed ? word_sum(payload, payload_bytes) : uint64_t{0};
  };
  write_header(right.data(), envelope, WireStatus::kOk, payload_bytes,
               sum(right.data() + kHeaderBytes));
  const std::vector<std::byte> message = received(input, right);

  const Fault fault =
      summed ? check_message(message.data(), agreement.envelope(step, chunk, phase), source,
                             payload_bytes)
             : check_unsummed_message(message.data(), agreement.envelope(step, chunk, phase),
                                      source, payload_bytes);
  MessageHeader wanted = make_header(envelope, payload_bytes, sum(message.data() + kHeaderBytes));
  std::memcpy(&wanted.seed, message.data() + offsetof(MessageHeader, seed), sizeof(wanted.seed));
  const bool lawful = std::memcmp(&wanted, message.data(), sizeof(wanted)) == 0;
  EXPECT_EQ(bool(fault), !lawful);
  if (!fault) return;
  EXPECT_EQ(fault.rank, source);
  EXPECT_NE(fault.expected, fault.received);
  expect_text({fault, agreement.rank, step});
}

void check_commits(Bytes& input, Agreement agreement) {
  agreement.has_loss_scale = input.flip();
  const uint64_t step = input.below(3), bucket = input.below(3);
  const size_t num_used = input.below(20);
  const uint64_t size = commit_bytes(num_used);
  std::vector<std::byte> right(size * agreement.world_size);
  for (uint32_t rank = 0; rank < agreement.world_size; ++rank) {
    UsedMap used(num_used);
    input.take(used.data(), used.size());
    Fault fault;
    if (input.flip())
      fault = {static_cast<WireStatus>(input.below(20)), Phase::kGather, 1, 2, 3, 4};
    const float scale = input.below(16) == 1 ? input.take<float>() : 8.0F;
    // Some are whole, but of another rank, step or bucket.
    const auto mostly = [&](uint64_t value) { return input.below(16) == 1 ? value + 1 : value; };
    write_commit(right.data() + rank * size, static_cast<uint32_t>(mostly(rank)), mostly(step),
                 mostly(bucket), fault, used, agreement.has_loss_scale ? scale : 0.0F);
  }
  const std::vector<std::byte> records = received(input, right);
  const Verdict verdict = read_commit(agreement, records.data(), step, bucket, num_used);
  EXPECT_LT(verdict.reporter, agreement.world_size);
  if (verdict.fault) expect_text(verdict);
  // What the records say is the same for every rank that receives them.
  for (agreement.rank = 0; agreement.rank < agreement.world_size; ++agreement.rank) {
    const Verdict other = read_commit(agreement, records.data(), step, bucket, num_used);
    EXPECT_TRUE(equal(verdict.fault, other.fault));
  }
  if (verdict.fault) return;
  const UsedMap used = read_used(records.data(), agreement.world_size, num_used);
  ASSERT_EQ(used.size(), num_used);
  for (size_t i = 0; i < num_used; ++i) {
    uint8_t any = 0;
    for (uint32_t rank = 0; rank < agreement.world_size; ++rank) {
      CommitRecord record;
      std::memcpy(&record, records.data() + rank * size, sizeof(record));
      EXPECT_EQ(record.source_rank, rank);
      EXPECT_EQ(record.step, step);
      EXPECT_EQ(record.bucket, bucket);
      CommitRecord first;
      std::memcpy(&first, records.data(), sizeof(first));
      EXPECT_EQ(record.received, first.received);
      EXPECT_EQ(is_loss_scale(record.received), agreement.has_loss_scale);
      EXPECT_TRUE(agreement.has_loss_scale || record.received == 0);
      any |= static_cast<uint8_t>(records[rank * size + sizeof(CommitRecord) + i]);
    }
    EXPECT_EQ(used[i] != 0, any != 0);
  }
}

}  // namespace

void run(Bytes input) {
  const bool commits = input.flip();
  const uint32_t world_size = 1 + input.below(4);
  const Agreement agreement{.rank = input.below(world_size),
                            .world_size = world_size,
                            .config_hash = input.take<uint16_t>(),
                            .layout_hash = input.take<uint16_t>()};
  if (commits) return check_commits(input, agreement);
  check_headers(input, agreement);
}

}  // namespace gradferry::fuzzing
