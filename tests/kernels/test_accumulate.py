"""gradferry.accumulate: the documented sum of messages, and an error for every bad one."""

from __future__ import annotations

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
from scenario import Weight

gradferry = pytest.importorskip("gradferry", reason="the package is not built")

LENGTH = 2 * 4096 + 100  # a part of a tile after whole ones


def values(n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, n])
    return rng.standard_normal(n) * np.exp2(rng.integers(-20, 12, n))


def encode(flat: np.ndarray, codec: str, dtype: str, seed: int = 0, step: int = 0) -> torch.Tensor:
    stored = narrow(flat if dtype == "float64" else flat.astype(np.float32), dtype)
    return gradferry.encode(as_tensor(stored, dtype), codec, seed=seed, step=step)


def assert_right_sum(messages: list[torch.Tensor], n: int, codec: str, dtype: str) -> None:
    """The mean, the sum, and a mean of more than there are, against the reference."""
    data = [message.numpy().tobytes() for message in messages]
    for divisor in (None, 1, len(messages) + 2):
        got = gradferry.accumulate(
            iter(messages), codec, shape=(n,), dtype=TORCH_DTYPES[dtype], divisor=divisor
        )
        want = accumulate_tensors(data, n, codec, dtype, divisor or len(messages))
        bits = Weight("t", (n,), TORCH_DTYPES[dtype]).to_flat(got).tobytes()
        assert bits == want.tobytes(), (len(messages), divisor)


# RankSums (codec_contract_test.cpp) has every codec in every dtype, and what is not finite.
KINDS = [("exact", "float64"), ("q4", "float32"), ("rht:bits=2", "bfloat16"), ("topk", "float16")]


@pytest.mark.parametrize(("codec", "dtype"), KINDS)
@pytest.mark.parametrize("seeds", ["one seed", "a seed each"])
def test_accumulate_equals_the_reference(codec: str, dtype: str, seeds: str) -> None:
    for n, most in ((LENGTH, 4), (31, 2), (1, 1)):
        # Messages of one seed and of two steps have other random numbers, too.
        messages = [
            encode(values(n, number), codec, dtype, *((number, 7) if "each" in seeds else (3, 7)))
            for number in range(most)
        ]
        assert_right_sum(messages[:1], n, codec, dtype)
        assert_right_sum(messages, n, codec, dtype)
    if "each" in seeds:
        steps = [encode(values(n, step), codec, dtype, 3, step) for step in range(2)]
        assert_right_sum(steps, n, codec, dtype)


@pytest.mark.parametrize("codec", ["q4", "rht:bits=4"])
def test_a_bad_message_is_named(codec: str) -> None:
    flat = values(LENGTH, 0).astype(np.float32)
    good = [encode(flat, codec, "float32", seed) for seed in range(3)]
    damaged = good[2].clone()
    damaged[500] ^= 1
    bad = {
        "message 2 has checksum": damaged,
        r"message 2 has \d+ bytes": good[2][:-16],
        "message 2 has codec hash": encode(flat, codec, "float32", 2).index_copy(
            0, torch.arange(16, 24), torch.zeros(8, dtype=torch.uint8)
        ),
        "message 2 has dtype or size hash": encode(flat, codec, "bfloat16", 2),
        "tile 1 of message 2 breaks the format": corrupt(flat, codec, tile=1),
    }
    for text, message in bad.items():
        with pytest.raises(gradferry.ProtocolError, match=text):
            accumulate([*good[:2], message], codec)
    for text, value in {
        "message 1 must be a torch.Tensor, not bytes": b"GFRY",
        "message 1 is on meta": good[1].to("meta"),
        "message 1 has layout": good[1].to_sparse(),
        "message 1 must be a contiguous": good[1][None],
    }.items():
        with pytest.raises(gradferry.ConfigError, match=text):
            accumulate([good[0], value, damaged], codec)


def accumulate(messages: object, codec: str = "q4", **options: object) -> torch.Tensor:
    arguments = {"shape": (LENGTH,), "dtype": torch.float32, **options}
    return gradferry.accumulate(messages, codec, **arguments)


def corrupt(flat: np.ndarray, codec: str, tile: int) -> torch.Tensor:
    """A message with a right checksum, of which a tile breaks the codec's format."""
    data = bytearray(encode_tensor(flat, codec, seed=2))
    size = CODECS[codec].payload_bytes(4096, "float32")
    header = Header.unpack(bytes(data))
    # q4: exponents lie between the scales and the padding; rht: scales end the tile.
    position = 64 + tile * size + (2048 + 128 if codec == "q4" else size - 2)
    data[position : position + 2] = b"\xfa\xff"
    header.checksum = 0
    payload = np.frombuffer(data[64:], np.uint8)
    header.checksum = message_checksum([payload, np.frombuffer(header.pack(), np.uint8)])
    return torch.frombuffer(bytearray(header.pack() + bytes(data[64:])), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": torch.zeros(80, dtype=torch.uint8)}, "single tensor"),
        ({"divisor": 0}, "divisor.* 0"),
        ({"divisor": -1}, "divisor.* -1"),
        ({"divisor": 2.0}, r"divisor.* 2\.0"),
        ({"divisor": 2**32}, "divisor.* 4294967296"),
        ({"codec": "off"}, "off"),
        ({"codec": "q44"}, "q4"),
        ({"shape": (0,)}, "empty"),
        ({"dtype": torch.int32}, "dtype"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(change: dict, text: str) -> None:
    good = encode(values(LENGTH, 0), "q4", "float32")
    with pytest.raises(gradferry.ConfigError, match=text):
        accumulate(**{"messages": [good], **change})
