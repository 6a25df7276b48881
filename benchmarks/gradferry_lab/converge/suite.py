"""The trainings of `gradferry converge` and their bands: tasks, contestants, seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gradferry.core.names import closest
from gradferry.errors import ConfigError

from gradferry_lab.workloads.optimizers import SGD_MOMENTUM
from gradferry_lab.workloads.parallel import DDP, FSDP

NUM_RANKS = 4
RULER = "torch:fp32"  # the baseline of all comparisons
DENSE = "dense"
MOMENTUM = "momentum"
EXACT = "exact"
_WARMUP_SHARE = 0.25  # of the steps: OneBitAdam learns its variance meanwhile
ADAMW_MOMENTUM = 0.8  # in MOMENTUM; docs/results/convergence.md has what others gave
_TOPK = "topk:ratio=0.01"
_COARSE_GAPS = {"sign1": 1e-6, _TOPK: 1e-6}  # to the optimum
_GAPS = {"q8": 1e-9, "q4": 1e-9, "rht:bits=4": 1e-9, **_COARSE_GAPS}


@dataclass(frozen=True)
class Near:
    """The excess of the mean loss is at most `floor`, or some standard deviations if more.

    ratio: and the whole training sends so many times fewer bytes than the baseline's.
    """

    floor: float
    ratio: float = 0.0


@dataclass(frozen=True)
class Reaches:
    """The mean gap to the optimum is at most `gap`."""

    gap: float


@dataclass(frozen=True)
class Misses:
    """A negative control: the gap must stay above `gap`, otherwise the task proves nothing."""

    gap: float


Demand = Near | Reaches | Misses


@dataclass(frozen=True)
class Contestant:
    """A codec with an optimizer and a mode of error feedback.

    Attributes:
        optimizer: of OPTIMIZERS.
        codec: a codec string, or one of PyTorch's hooks.
        mode: DENSE for PyTorch's hooks, MOMENTUM, or the `error_feedback` of `attach`. FSDP of
            sharded models: `codec` is then the whole name of the hook.
        demand: None: the result is reported, not judged.
        warmup: codec of the first quarter of the steps, in MOMENTUM; None: there is no warm-up.
            OneBitAdam, which learns its variance meanwhile, has one.
        momentum: of the hook, in MOMENTUM.
    """

    optimizer: str
    codec: str
    mode: str
    demand: Demand | None = None
    warmup: str | None = None
    momentum: float = SGD_MOMENTUM

    def facts(self) -> dict[str, str | float | None]:
        """Keys of a row that tell its contestant from all others of a task."""
        return {
            "optimizer": self.optimizer,
            "codec": self.codec,
            "mode": self.mode,
            "momentum": self.momentum if self.mode == MOMENTUM else None,
            "warmup": self.warmup,
        }

    @property
    def parallel(self) -> str:
        """For `workloads.training.train`."""
        return FSDP if self.mode == FSDP else DDP

    def hook(self, steps: int) -> str:
        """Name of the hook, for `workloads.training.train`."""
        if self.mode == DENSE or self.parallel != DDP:
            return self.codec
        if self.mode != MOMENTUM:
            return f"{self.codec}+error_feedback={self.mode}"
        name = f"{self.codec}+momentum={self.momentum}"
        if self.warmup is None:
            return name
        name += f"+warmup_steps={max(1, round(_WARMUP_SHARE * steps))}"
        return name if self.warmup == EXACT else f"{name}+warmup={self.warmup}"


@dataclass(frozen=True)
class Contest:
    """Contestants that train one task; the first one is the baseline of the others."""

    task: str
    steps: int
    cost: float  # core seconds per step, about
    contestants: tuple[Contestant, ...]
    ruler_seeds: int
    seeds: int
    num_ranks: int = NUM_RANKS


@dataclass(frozen=True)
class Training:
    """One training. Two equal ones end with the same parameters."""

    suite: str
    task: str
    contestant: Contestant
    seed: int
    steps: int
    num_ranks: int
    cost: float
    device: str = "cpu"

    def facts(self) -> dict[str, str | float | None]:
        """Keys of its row that tell it from all other trainings."""
        size: dict[str, str | int] = {
            "seed": self.seed,
            "steps": self.steps,
            "ranks": self.num_ranks,
        }
        if self.device != "cpu":  # whose rounding is another
            size["device"] = self.device
        return {"suite": self.suite, "task": self.task, **self.contestant.facts(), **size}

    @property
    def title(self) -> str:
        """A name for progress and messages."""
        one = self.contestant
        facts = (str(value) for value in one.facts().values() if value is not None)
        return f"{self.task} {' '.join(facts)} seed {self.seed}"


@dataclass(frozen=True)
class Suite:
    """All contests of a run. `sigmas`: least width of a band, in standard deviations."""

    name: str
    contests: tuple[Contest, ...]
    sigmas: float

    def trainings(self, device: str = "cpu") -> Iterator[Training]:
        """Every training of every contest."""
        for contest in self.contests:
            for one in contest.contestants:
                seeds = contest.ruler_seeds if one.codec == RULER else contest.seeds
                for seed in range(seeds):
                    yield Training(
                        suite=self.name,
                        task=contest.task,
                        contestant=one,
                        seed=seed,
                        steps=contest.steps,
                        num_ranks=contest.num_ranks,
                        cost=contest.steps * contest.cost,
                        device=device,
                    )


def _of_gradients(optimizer: str, floor: float) -> tuple[Contestant, ...]:
    """What is not in momentum mode."""
    near = Near(floor)
    return (
        Contestant(optimizer, RULER, DENSE),
        Contestant(optimizer, "torch:bf16", DENSE),
        Contestant(optimizer, "q8", "owner", near),
        Contestant(optimizer, "q4", "both", near),
        Contestant(optimizer, "rht:bits=4", "both", near),
        Contestant(optimizer, "rht:bits=3", "both"),
        Contestant(optimizer, "sign1", "both"),
        Contestant(optimizer, _TOPK, "both"),
    )


def _adam(floor: float, sign1: float, topk: float) -> tuple[Contestant, ...]:
    return (
        *_of_gradients("AdamW", floor),
        Contestant("OneBitAdam", "sign1", MOMENTUM, Near(sign1), EXACT),
        Contestant("OneBitAdam", _TOPK, MOMENTUM, Near(topk), EXACT),
    )


def _sgd(floor: float, topk: float) -> tuple[Contestant, ...]:
    return (
        *_of_gradients("SGD", floor),
        Contestant("SGD", "sign1", MOMENTUM),
        Contestant("SGD", _TOPK, MOMENTUM, Near(topk)),
    )


def _whole_run(sign1: Demand | None) -> tuple[Contestant, ...]:
    """AdamW in momentum mode from the first step to the last; `exact` is a ruler for the others."""
    demands: Mapping[str, Demand | None] = {
        "exact": None,
        "rht:bits=2": Near(0.01, ratio=12),
        "sign1": sign1,
        "topk:ratio=0.04": Near(0.02),
        _TOPK: None,
    }
    return tuple(
        Contestant("AdamW", codec, MOMENTUM, demand, momentum=ADAMW_MOMENTUM)
        for codec, demand in demands.items()
    )


def _warmed_up(sign1: Demand, topk: Demand) -> tuple[Contestant, ...]:
    """What begins with a warm-up, with one that is compressed."""
    return tuple(
        Contestant("OneBitAdam", codec, MOMENTUM, demand if warmup == "q8" else None, warmup)
        for codec, demand in (("sign1", sign1), (_TOPK, topk))
        for warmup in ("q8", "q4")
    )


def _convex(gaps: Mapping[str, float]) -> tuple[Contestant, ...]:
    """Each codec with error feedback, which must reach the gap, and without, which must miss it."""
    return (
        Contestant("SGD", RULER, DENSE),
        Contestant("SGD", "torch:bf16", DENSE),
        *(
            Contestant("SGD", codec, mode, demand)
            for codec, gap in gaps.items()
            for mode, demand in (("none", Misses(gap)), ("both", Reaches(gap)))
        ),
    )


def _muon() -> tuple[Contestant, ...]:
    """Muon with its own momentum, and with the hook's instead."""
    near = Near(0.005)
    return (
        Contestant("Muon", RULER, DENSE),
        Contestant("Muon", "q8", "owner", near),
        Contestant("Muon", "q4", "both", near),
        Contestant("Muon", "rht:bits=4", "both", near),
        Contestant("Muon", "rht:bits=3", "both"),
        Contestant("Muon", "rht:bits=2", "both"),
        Contestant("Muon", "rht:bits=2", "worker"),
        Contestant("Muon", "rht:bits=2", "none"),
        Contestant("Muon", "sign1", "both"),
        *(
            Contestant("Muon", codec, MOMENTUM, momentum=0.5)
            for codec in ("exact", "q4", "rht:bits=4", "rht:bits=2")
        ),
    )


def _judged(contest: Contest) -> Contest:
    """The contest without contestants that are not judged."""
    ruler, *others = contest.contestants
    return replace(contest, contestants=(ruler, *(one for one in others if one.demand)))


_TEXT_ADAM, _VISION_ADAM = (
    (
        *_adam(0.003, 0.02, 0.06),
        *_whole_run(sign1),
        *_warmed_up(Near(0.02, ratio=9), Near(0.06, ratio=10)),
    )
    for sign1 in (Near(0.01, ratio=15), Near(0.02, ratio=20))
)
_SGD = _sgd(0.003, 0.06)

FULL = Suite(
    name="full",
    contests=(
        Contest("tiny_text", 450, 0.08, _TEXT_ADAM, ruler_seeds=5, seeds=3),
        Contest("tiny_text", 450, 0.08, _SGD, ruler_seeds=5, seeds=3),
        Contest("tiny_text", 450, 0.2, _muon(), ruler_seeds=5, seeds=3),
        Contest("tiny_vision", 400, 0.02, _VISION_ADAM, ruler_seeds=5, seeds=5),
        Contest("tiny_vision", 400, 0.02, _SGD, ruler_seeds=5, seeds=3),
        Contest("digits", 300, 0.014, _adam(0.003, 0.02, 0.06), ruler_seeds=5, seeds=3),
        Contest("digits", 300, 0.014, _sgd(0.003, 0.06), ruler_seeds=5, seeds=3),
        Contest("convex", 2000, 0.012, _convex(_GAPS), ruler_seeds=5, seeds=3),
    ),
    sigmas=2,
)

# Shorter, with one or two seeds per codec: the bands allow for the scatter of a single training.
QUICK = Suite(
    name="quick",
    contests=(
        _judged(Contest("tiny_text", 150, 0.08, _adam(0.01, 0.04, 0.12), ruler_seeds=3, seeds=1)),
        _judged(Contest("tiny_vision", 150, 0.02, _sgd(0.02, 0.3), ruler_seeds=3, seeds=1)),
        _judged(Contest("digits", 200, 0.014, _adam(0.1, 0.3, 1.0), ruler_seeds=3, seeds=2)),
        _judged(Contest("convex", 1500, 0.012, _convex(_COARSE_GAPS), ruler_seeds=1, seeds=1)),
    ),
    sigmas=3,
)

_NEAR_FP32 = Near(0.003)
# One replica over all ranks: its reduce-scatter and its gathers, each alone and together.
_FSDP: Mapping[str, Demand | None] = {
    RULER: None,
    "off+all_gather=q8": _NEAR_FP32,
    "q4": _NEAR_FP32,
    "off+all_gather=q4": None,
    "q4+all_gather=off": _NEAR_FP32,
    "off+all_gather=bf16": None,
    "torch:bf16": None,
    "off+all_gather=q8+param_dtype=bf16": None,
    "q4+all_gather=q4": None,
}
_SHARDED = tuple(Contestant("AdamW", hook, FSDP, demand) for hook, demand in _FSDP.items())
SHARDED = Suite(
    name="sharded",
    contests=(Contest("tiny_text", 400, 0.2, _SHARDED, ruler_seeds=3, seeds=3),),
    sigmas=2,
)


# Larger models than the bands were found with: reported, not judged.
_AT_SCALE = (
    Contestant("AdamW", RULER, DENSE),
    Contestant("AdamW", "q4", "both"),
    *(
        Contestant("AdamW", codec, MOMENTUM, momentum=ADAMW_MOMENTUM)
        for codec in ("rht:bits=2", "sign1", "topk:ratio=0.04")
    ),
)
LARGE = Suite(
    name="large",
    contests=(
        Contest("text_10m", 2000, 3.6, _AT_SCALE, ruler_seeds=2, seeds=2),
        Contest("gpt2_small", 300, 80.0, _AT_SCALE[:-1], ruler_seeds=1, seeds=1, num_ranks=2),
    ),
    sigmas=2,
)

SUITES = {suite.name: suite for suite in (QUICK, FULL, SHARDED, LARGE)}


def select(
    suite: Suite,
    tasks: Sequence[str] | None = None,
    codecs: Sequence[str] | None = None,
    optimizers: Sequence[str] | None = None,
) -> Suite:
    """The part of a suite with these tasks, codecs and optimizers; None: all.

    A contest keeps its baseline. Raises ConfigError for names that the suite does not have.
    """
    everyone = [one for contest in suite.contests for one in contest.contestants]
    _check("--tasks", tasks, [contest.task for contest in suite.contests])
    _check("--codecs", codecs, [one.codec for one in everyone])
    _check("--optimizers", optimizers, [one.optimizer for one in everyone])
    contests = []
    for contest in suite.contests:
        kept = tuple(
            one
            for one in contest.contestants
            if (codecs is None or one.codec in codecs)
            and (optimizers is None or one.optimizer in optimizers)
        )
        if kept and (tasks is None or contest.task in tasks):
            rulers = tuple(one for one in contest.contestants[:1] if one not in kept)
            contests.append(replace(contest, contestants=(*rulers, *kept)))
    return replace(suite, contests=tuple(contests))


def _check(option: str, wanted: Sequence[str] | None, known: Sequence[str]) -> None:
    for value in wanted or ():
        if value not in known:
            choices = list(dict.fromkeys(known))
            raise ConfigError(
                f"{option}: {value!r} is not in this suite, which has {', '.join(choices)}"
                f"{closest(value, choices)}"
            )
