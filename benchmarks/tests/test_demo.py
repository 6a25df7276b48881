"""`gradferry demo` as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gradferry.errors import PeerError
from gradferry_lab import demo
from gradferry_lab.cli import main, parser
from gradferry_lab.demo import demo_table
from gradferry_lab.ranks import network

ROW_KEYS = {
    "task", "hook", "link", "ranks", "steps", "seed", "initial_loss", "final_loss",
    "wire_bytes_per_step", "wire_bytes_measured", "wire_bytes_formula", "ratio", "ms_per_step",
}  # fmt: skip


def test_demo_compares_hooks_on_text(tmp_path, capsys):
    hooks = ["torch:fp32", "q4"]
    arguments = ["--steps", "3", "--out", str(tmp_path / "out"), "--json", str(tmp_path / "j")]
    assert main(["demo", "--link", "loopback", "--hooks", *hooks, *arguments]) == 0
    fp32, q4 = json.loads((tmp_path / "j").read_text())["rows"]
    for row in (fp32, q4):
        assert set(row) == ROW_KEYS
        assert row["wire_bytes_per_step"] == row["wire_bytes_formula"]
    assert fp32["ratio"] == 1
    assert 7 < q4["ratio"] < 7.5
    assert q4["final_loss"] == pytest.approx(fp32["final_loss"], rel=0.02)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["loss_curves.png"]
    shown = capsys.readouterr().out
    assert "456 source files (10.2 MB) of sympy 1.14.0" in shown
    assert shown.count("step 1/3: torch:fp32, loss ") == 1
    assert f"{q4['wire_bytes_per_step']:,}" in shown
    assert "Times are left out" in shown
    assert "ms per" not in shown
    assert shown.index("loss_curves.png") < shown.index("gradferry demo: task")


ROW = {
    "task": "digits", "link": "1gbit", "ranks": 2, "steps": 3, "seed": 0, "initial_loss": 2.0,
    "wire_bytes_per_step": 10, "wire_bytes_measured": True, "wire_bytes_formula": 10,
}  # fmt: skip
PLAIN = {**ROW, "hook": "torch:fp32", "ms_per_step": 12.0, "final_loss": 1.0, "ratio": 1.0}


def test_the_demo_compares_with_plain_ddp_and_has_times_where_there_is_a_link():
    q4 = {**ROW, "hook": "q4", "ms_per_step": 5.0, "final_loss": 1.01, "ratio": 7.25}
    assert demo_table([PLAIN, q4]).cells()[1] == ["q4", "1.0100", "+1.00 %", "10 ", "7.25", "5.0"]
    assert demo_table([q4]).cells()[0][2] == "-"
    without = demo_table([{**row, "link": "loopback"} for row in (PLAIN, q4)])
    assert without.cells()[1][-1] == "7.25"
    assert "As root" in " ".join(without.notes)


def parsed(*words):
    arguments = parser().parse_args(["demo", *words])
    arguments.command_line = ["demo", *words]
    return arguments


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
def test_demo_ends_its_ranks_on_ctrl_c(tmp_path):
    options = ["--steps", "100000", "--hooks", "q4", "--link", "loopback", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "gradferry", "demo", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while "step 1/" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        family = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in family}
        ranks = [child for child, command in commands.items() if b"spawn_main" in command]
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert errors == "gradferry: interrupted\n"
    assert len(ranks) == 2
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
