"""`gradferry bench collective` on the ranks: all-reduces of the same numbers that take turns, the
backend's and every codec's.

Inputs are multiples of a power of two, small enough that their sums are exact in every dtype, so
the result of the backend's own is known to the bit. The expected result of a codec is computed with
its functions in one process, and also compared to the bit.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from gradferry import _native
from gradferry.core.agreement import most_of_ranks
from gradferry.core.config import make_config
from gradferry.core.device import Transport, agreed_transport
from gradferry.core.engine import start_engine
from gradferry.core.nodes import AUTO, Nodes
from gradferry.core.parameters import describe_parameters
from gradferry.ddp.trial import Clock
from gradferry.diagnosis import TORCH_DTYPES

from gradferry_lab.ranks.exchanges import exchange_among, with_exchanges
from gradferry_lab.ranks.hosts import found_hosts
from gradferry_lab.ranks.launch import Emit, default_group, gather_from_ranks
from gradferry_lab.ranks.place import place_of_rank
from gradferry_lab.workloads.hooks import all_reduce_bytes, phases_of

_UNIT = 2.0**-10
_MOST_UNITS = 256  # whose multiples bfloat16, the coarsest dtype, still holds exactly
_SEED = 0


@dataclass(frozen=True)
class CollectiveOptions:
    """The options. Names are already checked."""

    names: tuple[str, ...]  # of TORCH_DTYPES, and codecs
    exchanges: tuple[str, ...]  # of EXCHANGES, for every codec
    sizes: tuple[int, ...]  # bytes of the fp32 tensor
    iterations: int
    warmup: int
    check: bool
    device: str = "cpu"  # or "cuda"


@dataclass
class CollectiveOutcome:
    """The result of one name, with one exchange, at one size, over all ranks."""

    name: str
    exchange: str | None  # of EXCHANGES; None: the backend's own
    num_elements: int  # of the whole tensor
    wrong: int | None  # elements that differ from what they must be; None: not checked
    relative_error: float  # |result - exact mean| / |exact mean|
    wire_bytes: int  # that the busiest rank sends
    wire_measured: bool
    seconds: list[float] = field(default_factory=list)  # of the slowest rank, by iteration
    # Per iteration, on rank 0; empty on a device, where the host only enqueues.
    phase_ms: dict[str, float] = field(default_factory=dict)
    chosen: str | None = None  # codec and exchange, where the exchange is AUTO


class _BackendCollective:
    """The backend's: in fp32, or cast to 16 bits and back, as PyTorch's own hooks do.

    Like a codec's it works in place.
    """

    wire_measured = False
    exchange = None
    chosen = None

    def __init__(self, name: str, num_elements: int, group: dist.ProcessGroup) -> None:
        self.name, self._group, self._dtype = name, group, TORCH_DTYPES[name]
        world_size = dist.get_world_size()
        self._wire_bytes = all_reduce_bytes(num_elements, self._dtype.itemsize, world_size)

    def run(self, gradient: torch.Tensor) -> None:
        small = gradient.to(self._dtype)  # gradient itself for fp32
        dist.all_reduce(small, group=self._group)
        if small is not gradient:
            gradient.copy_(small)
        gradient.div_(dist.get_world_size())

    def expected(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(gradients)).sum(0).div_(len(gradients))

    def wire_bytes(self) -> int:
        return self._wire_bytes

    def phase_ms(self) -> dict[str, float]:
        return {}


class _CodecCollective:
    """A codec's, by an engine for this one tensor."""

    wire_measured = True

    def __init__(
        self,
        name: str,
        exchange: str,
        gradient: torch.Tensor,
        group: dist.ProcessGroup,
        transport: Transport,
        hosts: Nodes,
    ) -> None:
        used = exchange_among(exchange, hosts, on_host=transport.on_host)
        self.name, self.exchange = name, exchange
        self.chosen = f"{name} {used.name}" if exchange == AUTO else None
        self._nodes = used.nodes
        self._on_host = transport.on_host
        options = {"seed": _SEED, "rules": [{"codec": name}]}  # however short it is
        config = transport.adapted(make_config(name, options))
        (self._layout,) = layouts = describe_parameters(
            [("gradient", gradient)], config, exchanges=dist.get_world_size() > 1
        )
        nonce = str(gather_from_ranks({"nonce": uuid.uuid4().hex})[0]["nonce"])
        self._engine = start_engine(
            config, layouts, group, nonce, transport=transport, nodes=self._nodes.members
        )

    def run(self, gradient: torch.Tensor) -> None:
        self._engine.exchange(gradient)

    def expected(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(gradients) == 1:  # nothing is exchanged
            return gradients[0]
        # To the bit: a tolerance that is wide enough for a lossy codec would hide a wrong tile.
        return _native.compressed_mean(
            [self._sum(gradients, ranks) for ranks in self._nodes.members],
            str(self._layout.codec),
            seed=_SEED,
            worker_residual=self._layout.residuals[0],
            owner_residual=self._layout.residuals[1],
        )

    def _sum(self, gradients: Sequence[torch.Tensor], ranks: Sequence[int]) -> torch.Tensor:
        """A node's part of the mean over nodes; of a single rank its gradient."""
        if self._nodes.is_flat:
            return gradients[ranks[0]]
        total = functools.reduce(torch.add, (gradients[rank] for rank in ranks))
        return total * (len(self._nodes.members) / self._nodes.world_size)

    def wire_bytes(self) -> int:
        return int(self._engine.stats()["wire_bytes"])

    def phase_ms(self) -> dict[str, float]:
        return phases_of(self._engine.stats()) if self._on_host else {}


_Collective = _BackendCollective | _CodecCollective


def compare_collectives(emit: Emit, options: CollectiveOptions) -> list[CollectiveOutcome]:
    """Runs on every rank; the outcomes are those of all. Emits what it is doing, as text."""
    place, own_group = place_of_rank(options.device)
    group = own_group or default_group()
    transport = agreed_transport(place, group)
    hosts = found_hosts()
    outcomes = []
    for size in options.sizes:
        emit(f"{size:,} bytes")
        outcomes += _compare(options, size // 4, group, transport, hosts)
    return outcomes


def _compare(
    options: CollectiveOptions,
    num_elements: int,
    group: dist.ProcessGroup,
    transport: Transport,
    hosts: Nodes,
) -> list[CollectiveOutcome]:
    gradients = [_gradient(rank, num_elements) for rank in range(dist.get_world_size())]
    mine = gradients[dist.get_rank()].to(transport.device)
    buffer, clock = torch.empty_like(mine), Clock(transport.device)
    entries = []
    for name, exchange in with_exchanges(
        options.names, options.exchanges, TORCH_DTYPES.__contains__
    ):
        collective: _Collective
        if exchange is None:
            collective = _BackendCollective(name, num_elements, group)
        else:
            collective = _CodecCollective(name, exchange, buffer, group, transport, hosts)
        outcome = _first_run(collective, buffer, gradients, check=options.check)
        entries.append((collective, outcome))
    for collective, _ in entries:
        for _ in range(options.warmup):
            _timed(collective, buffer, mine, clock)
    before = [collective.phase_ms() for collective, _ in entries]
    turns = list(entries)
    for _ in range(options.iterations):
        for collective, outcome in turns:
            outcome.seconds.append(_timed(collective, buffer, mine, clock))
        turns.reverse()
    for (collective, outcome), earlier in zip(entries, before, strict=True):
        outcome.seconds = most_of_ranks(outcome.seconds)
        for key, total in collective.phase_ms().items():
            outcome.phase_ms[key] = (total - earlier[key]) / options.iterations
    return [outcome for _, outcome in entries]


def _first_run(
    collective: _Collective,
    buffer: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    *,
    check: bool,
) -> CollectiveOutcome:
    """Runs once on fresh state and compares the result with what it must be."""
    before = collective.wire_bytes() if collective.wire_measured else 0
    buffer.copy_(gradients[dist.get_rank()])
    collective.run(buffer)
    result = buffer.cpu()
    exact = torch.zeros_like(result, dtype=torch.float64)
    for gradient in gradients:  # not stacked: all ranks of a machine do this at once
        exact += gradient.double() / len(gradients)
    here = {
        "wire": collective.wire_bytes() - before,
        "wrong": int((_bits(result) != _bits(collective.expected(gradients))).sum())
        if check
        else 0,
        "error": float((result.double() - exact).norm()),
    }
    of_ranks = gather_from_ranks(here)
    norm = float(exact.norm())
    return CollectiveOutcome(
        name=collective.name,
        exchange=collective.exchange,
        chosen=collective.chosen,
        num_elements=buffer.numel(),
        wrong=max(record["wrong"] for record in of_ranks) if check else None,
        relative_error=max(record["error"] for record in of_ranks) / norm if norm else 0.0,
        wire_bytes=max(record["wire"] for record in of_ranks),
        wire_measured=collective.wire_measured,
    )


def _timed(
    collective: _Collective, buffer: torch.Tensor, gradient: torch.Tensor, clock: Clock
) -> float:
    buffer.copy_(gradient)
    clock.wait()
    dist.barrier()
    started = time.perf_counter()
    collective.run(buffer)
    clock.wait()
    return time.perf_counter() - started


def _gradient(rank: int, num_elements: int) -> torch.Tensor:
    """Gaussian numbers on a grid, so coarse that sums over ranks are exact in every dtype."""
    most = _MOST_UNITS // dist.get_world_size()
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(rank))
    values.mul_(most / 4).round_().clamp_(-most, most).mul_(_UNIT)
    return values.add_(0.0)  # so that no zero has a sign


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)
