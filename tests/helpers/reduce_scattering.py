"""Steps of an engine that reduce-scatters, for comparison with its reference.

The model has modules of parameters, of which every rank owns a shard. To the engine each shard is a
parameter of its own; a module is a bucket, `[rank][parameter]`.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gradferry import _native
from gradferry.core.codec_spec import parse_codec
from gradferry.core.config import Config, make_config
from gradferry.core.device import CPU, load_kernels, transport_of
from gradferry.core.engine import start_engine
from gradferry.core.parameters import ParameterLayout
from reference import DTYPES, ReferenceReduceScatter, narrow, scattered_bytes_per_step
from residual_sums import aligned
from scenario import Weight

HASHES = (11, 12)  # of configuration and layout

# Elements of every parameter's shards, by rank; "bias" is exact. As padded shards are, of several
# tiles; of different length; of less than a tile, or nothing; and a module without elements.
SHARDS: dict[str, tuple[int, ...]] = {
    "block.weight": (3 * 4096 + 100,) * 4,
    "block.bias": (21,) * 4,
    "head.weight": (9000, 5000, 1, 4096),
    "ends.weight": (0, 7, 33, 0),
    "nothing.weight": (0,) * 4,
}


@dataclasses.dataclass(frozen=True)
class Case:
    world_size: int
    codec: str
    dtype: torch.dtype = torch.float32
    error_feedback: str = "none"
    steps: int = 3
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    scales: tuple[float, ...] = ()  # of the loss, by step
    # (step, rank, parameter, owner) with an infinity
    poison: tuple[int, int, str, int] | None = None
    shards: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=lambda: SHARDS)
    device: str = "cpu"  # "streamed" and "staged": the fake device of tests/engine/streams

    @property
    def pairs(self) -> list[tuple[str, int]]:
        """(parameter, owner) of what the engine calls a parameter: not in the order of buckets."""
        return [(name, rank) for name in self.shards for rank in range(self.world_size)]

    @property
    def sizes(self) -> list[int]:
        return [self.shards[name][owner] for name, owner in self.pairs]

    @property
    def codecs(self) -> list[str]:
        return ["exact" if "bias" in name else self.codec for name, _ in self.pairs]

    @property
    def buckets(self) -> list[list[int]]:
        number = {pair: index for index, pair in enumerate(self.pairs)}
        modules = dict.fromkeys(name.partition(".")[0] for name in self.shards)
        return [
            [
                number[name, rank]
                for rank in range(self.world_size)
                for name in self.shards
                if name.startswith(module)
            ]
            for module in modules
        ]

    @property
    def place(self) -> torch.device:
        if self.device == "cpu":
            return CPU
        import fake_device

        return fake_device.DEVICE

    def group(self) -> dist.ProcessGroup:
        if self.device == "cpu":
            return dist.group.WORLD
        import fake_device

        load_kernels(self.place.type)
        return fake_device.group(self.device)

    def config(self) -> Config:
        scaler = torch.amp.GradScaler(self.place.type) if self.scales else None
        options = {"error_feedback": self.error_feedback, "grad_scaler": scaler, **self.options}
        return make_config(self.codec, options)

    def layouts(self, config: Config) -> list[ParameterLayout]:
        described = []
        for (name, owner), size, text in zip(self.pairs, self.sizes, self.codecs, strict=True):
            codec = parse_codec(text)
            described.append(
                ParameterLayout(
                    name=f"{name}[{owner}]",
                    shape=(size,),
                    strides=(1,),
                    dtype=self.dtype,
                    num_elements=size,
                    is_complex=False,
                    codec=codec,
                    warmup=config.warmup_codec_of(codec),
                    residuals=config.residuals_of(codec),
                    owner=owner,
                )
            )
        return described

    def gradient(self, step: int, rank: int, index: int) -> np.ndarray:
        """Flat, as it is stored; spans powers of two, holds zeros, and some tiles are zero."""
        name, owner = self.pairs[index]
        rng = np.random.default_rng([step, rank, index])
        values = rng.standard_normal(self.sizes[index])
        values *= np.exp2(rng.integers(-12, 3, len(values)))
        values[rng.random(len(values)) < 0.02] = 0
        if (step + rank + index) % 3 == 0:
            values[:4096] = 0
        if (step, rank, name, owner) == self.poison:
            values[len(values) // 2] = np.inf
        if self.dtype != torch.float64:
            values = values.astype(np.float32)
        return narrow(values, self.kind)

    @property
    def kind(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def expected(self) -> tuple[list[list[np.ndarray]], ReferenceReduceScatter]:
        """[step][parameter], and the residuals after the last step."""
        config = self.config()
        reference = ReferenceReduceScatter(
            self.world_size,
            self.sizes,
            self.codecs,
            self.kind,
            keeps=[p.residuals[0] for p in self.layouts(config)],
            seed=config.seed,
        )
        scales = self.scales or (1.0,) * self.steps
        means = []
        for step in range(self.steps):
            gradients = [
                [self.gradient(step, rank, index) for index in range(len(self.pairs))]
                for rank in range(self.world_size)
            ]
            gain = scales[step] / scales[max(step - 1, 0)]
            warmup = str(config.warmup) if step < config.warmup_steps else None
            means.append(reference.step(step, gradients, gain=gain, warmup=warmup))
        return means, reference

    def wire_bytes(self) -> list[int]:
        """Of all steps, by rank."""
        config = self.config()
        layouts = self.layouts(config)
        total = np.zeros(self.world_size, int)
        for step in range(self.steps):
            warming_up = step < config.warmup_steps
            total += scattered_bytes_per_step(
                self.sizes,
                [str(p.warmup if warming_up else p.codec) for p in layouts],
                [owner for _, owner in self.pairs],
                self.buckets,
                self.world_size,
                config.chunk_bytes_at(self.world_size),
                self.kind,
            )
        return total.tolist()


class Steps:
    """An engine on this rank, and the steps of a case."""

    def __init__(
        self,
        case: Case,
        tensors: Sequence[torch.Tensor] = (),
        *,
        collective: str = "reduce_scatter",
        keep_gathered: bool = False,
    ) -> None:
        self.case = case
        self.rank = dist.get_rank()
        self.config = dataclasses.replace(case.config(), keep_gathered=keep_gathered)
        nonce, group = [uuid.uuid4().hex], case.group()
        dist.broadcast_object_list(nonce)
        self.engine = start_engine(
            self.config,
            case.layouts(self.config),
            group,
            nonce[0],
            transport=transport_of(case.place, group),
            hashes=HASHES,
            tensors=tensors,
            collective=collective,
        )
        self.reducer = _native.AllReducer(self.engine)

    def run(self, step: int) -> list[np.ndarray | None]:
        """A step with a bucket per call, all of them in flight; the means that this rank owns."""
        if self.case.scales:
            self.config.grad_scaler.update(new_scale=self.case.scales[step])
        given = [self.bucket(step, bucket) for bucket in self.case.buckets]
        flats = [flat.clone() for flat in given]
        calls = [
            self.reducer.start([(bucket, flat)], in_background=step == 1)
            for bucket, flat in zip(self.case.buckets, flats, strict=True)
        ]
        for call in calls:
            call.wait()
        means: list[np.ndarray | None] = [None] * len(self.case.pairs)
        for bucket, before, after in zip(self.case.buckets, given, flats, strict=True):
            lengths = [self.case.sizes[index] for index in bucket]
            parts = zip(bucket, before.split(lengths), after.split(lengths), strict=True)
            for index, was, now in parts:
                got = self._weight(len(now)).to_flat(now)
                if self.case.pairs[index][1] == self.rank:
                    means[index] = got
                else:
                    assert got.tobytes() == self._weight(len(was)).to_flat(was).tobytes()
        return means

    def bucket(self, step: int, bucket: Sequence[int]) -> torch.Tensor:
        """This rank's gradients of a module."""
        pieces = [self.case.gradient(step, self.rank, index) for index in bucket]
        flat = np.concatenate(pieces)
        return self._weight(len(flat)).from_flat(flat).to(self.case.place)

    def _weight(self, num_elements: int) -> Weight:
        return Weight("", (num_elements,), self.case.dtype)

    def residuals(self) -> list[np.ndarray]:
        """Worker residuals by parameter; empty where it has none."""
        _, worker, owner, _ = self.engine.state()
        assert owner.numel() == 0
        pieces, begin = [], 0
        for layout in self.case.layouts(self.config):
            # A world of one has memory for them once it has loaded some.
            size = layout.num_elements if layout.residuals[0] and worker.numel() else 0
            pieces.append(worker[begin : begin + size].numpy().copy())
            begin += aligned(size)
        assert begin == worker.numel()
        return pieces


def case_steps(case: Case) -> dict[str, Any]:
    steps = Steps(case)
    return {
        "means": [steps.run(step) for step in range(case.steps)],
        "residuals": steps.residuals(),
        "stats": steps.engine.stats(),
        "workspace": steps.engine.workspace(),
        "events": steps.engine.events(),
    }


def assert_bit_equal(answers: Sequence[dict[str, Any]], case: Case) -> None:
    """The means of every rank, and what it withholds, are those of the reference."""
    expected, reference = case.expected()
    bits = DTYPES[case.kind].bits
    for rank, answer in enumerate(answers):
        for step in range(case.steps):
            for index, (name, owner) in enumerate(case.pairs):
                got, want = answer["means"][step][index], expected[step][index]
                if owner != rank:
                    assert got is None
                    continue
                np.testing.assert_array_equal(
                    got.view(bits), want.view(bits), f"rank {rank}, step {step}, {name}"
                )
        for held, by_rank in zip(answer["residuals"], reference.worker_residual, strict=True):
            want = by_rank[rank] if by_rank else np.zeros(0, np.float32)
            np.testing.assert_array_equal(held.view(np.uint32), want.view(np.uint32))
