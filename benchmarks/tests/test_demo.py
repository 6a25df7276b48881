"""`gradferry demo` as a user runs it."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gradferry.ddp.schedule import BUSY
from gradferry.errors import PeerError
from gradferry_lab import demo
from gradferry_lab.cli import main, parser
from gradferry_lab.demo import section_of
from gradferry_lab.ranks import network
from gradferry_lab.workloads import load_task

COMMAND = [sys.executable, "-m", "gradferry"]
ROW_KEYS = {
    "task", "hook", "link", "ranks", "steps", "seed", "initial_loss", "final_loss",
    "wire_bytes_per_step", "wire_bytes_measured", "wire_bytes_formula", "ratio", "ms_per_step",
    "losses", "cumulative_wire_bytes",
}  # fmt: skip


def check_rows(path: Path, hooks: list[str], steps: int) -> list[dict]:
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    rows = document["rows"]
    assert [row["hook"] for row in rows] == hooks
    for row in rows:
        assert set(row) == ROW_KEYS
        assert len(row["losses"]) == len(row["cumulative_wire_bytes"]) == steps
        assert row["wire_bytes_per_step"] == row["wire_bytes_formula"]
        assert row["initial_loss"] == rows[0]["initial_loss"]
        assert row["losses"][0] == pytest.approx(rows[0]["losses"][0], rel=1e-6)
        assert row["wire_bytes_measured"] is not row["hook"].startswith("torch:")
    return rows


def test_demo_compares_hooks_on_text(tmp_path, capsys):
    hooks = ["torch:fp32", "q4"]
    arguments = ["--steps", "3", "--out", str(tmp_path / "out"), "--json", str(tmp_path / "j")]
    assert main(["demo", "--link", "loopback", "--hooks", *hooks, *arguments]) == 0
    fp32, q4 = check_rows(tmp_path / "j", hooks, steps=3)
    assert fp32["ratio"] == 1
    assert 7 < q4["ratio"] < 7.5
    assert q4["final_loss"] == pytest.approx(fp32["final_loss"], rel=0.02)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["index.html", "loss_curves.png"]
    shown = capsys.readouterr().out
    assert "456 source files (10.2 MB) of sympy 1.14.0" in shown
    turns = re.findall(r"^(\S+): step (\d)/3,", shown, re.MULTILINE)
    assert turns == [
        ("torch:fp32", "1"), ("q4", "1"), ("q4", "2"), ("torch:fp32", "2"), ("torch:fp32", "3"),
        ("q4", "3"),
    ]  # fmt: skip
    assert f"{q4['wire_bytes_per_step']:,}" in shown
    assert "Times are left out" in shown
    assert "ms per" not in shown
    picture, table, verdict = map(
        shown.index, ("loss_curves.png", "gradferry demo: task", "q4 sends 7.")
    )
    assert picture < table < verdict


@pytest.mark.usefixtures("namespaces_allowed")
def test_demo_measures_on_a_link(tmp_path, capfd):
    options = ["--task", "tiny_text", "--steps", "3", "--hooks", "torch:fp32", "q4"]
    files = ["--out", str(tmp_path), "--json", str(tmp_path / "j")]
    assert main(["demo", *options, *files]) == 0
    document = json.loads((tmp_path / "j").read_text())
    assert [row["link"] for row in document["rows"]] == ["1gbit"] * 2
    assert "--link 1gbit" in document["environment"]["command"]
    shown = capfd.readouterr().out
    assert shown.count("take turns") == 1
    assert "ms per" in shown
    assert re.search(r"a step takes \d+ ms instead of \d+", shown)


ROW = {
    "task": "digits", "link": "1gbit", "ranks": 2, "steps": 3, "seed": 0, "initial_loss": 2.0,
    "wire_bytes_per_step": 10, "wire_bytes_measured": True, "wire_bytes_formula": 10,
    "losses": [2.0], "cumulative_wire_bytes": [10],
}  # fmt: skip
PLAIN = {**ROW, "hook": "torch:fp32", "ms_per_step": 12.0, "final_loss": 1.0, "ratio": 1.0}


@pytest.mark.parametrize(
    ("loss", "ms", "said"),
    [
        (1.01, 5.0, "a step takes 5 ms instead of 12, and the loss ends 1.00 % above plain DDP's."),
        (
            0.5,
            20.0,
            "a step takes 20 ms instead of 12, and the loss ends 50.00 % below plain DDP's",
        ),
    ],
)
def test_verdict_of_the_demo_is_what_it_measured(loss, ms, said):
    q4 = {**ROW, "hook": "q4", "ms_per_step": ms, "final_loss": loss, "ratio": 7.25}
    verdict = section_of([PLAIN, q4]).verdict
    assert verdict.startswith(f"q4 sends 7.2 times fewer bytes than plain DDP, {said}")
    assert section_of([q4]).verdict == ""
    without = section_of([{**row, "link": "loopback"} for row in (PLAIN, q4)])
    assert " ms " not in without.verdict
    assert "As root" in " ".join(without.table.notes)


@pytest.mark.parametrize("hook", ["off", "exact", "torch:fp16"])
def test_only_codecs_that_save_bytes_are_in_the_verdict(hook):
    ratio = {"off": 1.0, "exact": 0.99, "torch:fp16": 2.0}[hook]
    row = {**PLAIN, "hook": hook, "ratio": ratio}
    assert section_of([PLAIN, row]).verdict == ""


def test_demo_says_that_the_machine_is_busy():
    for waited, is_busy in [(BUSY - 0.01, False), (BUSY, True)]:
        notes = " ".join(section_of([PLAIN], waited).table.notes)
        assert ("This machine is busy" in notes) == is_busy
    on_loopback = section_of([{**PLAIN, "link": "loopback"}], 0.9).table.notes
    assert "busy" not in " ".join(on_loopback)  # no times are shown


def parsed(*words):
    arguments = parser().parse_args(["demo", *words])
    arguments.command_line = ["demo", *words]
    return arguments


def plan_of(*words):
    arguments = parsed(*words)
    demo._choose_link(arguments)
    return demo._plan(load_task("digits"), ["q4"], 3, arguments)


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ((), "between the ranks of torchrun."),
        (("--link", "1gbit"), "between the ranks of torchrun, on 1gbit."),
        (("--link", "25 GbE"), "between the ranks of torchrun, on 25 GbE."),
    ],
)
def test_under_torchrun_a_link_is_only_a_name(monkeypatch, words, where):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    _, turns = plan_of(*words)
    assert turns.endswith(where)


def test_the_time_of_the_demo_is_told_only_for_its_defaults(monkeypatch):
    monkeypatch.setattr(demo, "_obstacle", lambda hosts: None)
    monkeypatch.setattr(demo, "check_network", lambda hosts: None)
    assert "about 2 minutes" in " ".join(plan_of())
    for words in (["--steps", "9"], ["--hooks", "q4"], ["--ranks", "3"], ["--link", "10mbit"]):
        assert "minutes" not in " ".join(plan_of(*words))


@pytest.mark.usefixtures("namespaces_allowed")
def test_demo_goes_on_over_loopback_where_no_link_can_be_made(monkeypatch):
    run = network._run

    def without_tbf(*command):
        if "tbf" in command:
            raise PeerError("'tc' failed: Error: Specified qdisc kind is unknown.")
        run(*command)

    monkeypatch.setattr(network, "_run", without_tbf)
    arguments = parsed()
    (said,) = demo._choose_link(arguments)
    assert said.endswith("could be made: 'tc' failed: Error: Specified qdisc kind is unknown.")
    assert arguments.link == "loopback"
    assert arguments.command_line == ["demo", "--link", "loopback"]
    asked = parsed("--link", "1gbit")
    assert demo._choose_link(asked) == []
    assert asked.link == "1gbit"  # and fails when it is made


@pytest.mark.slow
def test_demo_runs_under_torchrun_on_vision(tmp_path):
    hooks = ["torch:powersgd:2", "off", "q4"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *torchrun, "-m", "gradferry", "demo", "--task", "vision"]
    options = ["--steps", "3", "--out", str(tmp_path), "--json", str(tmp_path / "j")]
    ended = subprocess.run(
        [*command, *options, "--hooks", *hooks], capture_output=True, text=True, timeout=500
    )
    if "found no data" in ended.stderr:
        pytest.skip("neither Fashion-MNIST nor scikit-learn is installed")
    assert ended.returncode == 0, ended.stderr
    document = json.loads((tmp_path / "j").read_text())
    assert [row["hook"] for row in document["rows"]] == hooks
    assert {row["ranks"] for row in document["rows"]} == {2}
    title = "gradferry demo: task vision, 2 ranks, link loopback, 3 steps, seed 0"
    assert ended.stdout.count(title) == 1
    assert "Times are left out" in ended.stdout


@pytest.fixture
def running_demo(tmp_path):
    """A demo that would go on for hours, its first step done, and the ids of its two ranks."""
    options = ["--steps", "100000", "--hooks", "q4", "--link", "loopback", "--out", str(tmp_path)]
    command = [*COMMAND, "demo", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while "step 1/" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [int(pid) for pid in children if is_rank(int(pid))]
        assert len(ranks) == 2
        yield process, ranks
    finally:
        process.kill()
        process.communicate()


def is_rank(pid: int) -> bool:
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_demo_ends_its_ranks_on_ctrl_c(running_demo):
    process, ranks = running_demo
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert errors == "gradferry: interrupted\n"
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_ranks_end_when_the_demo_is_killed(running_demo):
    process, ranks = running_demo
    ends = [os.pidfd_open(rank) for rank in ranks]
    process.kill()
    for end in ends:
        assert select.select([end], [], [], 10)[0], "a rank outlives the demo"
        os.close(end)
