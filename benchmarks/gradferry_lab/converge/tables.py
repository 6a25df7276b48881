"""Tables of a suite's rows, for the terminal and a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gradferry_lab.converge.suite import (
    LARGE,
    MOMENTUM,
    SHARDED,
    Contest,
    Contestant,
    Misses,
    Near,
    Reaches,
    Suite,
)
from gradferry_lab.converge.summary import Summary, summarize
from gradferry_lab.output.table import Column, Row, Table, markdown_table, replace_section
from gradferry_lab.workloads import load_task
from gradferry_lab.workloads.parallel import DDP
from gradferry_lab.workloads.task import Task

_SECTION = "results of gradferry converge"  # in a document; of FULL and QUICK


@dataclass(frozen=True)
class Outcome:
    """One contest, judged."""

    contest: Contest
    task: Task
    summaries: Sequence[Summary]


def judge(suite: Suite, rows: Sequence[Row]) -> list[Outcome]:
    """Every contest of the suite that has rows."""
    outcomes = [
        Outcome(contest, load_task(contest.task), summarize(suite, contest, rows))
        for contest in suite.contests
    ]
    return [outcome for outcome in outcomes if outcome.summaries]


def table_of(suite: Suite, outcome: Outcome) -> Table:
    """The table of one contest."""
    contest, task = outcome.contest, outcome.task
    is_gap = _is_gap(outcome)
    gathered = Column("loss as\ngathered", lambda row: _loss(_as_gathered(row["of"])), detail=2)
    score = Column(task.score_title, lambda row: f"{100 * row['of'].metric:.2f} %", detail=4)
    columns = [
        Column("optimizer", lambda row: row["of"].contestant.optimizer, is_number=False),
        Column("codec", lambda row: row["of"].contestant.codec, is_number=False),
        Column("mode", lambda row: _mode(row["of"].contestant), is_number=False),
        Column("warm-up", lambda row: row["of"].contestant.warmup or "-", is_number=False),
        Column("seeds", lambda row: str(len(row["of"].rows)), detail=5),
        Column("final loss\n(mean)", lambda row: _loss(row["of"].loss), detail=0 if is_gap else 3),
        Column("spread", lambda row: _loss(row["of"].spread), detail=5),
        Column(
            "against\nfp32",
            lambda row: "-" if is_gap else _percent(row["of"].excess),
            detail=6 if is_gap else 0,
        ),
        *([gathered] if _is_sharded(outcome) else []),
        Column("band", lambda row: _band(row["of"]), detail=2),
        *([] if is_gap else [score]),
        Column("MB\nsent", lambda row: f"{row['of'].wire_bytes / 1e6:.1f}", detail=4),
        Column("fp32 /\nsent", lambda row: f"{row['of'].ratio:.2f}", detail=1),
        Column("verdict", lambda row: row["of"].verdict, is_number=False),
    ]
    first = outcome.summaries[0]
    return Table(
        title=f"Task {task.name}, {first.contestant.optimizer}: {first.rows[0]['ranks']} ranks, "
        f"{contest.steps} steps",
        columns=columns,
        rows=[{"of": summary} for summary in outcome.summaries],
        notes=[_note(suite, outcome)],
    )


def broken_demands(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for each demand that is not met."""
    return [
        f"{outcome.contest.task}, {one.optimizer}, {one.codec}, {_mode_and_warmup(one)}: "
        f"{summary.verdict} ({_result(outcome, summary)}, band {_band(summary)})"
        for outcome in outcomes
        for summary in outcome.summaries
        for one in [summary.contestant]
        if summary.is_bad
    ]


def write_markdown(
    suite: Suite, outcomes: Sequence[Outcome], environment: Mapping[str, Any], path: Path
) -> None:
    """Replaces the results in a document. Raises ConfigError when it has no place for them."""
    facts = ", ".join(f"{key} {value}" for key, value in environment.items() if key != "os")
    parts = [f"{_verdict_line(outcomes)} Obtained with: {facts}."]
    parts += [markdown_table(table).strip() for table in document_tables(outcomes)]
    own = suite.name in (SHARDED.name, LARGE.name)
    section = f"{_SECTION} --{suite.name}" if own else _SECTION
    replace_section(path, section, "\n\n".join(parts))


def document_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """For each optimizer a table with a row per contestant and a column per task.

    Tasks that measure a gap, which is no loss, have a table of their own.
    """
    groups: dict[tuple[str, bool], list[Outcome]] = {}
    for outcome in outcomes:
        key = outcome.summaries[0].contestant.optimizer, _is_gap(outcome)
        groups.setdefault(key, []).append(outcome)
    return [_document_table(group) for group in groups.values()]


def _document_table(group: Sequence[Outcome]) -> Table:
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for outcome in group:
        for summary in outcome.summaries:
            row = rows.setdefault(tuple(summary.contestant.facts().values()), {"of": summary})
            row[outcome.task.name] = _document_cell(outcome, summary)
    title = group[0].summaries[0].contestant.optimizer
    if _is_gap(group[0]):
        title += f", {group[0].task.name}"
    columns = [
        Column("optimizer", lambda row: row["of"].contestant.optimizer, is_number=False),
        Column("codec", lambda row: row["of"].contestant.codec, is_number=False),
        Column("mode", lambda row: _mode_and_warmup(row["of"].contestant), is_number=False),
        *map(_task_column, group),
        Column("fp32 / sent", lambda row: f"{row['of'].ratio:.1f}"),
    ]
    if len({row["of"].contestant.optimizer for row in rows.values()}) == 1:
        columns = columns[1:]
    return Table(title, columns, list(rows.values()))


def _task_column(outcome: Outcome) -> Column:
    task = outcome.task.name
    return Column(task if _is_gap(outcome) else f"{task}, %", lambda row: row.get(task, ""))


def _document_cell(outcome: Outcome, summary: Summary) -> str:
    """The loss of the baseline, the excess of others, a gap; and the band, where there is one."""
    if summary is outcome.summaries[0]:
        return f"{_loss(summary.loss)} ± {_loss(summary.spread)}"
    text = _loss(summary.loss) if _is_gap(outcome) else f"{100 * summary.excess:+.2f}"
    band = _band(summary).replace(" %", "").replace("+", "")
    return text if summary.band is None else f"{text} ({band})"


def _mode_and_warmup(one: Contestant) -> str:
    return f"{_mode(one)}, warm-up {one.warmup}" if one.warmup else _mode(one)


def _verdict_line(outcomes: Sequence[Outcome]) -> str:
    broken = broken_demands(outcomes)
    demands = sum(s.band is not None for outcome in outcomes for s in outcome.summaries)
    if not demands:
        return "Nothing is judged."
    if not broken:
        return f"All {demands} requirements are met."
    return f"{len(broken)} of {demands} requirements are not met: {'; '.join(broken)}."


def _mode(one: Contestant) -> str:
    return f"{one.mode} {one.momentum:g}" if one.mode == MOMENTUM else one.mode


def _note(suite: Suite, outcome: Outcome) -> str:
    sigma, ruler = suite.sigmas, outcome.summaries[0]
    source = str(ruler.rows[0]["source"])
    what = f"{source[0].upper()}{source[1:]}. Final loss: {outcome.task.metric}"
    if _is_gap(outcome):
        return (
            f"{what}; gradients have no sampling noise, so that a remaining gap is due to the "
            f"codec. 'stalls' rows are controls: without error feedback they must miss the gap."
        )
    held = ""
    if _is_sharded(outcome):
        held = (
            " Its parameters are those that optimizers and checkpoints hold; as gathered: those "
            "that forward passes compute with."
        )
    return (
        f"{what}, on the validation data.{held} Against fp32: mean difference to the fp32 training "
        f"with the same seed. Band: the demanded one, or {sigma:g} standard deviations of "
        f"{ruler.contestant.codec}'s {len(ruler.rows)} seeds if that is more, and with 'x' at "
        f"least so many times fewer bytes; a lower loss is within it. Rows without a band are not "
        f"judged. Mode momentum: with that momentum. Bytes are of the whole training, its warm-up "
        f"included."
    )


def _result(outcome: Outcome, summary: Summary) -> str:
    if _is_gap(outcome):
        return f"gap {_loss(summary.loss)}"
    return (
        f"loss {_loss(summary.loss)}, {_percent(summary.excess)} against fp32, "
        f"{summary.ratio:.2f} times fewer bytes"
    )


def _is_gap(outcome: Outcome) -> bool:
    return outcome.task.lowest_loss > 0


def _is_sharded(outcome: Outcome) -> bool:
    return outcome.contest.contestants[0].parallel != DDP


def _as_gathered(summary: Summary) -> float:
    losses = [row["gathered_loss"] for row in summary.rows]
    return float("inf") if None in losses else fmean(losses)


def _loss(value: float) -> str:
    return f"{value:.4f}" if 0.001 <= value < 100 or value == 0 else f"{value:.1e}"


def _percent(share: float) -> str:
    return f"{100 * share:+.2f} %"


def _band(summary: Summary) -> str:
    demand = summary.contestant.demand
    if summary.band is None:
        return "-"
    if isinstance(demand, Near):
        return _percent(summary.band) + (f", {demand.ratio:g}x" if demand.ratio else "")
    sign = {Reaches: "<=", Misses: ">"}[type(demand)]
    return f"{sign} {summary.band:.0e}"
