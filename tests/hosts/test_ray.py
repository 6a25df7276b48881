"""gradferry in Ray Train: a worker is killed, and the training ends with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from documented import ROOT
from resumable import fingerprints
from trained import expect_trained
from trainings import SECONDS

FOLDER = ROOT / "examples" / "trainers"
# After the second epoch of the first attempt, whose checkpoint Ray has taken, worker 1 dies.
KILLED = """
import os, signal, sys
import ray.train
import with_ray

whole = with_ray.train

def train():
    report, reported = ray.train.report, []
    def report_and_die(metrics, checkpoint):
        report(metrics, checkpoint=checkpoint)
        reported.append(metrics)
        if len(reported) == 2:
            assert len(ray.train.get_all_reported_checkpoints()) == 2
            if ray.train.get_context().get_world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    if not ray.train.get_checkpoint():
        ray.train.report = report_and_die
    whole()

with_ray.train = train
with_ray.main(sys.argv[1])
"""


def run(*arguments: str) -> str:
    """What the driver and all workers printed."""
    path = os.pathsep.join((str(FOLDER), os.environ.get("PYTHONPATH", "")))
    ended = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    expect_trained(ended.returncode, ended.stdout, ended.stderr)
    return ended.stdout + ended.stderr


def last_checkpoint(folder: Path) -> tuple[int, list[dict[str, str]]]:
    """How many there are, and the content of what each worker saved in the last."""
    *others, last = sorted(folder.glob("gradferry/checkpoint_[0-9]*"))
    files = sorted(last.iterdir())
    assert [file.name for file in files] == ["rank0.pt", "rank1.pt"]
    return len(others) + 1, [dict(fingerprints(torch.load(file))) for file in files]


def test_a_killed_worker_changes_no_bit(tmp_path: Path) -> None:
    run(str(FOLDER / "with_ray.py"), str(tmp_path / "whole"))
    (tmp_path / "killed.py").write_text(KILLED)
    said = run(str(tmp_path / "killed.py"), str(tmp_path / "killed"))
    assert said.count("Started training worker group") == 2
    whole, killed = (last_checkpoint(tmp_path / name) for name in ("whole", "killed"))
    assert whole == killed
    assert whole[0] == 5  # so the second attempt went on after the second epoch
