"""`gradferry info`, and a command line on a machine that lacks what the environment asks for."""

from __future__ import annotations

import os
import subprocess
import sys

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


def test_an_instruction_set_that_is_not_there_is_one_sentence():
    ended = subprocess.run(
        [sys.executable, "-m", "gradferry", "info"],
        env={**os.environ, "GRADFERRY_ISA": "neon"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("gradferry: environment variable GRADFERRY_ISA is 'neon'")
    assert ended.stderr.count("\n") == 1
