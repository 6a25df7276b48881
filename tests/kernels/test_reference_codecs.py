"""The reference's codecs against what their formats cite. That they round as the formats say shows
where the library, written apart from them, gives the same bytes (test_codec_bytes.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from reference import ideal
from reference.codecs.philox import philox_4x32
from reference.codecs.rht import MAGNITUDES, ORDER, THRESHOLDS, hadamard


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
