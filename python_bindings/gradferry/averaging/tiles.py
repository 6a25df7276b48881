"""Residuals by tile: where those of a rank are, and how they move to other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gradferry import _native
from gradferry.errors import StateError

# In elements: tiles begin at its multiples.
_BLOCK = _native.RESIDUAL_ALIGNMENT

Kind = Literal["worker", "owner"]  # of a residual
KINDS: tuple[Kind, ...] = ("worker", "owner")  # in the order of `ParameterLayout.residuals`
Slot = Mapping[str, torch.Tensor]  # see `saved_state.pack`
Held = Sequence[tuple[bool, bool]]  # by parameter, whether it had a (worker, owner) residual


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
    worker: torch.Tensor, owner: torch.Tensor, tiles: Iterable[Tile], factors: Sequence[float]
) -> None:
    """Multiplies the residuals of every parameter by its factor, where that is finite."""
    for tile in tiles:
        factor = factors[tile.parameter]
        for residual, offset in ((worker, tile.worker_offset), (owner, tile.owner_offset)):
            if factor != 1 and offset >= 0:
                part = residual[offset : offset + tile.num_elements]
                scaled = part * factor
                part.copy_(torch.where(scaled.isfinite(), scaled, part))


def resize(
    slots: Sequence[Slot], members: Iterable[Sequence[int]], tiles: Sequence[Tile], held: Held
) -> tuple[torch.Tensor, torch.Tensor]:
    """The worker and the owner residual of this rank, from those of all ranks.

    Every node gets the mean of the nodes' worker residuals, and every rank the owner residuals of
    its tiles. This preserves that mean plus the owner residuals, which the averaged gradient still
    lacks. Tiles that have only one of both here get the sum there: so it is in a world of one, and
    for codecs that keep no worker residual in a larger one.

    Args:
        slots: of all ranks that saved.
        members: those ranks, by node.
        tiles: of the layout of this rank.
        held: where it was saved.

    Raises:
        StateError: the slots do not fit together, or there is no place for what they hold.
    """
    places = _Places(tiles)
    worker = _mean_of_nodes(slots, members, places, held)
    owner = places.zeros(torch.float32)
    found = places.no_tiles()
    for number, slot in enumerate(slots):
        places.add(owner, found, "owner", number, slot)
    places.expect_all(found, "owner", held)
    no_owner = places.blocks(ids(tile.id for tile in tiles if not tile.owner_residual))
    no_worker = places.blocks(ids(tile.id for tile in tiles if not tile.worker_residual))
    moved = owner[no_owner]
    owner[no_worker] += worker[no_worker]
    worker[no_owner] += moved
    neither = ids(t.id for t in tiles if not (t.worker_residual or t.owner_residual))
    if worker[places.blocks(neither)].any():
        raise StateError(
            "the saved state has residuals of tiles that have none in this model; it was damaged"
        )
    return collect(worker, tiles, "worker"), collect(owner, tiles, "owner")


def fold(
    slot: Slot, sizes: tuple[int, int], tiles: Sequence[Tile], held: Held
) -> tuple[torch.Tensor, torch.Tensor]:
    """The worker and the owner residual with which a rank goes on alone from its own slot, where
    ranks have left or come: worker' = worker * W'/W + owner * W', owner' = 0.

    The next mean divides by W' instead of W, and receives the owner residual once. So it gets all
    that this rank has; what other ranks have is theirs.

    Args:
        slot: of this rank.
        sizes: W and W', the ranks of the world that saved and of this one.
        tiles: of the layout of this rank.
        held: where it was saved.

    Raises:
        StateError: there is no place for what it holds.
    """
    before, now = sizes
    places = _Places(tiles)
    whole = places.zeros(torch.float64)
    found = places.no_tiles()
    places.add(whole, found, "worker", 0, slot)
    places.expect_all(found, "worker", held)
    whole.mul_(now).div_(before)
    scaled = {**slot, "owner": slot["owner"].double().mul_(now)}
    places.add(whole, places.no_tiles(), "owner", 0, scaled)
    lost = places.blocks(ids(tile.id for tile in tiles if not tile.worker_residual))
    if whole[lost].any():
        raise StateError(
            "on_resize='fold' keeps everything in worker residuals, which are not kept here; use "
            "error_feedback='both', or the merged states of all ranks with on_resize='mean'"
        )
    mine = collect(whole, tiles, "worker").float()
    return mine, zero_residual(len(places.blocks(held_tiles(tiles, "owner"))) * _BLOCK)


def _mean_of_nodes(
    slots: Sequence[Slot], members: Iterable[Sequence[int]], places: _Places, held: Held
) -> torch.Tensor:
    total = places.zeros(torch.float64)
    first: torch.Tensor | None = None
    nodes = list(members)
    for ranks in nodes:
        found = places.no_tiles()
        for rank in ranks:
            places.add(total, found, "worker", rank, slots[rank])
        first = found if first is None else first
        if not torch.equal(found, first):
            raise StateError(
                "the saved state has worker residuals of other tiles on the node of ranks "
                f"{', '.join(map(str, ranks))} than on that of ranks "
                f"{', '.join(map(str, nodes[0]))}, such as tile "
                f"{int((found ^ first).nonzero()[0])}; it was damaged"
            )
    assert first is not None
    places.expect_all(first, "worker", held)
    return (total / len(nodes)).float()


class _Places:
    """Residuals of a whole model, in blocks of `_BLOCK` elements, one row each.

    Args:
        tiles: all of the model, in order.
    """

    def __init__(self, tiles: Sequence[Tile]) -> None:
        self.tiles = tiles
        self._count = ids(-(-tile.num_elements // _BLOCK) for tile in tiles)  # blocks of a tile
        self._first = self._count.cumsum(0) - self._count

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """A residual of zeros."""
        return torch.zeros((int(self._count.sum()), _BLOCK), dtype=dtype, device="cpu")

    def no_tiles(self) -> torch.Tensor:
        """Which tiles have been added to a residual, so far none."""
        return torch.zeros(len(self.tiles), dtype=torch.bool, device="cpu")

    def blocks(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows of these tiles, one tile after the other."""
        count = self._count[numbers]
        before = self._first[numbers] - (count.cumsum(0) - count)
        rows = torch.arange(int(count.sum()), dtype=torch.int64, device="cpu")
        return before.repeat_interleave(count) + rows

    def add(
        self, whole: torch.Tensor, found: torch.Tensor, kind: Kind, number: int, slot: Slot
    ) -> None:
        """Adds what a slot holds.

        Args:
            whole: a residual of the model.
            found: which tiles it has so far.
            kind: of the residual.
            number: of the slot.
            slot: with ``"<kind>_tiles"``.

        Raises:
            StateError: the slot does not fit.
        """
        numbers, values = slot[f"{kind}_tiles"], slot[kind]
        where = f"the saved state's slot_{number}"
        for wrong, reason in (
            ((numbers < 0) | (numbers >= len(self.tiles)), "the model lacks"),
            (found[numbers.clamp(0, len(self.tiles) - 1)], "another slot has, too"),
        ):
            if wrong.any():
                tile = int(numbers[wrong][0])
                raise StateError(f"{where} has the {kind} residual of tile {tile}, which {reason}")
        before = int(found.sum())
        found[numbers] = True
        if int(found.sum()) != before + len(numbers):
            raise StateError(f"{where} has the {kind} residual of a tile twice; it was damaged")
        rows = self.blocks(numbers)
        if values.numel() != len(rows) * _BLOCK:
            raise StateError(
                f"{where} has {values.numel()} {kind} residuals for tiles of "
                f"{len(rows) * _BLOCK}; it was damaged"
            )
        whole.index_add_(0, rows, values.view(-1, _BLOCK).to(whole.dtype))

    def expect_all(self, found: torch.Tensor, kind: Kind, held: Held) -> None:
        """Checks that a residual, if any tile has one, has all tiles that had one.

        Raises:
            StateError: it has not.
        """
        expected = [held[tile.parameter][KINDS.index(kind)] for tile in self.tiles]
        lacking = torch.tensor(expected, dtype=torch.bool, device="cpu") & ~found
        if found.any() and lacking.any():
            raise StateError(
                f"the saved state lacks the {kind} residual of tile {int(lacking.nonzero()[0])}; "
                "it was damaged"
            )
