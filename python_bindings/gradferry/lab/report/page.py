"""The sections of the page for each kind of result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gradferry.core.nodes import AUTO
from gradferry.errors import ConfigError
from gradferry.forecast.hook_names import NO_HOOK, RULERS
from gradferry.lab import converge, demo
from gradferry.lab.bench.codec import codec_table
from gradferry.lab.bench.collective import collective_table
from gradferry.lab.bench.device_codec import device_codec_table, device_peer_table
from gradferry.lab.bench.overlap import overlap_table
from gradferry.lab.bench.peers import peer_table
from gradferry.lab.bench.train import train_table
from gradferry.lab.doctor import doctor_tables
from gradferry.lab.output.drawing import THEMES, Theme
from gradferry.lab.output.html import Picture, Section
from gradferry.lab.output.json_file import read_json
from gradferry.lab.output.links import LinkCurve, draw_speedups
from gradferry.lab.output.speedups import draw_speedups as draw_planned
from gradferry.lab.output.steps import draw_steps
from gradferry.lab.output.table import Column, Row, Table
from gradferry.lab.output.waterfall import draw_waterfalls, waterfall_of
from gradferry.lab.plan import plan_curves, plan_table
from gradferry.lab.ranks.exchanges import exchange_columns
from gradferry.lab.ranks.hosts import ranks_text
from gradferry.lab.ranks.network import parse_link


@dataclass(frozen=True)
class Measurement:
    """One JSON file."""

    path: Path
    results_of: str  # a key of KINDS
    rows: Sequence[Row]
    environment: Mapping[str, Any]

    def section(self, table: Table, pictures: Sequence[Picture] = ()) -> Section:
        """A section that says where its figures come from."""
        facts = ", ".join(f"{key} {value}" for key, value in self.environment.items())
        return Section(replace(table, notes=(*table.notes, f"{self.path}: {facts}.")), pictures)


@dataclass(frozen=True)
class Kind:
    """The results of one command: keys that only its rows have, and their sections."""

    keys: frozenset[str]
    sections: Callable[[Measurement], list[Section]]


def read(path: Path) -> Measurement:
    """Reads one file. Raises ConfigError when it holds no results of a gradferry command."""
    document = read_json(path)
    rows, place = document.get("rows"), document.get("environment")
    is_table = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if not (is_table and rows and isinstance(place, dict)):
        raise ConfigError(f"{path} holds no rows")
    return Measurement(path, _command_of(path, document), rows, place)


def _command_of(path: Path, document: Mapping[str, Any]) -> str:
    """The command of a file: as the file says or, for files of old versions, by its rows' keys."""
    named = document.get("results_of")
    if isinstance(named, str) and named in KINDS:
        return named
    keys = set().union(*document["rows"])
    for name, kind in KINDS.items():
        if named is None and kind.keys <= keys:
            return name
    shown = ", ".join(sorted(keys)[:8]) if named is None else f"results_of {named!r}"
    raise ConfigError(f"{path} holds rows of no command of gradferry's ({shown})")


class Page:
    """The sections for all files, by command; comparisons between files follow training.

    A bad file affects only its own sections.

    Attributes:
        sections: in the order of the page.
        shown: the files that they show.
        left_out: a sentence for each thing that could not be shown.
    """

    def __init__(self, found: Sequence[Measurement]) -> None:
        self.sections: list[Section] = []
        self.shown: list[Measurement] = []
        self.left_out: list[str] = []
        for name, kind in KINDS.items():
            for measurement in found:
                if measurement.results_of == name and self._add(
                    partial(kind.sections, measurement), str(measurement.path)
                ):
                    self.shown.append(measurement)
            if name == _TRAIN:
                rows = [row for train in self._shown_of(_TRAIN) for row in train.rows]
                self._add(partial(_by_link, rows), "the comparison of links")
        doctors, trains = self._shown_of(_DOCTOR), self._shown_of(_TRAIN)
        self._add(partial(_predictions, doctors, trains), "the comparison of predictions")

    def _shown_of(self, command: str) -> list[Measurement]:
        return [one for one in self.shown if one.results_of == command]

    def _add(self, make: Callable[[], list[Section]], what: str) -> bool:
        try:
            sections = make()
            for section in sections:
                section.table.cells()  # reads every row
        except ConfigError as error:
            text = str(error)
            self.left_out.append(text if what in text else f"{what}: {text}")
        except Exception as error:
            self.left_out.append(f"{what} cannot be shown: {type(error).__name__}: {error}")
        else:
            self.sections += sections
            return True
        return False


def _picture(description: str, draw: Callable[[Theme], bytes]) -> Picture:
    return Picture(description, *(draw(theme) for theme in THEMES))


def _check_places(rows: Iterable[Row]) -> None:
    """What comparisons between files go by."""
    for row in rows:
        found = {**{key: row[key] for key in _PLACE}, "hosts": row.get("hosts", 1)}
        if not all(isinstance(found[key], kind) for key, kind in {**_PLACE, "hosts": int}.items()):
            raise ConfigError(f"{found} are not names and numbers of ranks and hosts")


def _place_of(row: Row) -> tuple[Any, ...]:
    return row["model"], row["link"], ranks_text(row), row["hook"]


def _exchange_of(row: Row) -> tuple[Any, ...]:
    """Where there is one exchange, predictions do not name it, nor do older files."""
    exchange = row.get("exchange")
    return *_place_of(row), None if exchange == AUTO else exchange


def _train(measurement: Measurement) -> list[Section]:
    rows = measurement.rows
    _check_places(rows)
    steps = [row for row in rows if row.get("last_step")]
    alone = next((row["last_step"] for row in steps if row["hook"] == NO_HOOK), None)
    pictures = []
    if alone:
        backward_ms = alone["backward_end_ms"] - alone["backward_ms"]
        waterfalls = [
            waterfall_of(_named(row), row["last_step"], backward_ms, row["hook"] in RULERS)
            for row in steps
        ]
        title = f"One step of every hook: {rows[0]['model']}, link {rows[0]['link']}"
        pictures = [_picture(title, partial(draw_waterfalls, waterfalls))]
    return [measurement.section(train_table(rows), pictures)]


def _by_link(rows: Sequence[Row]) -> list[Section]:
    """One section per model that was trained on several links."""
    sections = []
    for (model, ranks), group in _grouped(rows, lambda row: (row["model"], ranks_text(row))):
        links = sorted({row["link"] for row in group}, key=_rate)
        if len(links) < 2:
            continue
        by_place = {(_named(row), row["link"]): row for row in group}
        hooks = list(dict.fromkeys(_named(row) for row in group if row["hook"] != NO_HOOK))
        columns = [Column("hook", lambda row: str(row["hook"]), is_number=False)]
        columns += [Column(link, _cell_of(link)) for link in links]
        table = Table(
            f"By link: {model}, {ranks}",
            columns,
            [{"hook": hook, **{link: by_place.get((hook, link)) for link in links}}
             for hook in hooks],
            ["Time of a step over that without communication, then, after a slash, over that of "
             "`sync`, where that took part, and (in brackets) speed-up over the fastest of "
             "PyTorch's own hooks on that link."],
        )  # fmt: skip
        curves = [
            LinkCurve(
                hook, [_speedup(by_place.get((hook, link))) for link in links], hook in RULERS
            )
            for hook in (*hooks, NO_HOOK)
        ]
        curves = [curve for curve in curves if any(curve.speedups)]
        if curves:
            draw = partial(draw_speedups, links, curves)
            title = f"Speed-up by link: {model}, {ranks}"
            sections.append(Section(table, [_picture(title, draw)]))
        else:
            sections.append(Section(table))
    return sections


def _named(row: Row) -> str:
    """The hook, with its exchange where one was asked for."""
    exchange = row.get("exchange")
    return str(row["hook"]) if exchange in (None, AUTO) else f"{row['hook']} ({exchange})"


def _rate(link: str) -> float:
    try:
        return parse_link(link).bits_per_second or float("inf")
    except ConfigError:  # loopback, or a name that the user gave it
        return float("inf")


def _cell_of(link: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        measured = row[link]
        if measured is None:
            return "-"
        speedup = "" if measured["speedup"] is None else f" ({measured['speedup']:.2f}x)"
        to_sync = measured.get("ratio_to_sync")
        ratios = f"{measured['ratio_to_none']:.2f}"
        if to_sync is not None:
            ratios += f" / {to_sync:.2f}"
        return f"{ratios}{speedup}"

    return cell


def _speedup(row: Row | None) -> float | None:
    return None if row is None else row["speedup"]


def _predictions(doctors: Sequence[Measurement], trains: Sequence[Measurement]) -> list[Section]:
    """Predictions of doctor beside measurements of bench train."""
    measured = {_exchange_of(row): row for m in trains for row in m.rows}
    rows = []
    for prediction in (row for m in doctors for row in m.rows if row["kind"] == "prediction"):
        found = measured.get(_exchange_of(prediction))
        if found is not None:
            rows.append({**prediction, "measured": found["ratio_to_none"]})
    if not rows:
        return []
    columns = [
        Column("model", lambda row: str(row["model"]), is_number=False),
        Column("link", lambda row: str(row["link"]), is_number=False),
        Column("hook", lambda row: str(row["hook"]), is_number=False),
        *exchange_columns(rows),
        Column("predicted\nratio to none", lambda row: f"{row['ratio_to_none']:.3f}"),
        Column("measured", lambda row: f"{row['measured']:.3f}"),
        Column(
            "predicted\noff by",
            lambda row: f"{100 * (row['ratio_to_none'] / row['measured'] - 1):+.1f} %",
        ),
    ]
    note = "Predicted by gradferry doctor, measured by gradferry bench train."
    return [Section(Table("Predicted against measured", columns, rows, [note]))]


def _doctor(measurement: Measurement) -> list[Section]:
    _check_places(row for row in measurement.rows if row["kind"] == "prediction")
    *tables, last = doctor_tables(measurement.rows)
    predicted = [row for row in measurement.rows if row["kind"] == "prediction"]
    picture = _picture(last.title, partial(draw_steps, predicted))
    section = measurement.section(last, [picture])
    return [*map(Section, tables), replace(section, verdict=_verdict(measurement))]


def _verdict(measurement: Measurement) -> str:
    """Empty in a file of an older version of plan."""
    return " ".join(str(row["text"]) for row in measurement.rows if row["kind"] == "verdict")


def _plan(measurement: Measurement) -> list[Section]:
    table = plan_table([row for row in measurement.rows if row["kind"] == "plan"])
    curves = plan_curves([row for row in measurement.rows if row["kind"] == "speedup"])
    draw = partial(draw_planned, curves, None)
    section = measurement.section(table, [_picture(f"Speed-up by link: {table.title}", draw)])
    return [replace(section, verdict=_verdict(measurement))]


def _overlap(measurement: Measurement) -> list[Section]:
    return [measurement.section(overlap_table(measurement.rows))]


def _collective(measurement: Measurement) -> list[Section]:
    return [measurement.section(collective_table(measurement.rows))]


def _codec(measurement: Measurement) -> list[Section]:
    ours = [row for row in measurement.rows if "peer" not in row]
    peers = [row for row in measurement.rows if "peer" in row]
    if "device" in measurement.rows[0]:
        first, others = (
            device_codec_table(ours, str(measurement.environment.get("gpu"))),
            device_peer_table(peers),
        )
    else:
        first, others = codec_table(ours), peer_table(peers)
    return [measurement.section(first), *([measurement.section(others)] if peers else [])]


def _converge(measurement: Measurement) -> list[Section]:
    sections = converge.sections_of(measurement.rows, measurement.path)
    return [measurement.section(section.table, section.pictures) for section in sections]


def _demo(measurement: Measurement) -> list[Section]:
    section = demo.section_of(measurement.rows)
    return [measurement.section(section.table, section.pictures)]


def _grouped(
    rows: Iterable[Row], key: Callable[[Row], tuple[Any, ...]]
) -> Iterable[tuple[tuple[Any, ...], list[Row]]]:
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups.items()


_PLACE = {"model": str, "link": str, "ranks": int, "hook": str}
_TRAIN, _DOCTOR = "bench train", "doctor"
# In the order of the page.
KINDS = {
    _TRAIN: Kind(frozenset({"ms_median"}), _train),
    "bench overlap": Kind(frozenset({"backward_ms"}), _overlap),
    _DOCTOR: Kind(frozenset({"waiting_ms"}), _doctor),
    "plan": Kind(frozenset({"crossover_gbit_per_s"}), _plan),
    "converge": Kind(frozenset({"final_metric"}), _converge),
    "demo": Kind(frozenset({"cumulative_wire_bytes"}), _demo),
    "bench collective": Kind(frozenset({"busbw"}), _collective),
    "bench codec": Kind(frozenset({"roof_ratio"}), _codec),
}
