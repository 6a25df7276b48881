"""gradferry.encode and decode: the documented bytes, and an error for every other byte."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import (
    CODECS,
    DTYPES,
    HEADER,
    Header,
    decode_tensor,
    encode_tensor,
    message_checksum,
    narrow,
)
from scenario import Weight
from test_reference_engine import documented_example, example_values
from torch._subclasses import FakeTensorMode

gradferry = pytest.importorskip("gradferry", reason="the package is not built")

TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPES}


def tensor_and_flat(n: int, dtype: str, seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    rng = np.random.default_rng([seed, n])
    values = rng.standard_normal(n) * np.exp2(rng.integers(-20, 12, n))
    flat = narrow(values if dtype == "float64" else values.astype(np.float32), dtype)
    return Weight("t", (n,), TORCH_DTYPES[dtype]).from_flat(flat), flat


def as_bytes(message: torch.Tensor) -> bytes:
    return message.numpy().tobytes()


def as_message(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )


def test_documented_example_equals_the_library() -> None:
    message = gradferry.encode(torch.from_numpy(example_values()), "q4")
    assert as_bytes(message) == documented_example()
    decoded = gradferry.decode(message, "q4", shape=(40,), dtype=torch.float32)
    assert decoded[[0, 16]].tolist() == [-2.4375, -0.40625]


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("n", [1, 31, 33, 1024, 4097, 10000])
def test_encode_equals_reference(codec: str, dtype: str, n: int) -> None:
    tensor, flat = tensor_and_flat(n, dtype)
    if dtype == "float64" and codec != "exact":
        with pytest.raises(gradferry.ConfigError, match="float64"):
            gradferry.encode(tensor, codec)
        return
    message = gradferry.encode(tensor, codec, seed=3, step=5)
    assert as_bytes(message) == encode_tensor(flat, codec, dtype, seed=3, step=5)
    decoded = gradferry.decode(message, codec, shape=(n,), dtype=tensor.dtype)
    weight = Weight("t", (n,), tensor.dtype)
    want = decode_tensor(as_bytes(message), n, codec, dtype)
    assert weight.to_flat(decoded).tobytes() == want.tobytes()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70))
def test_encode_of_any_bits_equals_reference(bits: list[int]) -> None:
    flat = np.array(bits, np.uint32).view(np.float32)
    for codec in CODECS:
        assert as_bytes(gradferry.encode(torch.from_numpy(flat), codec)) == encode_tensor(
            flat, codec
        )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(min_size=48, max_size=48), st.sampled_from([(40, "q4"), (24, "bf16")]))
def test_decode_of_any_payload_is_refused_or_equals_reference(
    payload: bytes, kind: tuple[int, str]
) -> None:
    n, codec = kind
    header = Header.unpack(encode_tensor(np.ones(n, np.float32), codec))
    body = np.frombuffer(payload, np.uint8)
    header.checksum = 0
    header.checksum = message_checksum([body, np.frombuffer(header.pack(), np.uint8)])
    message = as_message(header.pack() + payload)
    corrupt = codec == "q4" and CODECS["q4"].corrupt(body[None], n).any()
    if corrupt:
        with pytest.raises(gradferry.ProtocolError):
            gradferry.decode(message, codec, shape=(n,), dtype=torch.float32)
        return
    decoded = gradferry.decode(message, codec, shape=(n,), dtype=torch.float32)
    want = CODECS[codec].decode(body[None], n, "float32")[0]
    assert decoded.numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: torch.arange(40), "dtype"),
        (lambda: torch.ones(40, dtype=torch.bool), "dtype"),
        (lambda: torch.ones(40, dtype=torch.complex64), "(?i)complex"),
        (lambda: torch.ones(40, 40).t(), "contiguous"),
        (lambda: torch.ones(40, device="meta"), "meta"),
        (lambda: torch.ones(40).to_sparse(), "parse"),
        (lambda: [1.0], "list"),
        (lambda: torch.ones(0, 3), "empty"),
    ],
)
def test_encode_of_what_is_not_a_dense_float_tensor_is_refused(make, part: str) -> None:
    value = make()
    if part == "contiguous":
        value = value[:, :7]
    with pytest.raises(gradferry.ConfigError, match=part):
        gradferry.encode(value, "q4")


GOOD = encode_tensor(example_values(), "q4", step=7)


def changed(offset: int, value: bytes) -> bytes:
    return GOOD[:offset] + value + GOOD[offset + len(value) :]


@pytest.mark.parametrize(
    ("message", "part"),
    [
        (b"", "0"),
        (GOOD[:63], "63"),
        (GOOD[:64], "64"),
        (GOOD[:-1], "111"),
        (GOOD + bytes(16), "128"),
        (b"GFRX" + GOOD[4:], "magic"),
        (changed(4, b"\1\0"), "wire version 1, expected 2"),
        (changed(6, b"\1"), "phase"),
        (changed(7, b"\3"), "status"),
        (changed(8, b"\1\0\0\0"), "rank"),
        (changed(12, b"\0\0\0\0"), "payload"),
        (changed(16, b"\0\0"), "codec hash"),
        (changed(24, b"\0\0"), "dtype or size hash"),
        (changed(32, b"\1"), "checksum"),
        (changed(40, b"\1"), "chunk"),
        (changed(48, b"\1"), "checksum"),
        (changed(56, b"\0\0\0\0"), "checksum"),
        (changed(63, b"\x80"), "checksum"),
        (changed(70, b"\xff"), "checksum"),
    ],
)
def test_decode_of_a_damaged_message_says_what_is_wrong(message: bytes, part: str) -> None:
    with pytest.raises(gradferry.ProtocolError, match=rf"(?i){part}"):
        gradferry.decode(as_message(message), "q4", shape=(40,), dtype=torch.float32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (41,)},
        {"shape": (4, 11)},
        {"dtype": torch.bfloat16},
        {"codec": "bf16"},
        {"codec": "q44"},
    ],
)
def test_decode_with_other_arguments_than_encode_is_refused(wrong: dict) -> None:
    arguments = {"codec": "q4", "shape": (40,), "dtype": torch.float32, **wrong}
    codec = arguments.pop("codec")
    with pytest.raises(gradferry.GradferryError):
        gradferry.decode(as_message(GOOD), codec, **arguments)


def test_decode_of_what_is_not_a_message_tensor_is_refused() -> None:
    for value in (torch.ones(112), as_message(GOOD * 2)[::2], as_message(GOOD)[None], GOOD):
        with pytest.raises(gradferry.GradferryError):
            gradferry.decode(value, "q4", shape=(40,), dtype=torch.float32)


def test_numbers_are_encoded_where_memory_holds_the_opposite() -> None:
    """Of a conjugate, torch notes a bit and leaves the memory as it is."""
    z = torch.complex(torch.zeros(1), torch.full((1,), 2.0))
    opposite = z.conj().imag
    assert opposite.is_neg()
    for codec in ("exact", "bf16"):  # in which 2 is a number
        message = gradferry.encode(opposite, codec)
        assert gradferry.decode(message, codec, shape=(1,), dtype=torch.float32).item() == -2.0
        kind = {"shape": (1,), "dtype": torch.float32}
        assert gradferry.accumulate([message], codec, **kind).item() == -2.0


class SpreadTensor(torch.Tensor):
    """In what counts here a DTensor."""

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(40)


UNUSABLE_SHAPES = (3700, None, "ab", (-1, 37), (100.0, 37), (True,), (2**40, 2**10), (2**80,))
UNUSABLE_DTYPES = (None, "float32", float, torch.int32, torch.complex64)
UNUSABLE_COUNTS = (-1, 2**64, 1.5, None, "1", True)


@pytest.mark.parametrize("name", ["seed", "step"])
@pytest.mark.parametrize("value", UNUSABLE_COUNTS)
def test_seeds_and_steps_that_no_header_holds_are_refused(name: str, value: Any) -> None:
    with pytest.raises(gradferry.ConfigError, match=f"{name}={value!r} must be a whole number"):
        gradferry.encode(torch.ones(40), "q4", **{name: value})


@pytest.mark.parametrize(
    "kind",
    [
        *({"shape": shape, "dtype": torch.float32} for shape in UNUSABLE_SHAPES),
        *({"shape": (40,), "dtype": dtype} for dtype in UNUSABLE_DTYPES),
    ],
)
def test_results_that_cannot_be_are_refused(kind: dict[str, Any]) -> None:
    wrong = "dtype" if kind["shape"] == (40,) else "shape="
    with pytest.raises(gradferry.ConfigError, match=wrong):
        gradferry.decode(as_message(GOOD), "q4", **kind)
    with pytest.raises(gradferry.ConfigError, match=wrong):
        gradferry.accumulate([as_message(GOOD)], "q4", **kind)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("make", [fake, lambda: torch.ones(40).as_subclass(SpreadTensor)])
def test_tensors_without_values_here_are_refused(make: Any) -> None:
    with pytest.raises(gradferry.ConfigError, match=r"without values|on several ranks"):
        gradferry.encode(make(), "q4")
    traced = torch.func.grad(lambda x: gradferry.encode(x, "q4").float().sum())
    with pytest.raises(gradferry.ConfigError, match="without values"):
        traced(torch.ones(40))


def test_messages_must_be_a_sequence() -> None:
    for messages in (None, 3, torch.ones):
        with pytest.raises(gradferry.ConfigError, match="pass a sequence of messages"):
            gradferry.accumulate(messages, "q4", shape=(40,), dtype=torch.float32)


def test_every_flipped_bit_is_refused() -> None:
    for bit in range(8 * len(GOOD)):
        flipped = bytearray(GOOD)
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(gradferry.ProtocolError):
            gradferry.decode(as_message(bytes(flipped)), "q4", shape=(40,), dtype=torch.float32)


def test_every_pair_of_flipped_top_bits_is_refused() -> None:
    """Bit 31 has the least room above it in the sum."""
    bits = range(31, 8 * len(GOOD), 32)
    for first, second in itertools.combinations(bits, 2):
        assert_refused(GOOD, [first, second], "q4", 40)


@pytest.mark.parametrize("codec", ["q4", "exact", "topk:ratio=0.01"])
def test_pairs_of_flipped_bits_are_refused_within_and_across_tiles(codec: str) -> None:
    rng = np.random.default_rng(0)
    n = 3 * 4096 + 100
    good = as_bytes(gradferry.encode(torch.from_numpy(rng.standard_normal(n)).float(), codec))
    num_words = len(good) // 4
    for first, second in rng.integers(0, 32 * num_words, (500, 2)).tolist():
        words = {first // 32, second // 32}
        # Any two bits, one bit of two words, and the top bits of these.
        pairs = [
            {first, second},
            *({32 * word + bit for word in words} for bit in (first % 32, 31)),
        ]
        for flips in pairs:
            assert_refused(good, sorted(flips), codec, n)


def assert_refused(good: bytes, flips: list[int], codec: str, n: int) -> None:
    """The message with these bits flipped, all of different places."""
    damaged = np.frombuffer(good, np.uint8).copy()
    for bit in flips:
        damaged[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(gradferry.ProtocolError):
        gradferry.decode(torch.from_numpy(damaged), codec, shape=(n,), dtype=torch.float32)


mutation = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 127), st.integers(0, 255)),
    st.tuples(st.just("cut"), st.integers(0, 112), st.just(0)),
    st.tuples(st.just("insert"), st.integers(0, 112), st.integers(0, 255)),
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(mutation, min_size=1, max_size=6))
def test_decode_of_mutated_bytes_raises_or_is_right(mutations: list) -> None:
    data = bytearray(GOOD)
    for kind, position, value in mutations:
        if kind == "set" and position < len(data):
            data[position] = value
        elif kind == "cut":
            del data[position:]
        elif kind == "insert":
            data.insert(position, value)
    try:
        decoded = gradferry.decode(as_message(bytes(data)), "q4", shape=(40,), dtype=torch.float32)
    except gradferry.GradferryError:
        assert bytes(data) != GOOD
    else:
        # What the checksum cannot tell apart from the original is still decoded by the rules.
        want = CODECS["q4"].decode(
            np.frombuffer(data, np.uint8)[None, HEADER.size :], 40, "float32"
        )
        assert decoded.numpy().tobytes() == want[0].tobytes()
