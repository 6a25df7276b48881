"""What the plan of a step says that ranks send, against the reference, which is written apart, and
against some sums by hand from docs/reference/wire_format.md. test_reference_engine.py has more of
these, and test_wire.py holds both against what engines have counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import reference
import torch
from gradferry import _native
from gradferry.core.nodes import Nodes, flat
from gradferry_lab.workloads.hooks import all_reduce_bytes, ring_exchange

HEADER = 64
COMMIT = 64
FULL_TILE = 16384  # bytes of 4096 fp32 elements


def planned(
    sizes: Sequence[int],
    buckets: Sequence[Sequence[int]],
    nodes: Nodes,
    *,
    codecs: Sequence[str] = (),
    warmup: Sequence[str] = (),
    owners: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[tuple[int, int]]:
    """codecs, warmup: of the parameters; exact, if not given."""
    exact = ["exact"] * len(sizes)
    parameters = [
        _native.ParameterSpec(
            name=str(number),
            num_elements=size,
            dtype=dtype,
            codec=codec,
            warmup=first,
            worker_residual=False,
            owner_residual=False,
            owner=owner,
        )
        for number, (size, codec, first, owner) in enumerate(
            zip(sizes, codecs or exact, warmup or exact, owners or [None] * len(sizes), strict=True)
        )
    ]
    usual = {
        "workspace_cap_bytes": 96 << 20,
        "collective": "reduce_scatter" if owners else "all_reduce",
    }
    hosts = options.pop("hosts", nodes.of_rank)
    engine = _native.EngineOptions(
        parameters=parameters, nodes=nodes.members, **{**usual, **options}
    )
    return _native.planned_bytes(engine, buckets=buckets, hosts=hosts, in_warmup=bool(warmup))


def sent(
    sizes: Sequence[int],
    buckets: Sequence[Sequence[int]],
    world: int | Nodes,
    **options: Any,
) -> list[int]:
    """What each rank sends to other hosts."""
    nodes = flat(world) if isinstance(world, int) else world
    return [elsewhere for elsewhere, _ in planned(sizes, buckets, nodes, **options)]


def test_one_rank_sends_nothing() -> None:
    assert sent([4096], [[0]], 1) == [0]
    assert all_reduce_bytes(4096, 4, 1) == 0


def test_reduce_scatter_sends_every_shard_to_its_owner_and_nothing_back() -> None:
    # Rank 2 owns a short tile, and rank 1 owns two parameters.
    sizes, owners = [4096, 4096, 4096, 5], [0, 1, 1, 2]
    to = [HEADER + FULL_TILE, HEADER + 2 * FULL_TILE, HEADER + 32]
    assert sent(sizes, [[0, 1, 2, 3]], 3, owners=owners) == [
        sum(to) - to[rank] + 2 * COMMIT for rank in range(3)
    ]


def test_reduce_scatter_takes_tiles_of_owners_in_turn() -> None:
    # Four tiles for each of two ranks. A chunk has room for two per rank.
    both = {"owners": [0, 1], "chunk_bytes": 2 * FULL_TILE}
    each = 2 * (HEADER + 2 * FULL_TILE) + COMMIT
    assert sent([4 * 4096, 4 * 4096], [[0, 1]], 2, **both) == [each] * 2
    # What is left of a longer shard is in chunks of its own, with a header for the other rank.
    one = {"owners": [0, 1], "chunk_bytes": FULL_TILE}
    assert sent([4096, 3 * 4096], [[0, 1]], 2, **one) == [
        3 * (HEADER + FULL_TILE) + COMMIT,
        3 * HEADER + FULL_TILE + COMMIT,
    ]


@pytest.mark.parametrize("codec", ["exact", "q4", "sign1"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_planned_reduce_scatter_is_that_of_the_reference(codec: str, world_size: int) -> None:
    shards = [60_000, 70, 306_500, 1, 0, 51_729, 4096, 9000]
    owners = [index % world_size for index in range(len(shards))]
    codecs = ["exact" if size == 70 else codec for size in shards]
    buckets = [[0, 1, 2], [3, 4], [5, 6, 7]]
    given = (shards, buckets, world_size)
    assert sent(*given, codecs=codecs, owners=owners, chunk_bytes=1 << 15) == (
        reference.scattered_bytes_per_step(shards, codecs, owners, buckets, world_size, 1 << 15)
    )


def test_all_reduce_sends_two_shares_of_w_minus_one() -> None:
    assert all_reduce_bytes(1000, 4, 4) == 6000


def test_hosts_with_different_numbers_of_ranks_send_what_their_ranks_must() -> None:
    # Rank 0 owns the tile. Ranks 0 and 1 send one message each to rank 2, which sends two.
    gather = HEADER + FULL_TILE
    assert sent([4096], [[0]], 3, hosts=[0, 0, 1]) == [
        HEADER + gather + COMMIT,
        HEADER + gather + COMMIT,
        HEADER + FULL_TILE + HEADER + 2 * gather + 2 * COMMIT,
    ]


def test_siblings_send_only_to_their_peers() -> None:
    # Four tiles, one for each rank: in two rails, from each node one tile to the other. A sibling
    # gets two tiles of gradients, what was gathered of both nodes, and a commit.
    nodes = Nodes(((0, 1), (2, 3)))
    local = (HEADER + 2 * FULL_TILE) + (HEADER + 2 * (HEADER + FULL_TILE)) + COMMIT
    assert planned([4 * 4096], [[0]], nodes) == [(2 * (HEADER + FULL_TILE) + 2 * COMMIT, local)] * 4


def test_chunks_of_nodes_are_cut_by_what_siblings_send() -> None:
    # 2 MB for a sibling are 128 full tiles of fp32 in a rail, or 256 of 16 bits. The payload of a
    # chunk has room for more than 129 of sign1.
    sizes = [2 * 129 * 4096]

    def of(world: int | Nodes, dtype: torch.dtype) -> list[int]:
        return sent(sizes, [[0]], world, codecs=["sign1"], dtype=dtype)

    nodes = Nodes(((0, 1), (2, 3)))
    whole, halves = of(nodes, torch.float32), of(nodes, torch.bfloat16)
    assert [a - b for a, b in zip(whole, halves, strict=True)] == [2 * HEADER] * 4
    assert of(4, torch.float32) == of(4, torch.bfloat16)


@pytest.mark.parametrize(
    ("hosts", "leaving"),
    [
        ([0, 1], [9, 9]),
        ([0, 0, 1, 1], [0, 9, 0, 9]),
        ([0, 1, 0, 1], [9, 9, 9, 9]),
        ([0, 0, 0], [0, 0, 0]),
        ([0], [0]),
    ],
)
def test_a_ring_leaves_a_host_where_the_next_rank_is_elsewhere(
    hosts: list[int], leaving: list[int]
) -> None:
    assert ring_exchange(9, hosts) == leaving


@pytest.mark.parametrize("codec", ["exact", "q8", "q4", "sign1", "topk", "rht"])
@pytest.mark.parametrize("members", [2, 3, ((0, 1), (2, 3)), ((0, 3), (1, 2)), ((0, 2), (1,))])
@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("warmup", [None, "exact", "q8"])
@pytest.mark.parametrize("equal_scatter", [False, True])
def test_planned_bytes_are_those_of_the_reference(
    codec: str,
    members: int | tuple[tuple[int, ...], ...],
    find_unused_parameters: bool,
    warmup: str | None,
    equal_scatter: bool,
) -> None:
    sizes = [60_000, 70, 306_500, 1, 0, 51_729]
    parameters = [
        reference.Parameter(str(number), size, ndim=1 if size == 70 else 2)
        for number, size in enumerate(sizes)
    ]
    nodes = flat(members) if isinstance(members, int) else Nodes(members)
    layout = reference.Layout(
        parameters, codec, nodes.world_size, warmup=warmup or "exact", nodes=nodes.members
    )
    travels = layout.in_warmup() if warmup else layout
    buckets = [[5, 4], [3, 2, 1], [0]]
    # So that buckets have several chunks, of some codecs; a tile of exact may be larger than one.
    chunk_bytes = 1 << (13 if find_unused_parameters else 15)
    here = [0, 1, 1][: nodes.world_size] if nodes.is_flat else list(nodes.of_rank)
    for hosts in (list(nodes.of_rank), here):
        found = planned(
            sizes,
            buckets,
            nodes,
            codecs=layout.codecs,
            warmup=layout.warmup_codecs if warmup else (),
            chunk_bytes=chunk_bytes,
            equal_scatter=equal_scatter,
            find_unused_parameters=find_unused_parameters,
            hosts=hosts,
        )
        options = (chunk_bytes, find_unused_parameters, equal_scatter)
        for rank, pair in enumerate(found):
            to = reference.sent_per_step(travels, buckets, rank, *options)
            elsewhere = sum(n for peer, n in enumerate(to) if hosts[peer] != hosts[rank])
            assert pair == (elsewhere, sum(to) - elsewhere)
