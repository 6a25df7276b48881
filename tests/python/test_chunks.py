"""What the predictor says a step sends, against sums by hand from docs/reference/wire_format.md and
against the reference, which is written apart; test_wire.py holds that against what engines have
counted.
"""

from __future__ import annotations

import pytest
import reference
import torch
from gradferry.core.nodes import Nodes, flat
from gradferry.forecast.chunks import (
    all_reduce_bytes,
    payload_sizes,
    ring_exchange,
    wire_bytes_per_step,
)

HEADER = 64
COMMIT = 64
FULL_TILE = 16384  # bytes of 4096 fp32 elements


def exact_fp32(parameter: int, num_elements: int) -> tuple[int, int]:
    payload = -(-4 * num_elements // 16) * 16
    return payload, payload


def test_one_tile_goes_to_its_owner_and_back():
    sent = wire_bytes_per_step([4096], exact_fp32, [[0]], world_size=2)
    gather = HEADER + FULL_TILE  # both ranks: the one without a tile sends padding
    assert sent == [HEADER + gather + COMMIT, HEADER + FULL_TILE + gather + COMMIT]


def test_short_tile_is_padded_to_16_bytes():
    sent = wire_bytes_per_step([5], exact_fp32, [[0]], world_size=2)
    gather = HEADER + 32
    assert sent == [HEADER + gather + COMMIT, HEADER + 32 + gather + COMMIT]


def test_equal_tiles_are_owned_in_turn():
    sent = wire_bytes_per_step([3 * 4096], exact_fp32, [[0]], world_size=3)
    to_owners = 2 * (HEADER + FULL_TILE)
    assert sent == [to_owners + 2 * (HEADER + FULL_TILE) + 2 * COMMIT] * 3


def test_owner_is_the_rank_with_fewest_bytes_so_far():
    # Tiles of 4096, 1024 and 1024 elements: rank 0, then rank 1 twice.
    sent = wire_bytes_per_step([4096, 1024, 1024], exact_fp32, [[0, 1, 2]], world_size=2)
    gather = HEADER + FULL_TILE
    assert sent == [
        HEADER + 2 * 4096 + gather + COMMIT,
        HEADER + FULL_TILE + gather + COMMIT,
    ]


def test_tile_that_overfills_an_owner_starts_a_chunk():
    sizes = [4 * 4096]  # two tiles per owner; a chunk has room for one
    sent = wire_bytes_per_step(sizes, exact_fp32, [[0]], world_size=2, chunk_bytes=FULL_TILE)
    chunk = (HEADER + FULL_TILE) + (HEADER + FULL_TILE)
    assert sent == [2 * chunk + COMMIT] * 2


def test_tile_larger_than_a_chunk_travels_alone():
    sent = wire_bytes_per_step([4096], exact_fp32, [[0]], world_size=2, chunk_bytes=16)
    assert sent == wire_bytes_per_step([4096], exact_fp32, [[0]], world_size=2)


def test_every_bucket_ends_with_a_commit_and_keeps_owners():
    one = wire_bytes_per_step([4096, 4096], exact_fp32, [[1, 0]], world_size=2)
    two = wire_bytes_per_step([4096, 4096], exact_fp32, [[1], [0]], world_size=2)
    both = HEADER + FULL_TILE
    assert one == [both + both + COMMIT] * 2
    assert two == [(HEADER + both) + (both + both) + 2 * COMMIT] * 2


def test_stages_of_different_size_count_separately():
    sent = wire_bytes_per_step([4096], lambda parameter, n: (160, 640), [[0]], world_size=2)
    assert sent == [HEADER + HEADER + 640 + COMMIT, HEADER + 160 + HEADER + 640 + COMMIT]


def test_one_rank_sends_nothing():
    assert wire_bytes_per_step([4096], exact_fp32, [[0]], world_size=1) == [0]
    assert all_reduce_bytes(4096, 4, 1) == 0


def test_parameter_without_elements_has_no_tile():
    with_empty = wire_bytes_per_step([0, 4096], exact_fp32, [[0, 1]], world_size=2)
    assert with_empty == wire_bytes_per_step([4096], exact_fp32, [[0]], world_size=2)


def test_reduce_scatter_sends_every_shard_to_its_owner_and_nothing_back() -> None:
    # Rank 2 owns a short tile, and rank 1 owns two parameters.
    sizes, owners = [4096, 4096, 4096, 5], [0, 1, 1, 2]
    sent = wire_bytes_per_step(sizes, exact_fp32, [[0, 1, 2, 3]], world_size=3, owners=owners)
    to = [HEADER + FULL_TILE, HEADER + 2 * FULL_TILE, HEADER + 32]
    assert sent == [sum(to) - to[rank] + 2 * COMMIT for rank in range(3)]


def test_reduce_scatter_takes_tiles_of_owners_in_turn() -> None:
    # Four tiles for each of two ranks. A chunk has room for two per rank, whatever the owner stage.
    sent = wire_bytes_per_step(
        [4 * 4096, 4 * 4096],
        lambda parameter, n: (160, 640),
        [[0, 1]],
        world_size=2,
        chunk_bytes=320,
        owners=[0, 1],
    )
    assert sent == [2 * (HEADER + 320) + COMMIT] * 2
    # What is left of a longer shard is in chunks of its own, with a header for the other rank.
    sent = wire_bytes_per_step(
        [4096, 3 * 4096], exact_fp32, [[0, 1]], world_size=2, chunk_bytes=FULL_TILE, owners=[0, 1]
    )
    assert sent == [3 * (HEADER + FULL_TILE) + COMMIT, 3 * HEADER + FULL_TILE + COMMIT]


def test_all_reduce_sends_two_shares_of_w_minus_one():
    assert all_reduce_bytes(1000, 4, 4) == 6000


def test_maps_of_used_parameters_take_a_byte_per_parameter_in_multiples_of_eight() -> None:
    sizes, buckets = [4096, *[0] * 8, 4096, 0], [[0], list(range(1, 10)), [10]]
    without = wire_bytes_per_step(sizes, exact_fp32, buckets, world_size=3)
    maps = wire_bytes_per_step(
        sizes, exact_fp32, buckets, world_size=3, find_unused_parameters=True
    )
    # 1 and 9 parameters; a bucket without elements has no commit.
    assert [a - b for a, b in zip(maps, without, strict=True)] == [2 * (8 + 16)] * 3


def test_messages_between_ranks_of_one_host_do_not_leave_it() -> None:
    # A tile per rank. To each of the two ranks elsewhere: a tile, an average and a commit.
    sent = wire_bytes_per_step([4 * 4096], exact_fp32, [[0]], world_size=4, hosts=[0, 0, 1, 1])
    assert sent == [2 * (2 * (HEADER + FULL_TILE) + COMMIT)] * 4
    assert wire_bytes_per_step([4096], exact_fp32, [[0]], world_size=3, hosts=[7, 7, 7]) == [0] * 3


def test_hosts_with_different_numbers_of_ranks_send_what_their_ranks_must() -> None:
    # Rank 0 owns the tile. Ranks 0 and 1 send one message each to rank 2, which sends two.
    sent = wire_bytes_per_step([4096], exact_fp32, [[0]], world_size=3, hosts=[0, 0, 1])
    gather = HEADER + FULL_TILE
    assert sent == [
        HEADER + gather + COMMIT,
        HEADER + gather + COMMIT,
        HEADER + FULL_TILE + HEADER + 2 * gather + 2 * COMMIT,
    ]


def test_siblings_send_only_to_their_peers() -> None:
    # Four tiles, one for each rank: in two columns, from each node one tile to the other.
    nodes = Nodes(((0, 1), (2, 3)))
    sent = wire_bytes_per_step([4 * 4096], exact_fp32, [[0]], world_size=4, nodes=nodes)
    assert sent == [2 * (HEADER + FULL_TILE) + 2 * COMMIT] * 4


def test_a_rank_beyond_the_smallest_node_sends_commits_alone() -> None:
    nodes = Nodes(((0, 2), (1,)))
    sent = wire_bytes_per_step([2 * 4096], exact_fp32, [[0]], world_size=3, nodes=nodes)
    gathered = HEADER + FULL_TILE
    assert sent == [
        HEADER + FULL_TILE + gathered + COMMIT,
        HEADER + FULL_TILE + gathered + 2 * COMMIT,
        COMMIT,
    ]


def test_chunks_of_nodes_are_cut_by_what_siblings_send() -> None:
    # 2 MB for a sibling are 128 full tiles of fp32 in a column, or 256 of 16 bits.
    count = 2 * 129

    def sent(nodes: Nodes, item: int) -> list[int]:
        return wire_bytes_per_step(
            [count * 4096], lambda p, n: (16, 16), [[0]], 4, nodes=nodes, item_bytes=[item]
        )

    nodes = Nodes(((0, 1), (2, 3)))
    halves, whole = sent(nodes, 4), sent(nodes, 2)
    assert [a - b for a, b in zip(halves, whole, strict=True)] == [2 * HEADER] * 4
    assert sent(flat(4), 4) == sent(flat(4), 2)


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
def test_predicted_bytes_are_those_of_the_reference(
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
    world_size = nodes.world_size
    layout = reference.Layout(
        parameters, codec, world_size, warmup=warmup or "exact", nodes=nodes.members
    )
    buckets = [[5, 4], [3, 2, 1], [0]]
    chunk_bytes = 1 << 15  # so that buckets have several chunks, of some codecs
    sent = layout.in_warmup() if warmup else layout
    apart = [0, 1, 1][:world_size] if nodes.is_flat else nodes.of_rank
    for hosts in (None, apart):
        predicted = wire_bytes_per_step(
            sizes,
            payload_sizes([(name, torch.float32) for name in layout.codecs]),
            buckets,
            world_size,
            chunk_bytes,
            equal_scatter=equal_scatter,
            sent_as=payload_sizes([(name, torch.float32) for name in layout.warmup_codecs])
            if warmup
            else None,
            find_unused_parameters=find_unused_parameters,
            hosts=hosts,
            nodes=nodes,
        )
        assert predicted == [
            reference.wire_bytes_per_step(
                sent, buckets, rank, chunk_bytes, find_unused_parameters, equal_scatter, hosts
            )
            for rank in range(world_size)
        ]
