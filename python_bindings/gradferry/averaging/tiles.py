"""Residuals by tile: where those of a rank are, and how they move to other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch

from gradferry import _native
from gradferry.errors import StateError

# In elements: tiles begin at its multiples.
_BLOCK = _native.RESIDUAL_ALIGNMENT

Kind = Literal["worker", "owner"]  # of a residual
KINDS: tuple[Kind, ...] = ("worker", "owner")  # in the order of `ParameterLayout.residuals`
Slot = Mapping[str, torch.Tensor]  # residuals, and the numbers of their tiles


@dataclass(frozen=True)
class Tile:
    """A tile and the offsets of its residuals, in elements; -1: this rank has none.

    Attributes:
        id: number of the tile in the model.
        num_elements: of the tile.
        worker_offset: into the worker residual.
        owner_offset: into the owner residual.
        parameter: index of its parameter.
        worker_residual: whether a rank has a worker residual for it.
        owner_residual: whether a rank has an owner residual for it.
    """

    id: int
    num_elements: int
    worker_offset: int
    owner_offset: int
    parameter: int
    worker_residual: bool
    owner_residual: bool

    def offset(self, kind: Kind) -> int:
        """The offset of its worker or owner residual."""
        return self.worker_offset if kind == "worker" else self.owner_offset


def zero_residual(num_elements: int) -> torch.Tensor:
    """Zeros of one dimension, on the CPU and in fp32 whatever torch's defaults are."""
    return torch.zeros(num_elements, dtype=torch.float32, device="cpu")


def ids(numbers: Iterable[int]) -> torch.Tensor:
    """Numbers of tiles as a state holds them."""
    return torch.tensor(list(numbers), dtype=torch.int64, device="cpu")


def held_tiles(tiles: Iterable[Tile], kind: Kind) -> torch.Tensor:
    """The tiles of this rank's worker or owner residual, in its order."""
    return ids(tile.id for tile in tiles if tile.offset(kind) >= 0)


def spread(residual: torch.Tensor, tiles: Sequence[Tile], kind: Kind) -> torch.Tensor:
    """A rank's residual with a place for every tile of the model, and zeros where it has none."""
    places = _Places(tiles)
    whole = places.zeros(torch.float32)
    whole[places.blocks(held_tiles(tiles, kind))] = residual.view(-1, _BLOCK)
    return whole


def collect(whole: torch.Tensor, tiles: Sequence[Tile], kind: Kind) -> torch.Tensor:
    """A rank's residual out of one with a place for every tile of the model."""
    return whole[_Places(tiles).blocks(held_tiles(tiles, kind))].flatten()


def rescale(
    worker: torch.Tensor,
    owner: torch.Tensor,
    tiles: Iterable[Tile],
    before: Sequence[float],
    now: Sequence[float],
) -> None:
    """Has residuals of parameters of which a share of the momentum was kept `before` hold the share
    that is kept `now`, where that is finite.
    """
    for tile in tiles:
        factor = now[tile.parameter] / before[tile.parameter]
        for residual, offset in ((worker, tile.worker_offset), (owner, tile.owner_offset)):
            if factor != 1 and offset >= 0:
                part = residual[offset : offset + tile.num_elements]
                scaled = part * factor
                part.copy_(torch.where(scaled.isfinite(), scaled, part))


def resize(
    nodes: Sequence[Sequence[Slot]], tiles: Sequence[Tile]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The worker and the owner residual of this rank, from those of all ranks.

    Every node gets the mean of the nodes' worker residuals, and every rank the owner residuals of
    its tiles. This preserves that mean plus the owner residuals, which the averaged gradient still
    lacks. Tiles that have only one of both here get the sum there: so it is in a world of one, and
    for codecs that keep no worker residual in a larger one.

    Args:
        nodes: the slots of all ranks that saved, by node.
        tiles: of the layout of this rank.
    """
    places = _Places(tiles)
    total, owner = places.zeros(torch.float64), places.zeros(torch.float32)
    for slot in chain(*nodes):
        places.add(total, "worker", slot)
        places.add(owner, "owner", slot)
    worker = (total / len(nodes)).float()
    no_owner = places.blocks(ids(tile.id for tile in tiles if not tile.owner_residual))
    no_worker = places.blocks(ids(tile.id for tile in tiles if not tile.worker_residual))
    moved = owner[no_owner]
    owner[no_worker] += worker[no_worker]
    worker[no_owner] += moved
    return collect(worker, tiles, "worker"), collect(owner, tiles, "owner")


def fold(
    slot: Slot, sizes: tuple[int, int], tiles: Sequence[Tile]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The worker and the owner residual with which a rank goes on alone from its own slot, where
    ranks have left or come: worker' = worker * W'/W + owner * W', owner' = 0.

    The next mean divides by W' instead of W, and receives the owner residual once. So it gets all
    that this rank has; what other ranks have is theirs.

    Args:
        slot: of this rank.
        sizes: W and W', the ranks of the world that saved and of this one.
        tiles: of the layout of this rank.

    Raises:
        StateError: there is no place for what it holds.
    """
    before, now = sizes
    places = _Places(tiles)
    whole = places.zeros(torch.float64)
    places.add(whole, "worker", slot)
    whole.mul_(now).div_(before)
    places.add(whole, "owner", {**slot, "owner": slot["owner"].double().mul_(now)})
    lost = places.blocks(ids(tile.id for tile in tiles if not tile.worker_residual))
    if whole[lost].any():
        raise StateError(
            "on_resize='fold' keeps everything in worker residuals, which are not kept here; use "
            "error_feedback='both', or the merged states of all ranks with on_resize='mean'"
        )
    mine = collect(whole, tiles, "worker").float()
    return mine, zero_residual(len(places.blocks(held_tiles(tiles, "owner"))) * _BLOCK)


class _Places:
    """Residuals of a whole model, in blocks of `_BLOCK` elements, one row each.

    Args:
        tiles: all of the model, in order.
    """

    def __init__(self, tiles: Sequence[Tile]) -> None:
        self._count = ids(-(-tile.num_elements // _BLOCK) for tile in tiles)  # blocks of a tile
        self._first = self._count.cumsum(0) - self._count

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """A residual of zeros."""
        return torch.zeros((int(self._count.sum()), _BLOCK), dtype=dtype, device="cpu")

    def blocks(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows of these tiles, one tile after the other."""
        count = self._count[numbers]
        before = self._first[numbers] - (count.cumsum(0) - count)
        rows = torch.arange(int(count.sum()), dtype=torch.int64, device="cpu")
        return before.repeat_interleave(count) + rows

    def add(self, whole: torch.Tensor, kind: Kind, slot: Slot) -> None:
        """Adds what a slot holds to a residual of the model."""
        rows = self.blocks(slot[f"{kind}_tiles"])
        whole.index_add_(0, rows, slot[kind].view(-1, _BLOCK).to(whole.dtype))
