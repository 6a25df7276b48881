"""benchmarks/small_matrices.py: what its variants send with which codec, and when it is done."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from gradferry.core import config
from on_ranks import on_ranks
from programs import load_program

bench = load_program("benchmarks/small_matrices.py")
Variant = bench.Variant
VISION, TEXT = (
    next(place for place in bench.GRID if place.task == task)
    for task in ("tiny_vision", "tiny_text")
)
IMAGES = ["layers.3.weight", "layers.9.weight"]
ATTENTION = [f"blocks.{block}.attention_out.weight" for block in (0, 1)]


@pytest.mark.parametrize(
    ("place", "variant", "finer"),
    [
        (VISION, Variant("sign1", 0), []),
        (VISION, Variant("sign1", 1), []),
        (VISION, Variant("sign1", 2), IMAGES[:1]),
        (VISION, Variant("sign1", 3), IMAGES),
        (VISION, Variant(bench.TOPK, 5), IMAGES),
        (VISION, Variant("sign1", small_codec="q8"), IMAGES),
        (VISION, Variant("sign1", small_codec="rht:bits=4"), IMAGES),
        (TEXT, Variant("sign1", 0), []),
        (TEXT, Variant(bench.TOPK, 1), []),
        (TEXT, Variant("sign1", 3), ["position"]),
        (TEXT, Variant("sign1", 5), ["position"]),
        (TEXT, Variant("sign1", 9), ["position", *ATTENTION]),
        (TEXT, Variant(bench.TOPK, with_output_layer=True), ["position", "head.weight"]),
    ],
    ids=lambda each: str(each) if isinstance(each, Variant) else None,
)
def test_matrices_with_a_finer_codec_are_those_of_the_variant(
    place: Any, variant: Any, finer: list[str]
) -> None:
    _, parameters = bench.layout(variant, place)
    codecs = {each.name: str(each.codec) for each in parameters}
    assert sorted(bench.finer(parameters, variant)) == sorted(finer)
    small, coarse = (str(config.parse_codec(c)) for c in (variant.small_codec, variant.codec))
    large = {name for name, each in codecs.items() if each != "exact"}
    assert {name: codecs[name] for name in large} == {
        name: small if name in finer else coarse for name in large
    }
    assert len(large) == (3 if place is VISION else 11)


def test_the_grid_has_the_library_as_it_is_and_differs_in_every_variant() -> None:
    for place in bench.GRID:
        every = bench.variants(place)
        assert len(set(every)) == len(every)
        assert every[0] == bench.FP32
        own = bench.layout(Variant("sign1"), place)[1]
        chosen = bench.make_config("sign1", {"momentum": bench.MOMENTA[place.optimizer]})
        model = bench.load_task(place.task).build_model()
        named = list(model.named_parameters())
        assert own == bench.describe_parameters(named, chosen, exchanges=True)
        assert Variant("sign1") in every


@pytest.mark.parametrize("place", [VISION, TEXT], ids=lambda place: place.task)
def test_a_rival_has_the_largest_ratio_with_as_many_bytes(place: Any) -> None:
    of = Variant(bench.TOPK)
    rival = bench.rival(place, of, "it")
    millionths = round(1e6 * float(rival.codec.removeprefix("topk:ratio=")))
    goal, fits = bench.step_bytes(of, place), bench.step_bytes(rival, place)
    too_many = bench.step_bytes(bench.with_ratio(millionths + 1, "it"), place)
    assert fits <= goal < too_many
    # A millionth more is at most one element more of a tile, and payloads are whole multiples of 16
    # bytes. A rank sends each tile once, and its own quarter to three others.
    _, parameters = bench.layout(rival, place)
    tiles = sum(math.ceil(each.num_elements / 4096) for each in parameters)
    assert too_many - fits <= 16 * (tiles + 3 * tiles / 4)


@on_ranks()
def test_a_training_sends_what_its_row_says() -> None:
    job = bench.Job(VISION, Variant("sign1", 2, "q8"), seed=0, steps=3)
    row = bench.train(job)
    assert row["small"] == IMAGES[:1]
    assert job.facts().items() <= row.items()
    # The model is smaller than DDP's first bucket.
    assert row["wire_bytes"] == 3 * bench.step_bytes(job.variant, VISION, num_ranks=2)
    assert config.SMALL_PERCENT == bench.PERCENT


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """trained(n) calls the program, which ends after n trainings; the rows of its file."""
    file = tmp_path / "rows.json"
    words = ["small_matrices.py", "--seeds", "2", "--steps", "3", "--json", str(file)]

    def main(most: int) -> list[dict[str, Any]]:
        def run(body: Any, arguments: Any, num_ranks: int, on_event: Any) -> None:
            for job in arguments[0][:most]:
                on_event({**job.facts(), "final_loss": job.seed + 1.0, "wire_bytes": 1})

        monkeypatch.setattr(bench, "run_ranks", run)
        monkeypatch.setattr(bench, "GRID", (VISION,))
        monkeypatch.setattr(sys, "argv", words)
        bench.main()
        return json.loads(file.read_text())["rows"]

    main.file = file
    return main


def test_an_interrupted_run_goes_on_and_rows_have_the_loss_of_fp32(trained: Any) -> None:
    first = trained(3)
    assert len(first) == 3
    rows = trained(1000)
    assert rows[:3] == first
    assert len(rows) == 2 * len(bench.variants(VISION)) == len({json.dumps(row) for row in rows})
    assert all(row["fp32_loss"] == row["seed"] + 1.0 for row in rows)
    assert trained(1000) == rows


def test_trainings_of_another_version_are_refused(
    trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(1)
    document = json.loads(trained.file.read_text())
    document["environment"]["torch"] = "2.0.0"
    trained.file.write_text(json.dumps(document))
    with pytest.raises(SystemExit):
        trained(1)
    assert "with another torch: delete it" in capsys.readouterr().err
