"""The simulated step against times worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gradferry import _native
from gradferry.core.nodes import Nodes, flat
from gradferry.forecast.buckets import CodecTraffic, parameter_codecs
from gradferry.forecast.costs import (
    CastCosts,
    CodecCosts,
    CollectiveCosts,
    Costs,
    Curve,
    Engine,
    LinkCosts,
    LocalCosts,
    NodeCosts,
    Parameter,
    StepProfile,
)
from gradferry.forecast.diagnosis import needs_momentum
from gradferry.forecast.hook_names import hook_config
from gradferry.forecast.predict import Prediction, Predictor
from gradferry.forecast.simulate import (
    Backward,
    ChunkCost,
    LocalChunkCost,
    ReducedBucket,
    play_all_reduce,
    play_codec,
)
from gradferry.forecast.simulate_streams import enqueued, play_on_streams
from gradferry.forecast.verdict import advise

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
    # Encoding takes a second, all else nothing, but what was sent arrives 100 s later. Chunks are
    # posted at 1, 2, 3, 4; two gathers at a time arrive at 201 and 202, then 301 and 302. The first
    # one's slot is free at 201: the fifth is posted at 202, its gather at 302, and has come at 402.
    chunk = ChunkCost(1, 0, 0, 0, 0)
    four = play_codec(Backward((0.0,), 0.0), [[chunk] * 4], link(s_per_byte=0.0))
    five = play_codec(Backward((0.0,), 0.0), [[chunk] * 5], link(s_per_byte=0.0))
    assert four.end_s == 302 + LATENCY
    assert five.end_s == 402 + LATENCY


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


LOCAL = LocalChunkCost(pack_s=4, scatter_bytes=30, sum_s=5, forward_bytes=40)


def link_of_nodes(s_per_byte: float, local_s_per_byte: float, latency: float) -> LinkCosts:
    between, inside = line(s_per_byte, latency), line(local_s_per_byte, latency)
    return LinkCosts(between, between, {}, local=LocalCosts(inside, inside))


def test_one_chunk_of_two_levels_takes_the_sum_of_its_parts():
    chunk = replace(CHUNK, local=LOCAL)
    costs = link_of_nodes(1.0, 2.0, LATENCY)
    played = play_codec(Backward((1000.0,), 1000.0), [[chunk]], costs)
    local_scatter, forward = 2 * 30 + LATENCY, 2 * 40 + LATENCY
    scatter, gather = 10 + LATENCY, 20 + LATENCY
    work = 4 + (5 + 1) + 2 + 3
    assert played.end_s == 1000 + work + local_scatter + scatter + gather + forward + LATENCY


def test_only_copies_for_siblings_hold_up_the_backward_pass():
    chunk = replace(CHUNK, local=LOCAL)
    played = play_codec(Backward((0.0,), 5000.0), [[chunk]], link_of_nodes(1.0, 1.0, LATENCY))
    assert played.end_s == 5000 + 4


def test_siblings_and_peers_have_links_of_their_own():
    # No work and no latency. All four local scatters are through at 40, when the first gather could
    # begin; scatters and gathers then take the card one after another, 10 s each, until 90, and the
    # last forward 10 s more.
    chunk = ChunkCost(0, 10, 0, 10, 0, local=LocalChunkCost(0, 10, 0, 10))
    played = play_codec(Backward((0.0,), 0.0), [[chunk] * 4], link_of_nodes(1.0, 1.0, 0.0))
    assert played.end_s == 100


def test_what_has_come_is_done_first_and_else_the_oldest_is_waited_for():
    # At 10 the first chunk is added (100 s): meanwhile the second one's local scatter comes. At 110
    # the first has been sent, which takes 1000 s: the second is added until 210. Its scatter leaves
    # when the first one's has, at 1110, and has come at 2110. The rest takes no time.
    first = ChunkCost(0, 1000, 0, 0, 0, local=LocalChunkCost(0, 10, 100, 0))
    played = play_codec(Backward((0.0,), 0.0), [[first] * 2], link_of_nodes(1.0, 1.0, 0.0))
    assert played.end_s == 2110


def test_chunks_of_nodes_cost_what_their_columns_have():
    """Two nodes of two ranks; four tiles, so each rank owns one and each column has two."""
    config = hook_config("q8")
    parameters = [Parameter("only", (4, 4096))]
    (codec,) = set(parameter_codecs(config, parameters))
    nodes = Nodes(((0, 1), (2, 3)))
    traffic = CodecTraffic(config, parameters, nodes)
    codecs = {codec: CodecCosts(1.0, 10.0, 100.0, 0.0)}
    costs = Costs(nodes, link_of_nodes(0.0, 0.0, 0.0), {}, codecs, NodeCosts(1000.0, 1e4))
    ((chunk,),) = traffic.cost(traffic.cut([[0]]), costs)
    payload = _native.payload_bytes("q8", 4096, torch.float32, "owner")
    assert chunk.encode_s == 2 * 4096
    assert chunk.reduce_s == 10 * 4096
    assert chunk.decode_s == 100 * 4 * 4096
    assert chunk.scatter_bytes == chunk.gather_bytes
    message = chunk.gather_bytes  # to the one peer
    assert message == 64 + payload
    assert chunk.local == LocalChunkCost(
        pack_s=1000 * 2 * 4096,
        scatter_bytes=64 + 4 * 2 * 4096,
        sum_s=1e4 * 2 * 4096,
        forward_bytes=64 + 2 * message,
    )
    link = replace(costs.link, local=replace(costs.link.local, shares_memory=True))
    ((shared,),) = traffic.cost(traffic.cut([[0]]), replace(costs, link=link))
    assert shared == replace(chunk, local=replace(chunk.local, scatter_bytes=64, forward_bytes=64))


def test_it_is_deterministic():
    buckets = [[CHUNK] * 7, [CHUNK] * 3]
    backward = Backward((0.1, 33.3), 35.0, spare_cores=0.3)
    first = play_codec(backward, buckets, link(0.3, 1.7, 0.1))
    assert play_codec(backward, buckets, link(0.3, 1.7, 0.1)) == first


SLOW = CollectiveCosts(0.0, Curve(((0.0, 0.0), (1.0, 1.0))), beside_backward=0.25)


def test_the_link_is_slower_while_gradients_are_computed():
    one = [ReducedBucket(0, 100, 0)]
    # 100 s of the link: a quarter of the 200 s of the pass, and 50 s after it.
    assert play_all_reduce(Backward((0.0,), 200.0), one, SLOW).end_s == 250
    # Two of them are through after 800 s.
    assert play_all_reduce(Backward((0.0, 0.0), 800.0), one * 2, SLOW).end_s == 800
    assert play_all_reduce(Backward((0.0, 0.0), 799.0), one * 2, SLOW).end_s > 799


def test_the_link_is_not_slower_while_ddp_waits_for_a_slot():
    chunk = ChunkCost(0, 10, 0, 0, 0)
    played = play_codec(
        Backward((0.0, 1.0, 2.0, 3.0, 4.0, 1000.0), 1000.0),
        [[chunk]] * 6,
        LinkCosts(SLOW, SLOW, {}),
    )
    # From second 4 on the thread waits for a slot: the first chunk has sent 1 of 10 s by then and
    # is through at 13, the three after it at 43. Then its gather takes no time and frees the slot.
    # The last chunk is ready 996 s after that, and has the link for itself.
    assert played.end_s == 43 + 996 + 10


def stream(s_per_byte: float, engine: Engine = Engine.STREAMS) -> LinkCosts:
    """A collective occupies the backend's stream until it has arrived."""
    costs = CollectiveCosts(LATENCY, Curve(((0.0, 0.0), (1.0, s_per_byte))), in_line=True)
    return LinkCosts(costs, costs, {}, engine)


def test_on_streams_work_is_enqueued_one_chunk_ahead():
    assert [f"{does} {chunk}" for does, chunk in enqueued(3)] == [
        "send 0", "send 1", "reduce 0", "send 2", "reduce 1", "decode 0", "reduce 2", "decode 1",
        "decode 2",
    ]  # fmt: skip
    assert [turn.does for turn in enqueued(1)] == ["send", "reduce", "decode"]


def test_on_streams_one_chunk_takes_the_sum_of_its_parts():
    backward = Backward((1000.0,), 1000.0)
    played = play_on_streams(backward, [[CHUNK]], stream(1.0))
    assert played.end_s == 1000 + 1 + 10 + 2 + 20 + 3  # no latency, and the next step commits


def test_on_streams_a_gather_waits_behind_the_next_scatter():
    # Scatters at 0 and 10, the first reduce to 12, but its gather goes behind the second scatter:
    # 20 to 40; the second's, reduced at 22, 40 to 60; and 3 to decode.
    chunk = ChunkCost(0, 10, 2, 20, 3)
    played = play_on_streams(Backward((0.0,), 0.0), [[chunk] * 2], stream(1.0))
    assert played.end_s == 60 + 3


def test_on_streams_encoding_does_not_hold_up_the_backward_pass():
    chunk = ChunkCost(50, 0, 0, 0, 0)
    backward = Backward((0.0, 1000.0), 1000.0, spare_cores=1.0)
    none = [ChunkCost(0, 0, 0, 0, 0)]
    assert play_on_streams(backward, [[chunk], none], stream(0.0)).end_s == 1000
    # Unless its kernels take the device, half or whole.
    for spare, end in ((0.5, 1025), (0.0, 1050)):
        sharing = Backward((0.0, 1000.0), 1000.0, spare_cores=spare)
        played = play_on_streams(sharing, [[chunk], none], stream(0.0))
        assert played.end_s == pytest.approx(end, abs=0.2)


@pytest.mark.parametrize(
    ("keeps_sent", "free"),
    [(False, 11), (True, 32)],  # the first chunk is reduced at 11, and decoded after a reduce at 32
)
def test_on_streams_a_fourth_chunk_waits_for_a_slot(keeps_sent, free):
    # A second to encode, 10 to reduce, 11 to decode, nothing to send. Three chunks are through at
    # 64. The fourth takes 60 s to encode.
    chunk = ChunkCost(1, 0, 10, 0, 11, keeps_sent)
    fourth = ChunkCost(60, 0, 10, 0, 11)
    backward = Backward((0.0, 0.0), 0.0)
    played = play_on_streams(backward, [[chunk] * 3, [fourth]], stream(0.0))
    assert played.end_s == free + 60 + 10 + 11


def test_staged_the_thread_waits_for_every_message():
    # On streams: encode 1, 2; arrive 11, 21; reduce to 13, 23; gather 21 to 41, 41 to 61; decode.
    chunk = ChunkCost(1, 10, 2, 20, 3)
    backward = Backward((0.0,), 0.0)
    assert play_on_streams(backward, [[chunk] * 2], stream(1.0)).end_s == 64
    # With a thread, a second bucket is only encoded when the first one's last gather is there:
    # 1, 11, 13, 33; then encode to 34, 44, reduce 46, 66, decode 69.
    staged = play_on_streams(
        Backward((0.0, 0.0), 0.0), [[chunk], [chunk]], stream(1.0, Engine.STAGED)
    )
    assert staged.end_s == 69
    streamed = play_on_streams(Backward((0.0, 0.0), 0.0), [[chunk], [chunk]], stream(1.0))
    assert streamed.end_s < 69


def test_slots_of_a_device_are_as_many_as_the_stages_of_a_chunk():
    turns = list(enqueued(7))
    assert _native.DEVICE_CHUNK_SLOTS == len({turn.does for turn in turns})


def stream_of_nodes(engine: Engine = Engine.STREAMS) -> LinkCosts:
    return replace(stream(1.0, engine), local=LocalCosts(stream(1.0).scatter, stream(1.0).gather))


def test_a_chunk_of_two_levels_takes_the_sum_of_its_parts_on_streams():
    chunk = replace(CHUNK, local=LOCAL)
    for engine in (Engine.STREAMS, Engine.STAGED):
        played = play_on_streams(Backward((1000.0,), 1000.0), [[chunk]], stream_of_nodes(engine))
        # Copy, local scatter, sum and encode, scatter, reduce, gather, forward, decode.
        assert played.end_s == 1000 + 4 + 30 + (5 + 1) + 10 + 2 + 20 + 40 + 3


def test_peers_and_siblings_have_streams_of_their_own():
    # No work. Local scatters end at 10, 20, 30. Peers' messages follow each other from 10 on: two
    # scatters until 30, the first gather until 40, the last scatter until 50, gathers until 60 and
    # 70. Every forward follows its gather; the last ends 10 s after it.
    chunk = ChunkCost(0, 10, 0, 10, 0, local=LocalChunkCost(0, 10, 0, 10))
    played = play_on_streams(Backward((0.0,), 0.0), [[chunk] * 3], stream_of_nodes())
    assert played.end_s == 80


def device_predictor() -> Predictor:
    """A model of two parameters, whose codec takes time and whose link takes none."""
    config = hook_config("q8")
    parameters = [Parameter(name, (64, 64)) for name in ("first", "second")]
    (codec,) = set(parameter_codecs(config, parameters))
    launches = CodecCosts(0.0, 0.0, 0.0, 0.0, *(1.0, 1.0, 1.0))
    costs = Costs(flat(2), stream(0.0), {}, {codec: launches})
    profile = StepProfile(200.0, 100.0, (0.0, 100.0), spare_cores=0.0)
    return Predictor(parameters, profile, costs, [[0], [1]])


@pytest.mark.parametrize(
    ("exposed", "spare", "waiting"),
    [
        (2.0, 1.0, 0.0),  # less than the three kernels of the last bucket
        (3.0, 1.0, 0.0),
        (4.5, 0.5, 0.0),  # those of the first delay the backward pass by half their time
        (6.0, 0.0, 0.0),
        (16.0, 0.0, 10.0),  # more than kernels explain
    ],
)
def test_what_kernels_take_from_the_backward_pass_is_found_by_measuring(exposed, spare, waiting):
    predictor = device_predictor().calibrated("q8", hook_config("q8"), None, exposed)
    assert predictor.profile.spare_cores == pytest.approx(spare, abs=0.02)
    # The search for the pass's length ends within 1e-4 of it, the one for the share within 2^-10.
    assert predictor.profile.waiting_s == pytest.approx(waiting, abs=0.1)
    predicted = predictor.codec("q8", hook_config("q8"), [None])
    assert predicted.exposed_s == pytest.approx(max(3.0, exposed), abs=0.1)


def gpu_predictions(bytes_per_second: float, hooks: tuple[str, ...]) -> list[Prediction]:
    """On 8 GPUs, with 8000 tokens each. Estimates for an H100: 400 TFLOP/s, so that the backward
    pass takes 4 * 52e6 * 8000 / 400e12 s; kernels of codecs move 3 TB/s; a launch takes 3 us, a
    collective 15.
    """
    move, launch, latency, world_size = 1 / 3e12, 3e-6, 15e-6, 8
    parameters = [Parameter(f"w{i}", (2560, 2560)) for i in range(8)]  # 25 MB each, of fp32
    configs = {hook: replace(hook_config(hook), chunk_bytes=4 << 20) for hook in hooks}
    codecs = {
        codec: CodecCosts(
            (4 + 8 * codec.residuals[0] + codec.codec.bits() / 8) * move,
            (8 * codec.residuals[1] + (world_size + 1) * codec.codec.bits() / 8) * move,
            (4 + codec.codec.bits() / 8) * move,
            move,
            *(launch, launch, launch),
        )
        for config in configs.values()
        for codec in parameter_codecs(config, parameters)
    }

    def costs(times: float) -> CollectiveCosts:
        line = Curve(((0.0, latency), (1e9, latency + times * 1e9 / bytes_per_second)))
        return CollectiveCosts(latency, line, in_line=True)

    moved = 2 * (world_size - 1) / world_size
    reduces = {dtype: costs(moved) for dtype in (torch.float32, torch.bfloat16)}
    link = LinkCosts(costs(1), costs(1), reduces, Engine.STREAMS)
    casts = {"torch:fp32": CastCosts(8 * move, 0.0), "torch:bf16": CastCosts(10 * move, 6 * move)}
    ready_s = tuple(4.2e-3 * number / 8 for number in range(8, 0, -1))
    profile = StepProfile(6.3e-3, 4.2e-3, ready_s, spare_cores=0.0)
    predictor = Predictor(parameters, profile, Costs(flat(world_size), link, casts, codecs))
    found = [predictor.backend_hook(hook, [25.0]) for hook in casts]
    return found + [predictor.codec(hook, config, [25.0]) for hook, config in configs.items()]


@pytest.mark.parametrize(
    ("bytes_per_second", "verdict"),
    [(400e9, "Do not compress: torch:"), (12.5e9, "Use q4: ")],
    ids=["NVLink", "100 Gb/s"],
)
def test_inside_a_node_the_verdict_is_no(bytes_per_second, verdict):
    predictions = gpu_predictions(bytes_per_second, ("q8", "q4"))
    assert advise(predictions, needs_momentum).startswith(verdict)
