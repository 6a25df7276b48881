"""`gradferry info`, and a command line on a machine that lacks what the environment asks for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from gradferry import _native
from gradferry.core.device import parse_build
from gradferry_lab import info
from gradferry_lab.cli import main
from gradferry_lab.info import codec_lines, facts


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


def test_info_through_a_pipe_is_no_wider_than_a_terminal(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["info"]) == 0
    _, _, codecs = capsys.readouterr().out.partition("\n\n")
    assert "topk" in codecs
    assert max(map(len, codecs.splitlines())) <= 80


@pytest.mark.parametrize("command", ["info", "bench"])
def test_an_instruction_set_that_is_not_there_is_one_sentence(command):
    ended = subprocess.run(
        [sys.executable, "-m", "gradferry", command],
        env={**os.environ, "GRADFERRY_ISA": "neon"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("gradferry: environment variable GRADFERRY_ISA is 'neon'")
    assert ended.stderr.count("\n") == 1


BUILD = parse_build("nvcc 13.0.88", "80-real 90-real 100")


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (None, "none on this machine"),
        ((12, 8), "runs CUDA 12.8 and older, too old for these kernels"),
        ((13, 0), "runs CUDA 13.0 and older: the machine code of these kernels, and translates"),
        ((13, 4), "and translates their PTX"),
    ],
)
def test_info_says_what_the_driver_runs(monkeypatch, driver, says):
    monkeypatch.setattr(info, "this_build", lambda: BUILD)
    monkeypatch.setattr(info, "driver_version", lambda: driver)
    assert says in facts()["CUDA driver"]


def test_info_says_what_every_gpu_runs(monkeypatch):
    capabilities = [(9, 0), (12, 0), (7, 5)]
    monkeypatch.setattr(info, "this_build", lambda: BUILD)
    monkeypatch.setattr(info, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    shown = facts()
    assert shown["cuda:0"] == "GPU 0, compute capability 9.0: runs machine code"
    assert shown["cuda:1"] == "GPU 1, compute capability 12.0: runs translated PTX"
    assert "7.5, and gradferry's kernels need 8.0 or newer" in shown["cuda:2"]
