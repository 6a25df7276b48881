"""What commands print fits a terminal of 80 columns; the tables are those of committed results."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gradferry.ddp.interval import Interval
from gradferry.diagnosis import Diagnosis, Step
from gradferry_lab.bench.codec import codec_table
from gradferry_lab.bench.collective import collective_table
from gradferry_lab.bench.device_codec import device_codec_table, device_peer_table
from gradferry_lab.bench.peers import peer_table
from gradferry_lab.bench.train import train_table
from gradferry_lab.cli import main
from gradferry_lab.converge.pages import judge, table_of
from gradferry_lab.converge.suite import SUITES
from gradferry_lab.demo import section_of
from gradferry_lab.output.json_file import read_json
from gradferry_lab.output.table import Column, Table, print_table
from gradferry_lab.plan import plan_table
from rich.console import Console

RESULTS = Path(__file__).parents[1] / "results"
Rows = list[dict[str, Any]]
MOMENTUM = "sign1+momentum=0.9+warmup_steps=100"


def rows_of(name: str) -> Rows:
    rows: Rows = read_json(RESULTS / name)["rows"]
    return rows


def printed(table: Table, *, wide: bool = False) -> list[str]:
    """The lines on a terminal of 80 columns."""
    file = io.StringIO()
    print_table(Console(file=file, width=80, force_terminal=True), table, wide=wide)
    return re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()).splitlines()


def train(name: str, **changes: Any) -> Iterator[Table]:
    yield train_table([{**row, **changes} for row in rows_of(name)])


def until_a_loss() -> Iterator[Table]:
    reached = {"until_loss": 2.5, "steps_to_loss": 12_345, "seconds_to_loss": 12_345.6}
    yield from train("train_1gbit.json", **reached)


def collective(**changes: Any) -> Iterator[Table]:
    """Rows as wide as any."""
    row = {
        "op": "all_reduce", "size": 1 << 26, "count": 1 << 24, "type": "float", "exchange": None,
        "chosen": None, "time": 1e6, "algbw": 100.123, "busbw": 100.123, "wrong": 0,
        "wire": 1 << 27, "ratio": 28.12, "enc": None, "dec": None, "net": None, "rel_err": 1e-2,
        "speedup": 1.23, "speedup_low": 1.01, "speedup_high": 10.45, "iters": 10,
        "interval_coverage": 0.978, "time_min": 9e5, "time_max": 2e6, "wire_measured": False,
        "interface_bytes": None, "interface_bytes_formula": 0, "link": "loopback", "ranks": 2,
        "hosts": 1, "ranks_per_host": 2, "device": "cpu", **changes,
    }  # fmt: skip
    codecs = ("torch:fp32", "topk:ratio=0.01")
    yield collective_table([{**row, "codec": codec} for codec in codecs])


ON_HOSTS = {
    "link": "1gbit", "ranks": 8, "hosts": 2, "ranks_per_host": 4, "exchange": "two-level",
    "chosen": "q4 two-level", "enc": 12345.6, "dec": 12345.6, "net": 123456.7,
    "wire_measured": True, "interface_bytes": 123_456_789, "interface_bytes_formula": 123_456_700,
}  # fmt: skip


def codec(name: str, **changes: Any) -> Iterator[Table]:
    rows = [{**row, **changes} for row in rows_of(name)]
    ours, peers = [r for r in rows if "peer" not in r], [r for r in rows if "peer" in r]
    yield codec_table(ours, 10.0)
    if peers:
        yield peer_table(peers)


def device_codec(name: str) -> Iterator[Table]:
    rows = rows_of(name)
    yield device_codec_table([row for row in rows if "peer" not in row], "NVIDIA H100 80GB HBM3")
    yield device_peer_table([row for row in rows if "peer" in row])


def converge() -> Iterator[Table]:
    suite = SUITES["full"]
    for outcome in judge(suite, rows_of("convergence.json")):
        yield table_of(suite, outcome)


def demo() -> Iterator[Table]:
    row = {
        "task": "digits", "link": "1gbit", "ranks": 2, "steps": 400, "seed": 0,
        "initial_loss": 10.1234, "final_loss": 9.8765, "wire_bytes_per_step": 123_456_789,
        "wire_bytes_measured": False, "wire_bytes_formula": 123_456_789, "ratio": 23.45,
        "ms_per_step": 1460.2, "losses": [10.0, 9.0], "cumulative_wire_bytes": [1, 2],
    }  # fmt: skip
    hooks = ("torch:fp32", "torch:bf16", "q4")
    yield section_of([{**row, "hook": hook} for hook in hooks]).table


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param(lambda: train("train_1gbit.json"), id="train"),
        pytest.param(
            lambda: train("train_1gbit.json", hosts=2, ranks=4, exchange="two-level", chosen="q8"),
            id="train, exchanges",
        ),
        pytest.param(until_a_loss, id="train, until a loss"),
        pytest.param(lambda: collective(**ON_HOSTS), id="collective, hosts"),
        pytest.param(lambda: collective(device="cuda"), id="collective, device"),
        pytest.param(lambda: codec("codec_cpu.json"), id="codec"),
        pytest.param(lambda: device_codec("codec_h100.json"), id="codec, device"),
        pytest.param(converge, id="converge"),
        pytest.param(demo, id="demo"),
    ],
)
def test_a_table_fits_80_columns(tables: Callable[[], Iterator[Table]]) -> None:
    for table in tables():
        lines = printed(table)
        assert max(map(len, lines)) <= 80, max(lines, key=len)
        for column in table.columns:  # each is shown, or named
            words = " ".join(column.title.split())
            assert any(part in line for line in lines for part in column.title.split("\n")), words


def test_the_greatest_detail_is_left_out_first_named_and_shown_with_wide() -> None:
    columns = [
        Column("hook", lambda row: row["hook"], is_number=False),
        Column("a", lambda row: "1" * 40, detail=1),
        Column("of\nformula", lambda row: "2" * 40, detail=2, note="What a formula is."),
        Column("c", lambda row: "3" * 20, detail=1),
    ]
    table = Table("A title", columns, [{"hook": "q4"}], ["A note."])
    narrow, wide = ("\n".join(printed(table, wide=wide)) for wide in (False, True))
    assert ["1" * 40 in narrow, "2" * 40 in narrow, "3" * 20 in narrow] == [True, False, True]
    assert narrow.endswith("A note.\n--wide shows also: of formula.")
    assert "2" * 40 in wide
    assert wide.endswith("A note.\nWhat a formula is.")


def test_a_file_gets_all_columns() -> None:
    columns = [
        Column("hook", lambda row: row["hook"], is_number=False),
        Column("ms", lambda row: "1" * 100, detail=1),
    ]
    file = io.StringIO()
    print_table(Console(file=file, width=80), Table("", columns, [{"hook": MOMENTUM}]), wide=False)
    assert f"{MOMENTUM}  {'1' * 100}" in file.getvalue()
    assert "--wide" not in file.getvalue()


def test_a_long_name_is_broken_before_its_options() -> None:
    columns = [
        Column("hook", lambda row: row["hook"], is_number=False),
        Column("ms", lambda row: "1" * 50),
    ]
    lines = printed(Table("", columns, [{"hook": MOMENTUM}]))
    assert [line.split()[0] for line in lines if line[:1] in ("s", "+")] == [
        "sign1", "+momentum=0.9", "+warmup_steps=100",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options", ["", "--compute-ms 12345 --params 7B", "--link 10gbit 2.5gbit 100mbit 1gbit"]
)
def test_plan_fits_80_columns(options: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert main(["plan", *options.split(), "--json", str(file)]) == 0
    lines = printed(plan_table(read_json(file)["rows"]))
    table = [line for line in lines if re.match(r"(-|flat|two-level) ", line)]
    assert len(table) >= 10
    assert max(map(len, table)) <= 80, max(table, key=len)


def test_doctor_fits_80_columns() -> None:
    hooks = ("rht:bits=3", "q4", "q8", "torch:bf16", "torch:fp32")
    steps = tuple(
        Step(hook, "two-level", 12.3, Interval(1, 1, 9), 2, 12_345_678_901, is_advised=False)
        for hook in hooks
    )
    text = str(Diagnosis("Use q4.", steps, 1.2, 64, 500, 7_000_000_000, "cpu"))
    table = [line for line in text.splitlines() if line.startswith(("hook", *hooks))]
    assert len(table) >= 6
    assert max(map(len, table)) <= 80, max(table, key=len)
