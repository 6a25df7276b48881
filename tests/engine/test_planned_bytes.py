"""What the plan of a step says that ranks send, against the reference, which is written apart.

tests/hook/test_scenarios.py holds the reference against what engines have counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import reference
import torch
from gradferry import _native
from gradferry.core.nodes import Nodes, flat
from gradferry_lab.workloads.hooks import ring_exchange


def planned(
    sizes: Sequence[int],
    buckets: Sequence[Sequence[int]],
    nodes: Nodes,
    *,
    codecs: Sequence[str] = (),
    warmup: Sequence[str] = (),
    owners: Sequence[int] = (),
    **options: Any,
) -> list[tuple[int, int]]:
    """codecs, warmup: of the parameters; exact, if not given."""
    exact = ["exact"] * len(sizes)
    parameters = [
        _native.ParameterSpec(
            name=str(number),
            num_elements=size,
            dtype=torch.float32,
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
    sent = _native.planned_bytes(engine, buckets=buckets, hosts=hosts, in_warmup=bool(warmup))
    return [rank[:2] for rank in sent]


@pytest.mark.parametrize("codec", ["exact", "q4", "sign1"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_planned_reduce_scatter_is_that_of_the_reference(codec: str, world_size: int) -> None:
    shards = [60_000, 70, 306_500, 1, 0, 51_729, 4096, 9000]
    owners = [index % world_size for index in range(len(shards))]
    codecs = ["exact" if size == 70 else codec for size in shards]
    buckets = [[0, 1, 2], [3, 4], [5, 6, 7]]
    nodes = flat(world_size)
    found = planned(shards, buckets, nodes, codecs=codecs, owners=owners, chunk_bytes=1 << 15)
    assert [elsewhere for elsewhere, _ in found] == (
        reference.scattered_bytes_per_step(shards, codecs, owners, buckets, world_size, 1 << 15)
    )


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
@pytest.mark.parametrize("on_streams", [False, True])
def test_planned_bytes_are_those_of_the_reference(
    codec: str,
    members: int | tuple[tuple[int, ...], ...],
    find_unused_parameters: bool,
    warmup: str | None,
    on_streams: bool,
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
    here = [0, 1, 1, *range(2, 19)] if nodes.is_flat else list(nodes.of_rank)
    here = here[: nodes.world_size]
    for hosts in (list(nodes.of_rank), here):
        found = planned(
            sizes,
            buckets,
            nodes,
            codecs=layout.codecs,
            warmup=layout.warmup_codecs if warmup else (),
            chunk_bytes=chunk_bytes,
            on_streams=on_streams,
            find_unused_parameters=find_unused_parameters,
            hosts=hosts,
        )
        options = (chunk_bytes, find_unused_parameters, on_streams)
        for rank, pair in enumerate(found):
            to = reference.sent_per_step(travels, buckets, rank, *options)
            elsewhere = sum(n for peer, n in enumerate(to) if hosts[peer] != hosts[rank])
            assert pair == (elsewhere, sum(to) - elsewhere)


@pytest.mark.parametrize("codec", ["exact", "q4"])
@pytest.mark.parametrize("members", [20, tuple((2 * i, 2 * i + 1) for i in range(12))])
def test_planned_bytes_of_more_ranks_than_tiles(codec: str, members: Any) -> None:
    """In two of three buckets: where more than 8 ranks own nothing, and where fewer do."""
    compare = test_planned_bytes_are_those_of_the_reference
    compare(codec, members, find_unused_parameters=False, warmup=None, on_streams=True)


def test_on_streams_chunks_are_as_large_as_memory_allows() -> None:
    """Two buckets of two levels: one fits into a chunk, and of the other siblings get more."""
    nodes, cap = Nodes(((0, 1), (2, 3))), reference.STREAM_CAP_BYTES
    sizes, buckets = [6 << 20, 18 << 20], [[0], [1]]
    parameters = [reference.Parameter(str(number), size) for number, size in enumerate(sizes)]
    layout = reference.Layout(parameters, "q4", 4, nodes=nodes.members)
    chunk_bytes = _native.chunk_bytes_within(cap, 4, _native.STREAM_CHUNK_BYTES)
    assert [len(reference.cut_chunks(layout, b, chunk_bytes, True)) for b in buckets] == [1, 2]
    given = {"chunk_bytes": chunk_bytes, "on_streams": True}
    found = planned(sizes, buckets, nodes, codecs=layout.codecs, workspace_cap_bytes=cap, **given)
    for rank, pair in enumerate(found):
        assert sum(pair) == sum(reference.sent_per_step(layout, buckets, rank, **given))
