"""The bytes of every codec and what they decode to equal the reference's, on hard inputs too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("gradferry", reason="the package is not built")

import codec_checks as checks
from codec_checks import NARROW_DTYPES, assert_same_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import CODECS, TILE_ELEMENTS, find_codec

# Around blocks of 16, 32 and 128, groups of 1024 and tiles; several tiles.
SIZES = (1, 2, 8, 9, 15, 16, 17, 33, 127, 128, 129, 150, 255, 257, 1023, 1025, 4095, 4096, 4097)
SEVERAL_TILES = (2 * TILE_ELEMENTS + 1, 5 * TILE_ELEMENTS + 130)


def draw(seed: int, n: int, lowest: int = -20, highest: int = 12) -> np.ndarray:
    rng = np.random.default_rng([seed, n])
    values = rng.standard_normal(n) * np.exp2(rng.integers(lowest, highest, n))
    return np.clip(values, -checks.LARGEST, checks.LARGEST).astype(np.float32)


@pytest.mark.parametrize("dtype", NARROW_DTYPES)
@pytest.mark.parametrize("codec", list(CODECS))
def test_bytes_equal_reference_at_every_size(codec: str, dtype: str) -> None:
    for n in (*SIZES, *SEVERAL_TILES):
        assert_same_bytes(draw(1, n), codec, dtype, seed=2**63 + 5, step=2**40 + 7)


def ties(make: Callable[[int, int], np.ndarray]) -> Callable[[str], np.ndarray]:
    return lambda codec: make(int(codec[-1]), 16)


RHT = [f"rht:bits={bits}" for bits in (4, 3, 2)]
# An input, and the codecs for which it is hard.
HARD_INPUTS = [
    (lambda codec: checks.every_power(), CODECS),
    (lambda codec: checks.special_values(), CODECS),
    (lambda codec: checks.repeated_magnitudes(), CODECS),
    (lambda codec: checks.integer_ties().astype(np.float32).reshape(-1), CODECS),
    (lambda codec: checks.rht_largest(4), CODECS),
    (lambda codec: checks.rht_minus_zero(), CODECS),
    # Another order of a sum, or a threshold that is one place off, is another byte.
    (lambda codec: checks.mean_ties(8), ["sign1"]),
    (ties(checks.rht_threshold_ties), RHT),
    (ties(checks.rht_scale_ties), RHT),
]


@pytest.mark.parametrize("dtype", NARROW_DTYPES)
@pytest.mark.parametrize(
    ("make", "codec"), [(make, codec) for make, codecs in HARD_INPUTS for codec in codecs]
)
def test_bytes_equal_reference_on_hard_input(
    make: Callable[[str], np.ndarray], codec: str, dtype: str
) -> None:
    values = make(codec)
    assert_same_bytes(values, codec, dtype)
    # Other cuts: blocks hold other elements, and the last tile is short.
    assert_same_bytes(values[1:-37], codec, dtype)


def test_q4_scales_of_all_sizes_beside_each_other_equal_reference() -> None:
    """Every power of two as a group's magnitude, with blocks of every smaller one."""
    exponents = np.arange(-149, 128)[:, None, None]
    smaller = np.arange(32)[:, None]
    v = np.random.default_rng(9).uniform(1, 2, (277, 32, 32)) * np.exp2(exponents - smaller)
    # The scale of a block ties with the least one there is, or lies just below and above the tie.
    tie = np.float32(6 * (2.0**-16 - 2.0**-21))
    near = np.array([tie, np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(1))])
    v[:, 29:, :] = 0
    v[:, 29:, 7] = near * np.exp2(exponents[:, 0])
    v[:, :, ::3] *= -1
    assert_same_bytes(v.astype(np.float32).reshape(-1), "q4")


@pytest.mark.parametrize(
    "codec",
    [
        "topk:ratio=0.001",
        "topk:ratio=0.0049999",
        "topk:ratio=0.0832",  # 341 of a full tile: indices, with four spare bits
        "topk:ratio=0.0834",  # 342: a bitmap
        "topk:ratio=0.25",
        "topk:ratio=0.05,values=q4",
        "topk:ratio=0.25,values=q4",
        "topk:ratio=0.25,owner_ratio=0.25,values=q4",
    ],
)
def test_topk_bytes_equal_reference_for_every_count_of_kept_elements(codec: str) -> None:
    for n in (*range(1, 140), 4090, 4095, 4096, 4097 + 4096):
        assert_same_bytes(draw(2, n), codec)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.floats(0.001, 0.25), st.floats(0.001, 0.25))
def test_topk_ratio_is_written_as_its_shortest_decimal(ratio: float, other: float) -> None:
    # In the text that a message carries the hash of.
    ratio, owner_ratio = sorted((ratio, other))
    assert_same_bytes(draw(3, 300), f"topk:owner_ratio={owner_ratio:.30f},ratio={ratio:.17e}")


@pytest.mark.parametrize(("ratio", "num_kept"), [("0.0124995", 2), ("0.0124994", 1)])
def test_topk_counts_its_ratio_in_whole_millionths(ratio: str, num_kept: int) -> None:
    # 12500 millionths of 120 are the first that round to 2.
    assert find_codec(f"topk:ratio={ratio}").num_kept(120, "worker") == num_kept
    assert_same_bytes(draw(3, 120), f"topk:ratio={ratio}")


any_bits = st.integers(0, 2**32 - 1)
ordinary = st.floats(width=32, min_value=-100, max_value=100).map(
    lambda x: int(np.float32(x).view(np.uint32))
)
equal_or_nearly = st.sampled_from([0x3F800000, 0x3F800001, 0xBF800000, 0, 0x80000000, 1])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.one_of(
        *(st.lists(kind, min_size=1, max_size=300) for kind in (ordinary, equal_or_nearly)),
        st.lists(st.one_of(any_bits, ordinary), min_size=1, max_size=40),
    ),
    st.sampled_from(sorted(set(CODECS) - {"exact", "bf16"})),
    st.sampled_from(NARROW_DTYPES),
    st.integers(0, 2**64 - 1),
)
def test_bytes_of_any_values_equal_reference(
    bits: list[int], codec: str, dtype: str, seed: int
) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    assert_same_bytes(values, codec, dtype, seed=seed, step=seed // 3)
