"""The reference's engine, layout and messages against first principles and known bytes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from reference import (
    CODECS,
    Header,
    Layout,
    Parameter,
    ReferenceEngine,
    cut_chunks,
    decode_tensor,
    encode_tensor,
    message_checksum,
    narrow,
    widen,
    wire_bytes_per_step,
    word_sum,
)
from reference.engine import accumulate_tiles, reduce_tiles
from reference.message import documented_example, example_values

Q4 = CODECS["q4"]


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def test_reduce_sums_in_rank_order_and_keeps_the_owner_residual() -> None:
    # (1e8 + 1) - 1e8 is 0 in fp32, 1e8 - 1e8 + 1 is 1: the order shows.
    big, one = row(1e8), row(1)
    payloads = [CODECS["exact"].encode(v, "float32") for v in (big, one, -big, row(0))]
    assert CODECS["exact"].decode(reduce_tiles("exact", "float32", payloads, 1), 1, "float32") == 0
    swapped = [payloads[0], payloads[2], payloads[1], payloads[3]]
    total = CODECS["exact"].decode(reduce_tiles("exact", "float32", swapped, 1), 1, "float32")
    assert total == 0.25

    residual = np.zeros((1, 40), np.float32)
    v = np.random.default_rng(3).standard_normal((1, 40)).astype(np.float32)
    payload = Q4.encode(v, "float32")
    q = Q4.decode(reduce_tiles("q4", "float32", [payload, payload], 40, residual), 40, "float32")
    assert (residual == Q4.decode(payload, 40, "float32") - q).all()


def test_accumulate_is_the_quotient_rounded_once() -> None:
    # The sum of three 60000 is infinite in float16, their mean is not.
    payload = CODECS["exact"].encode(row(60000, 1, -0.0), "float16")
    total, mean = (accumulate_tiles("exact", "float16", [payload] * 3, 3, d) for d in (1, 3))
    assert total.tolist() == [[np.inf, 3, 0]]
    assert mean.tolist() == [[60000, 1, 0]]
    assert np.signbit(mean[0, 2])


@pytest.mark.parametrize("feedback", ["none", "worker", "owner", "both"])
def test_engine_loses_nothing_that_a_residual_withholds(feedback: str) -> None:
    rng = np.random.default_rng(4)
    engine = ReferenceEngine(3, [Parameter("w", 5000)], "q4", feedback)
    applied, given_sum = np.zeros(5000), np.zeros(5000)
    for step in range(30):
        gradients = [[rng.standard_normal(5000).astype(np.float32)] for _ in range(3)]
        if step % 3 == 0:
            gradients[1][0][:] = 0
        given_sum += np.mean([g[0].astype(np.float64) for g in gradients], axis=0)
        applied += engine.step(gradients)[0][0]
    withheld = np.zeros(5000)
    if feedback in ("worker", "both"):
        withheld += np.mean([r.astype(np.float64) for r in engine.worker_residual[0]], axis=0)
    if feedback in ("owner", "both"):
        withheld += engine.owner_residual[0]
    # Each of at most 30 * (2 * 3 + 4) fp32 roundings is of a value below 16.
    bound = 300 * 16 * 2.0**-24
    lost = np.abs(given_sum - applied - withheld).max()
    assert (lost <= bound) == (feedback == "both")


def test_engine_zero_tile_keeps_the_worker_residual_and_all_zero_keeps_the_owners() -> None:
    rng = np.random.default_rng(5)
    engine = ReferenceEngine(2, [Parameter("w", 4096)], "q4", "both")

    def draw() -> np.ndarray:
        return rng.standard_normal(4096).astype(np.float32)

    zero = np.array([0.0, -0.0], np.float32).repeat(2048)
    engine.step([[draw()], [draw()]])
    worker = [r.copy() for r in engine.worker_residual[0]]
    engine.step([[zero], [draw()]])
    assert (engine.worker_residual[0][0] == worker[0]).all()
    assert (engine.worker_residual[0][1] != worker[1]).any()
    owner = engine.owner_residual[0].copy()
    result = engine.step([[zero], [zero]])[0][0]
    assert result.tobytes() == bytes(4 * 4096)
    assert (engine.owner_residual[0] == owner).all()


def test_layout_resolves_codecs_and_balances_owners() -> None:
    parameters = [
        Parameter("embedding", 10000),
        Parameter("bias", 5000, ndim=1),
        Parameter("small", 1023),
        Parameter("empty", 0),
        Parameter("double", 5000, dtype="float64"),
        Parameter("wave", 5000, is_complex=True),
        Parameter("half", 1024, dtype="float16"),
    ]
    layout = Layout(parameters, "q4", 3, rules=[("em*", "bf16"), ("double", "q4")])
    assert layout.codecs == ["bf16", "exact", "exact", "bf16", "exact", "exact", "q4"]
    assert [t.num_elements for t in layout.tiles[:3]] == [4096, 4096, 1808]
    assert layout.tiles_of[3] == range(6, 6)
    equal = Layout([Parameter("w", 4096 * 7)], "q4", 3)
    assert equal.owners == [0, 1, 2, 0, 1, 2, 0]
    load = [0, 0, 0]
    for tile, owner in zip(layout.tiles, layout.owners, strict=True):
        assert load[owner] == min(load)
        assert min(load) not in load[:owner]
        load[owner] += tile.worker_bytes + tile.owner_bytes


def test_chunks_hold_as_many_tiles_as_fit_and_at_least_one() -> None:
    layout = Layout([Parameter("w", 4096 * 9)], "exact", 2)
    assert cut_chunks(layout, [0], 2 * 16384) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert cut_chunks(layout, [0], 2 * 16384 - 1) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert len(cut_chunks(layout, [0], 1)) == 9


def test_wire_bytes_of_a_small_model_by_hand() -> None:
    layout = Layout([Parameter("w", 8192 + 32), Parameter("b", 4, ndim=1)], "q4", 2)
    # Tiles of 2192, 2192, 32 and 16 bytes; owners 0, 1, 0, 1. One bucket, one chunk.
    assert layout.owners == [0, 1, 0, 1]
    assert wire_bytes_per_step(layout, [[0, 1]], 0) == (64 + 2208) + (64 + 2224) + 64
    assert wire_bytes_per_step(layout, [[0, 1]], 1) == (64 + 2224) + (64 + 2224) + 64
    assert wire_bytes_per_step(layout, [[0], [1]], 1) == (
        (64 + 2224) + (64 + 2224) + 64 + (64 + 0) + (64 + 16) + 64
    )
    assert wire_bytes_per_step(Layout([Parameter("w", 9)], "q4", 1), [[0]], 0) == 0


def test_checksum_sees_swapped_tiles() -> None:
    payload = np.random.default_rng(6).integers(0, 256, 64).astype(np.uint8)
    other = payload[::-1].copy()
    checksum = message_checksum([payload, other])
    assert message_checksum([other, payload]) != checksum
    assert message_checksum([]) == 0
    assert word_sum(np.array([1, 0, 0, 0] * 3, np.uint8)) == 3 + 5 + 7
    assert word_sum(np.array([0, 0, 0, 128] * 2, np.uint8)) == 2**31 * (3 + 5)


def test_no_two_flipped_bits_leave_the_checksum_as_it_was() -> None:
    message = np.random.default_rng(7).integers(0, 256, 4 * 40).astype(np.uint8)
    sums = []
    for bit in range(8 * len(message)):
        flipped = message.copy()
        flipped[bit // 8] ^= 1 << (bit % 8)
        sums.append(word_sum(flipped) - word_sum(message))
    # Of one word, too: there both flips add up to a change of the word. Then the checksum's own.
    sums += [2**bit for bit in range(64)]
    changes = {change % 2**64 for change in sums}
    assert len(changes) == len(sums)
    # 2^63 is its own negative: the checksum's top bit, which no other flip reaches.
    assert all(-change % 2**64 not in changes for change in sums if change != 2**63)


@pytest.mark.parametrize(
    ("codec", "dtype", "n"),
    [
        ("exact", "float16", 4097),
        ("bf16", "float32", 40),
        ("q4", "bfloat16", 4097),
        ("q4", "float32", 1),
    ],
)
def test_single_tensor_message_round_trips(codec: str, dtype: str, n: int) -> None:
    values = np.random.default_rng(7).standard_normal(n).astype(np.float32)
    message = encode_tensor(narrow(values, dtype), codec, dtype, seed=3, step=2)
    header = Header.unpack(message)
    assert (header.phase, header.step, header.status, header.seed) == (4, 2, 0, 3)
    assert len(message) == 64 + header.payload_bytes
    decoded = widen(decode_tensor(message, n, codec, dtype), dtype)
    # E2M1's widest gap is 2 of 6, so an element is off by at most 1/6 of its block's maximum,
    # stretched by the scale's rounding of at most 1/16.
    bound = {"exact": 2.0**-8, "bf16": 2.0**-8, "q4": 17 / 96 + 2.0**-8}[codec]
    assert np.abs(decoded - values).max() <= bound * np.abs(values).max()


def test_documented_example_equals_the_reference() -> None:
    assert encode_tensor(example_values(), "q4") == documented_example()
    decoded = decode_tensor(documented_example(), 40, "q4", "float32")
    assert decoded[[0, 16]].tolist() == [-2.4375, -0.40625]


class Walk:
    """A step of the exchange of one tile, by the lines at the head of hooks/bucket_engine.h."""

    def __init__(self, world_size: int, n: int, momentum: float) -> None:
        self.momentum, self.alpha = momentum, np.float32(1 - momentum)
        self.worker = [np.zeros((1, n), np.float32) for _ in range(world_size)]
        self.owner = np.zeros((1, n), np.float32)
        self.step = 0

    def scatter(self) -> None:
        v = [self.alpha * g + r for g, r in zip(self.gradients, self.worker, strict=True)]
        self.sent = [Q4.decode(Q4.encode(each, "float32"), each.size, "float32") for each in v]
        self.worker = [each - sent for each, sent in zip(v, self.sent, strict=True)]

    def reduce(self) -> None:
        total = sum(self.sent[1:], start=self.sent[0])
        u = total * (np.float32(1) / np.float32(len(self.sent))) + self.owner
        self.mean = Q4.encode(u, "float32")
        self.owner = u - Q4.decode(self.mean, u.size, "float32")

    def gather(self) -> None:
        self.gathered = self.mean

    def decode(self) -> None:
        self.result = Q4.decode(self.gathered, self.owner.size, "float32")
        self.worker = [r + np.float32(self.momentum) * self.result for r in self.worker]

    def commit(self) -> None:
        self.step += 1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_page_of_the_engine_says_what_the_reference_does(momentum: float) -> None:
    page = (Path(__file__).parents[2] / "hooks" / "bucket_engine.h").read_text()
    page = page[page.index("// The exchange of a bucket") : page.index("The cases:")]
    steps = re.findall(r"^// +([a-z]+)  +\w", page, re.MULTILINE)
    assert steps == ["scatter", "reduce", "gather", "decode", "commit"]
    n, rng = 1100, np.random.default_rng(7)
    walk = Walk(3, n, momentum)
    reference = ReferenceEngine(
        3, [Parameter("w", n, "float32")], error_feedback="both", momentum=momentum
    )
    for _ in range(3):
        gradients = [rng.standard_normal(n).astype(np.float32) for _ in range(3)]
        walk.gradients = [gradient[None] for gradient in gradients]
        for step in steps:
            getattr(walk, step)()
        (expected,) = reference.step([[gradient] for gradient in gradients])[0]
        assert (walk.result[0] == expected).all()
        for mine, theirs in zip(walk.worker, reference.worker_residual[0], strict=True):
            assert (mine[0] == theirs).all()
        assert (walk.owner[0] == reference.owner_residual[0]).all()
