"""The examples, as their first lines say to run them."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from reference import TILE_ELEMENTS, find_codec
from trained import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SECONDS = 500  # only what hangs takes so long


def run(name: str, *arguments: str, ranks: int = 2) -> str:
    """What rank 0 of a standalone torchrun printed."""
    command = [*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", str(EXAMPLES / name)]
    ended = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]


def start(name: str, *arguments: str, ranks: int = 2) -> list[subprocess.Popen[str]]:
    """Ranks without torchrun: no agent takes its time to start, or outlives what it started."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, "-u", str(EXAMPLES / name), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **address, "WORLD_SIZE": str(ranks), "RANK": str(rank)},
        )
        for rank in range(ranks)
    ]


def run_bare(name: str, *arguments: str, ranks: int) -> str:
    """What rank 0 printed, as of `run`."""
    started = start(name, *arguments, ranks=ranks)
    ended = [process.communicate(timeout=SECONDS) for process in started]
    assert [process.returncode for process in started] == [0] * ranks, ended
    return ended[0][0]


@pytest.mark.slow
def test_amp_resumes_after_kill_9_to_the_same_bits_and_with_more_ranks(tmp_path: Path) -> None:
    folder, finished = str(tmp_path / "checkpoint"), str(tmp_path / "whole")
    name = "ddp_amp_resume.py"
    whole = run(name, "--checkpoint", finished, "--epochs", "4")
    assert len(losses(whole)) == 4
    assert losses(whole)[-1] < 0.8 * losses(whole)[0]
    ranks = start(name, "--checkpoint", folder, "--epochs", "1000")
    seen = ranks[0].stdout.readline()  # the first epoch is saved
    for process in ranks:
        process.kill()
    for process in ranks:
        process.communicate()
    rest = run_bare(name, "--checkpoint", folder, "--epochs", "4", ranks=2)
    # The kill may have come after a later save: then those epochs were not printed here.
    assert whole.startswith(seen)
    assert whole.endswith("".join(re.findall(r"epoch .*\n", rest)))
    assert ("finished" in rest) == ("epoch 3:" not in rest)
    again = run_bare(name, "--checkpoint", finished, "--epochs", "4", ranks=2)
    assert again == f"finished: 4 epochs are done in {finished}; more with --epochs\n"
    more = run_bare(name, "--checkpoint", finished, "--epochs", "5", ranks=3)
    assert re.findall(r"epoch (\d)", more) == ["4"]
    assert losses(more)[0] < 0.8 * losses(whole)[0]


def test_gradferry_is_one_import_and_one_attach_in_the_example_of_the_readme() -> None:
    code = (EXAMPLES / "ddp_minimal.py").read_text().split('"""')[2]
    uses = [line.strip() for line in code.splitlines() if "gradferry" in line]
    assert uses == ["import gradferry", 'gradferry.attach(ddp, "q4")']
    found = losses(run("ddp_minimal.py"))
    assert len(found) == 5
    assert found[-1] < 0.7 * found[0]


@pytest.mark.slow
def test_one_bit_adam_learns_and_sends_a_twentieth() -> None:
    text = run_bare("ddp_one_bit_adam.py", ranks=2)
    sent = [int(count) for count in re.findall(r"(\d+) bytes", text)]
    assert losses(text)[-1] < 0.7 * losses(text)[0]
    # The first epoch is dense; biases and messages' headers remain beside one bit per element.
    assert sent[-1] < sent[0] / 10


@pytest.mark.slow
def test_diloco_averages_changes_through_a_codec() -> None:
    text = run_bare("diloco.py", "--outer-steps", "4", "--inner-steps", "20", ranks=2)
    assert len(losses(text)) == 4
    assert losses(text)[-1] < losses(text)[0]
    # 8 bits would be 4 times fewer at most, 4 bits 8 times.
    assert re.search(r" bytes sent, 7\.\d times fewer than fp32", text)


def message_bytes(codec: str, *shape: int) -> int:
    """Of one tensor, by docs/reference/wire_format.md: a header and the payloads of its tiles."""
    whole, rest = divmod(math.prod(shape), TILE_ELEMENTS)
    tiles = [TILE_ELEMENTS] * whole + [rest] * (rest > 0)
    return 64 + sum(find_codec(codec).payload_bytes(n, "float32") for n in tiles)


@pytest.mark.slow
def test_parameter_server_keeps_all_copies_equal() -> None:
    options = ("--steps", "40", "--workers", "2", "--codec", "q4")
    (started,) = start("parameter_server.py", *options, ranks=1)
    text, errors = started.communicate(timeout=SECONDS)
    assert started.returncode == 0, errors
    early, late, validation = losses(text)
    assert late < early
    assert validation < 0.6 * math.log(256)  # of a byte that is guessed
    # The embedding, two layers and their biases.
    size = sum(message_bytes("q4", 256, n) for n in (32, 32 * 32, 256))
    size += 2 * message_bytes("exact", 256)
    one_way = 40 * 2 * size
    assert f"the server received {one_way} bytes and sent {one_way}" in text
    assert "all 3 copies of the parameters have SHA-256" in text


@pytest.mark.slow
def test_parameter_server_names_a_worker_that_dies_and_ends() -> None:
    (started,) = start("parameter_server.py", "--steps", "1000000", ranks=1)
    seen = started.stdout.readline()
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    processes = [  # in the order in which they were started: the server and two workers
        int(child)
        for child in children
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    os.kill(processes[2], signal.SIGKILL)
    _, errors = started.communicate(timeout=SECONDS)
    assert "step 20" in seen
    assert started.returncode == 1
    assert "worker2 ended first: process 2 terminated with signal SIGKILL" in errors
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


@pytest.mark.slow
def test_numbers_of_every_step_reach_tensorboard(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_bare("tensorboard_numbers.py", str(tmp_path), ranks=2)
    for rank in (0, 1):
        events = reader.EventAccumulator(str(tmp_path / f"rank{rank}"))
        events.Reload()
        sent = events.Scalars("gradferry/wire_bytes")
        assert [point.step for point in sent] == list(range(20))
        assert all(point.value > 0 for point in sent)
        assert len(events.Scalars("gradferry/exposed_ms")) == 20


@pytest.mark.slow  # four trainings on two ranks
def test_the_notebook_compares_codecs(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "gradferry.ipynb", as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=SECONDS, resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    rows = re.findall(r"^(exact|q4|rht:bits=3) +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.M)
    ratios = {codec: float(ratio) for codec, _, _, ratio in rows}
    # 32 bits against 4.3 and 3.1; biases, which stay as they are, and headers take the rest.
    assert ratios["exact"] == 1
    assert 7 < ratios["q4"] < 32 / 4.3
    assert 9.5 < ratios["rht:bits=3"] < 32 / 3.1
    # It begins at ln 256 = 5.5, that of 256 characters equally likely.
    assert all(float(loss) < 2 for _, loss, _, _ in rows)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
