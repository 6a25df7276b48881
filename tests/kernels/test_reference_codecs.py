"""The reference's codecs against first principles: brute force and exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import CODECS, ideal
from reference.codecs.philox import philox_4x32
from reference.codecs.q4 import E2M1, e4m3_byte, e4m3_value, nearest_e2m1, round_to_4_bits
from reference.codecs.rht import MAGNITUDES, ORDER, THRESHOLDS, hadamard

Q4 = CODECS["q4"]
LARGEST = np.finfo(np.float32).max
LEAST_TIE = np.float32(6 * (2.0**-16 - 2.0**-21))
any_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def fraction(x: float) -> Fraction:
    return Fraction(float(x))


def nearest(value: Fraction, candidates: list[tuple[Fraction, int]]) -> int:
    """Key of the candidate nearest to value; of two, the one with the even key."""
    return min(candidates, key=lambda c: (abs(c[0] - value), c[1] % 2))[1]


def test_nearest_e2m1_equals_brute_force_on_a_fine_grid() -> None:
    grid = np.arange(0, 8 * 64 + 1, dtype=np.float32) / 64  # hits every tie
    grid = np.concatenate([grid, np.nextafter(grid, np.float32(9)), [np.float32(1e30)]])
    candidates = [(fraction(value), code) for code, value in enumerate(E2M1)]
    expected = [nearest(fraction(t), candidates) for t in grid]
    assert nearest_e2m1(grid.astype(np.float32)).tolist() == expected


def test_scale_rounding_equals_brute_force_over_all_e4m3_values() -> None:
    codes = np.arange(8, 0x7B, dtype=np.uint8)
    values = e4m3_value(codes)
    assert (e4m3_byte(values) == codes).all()
    assert values[0] == 2.0**-6
    assert values[-1] == 320
    candidates = [(fraction(v), int(c)) for v, c in zip(values, codes, strict=True)]
    middles = (values[:-1] + values[1:]) / 2
    grid = np.concatenate([middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9)])
    expected = [nearest(fraction(y), candidates) for y in grid]
    assert e4m3_byte(round_to_4_bits(grid)).tolist() == expected


def brute_force_group(v: list[float]) -> list[Fraction]:
    """What a q4 group of finite values decodes to, by search over exact fractions.

    The two roundings to fp32 that the format asks for (y, and r and t) are done with NumPy's
    scalars, one at a time; everything between them is exact.
    """
    largest = max(abs(fraction(x)) for x in v)
    k = -118
    while k < 117 and largest >= Fraction(2) ** (k + 11):
        k += 1
    result: list[Fraction] = []
    scales = [
        (Fraction(8 + m) / 8 * Fraction(2) ** (e - 7), e * 8 + m)
        for e in range(1, 16)
        for m in range(8)
        if not (k == 117 and e * 8 + m > 0x7A) and e * 8 + m < 0x7F
    ]
    for start in range(0, len(v), 32):
        block = v[start : start + 32]
        scaled = np.float32(max(abs(x) for x in block)) * np.float32(2.0**-k)
        y = fraction(scaled / np.float32(6))
        # Halfway below the least scale lies half of its spacing away: 2^-6 / 16 / 2.
        if y < Fraction(2) ** -6 - Fraction(2) ** -11:
            result += [Fraction(0)] * len(block)
            continue
        s = next(value for value, byte in scales if byte == nearest(y, scales))
        step = s * Fraction(2) ** k
        r = np.float32(1) / np.float32(float(step))
        for x in block:
            t = fraction(np.float32(abs(x)) * r)
            code = nearest(t, [(fraction(value), c) for c, value in enumerate(E2M1)])
            result.append(fraction(E2M1[code]) * step * (-1 if x < 0 else 1))
    return result


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(any_float32, min_size=1, max_size=70),
    st.sampled_from([1.0, 1e-30, 1e-38, 1e30, 1e-44]),
)
# The least scale beside 1 is 2^-16: blocks at its tie, just above and just below it.
@example([1.0] * 32 + [LEAST_TIE], 1.0)
@example([1.0] * 32 + [np.nextafter(LEAST_TIE, np.float32(1))], 1.0)
@example([1.0] * 32 + [np.nextafter(LEAST_TIE, np.float32(0))], 1.0)
def test_q4_equals_brute_force_on_any_finite_values(values: list[float], scale: float) -> None:
    v = np.clip(np.array(values, np.float64) * scale, -LARGEST, LARGEST).astype(np.float32)
    decoded = Q4.decode(Q4.encode(v[None], "float32"), len(v), "float32")[0]
    assert [fraction(x) for x in decoded] == brute_force_group([float(x) for x in v])


def test_philox_gives_its_authors_known_answers() -> None:
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    ones = 0xFFFFFFFF
    for counter, key, answer in (
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, (ones, ones), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (pi, (0xA4093822, 0x299F31D0), [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ):
        assert philox_4x32(np.array(counter), key).tolist() == answer


def test_hadamard_is_its_matrix_and_coordinates_are_a_permutation() -> None:
    assert (hadamard(np.eye(128)) == ideal.sylvester(128)).all()
    assert (np.sort(ORDER) == np.arange(128)).all()
    assert ORDER[:4].tolist() == [0, 16, 1, 17]
    assert ORDER[32] == 32


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_rht_levels_are_lloyd_max_in_one_unit_to_the_nearest_integer(bits: int) -> None:
    levels = np.array(MAGNITUDES[bits])
    middles = (levels[1:] + levels[:-1]) / 2
    units = middles / [float.fromhex(t) for t in THRESHOLDS[bits]]
    # Each threshold is rounded once, by at most 2^-24 of itself.
    assert np.ptp(units) <= 2 * 2.0**-24 * units[0]
    assert (np.rint(ideal.lloyd_max(2 ** (bits - 1)) * units[0]) == levels).all()


def documented_bytes(codec: str, n: int) -> int:
    """Of the payload of a float32 tile on its way to the owner, without its padding."""
    k = max(1, (n + 50) // 100)  # topk's ratio is 0.01 unless given
    last = k - (k - 1) // 32 * 32  # of its values, in the last block
    blocks, positions = -(-n // 128), min(-(-12 * k // 8), -(-n // 8))
    return {
        "exact": 4 * n,
        "bf16": 2 * n,
        "q4": 17 * -(-n // 32) + -(-n // 1024),
        "q8": 16 * -(-n // 16) + 2 * blocks,
        "sign1": 2 * -(-n // 16) + 2 * blocks,
        "topk": 2 * k + positions,
        "topk:values=q4": (k - last) // 2 + min(last, 16) + -(-k // 32) + 1 + positions,
        "rht:bits=4": 66 * blocks,
        "rht:bits=3": 50 * blocks,
        "rht:bits=2": 34 * blocks,
    }[codec]


@pytest.mark.parametrize("codec", list(CODECS))
def test_payload_size_equals_formula_and_padding_is_zero(codec: str) -> None:
    for n in (1, 31, 32, 33, 1023, 1024, 1025, 4095, 4096):
        used = documented_bytes(codec, n)
        payload = CODECS[codec].encode(np.full((1, n), np.nan, np.float32), "float32")
        assert payload.shape == (1, CODECS[codec].payload_bytes(n, "float32"))
        assert len(payload[0]) % 16 == 0
        assert 0 <= len(payload[0]) - used < 16
        assert not payload[0, used:].any()
    full = {"q4": 2192, "q8": 4160, "sign1": 576, "rht:bits=4": 2112, "rht:bits=3": 1600}
    for name, size in {**full, "rht:bits=2": 1088, "topk": 144}.items():
        assert CODECS[name].payload_bytes(4096, "float32") == size
