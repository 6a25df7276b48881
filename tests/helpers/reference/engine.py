"""Section 3 of docs/reference/wire_format.md: all ranks of a world, in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .codecs import DEFAULT, OWNER, WORKER, Context, find_codec
from .layout import TILE_ELEMENTS, Layout, Parameter, Rules
from .scalars import DTYPES, divided_sum, narrow, widen

FEWEST_BITS_WITHOUT_WORKER_RESIDUAL = 8


def resolve_error_feedback(
    error_feedback: str, codec: str, dtype: str, momentum: float = 0.0
) -> tuple[bool, bool]:
    """Whether a parameter has a worker and an owner residual."""
    if momentum and error_feedback == "auto":
        error_feedback = "both"
    if not find_codec(codec).lossy:
        return momentum != 0, False
    if error_feedback == "auto":
        bits = find_codec(codec).payload_bytes(TILE_ELEMENTS, dtype, WORKER) * 8 / TILE_ELEMENTS
        error_feedback = "owner" if bits >= FEWEST_BITS_WITHOUT_WORKER_RESIDUAL else "both"
    return error_feedback in ("worker", "both"), error_feedback in ("owner", "both")


def momentum_behind(codec: str, momentum: float) -> float:
    """What stays of what was sent: less, the more elements wait for their turn."""
    unsent = 1 / find_codec(codec).sent_share - 1
    if unsent == 0:
        return momentum
    delay = momentum / (1 - momentum) / (1 + unsent / 4)
    return delay / (1 + delay)


def encode_tiles(
    codec: str,
    dtype: str,
    gradient: np.ndarray,
    residual: np.ndarray | None = None,
    alpha: float = 1.0,
    gain: float = 1.0,
    context: Context = DEFAULT,
    hold: bool = True,
) -> np.ndarray:
    """Payloads of tiles [tiles, n] of widened gradients. Updates `residual` in place."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        v = gradient.dtype.type(np.float32(alpha)) * gradient
        if residual is not None:
            v = v + v.dtype.type(np.float32(gain)) * residual
    held = (gradient == 0).all(axis=1) & hold
    payload = find_codec(codec).encode(v, dtype, context)
    payload[held] = 0
    if residual is not None:
        _keep_what_was_withheld(residual, gain, v, payload, held, codec, dtype, context)
    return payload


def reduce_tiles(
    codec: str,
    dtype: str,
    payload_by_rank: Sequence[np.ndarray],
    n: int,
    residual: np.ndarray | None = None,
    gain: float = 1.0,
    context: Context = DEFAULT,
    hold: bool = True,
) -> np.ndarray:
    """Owner payloads of tiles of n elements. Updates the owner `residual` in place."""
    v = _quotient(codec, dtype, payload_by_rank, n, len(payload_by_rank), context)
    context = dataclasses.replace(context, stage=OWNER)
    if residual is not None:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            v = v + v.dtype.type(np.float32(gain)) * residual
    held = ~np.any([payload.any(axis=1) for payload in payload_by_rank], axis=0) & hold
    payload = find_codec(codec).encode(v, dtype, context)
    payload[held] = 0
    if residual is not None:
        _keep_what_was_withheld(residual, gain, v, payload, held, codec, dtype, context)
    return payload


def accumulate_tiles(
    codec: str,
    dtype: str,
    payload_by_rank: Sequence[np.ndarray],
    n: int,
    divisor: int,
    context: Context = DEFAULT,
) -> np.ndarray:
    """The sum of tiles of n elements over ranks, divided: gradients of `dtype`, [tiles, n]."""
    return narrow(_quotient(codec, dtype, payload_by_rank, n, divisor, context), dtype)


def _quotient(
    codec: str,
    dtype: str,
    payload_by_rank: Sequence[np.ndarray],
    n: int,
    divisor: int,
    context: Context,
) -> np.ndarray:
    """The sum of decoded tiles in rank order, times 1 / divisor."""
    context = dataclasses.replace(context, stage=WORKER)
    decoded = [find_codec(codec).decode(payload, n, dtype, context) for payload in payload_by_rank]
    return divided_sum(decoded, divisor)


def _keep_what_was_withheld(
    residual: np.ndarray,
    gain: float,
    v: np.ndarray,
    payload: np.ndarray,
    held: np.ndarray,
    codec: str,
    dtype: str,
    context: Context,
) -> None:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        withheld = v - find_codec(codec).decode(payload, v.shape[1], dtype, context)
        kept = np.float32(gain) * residual
    keep = held[:, None] | find_codec(codec).non_finite(v) | ~np.isfinite(withheld)
    residual[...] = np.where(keep, np.where(np.isfinite(kept), kept, residual), withheld)


def finish_residual(
    residual: np.ndarray,
    gradient: np.ndarray,
    own: np.ndarray,
    arrived: np.ndarray,
    usable: np.ndarray,
    alpha: float,
    beta: float,
) -> None:
    """What decode does to a worker `residual`, in place; all arrays are [tiles, n].

    `own` is D(what this rank sent), `arrived` D(what came back), and `usable` says where that is
    finite in the gradient's dtype. Elsewhere the step is undone.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        kind = gradient.dtype.type
        went_on = residual + kind(np.float32(beta)) * arrived
        undone = residual + (own - kind(np.float32(alpha)) * gradient)
        updated = np.where(usable, went_on, undone).astype(np.float32)
    residual[...] = np.where(np.isfinite(updated), updated, residual)


def cut_into_tiles(flat: np.ndarray) -> list[np.ndarray]:
    """Views [tiles, n] of a flat array: its full tiles, then its last short one."""
    full = len(flat) // TILE_ELEMENTS * TILE_ELEMENTS
    views = [flat[:full].reshape(-1, TILE_ELEMENTS), flat[full:].reshape(1, -1)]
    return [view for view in views if view.size]


class ReferenceEngine:
    """What every rank's hook together make of the gradients of a step.

    Gradients are flat arrays in the order of memory: float32, float64, float16, or uint16 holding
    the bits of bfloat16. Residuals are float32, per parameter (and rank), or None. A world of one
    sends nothing, but it has the momentum, and delivers what a larger world has withheld.
    """

    def __init__(
        self,
        world_size: int,
        parameters: Sequence[Parameter],
        codec: str = "q4",
        error_feedback: str = "auto",
        rules: Rules = (),
        seed: int = 0,
        momentum: float = 0.0,
        warmup_steps: int = 0,
        warmup: str = "exact",
        nodes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`nodes`: ranks by node, where those of a node add up their gradients first."""
        self.nodes = nodes or [[rank] for rank in range(world_size)]
        self.world_size = world_size
        self.seed = seed
        self.momentum = momentum
        self.warmup_steps = warmup_steps
        self.warmup = warmup
        self.num_steps = 0
        self.scale = 0.0  # in whose units residuals are; 0: none was
        self.layout = Layout(parameters, codec, world_size, rules, warmup)
        self.worker_residual: list[list[np.ndarray | None]] = []
        self.owner_residual: list[np.ndarray | None] = []
        for parameter, resolved in zip(self.layout.parameters, self.layout.codecs, strict=True):
            worker, owner = resolve_error_feedback(
                error_feedback, resolved, parameter.dtype, momentum
            )
            if world_size == 1:
                worker, owner = True, False
            n = parameter.num_elements
            self.worker_residual.append(
                [np.zeros(n, np.float32) if worker else None for _ in self.nodes]
            )
            self.owner_residual.append(np.zeros(n, np.float32) if owner else None)

    def step(
        self, gradients: Sequence[Sequence[np.ndarray]], scale: float = 1.0
    ) -> list[list[np.ndarray]]:
        """gradients[rank][parameter] -> the gradients every rank has afterwards, same indexing.

        `scale`: of the loss.
        """
        warming_up = self.num_steps < self.warmup_steps
        if not (warming_up and self.warmup == "exact"):
            self._rescale(np.float32(scale) / np.float32(self.scale or scale))
            self.scale = scale
        if self.world_size == 1 and not self._changes_alone(warming_up=warming_up):
            self.num_steps += 1
            return [[np.array(g) for g in gradients[0]]]
        averaged = [
            self._parameter(
                index,
                [gradients[rank][index] for rank in range(self.world_size)],
                warming_up=warming_up,
            )
            for index in range(len(self.layout.parameters))
        ]
        self.num_steps += 1
        if self.num_steps == self.warmup_steps and self.warmup != "exact":
            self._turn_to_momentum()
        return [averaged] * self.world_size

    def _changes_alone(self, *, warming_up: bool) -> bool:
        if warming_up and self.warmup == "exact":
            return False
        return self.momentum != 0 or any(worker[0].any() for worker in self.worker_residual)

    def _rescale(self, gain: np.float32) -> None:
        for index in range(len(self.layout.parameters)):
            for residual in (*self.worker_residual[index], self.owner_residual[index]):
                if residual is not None:
                    with np.errstate(over="ignore"):
                        scaled = gain * residual
                    residual[...] = np.where(np.isfinite(scaled), scaled, residual)

    def codec_of(self, index: int) -> str:
        """Of a parameter, after the warm-up. A rank alone sends nothing."""
        return self.layout.codecs[index] if self.world_size > 1 else "exact"

    def _turn_to_momentum(self) -> None:
        for index in range(len(self.layout.parameters)):
            alpha = np.float32(1.0 - momentum_behind(self.codec_of(index), self.momentum))
            for residual in (*self.worker_residual[index], self.owner_residual[index]):
                if residual is not None:
                    residual *= alpha

    def _parameter(
        self, index: int, by_rank: Sequence[np.ndarray], *, warming_up: bool
    ) -> np.ndarray:
        parameter = self.layout.parameters[index]
        codec = self.codec_of(index)
        dtype = parameter.dtype
        momentum = 0.0 if warming_up else momentum_behind(codec, self.momentum)
        alpha = np.float32(1.0 - momentum)
        if warming_up and self.world_size > 1:
            codec = self.layout.warmup_codecs[index]
        for flat in by_rank:
            if flat.shape != (parameter.num_elements,) or flat.dtype != DTYPES[dtype].storage:
                raise ValueError(f"{parameter.name}: got {flat.dtype} {flat.shape}")
        wide = [cut_into_tiles(self._sum(members, by_rank, dtype)) for members in self.nodes]
        untouched = warming_up and self.warmup == "exact"
        worker, owner = self.worker_residual[index], self.owner_residual[index]
        worker = [_tiles_or_none(None if untouched else r, len(wide[0])) for r in worker]
        owner = _tiles_or_none(None if untouched else owner, len(wide[0]))
        pieces = []
        first_tile = self.layout.tiles_of[index].start
        for part in range(len(wide[0])):
            tiles, n = wide[0][part].shape
            context = Context(WORKER, self.seed, self.num_steps, first_tile)
            common = {"context": context, "hold": not momentum}
            payloads = [
                encode_tiles(codec, dtype, wide[node][part], worker[node][part], alpha, **common)
                for node in range(len(self.nodes))
            ]
            result = reduce_tiles(codec, dtype, payloads, n, owner[part], **common)
            arrived = find_codec(codec).decode(
                result, n, dtype, dataclasses.replace(context, stage=OWNER)
            )
            narrowed = narrow(arrived.reshape(-1), dtype)
            pieces.append(narrowed)
            usable = np.isfinite(widen(narrowed, dtype)).reshape(arrived.shape)
            for rank, payload in enumerate(payloads):
                residual = worker[rank][part]
                if residual is None:
                    continue
                own = find_codec(codec).decode(payload, n, dtype, context)
                gradient = wide[rank][part]
                finish_residual(residual, gradient, own, arrived, usable, alpha, momentum)
            first_tile += tiles
        return np.concatenate(pieces) if pieces else np.array(by_rank[0])

    def _sum(self, members: Sequence[int], by_rank: Sequence[np.ndarray], dtype: str) -> np.ndarray:
        """A node's part of the mean: its ranks' gradients, added in their order, times nodes per
        rank, rounded to their dtype.
        """
        first, *others = (widen(by_rank[rank], dtype) for rank in members)
        if len(self.nodes) == self.world_size:
            return first
        total = first.copy()
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for values in others:
                total = total + values
            scaled = total * total.dtype.type(len(self.nodes) / self.world_size)
        return widen(narrow(scaled, dtype), dtype)


def _tiles_or_none(flat: np.ndarray | None, parts: int) -> list[np.ndarray | None]:
    return [None] * parts if flat is None else list(cut_into_tiles(flat))
