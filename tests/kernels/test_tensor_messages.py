"""gradferry.encode and decode: the documented bytes, and an error for what they cannot take.

That any other byte of a message is refused is what tests/fuzz/tensor_message_fuzz.cpp asks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import CODECS, encode_tensor
from reference.message import documented_example, example_values
from torch._subclasses import FakeTensorMode

gradferry = pytest.importorskip("gradferry", reason="the package is not built")


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


def test_float64_is_for_exact_alone() -> None:
    values = torch.randn(4097, dtype=torch.float64)
    message = gradferry.encode(values, "exact", seed=3, step=5)
    assert as_bytes(message) == encode_tensor(values.numpy(), "exact", "float64", seed=3, step=5)
    assert torch.equal(
        gradferry.decode(message, "exact", shape=(4097,), dtype=torch.float64), values
    )
    for codec in set(CODECS) - {"exact"}:
        with pytest.raises(gradferry.ConfigError, match="float64"):
            gradferry.encode(values, codec)


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
        (GOOD[:-1], "111"),
        (GOOD + bytes(16), "128"),
        (changed(4, b"\1\0"), "wire version 1, expected 2"),
        (changed(16, b"\0\0"), "codec hash"),
        (changed(24, b"\0\0"), "dtype or size hash"),
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
