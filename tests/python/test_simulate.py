"""The simulated step against times worked out by hand."""

from __future__ import annotations

import pytest
import torch
from gradferry.forecast.costs import CollectiveCosts, Curve, LinkCosts
from gradferry.forecast.simulate import (
    Backward,
    ChunkCost,
    ReducedBucket,
    play_all_reduce,
    play_codec,
)

# A second per byte on the link; a collective arrives 100 s after it has left.
LATENCY = 100.0


def line(s_per_byte: float, latency: float = LATENCY, cpu: float = 0.0) -> CollectiveCosts:
    return CollectiveCosts(latency, Curve(((0.0, 0.0), (1.0, s_per_byte))), cpu)


def link(s_per_byte: float = 1.0, latency: float = LATENCY, cpu: float = 0.0) -> LinkCosts:
    costs = line(s_per_byte, latency, cpu)
    return LinkCosts(costs, costs, {torch.float32: costs})


CHUNK = ChunkCost(encode_s=1, scatter_bytes=10, reduce_s=2, gather_bytes=20, decode_s=3)


def test_a_curve_is_straight_between_points_and_beyond():
    curve = Curve(((10.0, 1.0), (20.0, 3.0), (40.0, 4.0)))
    assert [curve.at(x) for x in (0, 10, 15, 20, 30, 60)] == [1, 1, 2, 3, 3.5, 5]


def test_one_chunk_takes_the_sum_of_its_parts():
    played = play_codec(Backward((1000.0,), 1000.0), [[CHUNK]], link())
    scatter, gather, commit = 10 + LATENCY, 20 + LATENCY, LATENCY
    assert played.end_s == 1000 + 1 + scatter + 2 + gather + 3 + commit


def test_what_arrives_before_the_backward_pass_ends_is_hidden():
    assert play_codec(Backward((0.0,), 5000.0), [[CHUNK]], link()).end_s == 5000 + 1  # the encoding


def test_messages_take_the_link_one_after_another():
    # Three chunks at once and no work: the link is never idle until the last gather has left.
    chunk = ChunkCost(0, 10, 0, 10, 0)
    played = play_codec(Backward((0.0,), 0.0), [[chunk] * 3], link(latency=0.0))
    assert played.end_s == 60


def test_latency_is_hidden_by_chunks_in_flight_and_paid_at_the_end():
    chunk = ChunkCost(0, 1000, 0, 1000, 0)
    played = play_codec(Backward((0.0,), 0.0), [[chunk] * 3], link())
    # All scatters have left at 3000, gathers follow: the last has arrived 100 s after it left.
    assert played.end_s == 6000 + LATENCY + LATENCY  # and the commit


def test_a_fifth_chunk_waits_for_a_slot():
    # Encoding takes a second, all else nothing, but what was sent arrives 100 s later: the first
    # slot is free when the first chunk was gathered, at 1 + 100 + 100. The fifth is encoded then.
    chunk = ChunkCost(1, 0, 0, 0, 0)
    four = play_codec(Backward((0.0,), 0.0), [[chunk] * 4], link(s_per_byte=0.0))
    five = play_codec(Backward((0.0,), 0.0), [[chunk] * 5], link(s_per_byte=0.0))
    # Two gathers are in flight, so the last two of four are posted once the first have arrived.
    assert four.end_s == 202 + LATENCY + LATENCY
    assert five.end_s > four.end_s


def test_the_finishing_thread_holds_up_the_backward_pass_where_it_shares_its_core():
    buckets = [[ChunkCost(0, 0, 30, 0, 20)], [ChunkCost(0, 0, 0, 0, 0)]]
    nothing = link(0.0, 0.0)
    alone = play_codec(Backward((0.0, 1000.0), 1000.0, spare_cores=1.0), buckets, nothing)
    sharing = play_codec(Backward((0.0, 1000.0), 1000.0, spare_cores=0.0), buckets, nothing)
    half = play_codec(Backward((0.0, 1000.0), 1000.0, spare_cores=0.5), buckets, nothing)
    assert alone.end_s == 1000
    assert sharing.end_s == pytest.approx(1050, abs=0.2)  # 1e-4 of the pass ends the search
    assert half.end_s == pytest.approx(1025, abs=0.2)


def test_moving_bytes_takes_processor_time_as_well():
    buckets = [[ChunkCost(0, 100, 0, 100, 0)], [ChunkCost(0, 0, 0, 0, 0)]]
    backward = Backward((0.0, 1000.0), 1000.0, spare_cores=0.0)
    played = play_codec(backward, buckets, link(0.5, 0.0, cpu=0.25))
    assert played.end_s == pytest.approx(1050, abs=0.2)


def test_all_reduces_queue_and_are_cast_before_and_after():
    buckets = [ReducedBucket(1, 100, 2), ReducedBucket(1, 50, 2)]
    played = play_all_reduce(Backward((10.0, 20.0), 20.0), buckets, line(1.0))
    # The first leaves at 11 and takes the link until 111, the second until 161.
    assert played.end_s == 161 + LATENCY + 2


def test_it_is_deterministic():
    buckets = [[CHUNK] * 7, [CHUNK] * 3]
    backward = Backward((0.1, 33.3), 35.0, spare_cores=0.3)
    first = play_codec(backward, buckets, link(0.3, 1.7, 0.1))
    assert play_codec(backward, buckets, link(0.3, 1.7, 0.1)) == first


def test_the_link_is_slower_while_gradients_are_computed():
    slow = CollectiveCosts(0.0, Curve(((0.0, 0.0), (1.0, 1.0))), beside_backward=0.25)
    buckets = [ReducedBucket(0, 100, 0)]
    # 100 s of the link: a quarter of the 200 s of the pass, and 50 s after it.
    assert play_all_reduce(Backward((0.0,), 200.0), buckets, slow).end_s == 250
    assert play_all_reduce(Backward((0.0,), 1000.0), buckets, slow).end_s == 1000


def test_the_link_is_not_slower_while_ddp_waits_for_a_slot():
    slow = CollectiveCosts(0.0, Curve(((0.0, 0.0), (1.0, 1.0))), beside_backward=0.25)
    costs = LinkCosts(slow, slow, {})
    chunk = ChunkCost(0, 10, 0, 0, 0)
    # A chunk a second, ten seconds of the link each: after the fifth second the slots are taken
    # and the thread waits, so that nearly all of the 70 s pass at full speed.
    ready = tuple(float(second) for second in range(7))
    played = play_codec(Backward(ready, 6.0), [[chunk]] * 7, costs)
    assert 70 < played.end_s < 70 + 2 * 5
