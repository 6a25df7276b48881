"""`gradferry bench collective` on the ranks: all-reduces that take turns on the same numbers, the
backend's and every codec's.

Inputs are multiples of a power of two, small enough that their sums are exact in every dtype, so
the result of the backend's all-reduce is known to the bit. The expected result of a codec is
computed with its functions in one process, and also compared to the bit.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from gradferry import _native
from gradferry.core.agreement import most_of_ranks
from gradferry.core.codec_spec import AUTO, parse_codec
from gradferry.core.config import make_config
from gradferry.core.device import Transport, agreed_transport
from gradferry.core.engine import start_engine
from gradferry.core.nodes import Exchange, Nodes
from gradferry.core.options import Options
from gradferry.core.parameters import ParameterLayout
from gradferry.ddp.trial import SETTLING_STEPS, TRIAL_STEPS
from gradferry.forecast.chunks import (
    all_reduce_bytes,
    payload_sizes,
    ring_exchange,
    wire_bytes_per_step,
)
from gradferry.forecast.clock import Clock, clock_of
from gradferry.forecast.hook_names import TORCH_DTYPES
from gradferry.forecast.verdict import most_precise
from gradferry.lab.bench.collective_choice import candidates_of_auto
from gradferry.lab.bench.hooked_model import phases_of
from gradferry.lab.ranks.exchanges import exchanges_among
from gradferry.lab.ranks.hosts import InterfaceCounter, busiest_host, found_hosts
from gradferry.lab.ranks.launch import Emit, gather_from_ranks
from gradferry.lab.ranks.place import place_of_rank

_UNIT = 2.0**-10
_MOST_UNITS = 256  # whose multiples bfloat16, the coarsest dtype, still holds exactly
_SEED = 0


@dataclass(frozen=True)
class CollectiveOptions:
    """The options. Names are already checked."""

    names: tuple[str, ...]  # of TORCH_DTYPES, codecs, and AUTO
    exchanges: tuple[str, ...]  # of EXCHANGES, for every codec
    sizes: tuple[int, ...]  # bytes of the fp32 tensor
    iterations: int
    warmup: int
    check: bool
    device: str = "cpu"  # or "cuda"

    def entries(self) -> Iterator[tuple[str, str | None]]:
        """Every name with each of its exchanges; None: the backend's own."""
        for name in self.names:
            if name in TORCH_DTYPES:
                yield name, None
            else:
                yield from ((name, exchange) for exchange in self.exchanges)


@dataclass
class CollectiveOutcome:
    """The result of one name, with one exchange, at one size, over all ranks."""

    name: str
    exchange: str | None  # of EXCHANGES; None: the backend's own
    num_elements: int
    wrong: int | None  # elements that differ from what they must be; None: not checked
    relative_error: float  # |result - exact mean| / |exact mean|
    wire_bytes: int  # that the busiest rank sends
    wire_measured: bool
    seconds: list[float] = field(default_factory=list)  # of the slowest rank, by iteration
    # Per iteration, on rank 0; empty on a device, where the host only enqueues.
    phase_ms: dict[str, float] = field(default_factory=dict)
    # In the first run, by the interface of the host that sends most; None: not counted.
    interface_bytes: int | None = None
    interface_formula: int = 0  # what the ranks of that host must send to other hosts
    chosen: str | None = None  # codec and exchange, where the name or the exchange is AUTO


class _BackendCollective:
    """The backend's: in fp32, or cast to 16 bits and back, as PyTorch's own hooks do."""

    wire_measured = False
    exchange = None
    chosen = None

    def __init__(self, name: str, num_elements: int, group: dist.ProcessGroup) -> None:
        self.name = name
        self._group = group
        self._dtype = TORCH_DTYPES[name]
        self._wire_bytes = all_reduce_bytes(
            num_elements, self._dtype.itemsize, dist.get_world_size()
        )

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

    def bytes_to_other_hosts(self, hosts: Sequence[int]) -> list[int]:
        return ring_exchange(self._wire_bytes, hosts)

    def phase_ms(self) -> dict[str, float]:
        return {}


class _CodecCollective:
    """A codec's, by an engine for this one tensor."""

    wire_measured = True

    def __init__(
        self,
        name: str,
        exchange: Exchange,
        num_elements: int,
        group: dist.ProcessGroup,
        transport: Transport,
    ) -> None:
        self.name, self.exchange = name, exchange.name
        self.chosen: str | None = None
        self._nodes = exchange.nodes
        config = transport.adapted(make_config(Options(name, seed=_SEED)))
        self._config = config
        self._on_host = transport.on_host
        codec = parse_codec(name)
        residuals = config.residuals_of(codec) if dist.get_world_size() > 1 else (False, False)
        self._layout = ParameterLayout(
            name="gradient",
            shape=(num_elements,),
            strides=(1,),
            dtype=torch.float32,
            num_elements=num_elements,
            is_complex=False,
            codec=codec,
            warmup=codec,
            residuals=residuals,
        )
        nonces = gather_from_ranks({"nonce": uuid.uuid4().hex})
        self._engine = start_engine(
            config,
            [self._layout],
            group,
            str(nonces[0]["nonce"]),
            transport=transport,
            nodes=self._nodes.members,
        )

    def run(self, gradient: torch.Tensor) -> None:
        self._engine.all_reduce(gradient)

    def expected(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(gradients) == 1:  # nothing is exchanged
            return gradients[0]
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

    def bytes_to_other_hosts(self, hosts: Sequence[int]) -> list[int]:
        return wire_bytes_per_step(
            [self._layout.num_elements],
            payload_sizes([(str(self._layout.codec), self._layout.dtype)]),
            [[0]],
            len(hosts),
            self._config.chunk_bytes_at(len(hosts)),
            equal_scatter=self._config.equal_scatter,
            hosts=hosts,
            nodes=self._nodes,
            dense_bytes=self._config.dense_bytes_between(self._nodes),
        )

    def phase_ms(self) -> dict[str, float]:
        return phases_of(self._engine.stats()) if self._on_host else {}


_Collective = _BackendCollective | _CodecCollective


def _asked(
    name: str,
    exchange: str,
    num_elements: int,
    group: dist.ProcessGroup,
    transport: Transport,
    hosts: Nodes,
) -> _CodecCollective:
    """The all-reduce of a codec, or of AUTO, with one of EXCHANGES."""

    def make(codec: str, used: Exchange) -> _CodecCollective:
        return _CodecCollective(codec, used, num_elements, group, transport)

    among = exchanges_among(exchange, hosts, on_host=transport.on_host)
    codec, used = name, among[-1]  # what attach takes
    if name == AUTO:
        by_name: dict[str | None, Exchange] = {each.name: each for each in among}
        candidates = candidates_of_auto(num_elements, group, transport, among)
        pairs = [(each.hook, by_name.get(each.exchange, used)) for each in candidates]
        if len(pairs) > 1:
            seconds = _trial([make(*pair) for pair in pairs], num_elements, transport)
            measured = [p.took(taken) for p, taken in zip(candidates, seconds, strict=True)]
            codec, used = pairs[measured.index(most_precise(measured))]
        else:
            ((codec, used),) = pairs
    collective = make(codec, used)
    if AUTO in (name, exchange):
        collective.chosen = f"{codec} {used.name}"
    collective.name, collective.exchange = name, exchange
    return collective


def _trial(
    collectives: Sequence[_CodecCollective], num_elements: int, transport: Transport
) -> list[float]:
    """The typical seconds of each, as `codec="auto"` finds them in training. Collective."""
    gradient = _gradient(dist.get_rank(), num_elements).to(transport.device)
    buffer, clock = torch.empty_like(gradient), clock_of(transport.device)
    turns = [
        [_timed(each, buffer, gradient, clock) for each in collectives] for _ in range(TRIAL_STEPS)
    ]
    timed = zip(*turns[SETTLING_STEPS:], strict=True)
    return most_of_ranks([median(seconds) for seconds in timed])


def compare_collectives(emit: Emit, options: CollectiveOptions) -> list[CollectiveOutcome]:
    """Runs on every rank; the outcomes are those of all. Emits what it is doing, as text."""
    place, own_group = place_of_rank(options.device)
    group = own_group or _default_group()
    transport = agreed_transport(place, group)
    interface = InterfaceCounter(found_hosts())
    outcomes = []
    for size in options.sizes:
        emit(f"{size:,} bytes")
        outcomes += _compare(options, size // 4, group, transport, interface)
    return outcomes


def _default_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _compare(
    options: CollectiveOptions,
    num_elements: int,
    group: dist.ProcessGroup,
    transport: Transport,
    interface: InterfaceCounter,
) -> list[CollectiveOutcome]:
    gradients = [_gradient(rank, num_elements) for rank in range(dist.get_world_size())]
    mine = gradients[dist.get_rank()].to(transport.device)
    buffer, clock = torch.empty_like(mine), clock_of(transport.device)
    entries = []
    for name, exchange in options.entries():
        collective: _Collective
        if exchange is None:
            collective = _BackendCollective(name, num_elements, group)
        else:
            collective = _asked(name, exchange, num_elements, group, transport, interface.hosts)
        outcome = _first_run(collective, buffer, gradients, interface, check=options.check)
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
    interface: InterfaceCounter,
    *,
    check: bool,
) -> CollectiveOutcome:
    """Runs once on fresh state and compares the result with what it must be."""
    before = collective.wire_bytes() if collective.wire_measured else 0
    buffer.copy_(gradients[dist.get_rank()])
    interface.begin()
    collective.run(buffer)
    result = buffer.cpu()
    sent = interface.end()
    wrong = 0
    if check:
        wrong = int((_bits(result) != _bits(collective.expected(gradients))).sum())
    exact = torch.zeros_like(gradients[0], dtype=torch.float64)
    for gradient in gradients:  # not stacked: all ranks of a machine do this at once
        exact += gradient.double() / len(gradients)
    error = float((result.double() - exact).norm() / exact.norm()) if exact.any() else 0.0
    facts = torch.tensor([wrong, collective.wire_bytes() - before], dtype=torch.int64)
    dist.all_reduce(facts, dist.ReduceOp.MAX)
    hosts = interface.hosts
    host, formula = busiest_host(hosts, collective.bytes_to_other_hosts(hosts.of_rank))
    counted = gather_from_ranks({"sent": sent})
    return CollectiveOutcome(
        name=collective.name,
        exchange=collective.exchange,
        chosen=collective.chosen,
        num_elements=buffer.numel(),
        wrong=int(facts[0]) if check else None,
        relative_error=error,
        wire_bytes=int(facts[1]),
        wire_measured=collective.wire_measured,
        interface_bytes=counted[hosts.members[host][0]]["sent"],
        interface_formula=formula,
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
