"""The example that sends numbers to TensorBoard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensorboard_numbers.py"


def test_example_writes_every_step(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*command, str(EXAMPLE), str(tmp_path)], capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
    for rank in (0, 1):
        events = reader.EventAccumulator(str(tmp_path / f"rank{rank}"))
        events.Reload()
        sent = events.Scalars("gradferry/wire_bytes")
        assert [point.step for point in sent] == list(range(20))
        assert all(point.value > 0 for point in sent)
        assert len(events.Scalars("gradferry/exposed_ms")) == 20
