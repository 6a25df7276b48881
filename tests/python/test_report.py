"""`gradferry report`: which files become which sections, and what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from gradferry.lab.bench.overlap import overlap_rows
from gradferry.lab.bench.overlap_turns import OverlapOptions, OverlapOutcome
from gradferry.lab.bench.train import train_rows
from gradferry.lab.bench.train_turns import LastStep, TrainOptions, TrainOutcome
from gradferry.lab.cli import main
from gradferry.lab.output.json_file import write_json
from gradferry.lab.output.links import LinkCurve, draw_speedups
from gradferry.lab.output.waterfall import Span, draw_waterfalls, waterfall_of
from gradferry.lab.ranks.hosts import Where
from matplotlib.axes import Axes

PNG_START = b"\x89PNG\r\n\x1a\n"
PLACE = {"cpu": "A&B"}
BUCKETS = [
    {"begin_ms": 20.0, "encoded_ms": 22.0, "complete_ms": 31.0},
    {"begin_ms": 28.0, "encoded_ms": 29.0, "complete_ms": 34.0},
]
STEP = LastStep(10.0, 35.0, 40.0, BUCKETS)


ALONE = (2, 2, 1)  # ranks, hosts, ranks per host
SHARED = (4, 2, 2)


def train(link: str, q4_ms: float, ranks: tuple[int, int, int] = ALONE) -> list[dict[str, Any]]:
    outcomes = [
        TrainOutcome("none", 25, {}, [100.0], last_step=LastStep(10.0, 30.0, 34.0, [])),
        TrainOutcome("sync", 25, {}, [120.0], last_step=LastStep(10.0, 34.0, 38.0, [])),
        TrainOutcome("torch:fp16", 25, {}, [150.0], last_step=LastStep(10.0, 60.0, 64.0, [])),
        TrainOutcome("q4", 4, {}, [q4_ms], last_step=STEP),
    ]
    options = TrainOptions("small", ("none", "sync", "torch:fp16", "q4"), (25.0,), 1, 1, 0)
    return train_rows(outcomes, options, Where(link, *ranks))


def report(tmp_path: Path, *arguments: str) -> str:
    page = tmp_path / "page.html"
    assert main(["report", *arguments, "-o", str(page)]) == 0
    return page.read_text(encoding="utf-8")


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def cells(page: str, heading: str) -> list[list[str]]:
    table = page.partition(f"<h2>{heading}</h2>")[2].partition("</table>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]


def test_trainings_on_several_links_are_compared(tmp_path):
    folder = tmp_path / "runs" / "deep"
    for name, link, q4_ms in (
        ("fast", "10gbit", 100.0),
        ("slow", "100mbit", 75.0),
        ("own", "our cluster", 120.0),
    ):
        write_json(folder / f"{name}.json", train(link, q4_ms), PLACE, results_of="bench train")
    page = report(tmp_path, str(tmp_path / "runs"))
    by_link = "By link: small, 2 ranks"
    assert headings(page)[-1] == by_link
    assert len(headings(page)) == 4
    head = page.partition(f"<h2>{by_link}</h2>")[2].partition("</thead>")[0]
    heads = re.findall(r"<th\b[^>]*>(.*?)</th>", head)
    assert heads == ["hook", "100mbit", "10gbit", "our cluster"]
    assert cells(page, by_link) == [
        ["sync", "1.20 / 1.00 (1.25x)", "1.20 / 1.00 (1.25x)", "1.20 / 1.00 (1.25x)"],
        ["torch:fp16", "1.50 / 1.25 (1.00x)", "1.50 / 1.25 (1.00x)", "1.50 / 1.25 (1.00x)"],
        ["q4", "0.75 / 0.62 (2.00x)", "1.00 / 0.83 (1.50x)", "1.20 / 1.00 (1.25x)"],
    ]
    # Of each file one step of every hook, and the comparison; nothing from elsewhere.
    sources = re.findall(r'(?:src|srcset|href)="([^"#]*)"', page)
    assert len(sources) == 2 * 4
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert f"{folder / 'fast.json'}: cpu A&amp;B." in page


def test_links_are_compared_among_the_same_hosts(tmp_path):
    files = {"alone": ALONE, "spread": (4, 4, 1), "shared": SHARED}
    for name, ranks in files.items():
        for link, ms in (("100mbit", 130.0), ("1gbit", 120.0)):
            rows = train(link, ms, ranks)
            write_json(tmp_path / f"{name}_{link}.json", rows, PLACE, results_of="bench train")
    page = report(tmp_path, str(tmp_path))
    for ranks in ("2 ranks", "4 ranks", "4 ranks on 2 hosts"):
        (q4,) = [row for row in cells(page, f"By link: small, {ranks}") if row[0] == "q4"]
        assert [cell[:4] for cell in q4[1:]] == ["1.30", "1.20"]


def test_a_number_of_hosts_that_is_none_affects_its_own_file_only(tmp_path):
    rows = [{**row, "hosts": "two"} for row in train("100mbit", 130.0)]
    write_json(tmp_path / "bad.json", rows, PLACE, results_of="bench train")
    write_json(tmp_path / "good.json", train("1gbit", 120.0), PLACE, results_of="bench train")
    page = report(tmp_path, str(tmp_path / "bad.json"), str(tmp_path / "good.json"))
    assert "numbers of ranks and hosts" in page
    assert "link 1gbit" in page


def test_predictions_stand_beside_what_was_measured(tmp_path):
    place = {"model": "small", "link": "1gbit", "ranks": 4, "hosts": 4, "ranks_per_host": 1}
    costs = {"ms": 7.0, "exposed_ms": 2.0, "wire_bytes": 9, "bucket_cap_mb": 4}
    step = {"kind": "prediction", "needs_momentum": False, **costs, **place}
    size = {"elements": 3, "parameters": 1, "waiting_ms": 0.0}
    predictions = [
        {**step, "hook": "q4", "ratio_to_none": 1.32},
        {**step, "hook": "q8", "ratio_to_none": 1.5},  # nobody measured it
        {"kind": "verdict", "text": "Use <q4>.", **size, **place},
    ]
    write_json(tmp_path / "doctor.json", predictions, PLACE, results_of="doctor")
    for name, ms, ranks in (("a", 120.0, (4, 4, 1)), ("b", 150.0, SHARED)):
        rows = train("1gbit", ms, ranks)
        write_json(tmp_path / f"train_{name}.json", rows, PLACE, results_of="bench train")
    page = report(tmp_path, str(tmp_path))
    assert cells(page, "Predicted against measured") == [
        ["small", "1gbit", "q4", "1.320", "1.200", "+10.0 %"]
    ]
    predicted = cells(page, "Predicted step: small, link 1gbit")
    assert [row[0] for row in predicted] == ["q4", "q8"]
    top = page.partition("<nav>")[0]
    assert "<p>Predicted step: small, link 1gbit: Use &lt;q4&gt;.</p>" in top
    assert 'alt="Predicted step: small, link 1gbit"' in page


def test_committed_results_become_a_page(tmp_path):
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    page = report(tmp_path, str(results), "--png", str(tmp_path / "png"))
    assert "Codecs on the CPU" in headings(page)
    for picture in (tmp_path / "png").iterdir():
        assert re.fullmatch(r"[a-z0-9._]+\.png", picture.name)
        assert picture.read_bytes().startswith(PNG_START)


def test_plan_becomes_a_section_with_its_curves(tmp_path):
    file = tmp_path / "plan.json"
    assert main(["plan", "--smoke", "--json", str(file)]) == 0
    page = report(tmp_path, str(file))
    (heading,) = headings(page)
    assert heading.startswith("Predicted on ")
    exchanges = {row[0] for row in cells(page, heading)}
    assert exchanges == {"-", "flat", "two-level"}  # PyTorch's own hooks have none
    assert re.search(r"<p>Predicted on .*: (Use|Do not compress)", page)
    assert page.count("data:image/png") == 2


def overlap() -> list[dict[str, Any]]:
    outcomes = [OverlapOutcome("none", [10.0, 20.0]), OverlapOutcome("q4", [11.0, 23.0])]
    options = OverlapOptions("small", ("none", "q4"), "cpu", 25.0, 2, 1, 0)
    return overlap_rows(outcomes, options, Where("1gbit", 2, 2, 1))


def older(path: Path) -> None:
    """As files were before they said which command they are of."""
    document = json.loads(path.read_text())
    del document["results_of"]
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("is_old", [False, True])
def test_backward_passes_have_a_section_beside_trainings(tmp_path, is_old):
    write_json(tmp_path / "overlap.json", overlap(), PLACE, results_of="bench overlap")
    write_json(tmp_path / "train.json", train("1gbit", 120.0), PLACE, results_of="bench train")
    if is_old:
        older(tmp_path / "overlap.json")
        older(tmp_path / "train.json")
    page = report(tmp_path, str(tmp_path))
    assert headings(page)[1:] == ["Backward passes"]
    shown = {row[0]: row for row in cells(page, "Backward passes")}
    assert shown["q4"][4:6] == ["2.00", "1.00 to 3.00"]
    assert "(50 %)" in page


def test_kernels_on_a_gpu_have_a_section(tmp_path):
    row = {
        "codec": "q4", "op": "encode", "dtype": "float32", "device": "cuda", "size_mb": 1.0,
        "num_elements": 1 << 18, "world_size": 1, "misaligned": False, "wrong": 0, "gbps": 100.0,
        "roof_gbps": 200.0, "roof_ratio": 0.5, "roof_ratio_min": 0.4, "roof_ratio_max": 0.6,
        "us_median": 9.0, "us_p99": 10.0, "bits_per_element": 4.28,
    }  # fmt: skip
    peer = {
        "codec": "q4", "op": "decode", "device": "cuda", "size_mb": 1.0, "peer": "another",
        "peer_elements_per_second": 1e9, "speedup": 2.0, "speedup_min": 1.5, "speedup_max": 2.5,
    }  # fmt: skip
    write_json(tmp_path / "gpu.json", [row, peer], {"gpu": "H<1>"}, results_of="bench codec")
    page = report(tmp_path, str(tmp_path / "gpu.json"))
    assert headings(page) == ["Codecs on H&lt;1&gt;", "Other implementations"]
    linked = re.findall(r'<li><a href="#(\w+)">(.*?)</a></li>', page)
    assert [title for _, title in linked] == headings(page)
    assert all(f'<section id="{place}">' in page for place, _ in linked)


UNUSABLE: list[Any] = [
    {"results_of": "bench train", "rows": [{"hook": "q4"}]},
    {"results_of": "bench train", "rows": [{**train("1gbit", 120.0)[0], "link": [5]}]},
    {"results_of": "bench train", "rows": [1]},
    {"results_of": "bench flight", "rows": train("1gbit", 120.0)},
    {"results_of": ["bench train"], "rows": train("1gbit", 120.0)},
    {"results_of": "doctor", "rows": [{"kind": "verdict", "text": 5}]},
    {"results_of": "demo", "rows": [{"task": "no such"}]},
    {"results_of": "converge", "rows": [{"suite": "no such"}]},
    {"rows": [{"round_ms": [], "hook": "q4", "link": "1gbit"}]},
]


@pytest.mark.parametrize("content", UNUSABLE, ids=range(len(UNUSABLE)))
def test_a_file_that_cannot_be_used_costs_no_more_than_itself(tmp_path, content, capsys):
    write_json(tmp_path / "train.json", train("1gbit", 120.0), PLACE, results_of="bench train")
    odd = tmp_path / "odd.json"
    odd.write_text(json.dumps({"schema": 1, "environment": {}, **content}))
    page = report(tmp_path, str(tmp_path / "train.json"), str(odd))
    assert headings(page)[-1] == "Left out"
    assert len(headings(page)) == 2
    ((reason,),) = cells(page, "Left out")
    assert str(odd) in reason
    assert f"Left out: {odd}" in capsys.readouterr().err
    assert "From train.json." in page


def test_demo_becomes_a_section_with_its_curves(tmp_path):
    demo = ["demo", "--task", "digits", "--steps", "3", "--hooks", "torch:fp32", "q4"]
    file = tmp_path / "demo.json"
    assert main([*demo, "--out", str(tmp_path / "demo"), "--json", str(file)]) == 0
    page = report(tmp_path, str(file))
    assert headings(page) == ["gradferry demo: task digits, 2 ranks, 3 steps, seed 0"]
    assert page.count("data:image/png") == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("{", "cannot be read"),
        ('{"rows": []}', "holds no results of schema 1"),
        ('{"schema": 1, "environment": {}, "rows": []}', "holds no rows"),
        ('{"schema": 1, "environment": {}, "rows": [{"speed": 1}]}', r"\(speed\)"),
    ],
)
def test_a_file_that_is_named_and_holds_no_results_is_an_error(tmp_path, content, message, capsys):
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content)
    assert main(["report", str(file), "-o", str(tmp_path / "page.html")]) == 2
    assert re.search(f"{file}.*{message}", capsys.readouterr().err)
    assert not (tmp_path / "page.html").exists()


def test_a_folder_may_hold_other_files(tmp_path, capsys):
    folder = tmp_path / "runs"
    write_json(folder / "train.json", train("1gbit", 120.0), PLACE, results_of="bench train")
    (folder / "settings.json").write_text(json.dumps({"a": 1}))
    assert len(headings(report(tmp_path, str(folder)))) == 2
    assert "Left out: " in capsys.readouterr().err
    (folder / "train.json").unlink()
    assert main(["report", str(folder)]) == 2
    assert "no results; make some with the option --json" in capsys.readouterr().err


def test_waterfall_of_a_codec_has_its_own_instants():
    waterfall = waterfall_of("q4", vars(STEP), backward_ms=20.0)
    assert waterfall.thread == [
        Span("forward", 0, 10.0),
        Span("backward", 10.0, 29.0),  # until the last bucket was posted
        Span("encode", 20.0, 22.0),
        Span("encode", 28.0, 29.0),
        Span("exposed", 29.0, 35.0),
        Span("optimizer", 35.0, 40.0),
    ]
    assert waterfall.buckets == [Span("on its way", 22.0, 31.0), Span("on its way", 29.0, 34.0)]


def test_waterfall_of_another_hook_exposes_what_none_does_not_take():
    step = {"backward_ms": 10.0, "backward_end_ms": 60.0, "end_ms": 64.0, "buckets": []}
    spans = {span.kind: span for span in waterfall_of("torch:fp16", step, backward_ms=20.0).thread}
    assert spans["backward"] == Span("backward", 10.0, 30.0)
    assert spans["exposed"] == Span("exposed", 30.0, 60.0)


def test_the_ends_of_rulers_and_what_they_give_are_drawn(monkeypatch):
    lines, styles = [], []
    monkeypatch.setattr(Axes, "axvline", lambda self, x, **_: lines.append(x))
    sync = {"backward_ms": 10.0, "backward_end_ms": 34.0, "end_ms": 38.0, "buckets": []}
    waterfalls = [waterfall_of("sync", sync, 20.0, True), waterfall_of("q4", vars(STEP), 20.0)]
    draw_waterfalls(waterfalls)
    assert lines == [38.0]
    plot = Axes.plot

    def noted(self: Axes, *values: Any, **style: Any) -> Any:
        styles.append(style)
        return plot(self, *values, **style)

    monkeypatch.setattr(Axes, "plot", noted)
    curves = [LinkCurve("q4", [1.5, 1.2]), LinkCurve("sync", [1.8, 1.3], is_ruler=True)]
    draw_speedups(["100mbit", "1gbit"], curves, "light")
    assert [(style["label"], style.get("linestyle")) for style in styles] == [
        ("q4", None),
        ("sync", ":"),
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_draw_waterfalls_gives_a_png(theme):
    assert draw_waterfalls([waterfall_of("q4", vars(STEP), 20.0)], theme).startswith(PNG_START)
