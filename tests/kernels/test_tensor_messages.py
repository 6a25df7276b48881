"""gradferry.encode, decode and accumulate: the documented bytes and sums, and an error for what
they cannot take.

That any other byte of a message is refused is what tests/fuzz/tensor_message_fuzz.cpp asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from codec_checks import TORCH_DTYPES, as_tensor
from reference import (
    CODECS,
    Header,
    accumulate_tensors,
    encode_tensor,
    message_checksum,
    narrow,
)
from reference.message import documented_example, example_values
from scenario import Weight
from torch._subclasses import FakeTensorMode

gradferry = pytest.importorskip("gradferry", reason="the package is not built")

GOOD = encode_tensor(example_values(), "q4", step=7)
KIND: dict[str, Any] = {"shape": (40,), "dtype": torch.float32}


def as_message(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode(message: Any, codec: str = "q4", **kind: Any) -> torch.Tensor:
    return gradferry.decode(message, codec, **{**KIND, **kind})


def accumulate(messages: Any, codec: str = "q4", **options: Any) -> torch.Tensor:
    return gradferry.accumulate(messages, codec, **{**KIND, **options})


# --- results --------------------------------------------------------------------------------------


def test_documented_example_equals_the_library() -> None:
    message = gradferry.encode(torch.from_numpy(example_values()), "q4")
    assert message.numpy().tobytes() == documented_example()
    assert decode(message)[[0, 16]].tolist() == [-2.4375, -0.40625]


def test_float64_is_for_exact_alone() -> None:
    values = torch.randn(4097, dtype=torch.float64)
    message = gradferry.encode(values, "exact", seed=3, step=5)
    expected = encode_tensor(values.numpy(), "exact", "float64", seed=3, step=5)
    assert message.numpy().tobytes() == expected
    assert torch.equal(decode(message, "exact", shape=(4097,), dtype=torch.float64), values)
    for codec in set(CODECS) - {"exact"}:
        with pytest.raises(gradferry.ConfigError, match="float64"):
            gradferry.encode(values, codec)


def test_numbers_are_encoded_where_memory_holds_the_opposite() -> None:
    """Of a conjugate, torch notes a bit and leaves the memory as it is."""
    opposite = torch.complex(torch.zeros(1), torch.full((1,), 2.0)).conj().imag
    assert opposite.is_neg()
    message = gradferry.encode(opposite, "exact")
    assert decode(message, "exact", shape=(1,)).item() == -2.0


# RankSums (codec_contract_test.cpp) has every codec in every dtype, and what is not finite.
@pytest.mark.parametrize(
    ("codec", "dtype"),
    [("exact", "float64"), ("q4", "float32"), ("rht:bits=2", "bfloat16"), ("topk", "float16")],
)
def test_accumulate_equals_the_reference(codec: str, dtype: str) -> None:
    """The mean, the sum, and a mean of more than there are; of other seeds and steps."""
    kind, n, rng, messages = TORCH_DTYPES[dtype], 2 * 4096 + 100, np.random.default_rng(0), []
    for seed, step in ((3, 7), (3, 7), (1, 7), (3, 0)):
        flat = rng.standard_normal(n) * np.exp2(rng.integers(-20, 12, n))
        stored = narrow(flat if dtype == "float64" else flat.astype(np.float32), dtype)
        messages.append(gradferry.encode(as_tensor(stored, dtype), codec, seed=seed, step=step))
    for some in (messages[:1], messages):
        data = [message.numpy().tobytes() for message in some]
        for divisor in (None, 1, len(some) + 2):
            got = accumulate(iter(some), codec, shape=(n,), dtype=kind, divisor=divisor)
            want = accumulate_tensors(data, n, codec, dtype, divisor or len(some))
            bits = Weight("t", (n,), kind).to_flat(got).tobytes()
            assert bits == want.tobytes(), (len(some), divisor)


# --- what is refused ------------------------------------------------------------------------------


def changed(offset: int, value: bytes) -> bytes:
    return GOOD[:offset] + value + GOOD[offset + len(value) :]


def corrupt() -> bytes:
    """The exponent of its group is no q4 exponent; the checksum is right."""
    data = bytearray(changed(64 + 17 * 2, b"\xfa"))
    header = Header.unpack(bytes(data))
    header.checksum = 0
    parts = [np.frombuffer(part, np.uint8) for part in (data[64:], header.pack())]
    header.checksum = message_checksum(parts)
    return header.pack() + bytes(data[64:])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "has 0 bytes, expected 112"),
        (GOOD + bytes(16), "has 128 bytes"),
        (changed(4, b"\1\0"), "has wire version 1, expected 2"),
        (encode_tensor(example_values(), "bf16")[:112], "has codec hash"),
        (encode_tensor(example_values()[:39], "q4"), "has dtype or size hash"),
        (changed(70, b"\xff"), "has checksum"),
        (corrupt(), "breaks the format"),
    ],
)
def test_a_bad_message_is_named_with_what_is_wrong(data: bytes, says: str) -> None:
    with pytest.raises(gradferry.ProtocolError, match=f"message.* {says}"):
        decode(as_message(data))
    with pytest.raises(gradferry.ProtocolError, match=f"message 2.* {says}"):
        accumulate([as_message(GOOD), as_message(GOOD), as_message(data)])


class SpreadTensor(torch.Tensor):
    """In what counts here a DTensor."""

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(40)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.arange(40), "dtype"),
        (lambda: torch.ones(40, dtype=torch.complex64), "(?i)complex"),
        (lambda: torch.ones(40, 40).t()[:, :7], "contiguous"),
        (lambda: torch.ones(40, device="meta"), "on meta"),
        (lambda: torch.ones(40).to_sparse(), "has layout"),
        (lambda: [1.0], "must be a torch.Tensor, not list"),
        (lambda: torch.ones(0, 3), "empty"),
        (fake, "without values"),
        (lambda: torch.ones(40).as_subclass(SpreadTensor), "on several ranks"),
    ],
)
def test_what_is_not_a_dense_float_tensor_is_neither_encoded_nor_decoded(
    make: Callable[[], Any], says: str
) -> None:
    with pytest.raises(gradferry.ConfigError, match=says):
        gradferry.encode(make(), "q4")
    with pytest.raises(gradferry.GradferryError, match="message"):
        decode(make())
    with pytest.raises(gradferry.GradferryError, match="message 1"):
        accumulate([as_message(GOOD), make()])


def test_a_traced_tensor_is_not_encoded() -> None:
    traced = torch.func.grad(lambda x: gradferry.encode(x, "q4").float().sum())
    with pytest.raises(gradferry.ConfigError, match="without values"):
        traced(torch.ones(40))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(
            ({"shape": s}, "shape=")
            for s in (3700, None, "ab", (-1, 37), (100.0, 37), (2**80,), (2**40, 2**10))
        ),
        *(({"dtype": each}, "dtype") for each in (None, "float32", float, torch.int32)),
        ({"dtype": torch.float64}, "float64"),
        ({"shape": (0,)}, "empty"),
        ({"codec": "off"}, "off"),
        ({"codec": "q44"}, "q4"),
    ],
)
def test_results_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    for call in (decode, lambda message, **given: accumulate([message], **given)):
        with pytest.raises(gradferry.ConfigError, match=says):
            call(as_message(GOOD), **options)


@pytest.mark.parametrize("name", ["seed", "step"])
@pytest.mark.parametrize("value", [-1, 2**64, 1.5, None, "1", True])
def test_seeds_and_steps_that_no_header_holds_are_refused(name: str, value: Any) -> None:
    with pytest.raises(gradferry.ConfigError, match=f"{name}={value!r} must be a whole number"):
        gradferry.encode(torch.ones(40), "q4", **{name: value})


@pytest.mark.parametrize(
    ("messages", "divisor", "says"),
    [
        ([], None, "no messages"),
        (as_message(GOOD), None, "single tensor"),
        (None, None, "pass a sequence of messages"),
        *(([as_message(GOOD)], d, rf"divisor.* {d}") for d in (0, -1, 2.0, 2**32)),
    ],
)
def test_messages_must_be_a_sequence_and_the_divisor_a_count(
    messages: Any, divisor: Any, says: str
) -> None:
    with pytest.raises(gradferry.ConfigError, match=says):
        accumulate(messages, divisor=divisor)
