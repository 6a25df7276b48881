"""Runs the tests that use the fake device on this machine's GPUs instead.

    python tests/kernels/cuda/run_device_tests.py [options of pytest]

Needs pytest and numpy beside torch and gradferry. Ends with the code of pytest, or with 77 and a
reason where this machine cannot run them. Tests that ask the fake device what it found or counted,
or tell it what to do wrong, are left out: those whose code, or whose cases' code, names it so.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1]
SKIPPED = 77
FILES = (
    "test_streams.py",
    "test_streams_training.py",
    "test_streams_safety.py",
    "test_fsdp2.py",
    "test_fsdp2_all_gather.py",
    "test_fsdp2_device.py",
    "test_reducer.py",
    "test_rank_mismatch.py",
    "test_elastic.py",
    "test_workspace.py",
    "test_diloco_resume.py",
)
# What only the fake device has.
ONLY_FAKE = re.compile(
    r"counters\(|omit_wait|set_prices|set_capturing|\.backends\[|last_made|case_launches"
    r"|Watched\(|torch\.device\(\"fake\"|CANNOT|def case_abandon_alone"
    r"|def case_loss_scale_goes_first"
)
CASE = re.compile(r"\bcase_\w+")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keeps tests that run on a device, and can run on any."""
    kept = [item for item in items if _uses_device(item) and not _asks_the_fake_one(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    # Before any rank starts: they get this path.
    sys.path.insert(0, str(HERE / "on_gpu"))


def _uses_device(item: Any) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    plays = parameters.get("sharding") or parameters.get("scenario")
    device = parameters.get("device", getattr(plays, "device", None))
    return device != "cpu" and (device is not None or "device_worlds" in item.fixturenames)


def _asks_the_fake_one(item: Any) -> bool:
    source = inspect.getsource(getattr(item.function, "body", item.function))
    values = (item.callspec.params if hasattr(item, "callspec") else {}).values()
    cases = [value for value in values if inspect.isfunction(value)]
    cases += [getattr(item.module, name, None) for name in CASE.findall(source)]
    code = source + "".join(inspect.getsource(case) for case in cases if case is not None)
    return ONLY_FAKE.search(code) is not None


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print("skipped: torch sees no GPU")
        return SKIPPED
    if importlib.util.find_spec("pytest") is None:
        print("skipped: the Python package pytest is not on this machine")
        return SKIPPED
    import pytest

    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
    files = [str(path) for name in FILES for path in TESTS.glob(f"*/{name}")]
    if importlib.util.find_spec("xdist") is not None:
        files += ["-n", "2", "--dist", "loadfile"]
    return int(pytest.main(["-q", "-p", Path(__file__).stem, *files, *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
