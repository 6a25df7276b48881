"""What do the smallest matrices need under a coarse codec? Trainings that vary what travels with a
finer one, in momentum mode, against fp32 with the same seed.

    python benchmarks/small_matrices.py --json benchmarks/results/small_matrices.json

The library sends the smallest matrices, together at most SMALL_PERCENT of all elements, with
SMALL_CODEC. Under sign1 and topk:ratio=0.04 both vary here: the share, in steps at which a model
has another matrix among them, and the codec at the library's share. On text, where the output layer
is not among them, it joins. topk has a rival that sends as many bytes with a larger ratio for all
matrices. `GRID` and `variants` have the list: images with AdamW and SGD, text with AdamW.

Four ranks train one after the other what is missing in the file, which has every training at once
when it is done: an interrupted run goes on where it stopped. About an hour on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from gradferry.core import config
from gradferry.core.codec_spec import parse_codec
from gradferry.core.config import Config, Rule, make_config
from gradferry.core.engine import planned_bytes
from gradferry.core.nodes import flat
from gradferry.core.parameters import ParameterLayout, describe_parameters
from gradferry.errors import ConfigError
from gradferry_lab.converge.suite import (
    ADAMW_MOMENTUM,
    DENSE,
    FULL,
    MOMENTUM,
    NUM_RANKS,
    RULER,
    Contestant,
)
from gradferry_lab.flags import add_json
from gradferry_lab.output.json_file import (
    environment,
    finite,
    occasion,
    read_json,
    require_replaceable,
    write_json,
)
from gradferry_lab.ranks.launch import Emit, run_ranks
from gradferry_lab.workloads import load_task
from gradferry_lab.workloads.optimizers import SGD_MOMENTUM
from gradferry_lab.workloads.training import Training

RESULTS_OF = "small matrices"
PERCENT, SMALL = config.SMALL_PERCENT, str(config.SMALL_CODEC)  # the library's
MOMENTA = {"AdamW": ADAMW_MOMENTUM, "SGD": SGD_MOMENTUM}
TOPK, COARSER_TOPK = "topk:ratio=0.04", "topk:ratio=0.01"
LARGEST_RATIO = 250_000  # of topk, whose ratios are whole millionths

_task = functools.cache(load_task)  # reads files


@dataclass(frozen=True)
class Place:
    """What is trained: a task with an optimizer.

    Attributes:
        percents: shares at which other matrices are among the smallest.
        small_codecs: what the smallest have at the library's share, beside the library's.
        alone: codecs that are trained with the library's rule and without, and no other way.
        output_layer: its name, where it is not among the smallest.
    """

    task: str
    optimizer: str
    percents: tuple[int, ...]
    small_codecs: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    output_layer: str | None = None

    @property
    def steps(self) -> int:
        """The number in `gradferry converge --full`."""
        return next(one.steps for one in FULL.contests if one.task == self.task)


CODECS = ("sign1", TOPK)
# In both models a share of 1 % takes nothing, and 5 % take what 3 % take. On images 2 % take the
# second convolution, 3 % the last layer, too. On text 3 % take the positions.
GRID = (
    Place("tiny_vision", "AdamW", (0, 2, 3), ("q8",), ("rht:bits=2", COARSER_TOPK)),
    Place("tiny_vision", "SGD", (0, 3)),
    Place("tiny_text", "AdamW", (0, 3), output_layer="head.weight"),
)


@dataclass(frozen=True)
class Variant:
    """What travels with which codec.

    Attributes:
        codec: of all matrices that no other field names.
        percent: the smallest matrices, together at most this share, have `small_codec`.
        with_output_layer: and so has the output layer.
        bytes_of: of a rival: what has as many bytes, a codec and what is finer under it. None: it
            is no rival.
    """

    codec: str
    percent: int = PERCENT
    small_codec: str = SMALL
    with_output_layer: bool = False
    bytes_of: str | None = None


FP32 = Variant(RULER, percent=0)


def variants(place: Place) -> list[Variant]:
    """What is trained there, the baseline first."""
    found = [FP32]
    for codec in CODECS:
        found += [Variant(codec, percent) for percent in place.percents]
        found += [Variant(codec, small_codec=small) for small in place.small_codecs]
        if place.output_layer:
            found.append(Variant(codec, with_output_layer=True))
    found += [Variant(codec, percent) for codec in place.alone for percent in (0, PERCENT)]
    if place.output_layer:
        whole = Variant(TOPK, with_output_layer=True)
        return [*found, rival(place, whole, "smallest and output layer")]
    topks = [TOPK, *(codec for codec in place.alone if codec == COARSER_TOPK)]
    return [*found, *(rival(place, Variant(codec), "smallest") for codec in topks)]


@contextlib.contextmanager
def sent_as(variant: Variant, place: Place) -> Iterator[None]:
    """The library's rule for the smallest matrices is the variant's meanwhile."""
    small = parse_codec(variant.small_codec)
    rules = config.DEFAULT_RULES
    if variant.with_output_layer:
        rules = (Rule(small, name=str(place.output_layer)), *rules)
    with mock.patch.multiple(
        config, SMALL_PERCENT=variant.percent, SMALL_CODEC=small, DEFAULT_RULES=rules
    ):
        yield


def finer(parameters: Sequence[ParameterLayout], variant: Variant) -> list[str]:
    """The matrices that do not have the variant's codec."""
    small = str(parse_codec(variant.small_codec))
    return [each.name for each in parameters if str(each.codec) == small]


def layout(variant: Variant, place: Place) -> tuple[Config, list[ParameterLayout]]:
    """The configuration, and the codec of every parameter."""
    named = list(_task(place.task).build_model().named_parameters())
    chosen = make_config(variant.codec, {"momentum": MOMENTA[place.optimizer]})
    with sent_as(variant, place):
        return chosen, describe_parameters(named, chosen, exchanges=True)


def step_bytes(variant: Variant, place: Place, num_ranks: int = NUM_RANKS) -> int:
    """Bytes of the rank that sends most, in one step whose gradients are in one bucket."""
    chosen, parameters = layout(variant, place)
    sent = planned_bytes(chosen, parameters, flat(num_ranks), [list(range(len(parameters)))])
    return max(elsewhere for elsewhere, _ in sent)


def with_ratio(millionths: int, bytes_of: str) -> Variant:
    """Every matrix travels with topk at this ratio."""
    return Variant(f"topk:ratio={millionths / 1e6:g}", percent=0, bytes_of=bytes_of)


def rival(place: Place, of: Variant, finer_of_it: str) -> Variant:
    """The largest ratio, the same for all matrices, that sends no more bytes than `of`."""
    most, name = step_bytes(of, place), f"{of.codec}, {finer_of_it}"
    fits, too_many = 1, LARGEST_RATIO
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if step_bytes(with_ratio(middle, name), place) <= most:
            fits = middle
        else:
            too_many = middle
    return with_ratio(fits, name)


@dataclass(frozen=True)
class Job:
    """One training."""

    place: Place
    variant: Variant
    seed: int
    steps: int

    def facts(self) -> dict[str, Any]:
        """Keys of its row that tell it from all others."""
        return {
            "task": self.place.task,
            "optimizer": self.place.optimizer,
            **asdict(self.variant),
            "seed": self.seed,
            "steps": self.steps,
        }


def train_all(emit: Emit, jobs: Sequence[Job]) -> None:
    """Trains one after the other; runs on every rank."""
    warnings.filterwarnings("ignore", message=".*trains worse behind", category=UserWarning)
    for job in jobs:
        emit(train(job))


def train(job: Job) -> dict[str, Any]:
    """The row of a training, without fp32's loss. Runs on every rank."""
    place, variant, task = job.place, job.variant, _task(job.place.task)
    mode, momentum = DENSE if variant == FP32 else MOMENTUM, MOMENTA[place.optimizer]
    one = Contestant(place.optimizer, variant.codec, mode, momentum=momentum)
    hook = one.hook(job.steps)
    with sent_as(variant, place):
        training = Training(task, hook, steps=job.steps, seed=job.seed, optimizer=one.optimizer)
        for _ in range(job.steps):
            training.step()
        run = training.finish()
        small = [] if training.state is None else finer(training.state.parameters, variant)
    return finite(
        {
            **job.facts(),
            "small": small,
            "source": task.source,
            "final_loss": run.final_loss,
            "wire_bytes": run.cumulative_wire_bytes[-1],
        }
    )


def with_baselines(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with fp32's loss of the same seed, where it is there."""
    keys = ("task", "optimizer", "seed")
    base = {
        tuple(row[key] for key in keys): row["final_loss"]
        for row in rows
        if row["codec"] == FP32.codec
    }
    return [{**row, "fp32_loss": base.get(tuple(row[key] for key in keys))} for row in rows]


def finished(path: Path | None) -> tuple[list[dict[str, Any]], str]:
    """Rows of an interrupted run and when it was. Raises ConfigError for another machine's, and
    for results of another command.
    """
    if path is None or not path.exists():
        return [], ""
    require_replaceable(path, RESULTS_OF)
    document = read_json(path)
    for key, here in environment().items():
        if document["environment"].get(key) != here:
            raise ConfigError(f"{path} has trainings with another {key}: delete it, to begin anew")
    return list(document["rows"]), f"{document['environment']['date']}; "


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--steps", type=int, help="default: those of `gradferry converge --full`")
    add_json(parser)
    arguments = parser.parse_args()
    try:
        rows, before = finished(arguments.json)
    except ConfigError as error:
        parser.error(str(error))
    jobs = [
        Job(place, variant, seed, arguments.steps or place.steps)
        for place in GRID
        for seed in range(arguments.seeds)
        for variant in variants(place)
    ]
    known = [row.items() for row in rows]
    missing = [job for job in jobs if not any(job.facts().items() <= row for row in known)]
    print(f"{len(missing)} of {len(jobs)} trainings are missing", flush=True)

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.json is not None:
            now = occasion()
            now["date"] = f"{before}{now['date']}"
            write_json(
                arguments.json,
                with_baselines(rows),
                environment() | now,
                results_of=RESULTS_OF,
            )

    if missing:
        run_ranks(train_all, [missing], NUM_RANKS, keep)


if __name__ == "__main__":
    main()
