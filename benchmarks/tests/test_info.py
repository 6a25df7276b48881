"""`gradferry info`."""

from __future__ import annotations

import pytest
from gradferry import _native
from gradferry_lab.info import codec_lines


@pytest.mark.parametrize("width", [60, 80, 100])
def test_codecs_fit_and_nothing_is_left_out(width):
    lines = codec_lines(width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for codec in _native.codecs():
        assert f" {codec['name']} " in text
        assert codec["summary"] in text
        for option in codec["options"]:
            assert f"{option['name']}=" in text
            assert option["help"] in text
