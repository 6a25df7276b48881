"""What decoding makes of payloads that no encoder writes: refused or accepted, as documented."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gradferry", reason="the package is not built")

from codec_checks import LARGEST, NARROW_DTYPES, assert_decodes_alike
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import CODECS, TILE_ELEMENTS, find_codec
from test_reference_codecs import documented_bytes

CORRUPT, NAN, ZERO, FINE = "corrupt", "nan", "zero", "fine"
CANONICAL_NAN = 0x7FC0
LOSSY = sorted(set(CODECS) - {"exact", "bf16"})
RHT = [codec for codec in LOSSY if codec.startswith("rht")]


def encoded(codec: str, n: int) -> np.ndarray:
    """A good payload, of several tiles if n is larger than one."""
    rng = np.random.default_rng(n)
    values = (rng.standard_normal(n) * np.exp2(rng.integers(-3, 3, n))).astype(np.float32)
    tiles = np.split(values, range(TILE_ELEMENTS, n, TILE_ELEMENTS))
    return np.concatenate([find_codec(codec).encode(t[None], "float32")[0] for t in tiles])


def set_word(body: np.ndarray, at: int, bits: int) -> None:
    body[at : at + 2] = [bits & 255, bits >> 8]


def assert_unit(body: np.ndarray, codec: str, n: int, unit: slice, what: str) -> None:
    """One unit decodes as told, in every dtype, and the others as they did."""
    for dtype in NARROW_DTYPES:
        _, refused = assert_decodes_alike(body, n, codec, dtype)
        assert refused == (what == CORRUPT), (codec, what)
    decoded, _ = assert_decodes_alike(body, n, codec)
    intact, _ = assert_decodes_alike(encoded(codec, n), n, codec)
    others = np.ones(n, bool)
    others[unit] = False
    assert (decoded[others] == intact[others]).all()
    if what in (CORRUPT, NAN):
        assert np.isnan(decoded[unit]).all(), (codec, what)
    elif what == ZERO:
        assert not decoded[unit].view(np.uint32).any(), (codec, what)
    else:
        assert np.isfinite(decoded[unit]).all(), (codec, what)


# Three blocks, the last of 44 elements.
BLOCKED_N, SECOND, LAST = 300, slice(128, 256), slice(256, 300)
SCALES_AT = {"q8": 304, "sign1": 38, "rht:bits=4": 192, "rht:bits=3": 144, "rht:bits=2": 96}


def with_scale(codec: str, block: int, bits: int) -> np.ndarray:
    body = encoded(codec, BLOCKED_N)
    set_word(body, SCALES_AT[codec] + 2 * block, bits)
    return body


@pytest.mark.parametrize("codec", list(SCALES_AT))
@pytest.mark.parametrize(("block", "unit"), [(1, SECOND), (2, LAST)])
def test_scale_that_no_encoder_writes_makes_its_block_nan_and_is_refused(
    codec: str, block: int, unit: slice
) -> None:
    infinite = (0x7F80, 0x7FBF, 0x7FC1, 0x7FFF)
    negative = (0x8000, 0x8080, 0xBF80, 0xFF80, 0xFFC0, 0xFFFF)
    for bits in (0x0001, 0x007F, *infinite, *negative):
        assert_unit(with_scale(codec, block, bits), codec, BLOCKED_N, unit, CORRUPT)
    for bits, what in ((0x0080, FINE), (0x3F80, FINE), (CANONICAL_NAN, NAN), (0, ZERO)):
        assert_unit(with_scale(codec, block, bits), codec, BLOCKED_N, unit, what)


@pytest.mark.parametrize(("codec", "largest"), [("q8", 0x7C01), ("sign1", 0x7F7F)])
def test_scale_may_be_the_largest_that_cannot_overflow(codec: str, largest: int) -> None:
    assert_unit(with_scale(codec, 1, largest), codec, BLOCKED_N, SECOND, FINE)
    assert_unit(with_scale(codec, 1, largest + 1), codec, BLOCKED_N, SECOND, CORRUPT)


@pytest.mark.parametrize("n", [128, 1])
@pytest.mark.parametrize("codec", RHT)
def test_rht_scale_may_be_as_large_as_all_codes_of_its_block_allow(codec: str, n: int) -> None:
    rng = np.random.default_rng(0)
    size = SCALES_AT[codec] // 3
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


@pytest.mark.parametrize("codec", list(SCALES_AT))
def test_every_code_decodes_at_scales_of_every_exponent(codec: str) -> None:
    rng = np.random.default_rng(1)
    largest = {"q8": 0x7C01, "sign1": 0x7F7F}.get(codec, 0x7700)  # rht: by its codes
    scales = np.arange(largest, 0x0080, -61)[: 32 * 15].astype("<u2")
    for some in scales.reshape(-1, 32):
        body = encoded(codec, TILE_ELEMENTS)
        codes = len(body) - 64
        body[:codes] = rng.integers(0, 256, codes)
        if codec == "q8":
            body[:codes] = np.where(body[:codes] == 0x80, 0x81, body[:codes])
        body[codes:] = some.view(np.uint8)
        assert not assert_decodes_alike(body, TILE_ELEMENTS, codec)[1]


def test_q4_decodes_every_code_at_every_exponent() -> None:
    codes = np.tile(np.arange(16) | np.arange(15, -1, -1) << 4, 32)
    for exponent in range(10, 246):
        last = 0x7A if exponent == 245 else 0x7E
        scales = 8 + (37 * np.arange(32) + exponent) % (last - 7)
        body = np.zeros(560, np.uint8)
        body[:545] = [*codes, *scales, exponent]
        assert not assert_decodes_alike(body, 1024, "q4")[1]
        body[512:544] = 0  # zero blocks, whatever their codes
        assert not assert_decodes_alike(body, 1024, "q4")[0].view(np.uint32).any()


def test_q4_scales_and_exponents_that_no_encoder_writes_make_their_group_nan() -> None:
    n, scales, exponents = 2000, 16 * 63, 17 * 63
    good = encoded("q4", n)
    usual, second = int(good[exponents + 1]), slice(1024, n)
    for byte in (*range(12), 0x64, 0x7A, 0x7B, 0x7E, 0x7F, 0x80, 0xC8, *range(244, 256)):
        bad = byte in range(1, 8) or byte >= 0x7F
        for place, exponent, corrupt in (
            (scales + 33, usual, bad),
            (scales + 62, 245, bad or byte > 0x7A),
            (scales + 40, 0, True),  # the other scales are not 0
            (scales + 40, 255, True),
            (exponents + 1, byte, not 10 <= byte <= 245),
        ):
            body = good.copy()
            body[[exponents + 1, place]] = [exponent, byte]
            assert_unit(body, "q4", n, second, CORRUPT if corrupt else FINE)


def test_q8_code_of_minus_128_is_refused_where_it_counts() -> None:
    for place, unit in ((0, slice(0, 128)), (255, SECOND), (256, LAST), (299, LAST)):
        body = encoded("q8", BLOCKED_N)
        body[place] = 0x80
        assert_unit(body, "q8", BLOCKED_N, unit, CORRUPT)
    for bits, what in ((0, ZERO), (CANONICAL_NAN, NAN)):
        body = with_scale("q8", 1, bits)
        body[200] = 0x80
        assert_unit(body, "q8", BLOCKED_N, SECOND, what)


@pytest.mark.parametrize(
    ("codec", "beyond", "bits"), [("q8", slice(300, 304), 0x80), ("sign1", slice(37, 38), 0xF0)]
)
def test_codes_beyond_the_end_are_not_looked_at(codec: str, beyond: slice, bits: int) -> None:
    body = encoded(codec, BLOCKED_N)
    want = assert_decodes_alike(body, BLOCKED_N, codec)[0]
    body[beyond] |= bits
    got, refused = assert_decodes_alike(body, BLOCKED_N, codec)
    assert got.tobytes() == want.tobytes()
    assert not refused


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("n", [1, 5, 40, 300, TILE_ELEMENTS - 1])
@pytest.mark.parametrize("zero", [False, True], ids=["coded", "zero"])
def test_padding_is_not_looked_at(codec: str, n: int, zero: bool) -> None:
    body = encoded(codec, n)
    used = documented_bytes(codec, n)
    if zero:
        body[:used] = 0
    want = assert_decodes_alike(body, n, codec)[0]
    assert want.any() != zero
    body[used:] = 0xFF
    got, refused = assert_decodes_alike(body, n, codec)
    assert got.tobytes() == want.tobytes()
    assert not refused


# k = 15 of 300: 180 bits of indices and four spare ones; values in 30 bytes, or in 17.
TOPK_N, INDICES_K = 300, 15
VALUE_BYTES = {"bf16": 30, "q4": 17}
# k = 75 of 300: a bitmap of 304 bits; values in 150 bytes, or in 47.
BITMAP_VALUE_BYTES = {"bf16": 150, "q4": 47}
WHOLE = slice(0, TOPK_N)


def indices_codec(values: str) -> str:
    return f"topk:ratio=0.05,values={values}"


def bitmap_codec(values: str) -> str:
    return f"topk:ratio=0.25,values={values}"


def with_bits(body: np.ndarray, at: int, num_bytes: int, change: dict[int, int]) -> np.ndarray:
    """A copy with bits of a section, lowest first, set to what `change` says."""
    bits = np.unpackbits(body[at : at + num_bytes], bitorder="little")
    bits[list(change)] = list(change.values())
    result = body.copy()
    result[at : at + num_bytes] = np.packbits(bits, bitorder="little")
    return result


@pytest.mark.parametrize("values", ["bf16", "q4"])
def test_topk_indices_rise_strictly_and_lie_in_the_tile(values: str) -> None:
    codec, at = indices_codec(values), VALUE_BYTES[values]
    good = encoded(codec, TOPK_N)
    bits = np.unpackbits(good[at : at + 23], bitorder="little")[:180]
    index = bits.reshape(INDICES_K, 12) @ (1 << np.arange(12))

    def with_index(place: int, value: int) -> np.ndarray:
        digits = {12 * place + bit: value >> bit & 1 for bit in range(12)}
        return with_bits(good, at, 23, digits)

    assert index[-1] > index[-2] + 1
    cases = [
        (with_index(5, index[4]), CORRUPT),
        (with_index(5, index[6]), CORRUPT),
        (with_index(5, index[4] - 1), CORRUPT),
        (with_index(0, 299), CORRUPT),
        (with_index(14, 300), CORRUPT),
        (with_index(14, 4095), CORRUPT),
        (with_index(14, 299), FINE),
        (with_index(14, index[-2] + 1), FINE),
        *((with_bits(good, at, 23, {180 + spare: 1}), CORRUPT) for spare in range(4)),
    ]
    for body, what in cases:
        assert_unit(body, codec, TOPK_N, WHOLE, what)


@pytest.mark.parametrize("values", ["bf16", "q4"])
def test_topk_bitmap_has_k_ones_in_the_tile(values: str) -> None:
    codec, at = bitmap_codec(values), BITMAP_VALUE_BYTES[values]
    good = encoded(codec, TOPK_N)
    bits = np.unpackbits(good[at : at + 38], bitorder="little")
    one, zero = np.flatnonzero(bits)[7], np.flatnonzero(bits[:TOPK_N] == 0)[7]
    assert bits.sum() == 75
    for change, what in (
        ({one: 0}, CORRUPT),
        ({zero: 1}, CORRUPT),
        ({zero: 1, one: 0}, FINE),
        ({one: 0, 300: 1}, CORRUPT),
        ({one: 0, 303: 1}, CORRUPT),
        ({303: 1}, CORRUPT),
    ):
        assert_unit(with_bits(good, at, 38, change), codec, TOPK_N, WHOLE, what)


@pytest.mark.parametrize("codec", [indices_codec("bf16"), bitmap_codec("bf16")])
def test_topk_value_that_is_not_finite_is_refused(codec: str) -> None:
    for place in (0, 3, 14):
        for bits in (0x7F80, 0xFF80, CANONICAL_NAN, 0xFFFF, 0x7F81):
            body = encoded(codec, TOPK_N)
            set_word(body, 2 * place, bits)
            assert_unit(body, codec, TOPK_N, WHOLE, CORRUPT)
        for bits in (0x7F7F, 0xFF7F, 0x0001, 0x0000, 0x8000):
            body = encoded(codec, TOPK_N)
            set_word(body, 2 * place, bits)
            assert_unit(body, codec, TOPK_N, WHOLE, FINE)
            decoded, _ = assert_decodes_alike(body, TOPK_N, codec)
            kept = find_codec(codec).num_kept(TOPK_N, "worker")
            assert (decoded.view(np.uint32) != 0).sum() == kept - (bits in (0, 0x8000))


def test_topk_values_in_q4_obey_its_rules() -> None:
    # 15 bytes of codes, a scale, the exponent; of 75 values: 16, 16, 11 codes, three scales.
    for codec, scale, exponent in ((indices_codec("q4"), 15, 16), (bitmap_codec("q4"), 44, 46)):
        good = encoded(codec, TOPK_N)
        cases = [({exponent: byte}, CORRUPT) for byte in (1, 9, 246, 254, 255, 0)]
        cases += [({scale: byte}, CORRUPT) for byte in (1, 7, 0x7F, 0x80, 0xFF)]
        cases += [({scale: 0x7B, exponent: 245}, CORRUPT), ({scale: 0x7B}, FINE)]
        cases += [({scale: 0x7A, exponent: 245}, FINE), ({scale: 8, exponent: 10}, FINE)]
        for change, what in cases:
            body = good.copy()
            body[list(change)] = list(change.values())
            assert_unit(body, codec, TOPK_N, WHOLE, what)


def test_topk_codes_beyond_k_are_not_looked_at_and_minus_zero_is_zero() -> None:
    codec = indices_codec("q4")
    body = encoded(codec, TOPK_N)
    want, _ = assert_decodes_alike(body, TOPK_N, codec)
    body[:15] |= 0xF0  # values 16 .. 30
    got, refused = assert_decodes_alike(body, TOPK_N, codec)
    assert got.tobytes() == want.tobytes()
    assert not refused
    assert body[3] & 7 != 0
    body[3] = 8
    got, _ = assert_decodes_alike(body, TOPK_N, codec)
    assert (got.view(np.uint32) != 0).sum() == (want != 0).sum() - 1


@pytest.mark.parametrize("make", [indices_codec, bitmap_codec])
@pytest.mark.parametrize("values", ["bf16", "q4"])
def test_topk_non_finite_tile_has_one_form(make, values: str) -> None:
    codec = make(values)
    num_values = (VALUE_BYTES if make is indices_codec else BITMAP_VALUE_BYTES)[values]
    good = find_codec(codec).encode(np.full((1, TOPK_N), np.nan, np.float32), "float32")[0]
    assert_unit(good, codec, TOPK_N, WHOLE, NAN)
    assert_unit(np.zeros_like(good), codec, TOPK_N, WHOLE, ZERO)
    num_positions = 23 if make is indices_codec else 38
    for place in (4, num_values, num_values + num_positions - 1):
        body = good.copy()
        body[place] = 1
        assert_unit(body, codec, TOPK_N, WHOLE, CORRUPT)
    # The positions of a good tile do not make it one either.
    body = encoded(codec, TOPK_N)
    body[:num_values] = good[:num_values]
    assert_unit(body, codec, TOPK_N, WHOLE, CORRUPT)


@pytest.mark.parametrize("values", ["bf16", "q4"])
def test_topk_tile_of_one_element_uses_one_bit(values: str) -> None:
    codec = f"topk:values={values}"
    num_values = 2 if values == "bf16" else 3
    good = encoded(codec, 1)
    assert good[num_values] == 1
    for byte, what in ((0, CORRUPT), (2, CORRUPT), (3, CORRUPT), (0x81, CORRUPT), (1, FINE)):
        body = good.copy()
        body[num_values] = byte
        assert_unit(body, codec, 1, slice(0, 1), what)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.sampled_from([*LOSSY, indices_codec("bf16"), indices_codec("q4"), bitmap_codec("q4")]),
    st.sampled_from([1, 17, 130, 300, TILE_ELEMENTS + 300]),
    st.sampled_from(NARROW_DTYPES),
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 255)), max_size=4),
    st.integers(0, 2**64 - 1),
)
def test_mutated_payload_decodes_as_the_reference_says(
    codec: str, n: int, dtype: str, mutations: list[tuple[int, int]], seed: int
) -> None:
    body = encoded(codec, n)
    for place, flips in mutations:
        body[place % len(body)] ^= flips
    assert_decodes_alike(body, n, codec, dtype, seed=seed, step=seed // 5)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(LOSSY), st.integers(1, 700), st.integers(0, 2**32 - 1))
def test_random_payload_decodes_as_the_reference_says(codec: str, n: int, seed: int) -> None:
    body = np.random.default_rng(seed).integers(0, 256, len(encoded(codec, n)), np.uint8)
    assert_decodes_alike(body, n, codec)
