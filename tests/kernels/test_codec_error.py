"""How much the codecs lose, beside ideal quantizers in float64 and their bounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("gradferry", reason="the package is not built")

from codec_checks import LARGEST, encode, rht_signs
from reference import TILE_ELEMENTS, ideal

TILES = 32
NUM_ELEMENTS = TILES * TILE_ELEMENTS
Draw = Callable[[np.random.Generator], np.ndarray]


def mixed_log_normal(rng: np.random.Generator) -> np.ndarray:
    """Magnitudes are log-normal, and so are the scales of runs of 512 elements."""
    magnitude = np.exp(rng.standard_normal(NUM_ELEMENTS))
    scale = np.exp(rng.standard_normal(NUM_ELEMENTS // 512)).repeat(512)
    return rng.choice([-1, 1], NUM_ELEMENTS) * magnitude * scale


DISTRIBUTIONS: dict[str, Draw] = {
    "gauss": lambda rng: rng.standard_normal(NUM_ELEMENTS),
    "laplace": lambda rng: rng.laplace(size=NUM_ELEMENTS),
    "student_t3": lambda rng: rng.standard_t(3, NUM_ELEMENTS),
    "mixed_log_normal": mixed_log_normal,
}


def draw(distribution: str, seed: int = 0) -> np.ndarray:
    return DISTRIBUTIONS[distribution](np.random.default_rng(seed)).astype(np.float32)


def nmse(v: np.ndarray, decoded: np.ndarray) -> float:
    v = v.astype(np.float64)
    return float(((v - decoded.reshape(v.shape)) ** 2).sum() / (v * v).sum())


def ideal_values(codec: str, v: np.ndarray) -> np.ndarray:
    v = v.astype(np.float64)
    name, _, option = codec.partition(":")
    if name == "topk":
        values = "q4" if option.endswith("q4") else "bf16"
        return ideal.topk(v.reshape(-1, TILE_ELEMENTS), num_kept(codec, TILE_ELEMENTS), values)
    if name == "rht":
        return ideal.rht(v.reshape(-1, 128), int(option[-1]), rht_signs(TILES))
    if name == "q4":
        return ideal.q4(v.reshape(-1, 32))
    return {"q8": ideal.q8, "sign1": ideal.sign1}[name](v.reshape(-1, 128))


def num_kept(codec: str, n: int) -> int:
    """Its ratio in hundredths, and the nearest count, half up."""
    hundredths = {"topk": 1, "topk:values=q4": 1, "topk:ratio=0.25": 25}[codec]
    return max(1, (hundredths * n + 50) // 100)


# By how much a codec's error may differ from the ideal one's, relatively.
TOLERANCE = {
    # fp32 moves an element to the other side of a tie, where both sides are equally good, and a
    # block below 2^-16 of its group's largest magnitude is zero.
    "q4": 1e-4,
    "topk:values=q4": 1e-4,
    # The bf16 scale is off by at most 2^-8, so a step's square by 0.8 %. Where it is rounded down
    # the largest element is off by up to half a step, which adds 1/4 to the 128/12 (in squares of
    # steps) of the block: 2.3 %.
    "q8": 0.03,
    # The error is (1 - d + d e^2) of the energy for a scale that is off by e, |e| < 2^-8, and
    # 1 - d is at least a third.
    "sign1": 1e-4,
    # Levels are integers: off by at most 0.3 where a standard deviation is 38.1. For a Gaussian,
    # whose levels are centroids, that adds at most (0.3 / 38.1)^2 = 6e-5 to 0.009 at 4 bits, and
    # less to more at 3 and 2. Rotation makes coordinates Gaussian but for a few blocks.
    "rht:bits=4": 0.01,
    "rht:bits=3": 0.01,
    "rht:bits=2": 0.01,
}


def tolerance(codec: str, expected: float) -> float:
    if codec in TOLERANCE:
        return TOLERANCE[codec]
    # topk rounds kept elements, 1 - expected of the energy, by at most 2^-8 of themselves.
    return 2.0**-16 * (1 - expected) / expected + 1e-12


@pytest.mark.parametrize("distribution", list(DISTRIBUTIONS))
@pytest.mark.parametrize("codec", [*TOLERANCE, "topk", "topk:ratio=0.25"])
def test_error_is_that_of_the_ideal_quantizer(codec: str, distribution: str) -> None:
    v = draw(distribution)
    expected, found = nmse(v, ideal_values(codec, v)), nmse(v, encode(v, codec))
    assert abs(found / expected - 1) <= tolerance(codec, expected)


def contraction(codec: str, kept_error: float) -> float:
    return 1 - (1 - kept_error) * num_kept(codec, TILE_ELEMENTS) / TILE_ELEMENTS


def hard_for(size: int, others: float) -> np.ndarray:
    """Blocks of a large number, anywhere in an octave, and of others that a codec rounds worst."""
    largest = np.exp2(np.arange(1024) / 1024)[:, None]
    blocks = largest * others * np.linspace(0.9, 1.1, 17)[np.arange(1024) % 17][:, None]
    blocks = np.repeat(blocks, size, axis=1)
    blocks[:, 0] = largest[:, 0]
    return blocks.astype(np.float32).reshape(-1)


@pytest.mark.parametrize(
    ("codec", "unit", "bound", "worst"),
    [
        # A block's largest magnitude has t in [6 * 16/17, 6 * 17/16] (a scale of 4 significant
        # bits), so contributes at least 31.8 to the power, in units of S^2, and 0.375^2 to the
        # error; the other 31 cost most where the error is all of them, t = 1/4: 31 / 16 to both.
        # (1.94 + 0.15) / (31.8 + 1.94) = 0.062. Zero blocks hold less than 32 (6 * 2^-6)^2 against
        # 2^20 of the group's maximum.
        ("q4", 1024, 0.062, hard_for(32, 0.25 / 6)),
        # An element's error is at most S / 2 and some roundings, and S at most (1 + 2^-8) a / 127.
        # So a block loses at most 128 / 4 * (1.004 / 127)^2 of a^2, which is at most its power.
        ("q8", 128, 128 / 4 * (1.004 / 127) ** 2, hard_for(128, 0.499 / 1.1 / 127)),
        # A least-squares scale projects: the error is at most the power. Feedback needs less.
        *((f"rht:bits={bits}", 128, 0.5, hard_for(128, 0.01)) for bits in (4, 3, 2)),
        # The mean magnitude leaves 1 - |v|_1^2 / (n |v|_2^2) of the power, most where one element
        # is all of it, and a scale that is off by 2^-8 adds its square.
        ("sign1", 128, 1 - 1 / 128 + 2.0**-16, hard_for(128, 0.0)),
        # The elements kept have k / n of the power, and no less only where all are equal. Of theirs
        # bf16 loses up to 2^-16. q4, in units of its scale S, is off by at most 1/4 below 2, and
        # above by a fifth of the value (1/2 of 2.5, 1 of 5; at most 6.375 becomes 6), S is at most
        # 17/96 of a block's largest a: 32 (17/384)^2 a^2 + |block|^2 / 25 <= 0.103 |block|^2.
        *(
            (
                codec,
                TILE_ELEMENTS,
                contraction(codec, kept_error),
                np.full(TILE_ELEMENTS, 1.5, "f4"),
            )
            for codec, kept_error in (
                ("topk", 2.0**-16),
                ("topk:ratio=0.25", 2.0**-16),
                ("topk:values=q4", 0.103 + 2.0**-16),
            )
        ),
    ],
)
def test_error_is_a_contraction_in_the_worst_case(
    codec: str, unit: int, bound: float, worst: np.ndarray
) -> None:
    draws = [draw(name, 5) for name in DISTRIBUTIONS]
    for v in (worst, *draws, draws[2] * np.float32(1e36), draws[3] * np.float32(1e-30)):
        units = np.clip(v, -LARGEST, LARGEST).reshape(-1, unit).astype(np.float64)
        decoded = encode(units.astype(np.float32).reshape(-1), codec).reshape(-1, unit)
        ratio = ((units - decoded) ** 2).sum(axis=1) / (units**2).sum(axis=1)
        assert ratio.max() <= bound
        if v is worst and not codec.startswith("rht"):
            assert ratio.max() >= 0.8 * bound  # it is nearly reached
