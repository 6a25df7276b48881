"""The library beside the reference, on one tensor: the same bytes, values and refusals.

And inputs that are hard for a codec: what a random tensor meets once in a million elements.
"""

from __future__ import annotations

import gradferry
import numpy as np
import torch
from gradferry import _native
from reference import (
    DTYPES,
    TILE_ELEMENTS,
    Context,
    Header,
    decode_tensor,
    encode_tensor,
    find_codec,
    message_checksum,
    narrow,
)
from reference.codecs.base import BLOCK
from reference.codecs.rht import ORDER, THRESHOLDS, block_signs, hadamard
from reference.message import hash64
from scenario import Weight

TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPES}
NARROW_DTYPES = ("float32", "bfloat16", "float16")
LARGEST = float(np.finfo(np.float32).max)


def as_tensor(flat: np.ndarray, dtype: str) -> torch.Tensor:
    return Weight("t", flat.shape, TORCH_DTYPES[dtype]).from_flat(flat)


def encode(values: np.ndarray, codec: str) -> np.ndarray:
    """float64 of what the library makes of float32 values."""
    tensor = torch.from_numpy(values)
    message = gradferry.encode(tensor, codec)
    decoded = gradferry.decode(message, codec, shape=values.shape, dtype=torch.float32)
    return decoded.numpy().astype(np.float64)


def assert_same_bytes(
    values: np.ndarray, codec: str, dtype: str = "float32", seed: int = 0, step: int = 0
) -> None:
    """Compares the message of a float32 array, rounded to dtype, and what it decodes to."""
    flat = narrow(values, dtype)
    message = gradferry.encode(as_tensor(flat, dtype), codec, seed=seed, step=step)
    got, want = message.numpy(), encode_tensor(flat, codec, dtype, seed=seed, step=step)
    if got.tobytes() != want:
        wrong = np.flatnonzero(got != np.frombuffer(want, np.uint8))
        raise AssertionError(
            f"{codec}, {len(flat)} elements of {dtype}: {len(wrong)} bytes differ, first at "
            f"{wrong[0]}, of {len(want)}"
        )
    decoded = gradferry.decode(message, codec, shape=flat.shape, dtype=TORCH_DTYPES[dtype])
    got_bits = Weight("t", flat.shape, TORCH_DTYPES[dtype]).to_flat(decoded).tobytes()
    assert got_bits == decode_tensor(want, len(flat), codec, dtype).tobytes(), (codec, dtype)


def decode_payload(
    body: np.ndarray, n: int, codec: str, dtype: str = "float32", seed: int = 0, step: int = 0
) -> tuple[np.ndarray, bool]:
    """What the library makes of any payload under a right header, and whether it refuses it.

    What it refuses it has decoded nevertheless, as a rank does before it reports the error.
    """
    header = Header(
        config_hash=hash64(find_codec(codec).name),
        layout_hash=hash64(f"{dtype}|{n}"),
        step=step,
        payload_bytes=len(body),
        seed=seed,
    )
    sizes = [min(TILE_ELEMENTS, n - start) for start in range(0, n, TILE_ELEMENTS)]
    ends = np.cumsum([find_codec(codec).payload_bytes(size, dtype) for size in sizes])
    tiles = np.split(body, ends[:-1])
    header.checksum = message_checksum([*tiles, np.frombuffer(header.pack(), np.uint8)])
    message = torch.frombuffer(bytearray(header.pack() + body.tobytes()), dtype=torch.uint8)
    out = torch.full((n,), 7, dtype=TORCH_DTYPES[dtype])
    text = ""
    try:
        _native.decode_tensor(
            message, codec, out, config_hash=header.config_hash, layout_hash=header.layout_hash
        )
    except gradferry.ProtocolError as error:
        text = str(error)
    assert text == "" or "breaks the format" in text, text
    return Weight("t", (n,), TORCH_DTYPES[dtype]).to_flat(out), text != ""


def assert_decodes_alike(
    body: np.ndarray, n: int, codec: str, dtype: str = "float32", seed: int = 0, step: int = 0
) -> tuple[np.ndarray, bool]:
    """Any payload, of tiles that the format may or may not allow. Returns decode_payload's."""
    got, refused = decode_payload(body, n, codec, dtype, seed, step)
    pieces, corrupt, start = [], False, 0
    for number, first in enumerate(range(0, n, TILE_ELEMENTS)):
        size = min(TILE_ELEMENTS, n - first)
        context = Context(seed=seed, step=step, first_tile=number)
        end = start + find_codec(codec).payload_bytes(size, dtype)
        tile = body[None, start:end]
        corrupt |= bool(find_codec(codec).corrupt(tile, size, context).any())
        pieces.append(find_codec(codec).decode(tile, size, dtype, context)[0])
        start = end
    want = narrow(np.concatenate(pieces), dtype)
    assert got.tobytes() == want.tobytes(), (codec, n, dtype)
    assert refused == corrupt, (codec, n, dtype)
    return got, refused


def every_power() -> np.ndarray:
    """A block at every power of two that float32 has, and a wide mix within blocks."""
    rng = np.random.default_rng(0)
    exponents = np.arange(-149, 128)
    blocks = rng.uniform(-1, 1, (len(exponents), BLOCK)) * np.exp2(exponents)[:, None]
    wide = rng.uniform(-2, 2, (64, BLOCK)) * np.exp2(rng.integers(-149, 127, (64, BLOCK)))
    return np.concatenate([blocks, wide]).astype(np.float32).reshape(-1)


def special_values() -> np.ndarray:
    """Blocks of one kind of number, and then of all kinds mixed; NaN and infinity among them."""
    rng = np.random.default_rng(1)
    tiny, least = float(np.finfo(np.float32).tiny), 2.0**-149
    kinds = [
        [0.0, -0.0],
        [-0.0],
        [least, -least, 0.0],
        [tiny, -tiny, tiny - least],
        [LARGEST, -LARGEST],
        [LARGEST, 1.0],
        [LARGEST, -LARGEST / 2, 0.0],
        [1.0, -1.0],
        [257 / 256, -257 / 256],
        [2.0**-100, 1.0, 2.0**100],
        # The scale of sign1 and of q8 ties with the smallest there is, and lies just below the tie.
        *(
            [float.fromhex(x) * factor]
            for x in ("0x1.fep-127", "0x1.fdp-127")
            for factor in (1, 127)
        ),
    ]
    poisons = [[np.nan, 1.0], [np.inf, -np.inf], [-np.inf, 2.0], [np.nan, np.inf, 0.0]]
    blocks = [rng.choice(kind, BLOCK) for kind in [*kinds, *poisons]]
    blocks += [np.full(BLOCK, kind[0]) for kind in kinds]
    everything = np.concatenate(kinds)
    blocks += [rng.choice(everything, BLOCK) for _ in range(40)]
    for poison in (np.nan, np.inf, -np.inf):
        for place in (0, 1, 63, 64, 127):
            block = rng.standard_normal(BLOCK)
            block[place] = poison
            blocks += [rng.standard_normal(BLOCK), block]
    return np.concatenate(blocks).astype(np.float32)


def repeated_magnitudes() -> np.ndarray:
    """Few magnitudes, so that the largest are many; whole tiles of one, and nearly empty ones."""
    rng = np.random.default_rng(2)
    tiles = [rng.choice(values, TILE_ELEMENTS) for values in ([1, -1], [0, 1, -1, 2], [0.0, -0.0])]
    tiles += [np.zeros(TILE_ELEMENTS) for _ in range(3)]
    tiles[-1][[0, 4095]] = -3
    tiles[-2][4095] = 1
    # bfloat16 cannot tell them apart, their keys can.
    tiles.append(1 + rng.integers(0, 3, TILE_ELEMENTS) * 2.0**-23)
    tiles.append(rng.choice([2.0**-149, -(2.0**-148), 0, -0.0], TILE_ELEMENTS))
    # Ties of which the first ones are kept, beside so many that are larger and come last.
    for num_larger in (1, 40, 41, 42, 163, 400, 1023):
        tiles.append(rng.choice([1.0, -1.0], TILE_ELEMENTS))
        tiles[-1][-num_larger:] *= 2
    return np.concatenate(tiles).astype(np.float32)


def integer_ties() -> np.ndarray:
    """Blocks whose q8 scale is a power of two, of halves; and next to them by one place."""
    rng = np.random.default_rng(3)
    halves = rng.integers(-253, 254, (40, BLOCK)) / 2
    halves[:, 17] = 127
    halves *= np.exp2(rng.integers(-100, 100, (40, 1)))
    near = np.nextafter(halves.astype(np.float32), rng.choice([-np.inf, np.inf], halves.shape))
    near[:, 17] = halves[:, 17]
    # a / 127 is halfway between two numbers of eight bits.
    odd = (2 * rng.integers(128, 256, (40, 1)) + 1) / 256 * 127
    return np.concatenate([halves, near, rng.uniform(-1, 1, (40, BLOCK)) * odd, odd.repeat(128, 1)])


def mean_ties(tiles: int) -> np.ndarray:
    """Blocks whose mean magnitude lies within a few roundings of a tie between two bfloat16."""
    rng = np.random.default_rng(4)
    v = rng.standard_normal((tiles * TILE_ELEMENTS // BLOCK, BLOCK))
    middle = (2 * rng.integers(128, 256, (len(v), 1)) + 1) / 256
    v *= middle / np.abs(v).mean(axis=1, keepdims=True)
    return v.astype(np.float32).reshape(-1)


def rht_signs(tiles: int) -> np.ndarray:
    """The signs of whole tiles at seed 0, step 0: [blocks, 128]."""
    return block_signs(Context(), tiles, TILE_ELEMENTS // BLOCK).reshape(-1, BLOCK).astype(float)


def rht_threshold_ties(bits: int, tiles: int) -> np.ndarray:
    """Blocks of which one coordinate lies within a few roundings of a threshold."""
    rng = np.random.default_rng(5)
    signs = rht_signs(tiles)
    v = rng.standard_normal(signs.shape)
    rows = np.arange(len(v))
    place = rng.integers(0, BLOCK, len(v))
    threshold = np.array([float.fromhex(t) for t in THRESHOLDS[bits]])
    wanted = rng.choice(threshold, len(v)) * rng.choice([-1, 1], len(v))
    unit = np.zeros_like(v)
    unit[rows, ORDER[place]] = 1
    direction = signs * hadamard(unit)  # changes that coordinate alone, by 128
    for _ in range(60):
        z = hadamard(signs * v)[:, ORDER][rows, place]
        r = np.sqrt((v * v).sum(axis=1))
        v += ((wanted * r - z) / BLOCK)[:, None] * direction
    return v.astype(np.float32).reshape(-1)


def rht_scale_ties(bits: int, tiles: int) -> np.ndarray:
    """Blocks whose scale lies within a few roundings of a tie between two bfloat16."""
    rng = np.random.default_rng(6)
    signs = rht_signs(tiles)
    v = rng.standard_normal(signs.shape)
    codec = find_codec(f"rht:bits={bits}")
    z = hadamard(signs * v)[:, ORDER]
    limits = codec.thresholds * np.sqrt((v * v).sum(axis=1))[:, None, None]
    magnitude = codec.magnitudes[(np.abs(z)[..., None] > limits).sum(axis=2)]
    scale = (np.abs(z) * magnitude).sum(axis=1) / (magnitude**2).sum(axis=1)
    middle = (2 * rng.integers(128, 256, len(v)) + 1) / 256
    return (v * (middle / scale)[:, None]).astype(np.float32).reshape(-1)


def rht_largest(tiles: int) -> np.ndarray:
    """Blocks at the end of float32's range, their energy in one coordinate, in two or in all."""
    rng = np.random.default_rng(7)
    signs = rht_signs(tiles)
    h = rng.standard_normal(signs.shape)
    half = len(h) // 2
    h[:half] = 0
    for weight in (1, rng.choice([-1, 1], half)):
        h[np.arange(half), rng.integers(0, BLOCK, half)] += weight * rng.uniform(0.5, 1, half)
    v = signs * hadamard(h)
    v /= np.abs(v).max(axis=1, keepdims=True)
    v *= np.exp2(rng.integers(-9, 1, (len(v), 1)))
    return (v * LARGEST).astype(np.float32).reshape(-1)


def rht_minus_zero() -> np.ndarray:
    """A tile of blocks of which a coordinate is -0: the last difference is that of -0 and +0."""
    rng = np.random.default_rng(8)
    signs = rht_signs(1)
    index = np.arange(BLOCK)
    rows = rng.choice(index[index & 8 != 0], len(signs))
    row = hadamard(np.eye(BLOCK))[rows]
    # Half of the inputs are zeros, each with the sign that keeps their sum -0 in that coordinate.
    x = -0.0 * row
    used = index[index & 8 != 0]
    x[:, used] = 0.0
    for block, weights in zip(x, row, strict=True):
        first, second = (rng.choice(used[weights[used] == sign]) for sign in (1, -1))
        block[[first, second]] = rng.standard_normal()
    z = np.take_along_axis(hadamard(x), rows[:, None], axis=1)
    assert ((z == 0) & np.signbit(z)).any()
    return (signs * x).astype(np.float32).reshape(-1)
