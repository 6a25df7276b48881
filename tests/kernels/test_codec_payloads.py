"""Of payloads that no encoder writes, the same break the format as in the reference, and the others
decode to what it makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import gradferry
import numpy as np
import pytest
import torch
from codec_checks import LARGEST, assert_decodes_alike
from gradferry import _native
from reference import CODECS, TILE_ELEMENTS, Header, find_codec, message_checksum, narrow
from reference.message import hash64

LOSSY = sorted(set(CODECS) - {"exact", "bf16"})
RHT = [codec for codec in LOSSY if codec.startswith("rht")]
TOPK = [
    f"topk:ratio={ratio},values={values}" for ratio in (0.05, 0.25) for values in ("bf16", "q4")
]


def encoded(codec: str, n: int) -> np.ndarray:
    """A good payload, of several tiles if n is larger than one."""
    rng = np.random.default_rng(n)
    values = (rng.standard_normal(n) * np.exp2(rng.integers(-3, 3, n))).astype(np.float32)
    tiles = np.split(values, range(TILE_ELEMENTS, n, TILE_ELEMENTS))
    return np.concatenate([find_codec(codec).encode(t[None], "float32")[0] for t in tiles])


def set_word(body: np.ndarray, at: int, bits: int) -> None:
    body[at : at + 2] = [bits & 255, bits >> 8]


# At the limits of what a scale of 16 bits means, and a byte of q4.
WORDS = [
    *(0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7C01, 0x7C02, 0x7F7F, 0x7F80, 0x7FBF),
    *(0x7FC0, 0x7FC1, 0x7FFF, 0x8000, 0x8080, 0xBF80, 0xFF80, 0xFFC0, 0xFFFF),
]
BYTES = [0, 1, 7, 8, 9, 10, 0x40, 0x7A, 0x7B, 0x7E, 0x7F, 0x80, 245, 246, 254, 255]


# Of topk with 0.05: several indices, of an odd number; with 0.25 a bitmap. Of one element it keeps
# one, whatever the ratio.
@pytest.mark.parametrize(
    ("codec", "n", "values"),
    [
        *((codec, 1, range(256)) for codec in CODECS),
        *((codec, 140, BYTES) for codec in (*CODECS, *TOPK)),
    ],
)
def test_a_payload_with_any_byte_changed_decodes_as_the_reference_says(
    codec: str, n: int, values: Sequence[int]
) -> None:
    """With each of these at every place. To the reference each is a further tile, in which rht has
    other signs.
    """
    changes = [*((value,) for value in values), *((w & 255, w >> 8) for w in WORDS)]
    used, right = find_codec(codec), encoded(codec, n)
    hashes = {"config_hash": hash64(used.name), "layout_hash": hash64(f"float32|{n}")}
    header = Header(**hashes, payload_bytes=len(right))
    for place in range(len(right) - 1):
        bodies = np.repeat(right[None], len(changes), axis=0)
        for body, change in zip(bodies, changes, strict=True):
            body[place : place + len(change)] = change
        want = narrow(used.decode(bodies, n, "float32"), "float32")
        corrupt = used.corrupt(bodies, n).any(axis=1)
        got, refused = torch.empty(len(bodies), n), np.zeros(len(bodies), bool)
        for number, body in enumerate(bodies):
            header.checksum = 0
            covered = [body, np.frombuffer(header.pack(), np.uint8)]
            header.checksum = message_checksum(covered)
            message = torch.frombuffer(bytearray(header.pack() + body.tobytes()), dtype=torch.uint8)
            try:
                _native.decode_tensor(message, codec, got[number], **hashes)
            except gradferry.ProtocolError:
                refused[number] = True
        assert (refused == corrupt).all(), place
        sign = np.abs if codec in RHT else np.asarray
        assert sign(got.numpy()).tobytes() == sign(want).tobytes(), place


@pytest.mark.parametrize("n", [128, 1])
@pytest.mark.parametrize("codec", RHT)
def test_rht_scale_may_be_as_large_as_all_codes_of_its_block_allow(codec: str, n: int) -> None:
    rng = np.random.default_rng(0)
    size = 16 * int(codec[-1])  # of codes, before the scale
    largest_is_beyond_n = 0
    for _ in range(40):
        body = np.zeros(find_codec(codec).payload_bytes(128, "float32"), np.uint8)
        body[:size] = rng.integers(0, 256, size)
        set_word(body, size, 0x3F80)  # 1
        whole = np.abs(assert_decodes_alike(body, 128, codec)[0])
        largest_is_beyond_n += whole[:n].max() < whole.max()
        # The largest bfloat16 with which the largest value is finite, and the next one.
        bits = int(np.float32(LARGEST / float(whole.max())).view(np.uint32)) >> 16
        for scale, corrupt in ((bits, False), (bits + 1, True)):
            set_word(body, size, scale)
            decoded, refused = assert_decodes_alike(body, n, codec)
            assert refused == corrupt
            assert np.isnan(decoded).all() == corrupt
            assert np.isfinite(decoded).all() != corrupt
    assert largest_is_beyond_n == 0 if n == 128 else largest_is_beyond_n > 30
