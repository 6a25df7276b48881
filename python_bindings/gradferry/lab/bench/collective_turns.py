"""`gradferry bench collective` on the ranks: all-reduces that take turns on the same numbers, the
backend's and every codec's.

Inputs are multiples of a power of two, small enough that sums of them are exact in every dtype:
so the result of the backend's is known to the bit. What a codec must give is worked out from
its functions in one process, and compared to the bit as well.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gradferry import _native
from gradferry.core.agreement import most_of_ranks
from gradferry.core.codec_spec import parse_codec
from gradferry.core.config import make_config
from gradferry.core.engine import start_engine
from gradferry.core.options import Options
from gradferry.core.parameters import ParameterLayout
from gradferry.forecast.chunks import all_reduce_bytes
from gradferry.forecast.hook_names import TORCH_DTYPES
from gradferry.lab.bench.hooked_model import phases_of
from gradferry.lab.ranks.launch import Emit, gather_from_ranks

_UNIT = 2.0**-10
_MOST_UNITS = 256  # whose multiples bfloat16, the coarsest dtype, still holds exactly
_SEED = 0


@dataclass(frozen=True)
class AllReduceOptions:
    """What is compared. Names are known to be good."""

    names: tuple[str, ...]  # of TORCH_DTYPES, and codecs
    sizes: tuple[int, ...]  # bytes of the fp32 tensor
    iterations: int
    warmup: int
    check: bool


@dataclass
class AllReduceOutcome:
    """What became of one name at one size, over all ranks."""

    name: str
    num_elements: int
    wrong: int | None  # elements that differ from what they must be; None: not checked
    relative_error: float  # |result - exact mean| / |exact mean|
    wire_bytes: int  # that the busiest rank sends
    wire_measured: bool
    seconds: list[float] = field(default_factory=list)  # of the slowest rank, by iteration
    phase_ms: dict[str, float] = field(default_factory=dict)  # per iteration, on rank 0


class _BackendAllReduce:
    """The backend's: in fp32, or cast to 16 bits and back, as PyTorch's own hooks do."""

    wire_measured = False

    def __init__(self, name: str, num_elements: int) -> None:
        self.name = name
        self._dtype = TORCH_DTYPES[name]
        self._wire_bytes = all_reduce_bytes(
            num_elements, self._dtype.itemsize, dist.get_world_size()
        )

    def run(self, gradient: torch.Tensor) -> None:
        small = gradient.to(self._dtype)  # gradient itself for fp32
        dist.all_reduce(small)
        if small is not gradient:
            gradient.copy_(small)
        gradient.div_(dist.get_world_size())

    def expected(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(gradients)).sum(0).div_(len(gradients))

    def wire_bytes(self) -> int:
        return self._wire_bytes

    def phase_ms(self) -> dict[str, float]:
        return {}


class _CodecAllReduce:
    """A codec's, by an engine for this one tensor."""

    wire_measured = True

    def __init__(self, name: str, num_elements: int) -> None:
        self.name = name
        config = make_config(Options(name, seed=_SEED))
        codec = parse_codec(name)
        residuals = config.residuals_of(codec) if dist.get_world_size() > 1 else (False, False)
        self._layout = ParameterLayout(
            name="gradient",
            shape=(num_elements,),
            strides=(1,),
            dtype=torch.float32,
            num_elements=num_elements,
            codec=codec,
            warmup=codec,
            residuals=residuals,
        )
        group = dist.group.WORLD
        assert group is not None
        nonces = gather_from_ranks({"nonce": uuid.uuid4().hex})
        self._engine = start_engine(config, [self._layout], group, str(nonces[0]["nonce"]))

    def run(self, gradient: torch.Tensor) -> None:
        self._engine.all_reduce(gradient)

    def expected(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(gradients) == 1:  # nothing is exchanged
            return gradients[0]
        return _native.compressed_mean(
            list(gradients),
            str(self._layout.codec),
            seed=_SEED,
            worker_residual=self._layout.residuals[0],
            owner_residual=self._layout.residuals[1],
        )

    def wire_bytes(self) -> int:
        return int(self._engine.stats()["wire_bytes"])

    def phase_ms(self) -> dict[str, float]:
        return phases_of(self._engine.stats())


_AllReduce = _BackendAllReduce | _CodecAllReduce


def compare_all_reduces(emit: Emit, options: AllReduceOptions) -> list[AllReduceOutcome]:
    """Runs on every rank; the outcomes are those of all. Emits what it is doing, as text."""
    outcomes = []
    for size in options.sizes:
        emit(f"{size:,} bytes")
        outcomes += _compare(options, size // 4)
    return outcomes


def _compare(options: AllReduceOptions, num_elements: int) -> list[AllReduceOutcome]:
    gradients = [_gradient(rank, num_elements) for rank in range(dist.get_world_size())]
    mine = gradients[dist.get_rank()]
    buffer = torch.empty_like(mine)
    entries = []
    for name in options.names:
        kind: Callable[[str, int], _AllReduce]
        kind = _BackendAllReduce if name in TORCH_DTYPES else _CodecAllReduce
        all_reduce = kind(name, num_elements)
        entries.append((all_reduce, _first_run(all_reduce, buffer, gradients, options.check)))
    for all_reduce, _ in entries:
        for _ in range(options.warmup):
            _timed(all_reduce, buffer, mine)
    before = [all_reduce.phase_ms() for all_reduce, _ in entries]
    turns = list(entries)
    for _ in range(options.iterations):
        for all_reduce, outcome in turns:
            outcome.seconds.append(_timed(all_reduce, buffer, mine))
        turns.reverse()
    for (all_reduce, outcome), earlier in zip(entries, before, strict=True):
        outcome.seconds = most_of_ranks(outcome.seconds)
        for key, total in all_reduce.phase_ms().items():
            outcome.phase_ms[key] = (total - earlier[key]) / options.iterations
    return [outcome for _, outcome in entries]


def _first_run(
    all_reduce: _AllReduce, buffer: torch.Tensor, gradients: Sequence[torch.Tensor], check: bool
) -> AllReduceOutcome:
    """Runs once on fresh state and compares the result with what it must be."""
    before = all_reduce.wire_bytes() if all_reduce.wire_measured else 0
    buffer.copy_(gradients[dist.get_rank()])
    all_reduce.run(buffer)
    wrong = 0
    if check:
        wrong = int((_bits(buffer) != _bits(all_reduce.expected(gradients))).sum())
    exact = torch.stack(list(gradients)).double().mean(0)
    error = float((buffer.double() - exact).norm() / exact.norm()) if exact.any() else 0.0
    facts = torch.tensor([wrong, all_reduce.wire_bytes() - before], dtype=torch.int64)
    dist.all_reduce(facts, dist.ReduceOp.MAX)
    return AllReduceOutcome(
        name=all_reduce.name,
        num_elements=buffer.numel(),
        wrong=int(facts[0]) if check else None,
        relative_error=error,
        wire_bytes=int(facts[1]),
        wire_measured=all_reduce.wire_measured,
    )


def _timed(all_reduce: _AllReduce, buffer: torch.Tensor, gradient: torch.Tensor) -> float:
    buffer.copy_(gradient)
    dist.barrier()
    started = time.perf_counter()
    all_reduce.run(buffer)
    return time.perf_counter() - started


def _gradient(rank: int, num_elements: int) -> torch.Tensor:
    """Gaussian numbers on a grid, so coarse that sums over ranks are exact in every dtype."""
    most = _MOST_UNITS // dist.get_world_size()
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(rank))
    values.mul_(most / 4).round_().clamp_(-most, most).mul_(_UNIT)
    return values.add_(0.0)  # so that no zero has a sign


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)
