"""`gradferry bench collective` on the ranks: all-reduces or reduce-scatters that take turns on the
same numbers, the backend's and every codec's.

Inputs are multiples of a power of two, small enough that their sums are exact in every dtype, so
the result of the backend's own is known to the bit. The expected result of a codec is computed with
its functions in one process, and also compared to the bit.
"""

from __future__ import annotations

import functools
import math
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from gradferry import _native
from gradferry.core.agreement import most_of_ranks
from gradferry.core.codec_spec import parse_codec
from gradferry.core.config import make_config
from gradferry.core.device import Transport, agreed_transport
from gradferry.core.engine import planned_bytes, start_engine
from gradferry.core.nodes import AUTO, Nodes
from gradferry.core.parameters import ParameterLayout
from gradferry.ddp.trial import Clock, clock_of
from gradferry.diagnosis import TORCH_DTYPES
from gradferry.errors import ConfigError
from gradferry.tensor import accumulate, encode
from torch.nn.functional import pad

from gradferry_lab.ranks.exchanges import exchange_among
from gradferry_lab.ranks.hosts import InterfaceCounter, busiest_host, found_hosts
from gradferry_lab.ranks.launch import Emit, gather_from_ranks
from gradferry_lab.ranks.place import place_of_rank
from gradferry_lab.workloads.hooks import all_reduce_bytes, phases_of, ring_exchange

ALL_REDUCE, REDUCE_SCATTER = "all_reduce", "reduce_scatter"
RING_PASSES = {ALL_REDUCE: 2, REDUCE_SCATTER: 1}  # how often a ring sends (W-1)/W of the tensor

_PART_ALIGNMENT = 4  # elements: in a reduce-scatter parts are whole 16 bytes, as in nccl-tests
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
    op: str = ALL_REDUCE  # of RING_PASSES

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
    num_elements: int  # of the whole tensor
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
    chosen: str | None = None  # codec and exchange, where the exchange is AUTO


class _BackendCollective:
    """The backend's: in fp32, or cast to 16 bits and back, as PyTorch's own hooks do.

    Like a codec's it works in place: of the gradient, `part` becomes the mean.
    """

    wire_measured = False
    exchange = None
    chosen = None

    def __init__(self, name: str, op: str, num_elements: int, group: dist.ProcessGroup) -> None:
        self.name, self.op, self.part = name, op, part_of_rank(op, num_elements)
        self._group = group
        self._dtype = TORCH_DTYPES[name]
        self._wire_bytes = ring_bytes(op, num_elements, self._dtype.itemsize, dist.get_world_size())

    def run(self, gradient: torch.Tensor) -> None:
        small = gradient.to(self._dtype)  # gradient itself for fp32
        mean = gradient[self.part]
        if self.op == ALL_REDUCE:
            dist.all_reduce(small, group=self._group)
        else:
            dist.reduce_scatter_tensor(small[self.part], small, group=self._group)
        if small is not gradient:
            mean.copy_(small[self.part])
        mean.div_(dist.get_world_size())

    def expected(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(parts)).sum(0).div_(len(parts))

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
        op: str,
        exchange: str,
        num_elements: int,
        group: dist.ProcessGroup,
        transport: Transport,
        hosts: Nodes,
    ) -> None:
        used = exchange_among(exchange, hosts, on_host=transport.on_host)
        self.name, self.exchange = name, exchange
        self.chosen = f"{name} {used.name}" if exchange == AUTO else None
        self.op, self.part = op, part_of_rank(op, num_elements)
        self._nodes = used.nodes
        # Each as its attach has it by default.
        feedback = "auto" if op == ALL_REDUCE else "none"
        options = {"error_feedback": feedback, "seed": _SEED}
        config = transport.adapted(make_config(name, options))
        self._config = config
        self._on_host = transport.on_host
        codec = parse_codec(name)
        residuals = config.residuals_of(codec) if dist.get_world_size() > 1 else (False, False)
        count = self.part.stop - self.part.start
        self._layout = ParameterLayout(
            name="gradient",
            shape=(count,),
            strides=(1,),
            dtype=torch.float32,
            num_elements=count,
            is_complex=False,
            codec=codec,
            warmup=codec,
            residuals=residuals,
        )
        owners = [None] if op == ALL_REDUCE else range(dist.get_world_size())
        self._parameters = [replace(self._layout, owner=owner) for owner in owners]
        nonces = gather_from_ranks({"nonce": uuid.uuid4().hex})
        self._engine = start_engine(
            config,
            self._parameters,
            group,
            str(nonces[0]["nonce"]),
            transport=transport,
            nodes=self._nodes.members,
            collective=op,
        )

    def run(self, gradient: torch.Tensor) -> None:
        self._engine.all_reduce(gradient)

    def expected(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(parts) == 1:  # nothing is exchanged
            return parts[0]
        if self.op == REDUCE_SCATTER:
            return self._scattered(parts)
        # To the bit: a tolerance that is wide enough for a lossy codec would hide a wrong tile.
        return _native.compressed_mean(
            [self._sum(parts, ranks) for ranks in self._nodes.members],
            str(self._layout.codec),
            seed=_SEED,
            worker_residual=self._layout.residuals[0],
            owner_residual=self._layout.residuals[1],
        )

    def _scattered(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean of this rank's part, whose tiles come after those of the ranks before it: with
        zeros in their place its tiles have the numbers from which `rht` takes its signs.
        """
        codec, count = str(self._layout.codec), self._layout.num_elements
        before = dist.get_rank() * math.ceil(count / _native.TILE_ELEMENTS) * _native.TILE_ELEMENTS
        messages = [encode(pad(part, (before, 0)), codec, seed=_SEED) for part in parts]
        mean = accumulate(messages, codec, shape=(before + count,), dtype=self._layout.dtype)
        return mean[before:]

    def _sum(self, gradients: Sequence[torch.Tensor], ranks: Sequence[int]) -> torch.Tensor:
        """A node's part of the mean over nodes; of a single rank its gradient."""
        if self._nodes.is_flat:
            return gradients[ranks[0]]
        total = functools.reduce(torch.add, (gradients[rank] for rank in ranks))
        return total * (len(self._nodes.members) / self._nodes.world_size)

    def wire_bytes(self) -> int:
        return int(self._engine.stats()["wire_bytes"])

    def bytes_to_other_hosts(self, hosts: Sequence[int]) -> list[int]:
        bucket = range(len(self._parameters))
        sent = planned_bytes(
            self._config,
            self._parameters,
            self._nodes,
            [bucket],
            collective=self.op,
            hosts=hosts,
        )
        return [elsewhere for elsewhere, _ in sent]

    def phase_ms(self) -> dict[str, float]:
        return phases_of(self._engine.stats()) if self._on_host else {}


_Collective = _BackendCollective | _CodecCollective


def ring_bytes(op: str, num_elements: int, item_bytes: int, world_size: int) -> int:
    """Bytes that each rank sends when the tensor is reduced around a ring."""
    return all_reduce_bytes(num_elements, item_bytes, world_size) * RING_PASSES[op] // 2


def elements_of(op: str, size: int, world_size: int) -> int:
    """Elements of the fp32 tensor of a size in bytes; in a reduce-scatter rounded down to equal
    parts of whole 16 bytes, as nccl-tests does. Raises ConfigError when nothing is left.
    """
    if op == ALL_REDUCE:
        return size // 4
    step = world_size * _PART_ALIGNMENT
    if size // 4 < step:
        raise ConfigError(
            f"{size} bytes are too few for --op {op}: each of {world_size} ranks gets a part of at "
            f"least {4 * _PART_ALIGNMENT} bytes; begin with -b {4 * step} or more"
        )
    return size // 4 // step * step


def part_of_rank(op: str, num_elements: int) -> slice:
    """The elements whose mean this rank gets."""
    if op == ALL_REDUCE:
        return slice(0, num_elements)
    count = num_elements // dist.get_world_size()
    first = dist.get_rank() * count
    return slice(first, first + count)


def compare_collectives(emit: Emit, options: CollectiveOptions) -> list[CollectiveOutcome]:
    """Runs on every rank; the outcomes are those of all. Emits what it is doing, as text."""
    place, own_group = place_of_rank(options.device)
    group = own_group or _default_group()
    transport = agreed_transport(place, group)
    interface = InterfaceCounter(found_hosts())
    outcomes = []
    for size in options.sizes:
        emit(f"{size:,} bytes")
        num_elements = elements_of(options.op, size, dist.get_world_size())
        outcomes += _compare(options, num_elements, group, transport, interface)
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
    entries, op = [], options.op
    for name, exchange in options.entries():
        collective: _Collective
        if exchange is None:
            collective = _BackendCollective(name, op, num_elements, group)
        else:
            collective = _CodecCollective(
                name, op, exchange, num_elements, group, transport, interface.hosts
            )
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
    result = buffer[collective.part].cpu()
    sent = interface.end()
    parts = [gradient[collective.part] for gradient in gradients]
    exact = torch.zeros_like(result, dtype=torch.float64)
    for part in parts:  # not stacked: all ranks of a machine do this at once
        exact += part.double() / len(parts)
    here = {
        "sent": sent,
        "wire": collective.wire_bytes() - before,
        "wrong": int((_bits(result) != _bits(collective.expected(parts))).sum()) if check else 0,
        "error": float((result.double() - exact).square().sum()),
        "exact": float(exact.square().sum()),
    }
    of_ranks = gather_from_ranks(here)

    def over_ranks(key: str) -> float:
        """The number for the whole tensor: every rank has looked at all of it, or at its part."""
        found: list[float] = [record[key] for record in of_ranks]
        return max(found) if collective.op == ALL_REDUCE else sum(found)

    exact_norm = math.sqrt(over_ranks("exact"))
    hosts = interface.hosts
    host, formula = busiest_host(hosts, collective.bytes_to_other_hosts(hosts.of_rank))
    return CollectiveOutcome(
        name=collective.name,
        exchange=collective.exchange,
        chosen=collective.chosen,
        num_elements=buffer.numel(),
        wrong=int(over_ranks("wrong")) if check else None,
        relative_error=math.sqrt(over_ranks("error")) / exact_norm if exact_norm else 0.0,
        wire_bytes=max(record["wire"] for record in of_ranks),
        wire_measured=collective.wire_measured,
        interface_bytes=of_ranks[hosts.members[host][0]]["sent"],
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
