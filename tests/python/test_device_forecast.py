"""doctor and codec="auto" on the fake device, whose clock follows prices that a test names."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradferry import _native
from gradferry.core.codec_spec import parse_codec
from gradferry.ddp.auto import CHOSEN_BY, FIRST_CHECK
from gradferry.ddp.trial import TRIAL_STEPS
from gradferry_lab.cli import main
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


@dataclasses.dataclass(frozen=True)
class Prices:
    """Seconds, as the fake device's set_prices() has them."""

    launch: float = 4e-6
    byte: float = 0.5e-12  # 2 TB/s
    collective: float = 20e-6
    byte_sent: float = 1e-9  # 8 Gb/s


@contextlib.contextmanager
def priced(prices: Prices) -> Iterator[Any]:
    from fake_device import machine

    machine.set_prices(**dataclasses.asdict(prices))
    try:
        yield machine
    finally:
        machine.set_prices(launch=0, byte=0, collective=0, byte_sent=0)


class Layer(torch.autograd.Function):
    """Does nothing, but takes its time on the device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        from fake_device import machine

        machine.compute(seconds / 2)
        ctx.seconds = seconds
        ctx.gradient = weight.detach()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        from fake_device import machine

        machine.compute(ctx.seconds)
        return gradient, ctx.gradient.clone(), None


LAYERS = 4
WIDTH = 256
NUM_ELEMENTS = LAYERS * WIDTH * WIDTH
BUCKET_MB = 4 * WIDTH * WIDTH / 2**20  # a layer each


class Model(nn.Module):
    """Layers that take so many seconds each, backwards; half of it forwards."""

    def __init__(self, layer_s: float) -> None:
        super().__init__()
        self.layer_s = layer_s
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = Layer.apply(x, weight, self.layer_s)
        return x.sum()


@contextlib.contextmanager
def small_measurements() -> Iterator[None]:
    """Sizes that loopback and emulated kernels get through in a second, and few repetitions: of the
    device's clock all are alike.
    """
    from gradferry.forecast import measure, measure_codecs, measure_device_link

    with (
        mock.patch.object(measure, "DEVICE_ELEMENTS", 16 * _native.TILE_ELEMENTS),
        mock.patch.object(measure_device_link, "_EXCHANGE_BYTES", (16 << 10, 64 << 10)),
        mock.patch.object(measure_device_link, "_LOCAL_BYTES", (16 << 10, 64 << 10)),
        mock.patch.object(measure_device_link, "_MOST_IN_BATCH", 2),
        mock.patch.object(measure_device_link, "_MOST_BATCHES", 2),
        mock.patch.object(measure_codecs, "_ROUNDS", 1),
        mock.patch.object(measure_device_link, "_REDUCE_BYTES", (64 << 10, 256 << 10)),
    ):
        yield


def wrapped(layer_s: float, kind: str) -> tuple[DistributedDataParallel, torch.Tensor]:
    """The model in DDP, and its batch."""
    import fake_device

    model = Model(layer_s).to(fake_device.DEVICE)
    group = fake_device.group(kind)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_MB)
    return ddp, torch.ones(1, device=fake_device.DEVICE, requires_grad=True)


@contextlib.contextmanager
def group_without_cpu() -> Iterator[None]:
    """Groups like those of init_process_group("nccl"), while this lasts."""
    import fake_device

    known = dict(fake_device.backends)

    def group(kind: str) -> dist.ProcessGroup:
        return dist.new_group(backend=f"fake:fake_{kind}")

    with mock.patch.object(fake_device, "group", group):
        yield
    fake_device.backends.update(known)


def case_without_cpu(case: str, **arguments: Any) -> Any:
    with group_without_cpu():
        return globals()[case](**arguments)


def case_doctor(prices: Prices, layer_s: float, hooks: list[str], kind: str = "streamed") -> Any:
    import fake_device

    with priced(prices), small_measurements():
        ddp, x = wrapped(layer_s, kind)
        found = gradferry.doctor(ddp, lambda: (x,), hooks=hooks, show=True)
    assert fake_device.machine.races() == []
    return found


# What "auto" takes where kernels, too, cost what they read and write: q4, as precise, sends more.
SHORTEST_OF_4_BITS = "rht:bits=4"
HOOKS = ["torch:fp32", "torch:bf16", "q8", "q4", "exact"]
LAYER_S = 100e-6


@pytest.fixture(scope="module")
def found(device_worlds: Worlds) -> Any:
    """What doctor finds on 8 Gb/s, which hide nothing."""
    answers = device_worlds(2).run(case_doctor, prices=Prices(), layer_s=LAYER_S, hooks=HOOKS)
    first, second = (dataclasses.replace(answer, costs=None) for answer in answers)
    assert first == second
    return answers[0]


def test_the_link_is_that_of_the_group(found: Any) -> None:
    link, prices = found.costs[0].link, Prices()
    assert link.engine.value == "streams"
    for costs in (link.scatter, link.gather, *link.all_reduce.values()):
        assert len(costs.occupied.points) > 2
        for num_bytes, seconds in costs.occupied.points:
            assert seconds == pytest.approx(prices.collective + num_bytes * prices.byte_sent)
        assert costs.latency_s == costs.occupied.points[0][1]
        assert costs.in_line


def test_kernels_are_timed_by_events(found: Any) -> None:
    # What a chunk must touch per element; besides, there are 108 bytes per tile of 4096 elements
    # (its entry, the codec's, flags), at most 2 % of the rest. Decoding may undo what was sent.
    bits = {"exact": 32, "q8": 8.25, "q4": 4.28}
    for kind, costs in found.costs[0].codecs.items():
        payload = bits[kind.codec.name] / 8
        worker, owner = (8 * kept for kept in kind.residuals)  # fp32, read and written; as one
        expected = {
            "encode": 4 + payload + worker / 2,
            "reduce": 3 * payload + owner / 2,
            "decode": payload + 4 + worker / 2 + payload * kind.residuals[0],
        }
        for part, num_bytes in expected.items():
            per_element = getattr(costs, f"{part}_per_element")
            assert per_element == pytest.approx(num_bytes * Prices().byte, rel=0.03, abs=0), kind
            assert getattr(costs, f"{part}_launch") == pytest.approx(Prices().launch, rel=0.01)
        assert costs.check_per_byte == 0  # the kernels check


def test_steps_are_timed_by_events(found: Any) -> None:
    # Whatever the host takes for its part, which is milliseconds. A layer copies three times what
    # it has: x, its gradient, and that into the bucket.
    copies = 3 * (Prices().launch + 2 * 4 * WIDTH**2 * Prices().byte)
    ready = sorted(found.profile.ready_s)
    for number, (before, after) in enumerate(itertools.pairwise(ready)):
        assert LAYER_S <= after - before <= LAYER_S + copies, number
    assert 6 * LAYER_S <= found.profile.total_s <= 6 * LAYER_S + 2 * LAYERS * copies


def case_measured(prices: Prices, layer_s: float, hook: str, nodes: object = "auto") -> list[float]:
    """Seconds of each of some steps with a hook."""
    import fake_device
    from gradferry.forecast.clock import DeviceClock

    with priced(prices):
        ddp, x = wrapped(layer_s, "streamed")
        if hook != "torch:fp32":
            gradferry.attach(ddp, hook, nodes=nodes)
        clock = DeviceClock(fake_device.DEVICE)
        marks = []
        for _ in range(6):
            ddp.zero_grad()
            ddp(x).backward()
            marks.append(clock.mark())
        return [clock.seconds(*pair) for pair in itertools.pairwise(marks)]


@pytest.mark.parametrize("hook", ["torch:fp32", "exact", "q8", "q4"])
def test_steps_take_the_time_that_was_predicted(worlds: Worlds, found: Any, hook: str) -> None:
    steps = worlds(2).run(case_measured, prices=Prices(), layer_s=LAYER_S, hook=hook)[0]
    (predicted,) = (p for p in found.predictions if p.hook == hook)
    # Not foreseen are single kernels: that of the commit, and those that begin a pass. DDP copies a
    # bucket into .grad while others are on their way; the forecast has all copies last.
    copy = Prices().launch + 2 * 4 * WIDTH**2 * Prices().byte
    assert predicted.seconds - LAYERS * copy - 3 * Prices().launch <= steps[-1]
    assert steps[-1] <= predicted.seconds + 3 * Prices().launch
    assert predicted.exposed_s > 50e-6  # so that the link and the kernels are part of it


FAST = Prices(collective=10e-6, byte_sent=1 / 400e9)


@pytest.mark.parametrize(
    ("prices", "verdict"),
    [
        (Prices(), r"Use q4: q4 takes .* times faster than torch:bf16, the best without gradferry"),
        (FAST, r"Do not compress: torch:"),
    ],
    ids=["8 Gb/s", "NVLink"],
)
def test_it_says_no_on_a_fast_link(worlds: Worlds, prices: Prices, verdict: str) -> None:
    # 400 GB/s take a bucket of 0.25 MB in a microsecond, less than one kernel of a codec.
    hooks = ["torch:fp32", "torch:bf16", "q4"]
    found = worlds(2).run(case_doctor, prices=prices, layer_s=20e-6, hooks=hooks)[0]
    assert re.match(verdict, found.verdict), found.verdict


def test_bytes_that_pass_through_the_host_are_measured_so(worlds: Worlds) -> None:
    answers = worlds(2).run(
        case_doctor, prices=Prices(), layer_s=LAYER_S, hooks=["q4"], kind="staged"
    )
    assert answers[0].verdict == answers[1].verdict
    link = answers[0].costs[0].link
    assert link.engine.value == "staged"
    # By the host's clock: real seconds of loopback.
    assert all(seconds > 0 for _, seconds in link.scatter.occupied.points)


def case_auto(prices: Prices, layer_s: float, kind: str = "streamed") -> tuple[dict, list[float]]:
    import fake_device
    from gradferry.forecast.clock import DeviceClock

    with priced(prices), small_measurements():
        ddp, x = wrapped(layer_s, kind)
        state = gradferry.attach(ddp, "auto")
        clock = DeviceClock(fake_device.DEVICE)
        marks = []
        for _ in range(CHOSEN_BY + 4):
            ddp.zero_grad()
            ddp(x).backward()
            marks.append(clock.mark())
        steps = [clock.seconds(*pair) for pair in itertools.pairwise(marks)]
        choice = state.stats()["choice"]
        state.load_state_dict(state.state_dict())
        assert state.stats()["choice"]["codec"] == choice["codec"]
    assert fake_device.machine.races() == []
    return choice, steps


def test_auto_follows_the_clock_of_the_device(worlds: Worlds) -> None:
    answers = worlds(2).run(case_auto, prices=Prices(), layer_s=LAYER_S)
    assert answers[0] == answers[1]
    choice, steps = answers[0]
    assert choice["codec"] == SHORTEST_OF_4_BITS
    assert "the most precise within 2% of the fastest" in choice["reason"]
    assert choice["step"] == FIRST_CHECK + len(choice["measured_ms"]) * TRIAL_STEPS
    dense = steps[6]
    assert choice["predicted_ms"]["exact"] == pytest.approx(1e3 * dense, rel=0.01)
    chosen = choice["predicted_ms"][choice["codec"]]
    assert steps[-1] == pytest.approx(1e-3 * chosen, abs=3 * Prices().launch)


def test_auto_does_not_compress_on_a_fast_link(worlds: Worlds) -> None:
    for choice, _ in worlds(2).run(case_auto, prices=FAST, layer_s=20e-6):
        assert choice["codec"] == "off"
        assert choice["predicted_ms"]["off"] < choice["predicted_ms"]["q4"]


def test_auto_measures_bytes_that_pass_through_the_host(worlds: Worlds) -> None:
    answers = worlds(2).run(case_auto, prices=Prices(), layer_s=LAYER_S, kind="staged")
    first, second = (choice for choice, _ in answers)
    assert first == second
    assert set(first["predicted_ms"]) >= {"off", "exact", "q4"}


@pytest.mark.slow
def test_a_group_needs_no_backend_for_the_cpu(worlds: Worlds) -> None:
    arguments = {"prices": Prices(), "layer_s": LAYER_S}
    first, second = worlds(2).run(case_without_cpu, case="case_auto", **arguments)
    assert first == second
    assert first[0]["codec"] == SHORTEST_OF_4_BITS
    found = worlds(2).run(case_without_cpu, case="case_doctor", hooks=["q4"], **arguments)[0]
    assert found.verdict.startswith("Use q4")


def case_switched(prices: Prices) -> list[np.ndarray]:
    """Owner residuals by tile, of the tiles that this rank owns, before and after a change."""
    from gradferry.ddp.state import bound_to

    with priced(prices):
        ddp, x = wrapped(LAYER_S, "streamed")
        bound = bound_to(gradferry.attach(ddp, "auto"))
        with torch.no_grad():  # so that ranks have different gradients
            for weight in ddp.parameters():
                weight.mul_(dist.get_rank() + 0.3)
        seen = []
        for number, codec in enumerate(("q4", "rht")):
            bound.running.switch(bound.hook, parse_codec(codec), number)
            if number == 0:
                ddp(x).backward()
                seen.append(owner_residuals(bound.running.engine))
        return [*seen, owner_residuals(bound.running.engine)]


def owner_residuals(engine: Any) -> np.ndarray:
    owner = engine.state()[2].numpy()
    whole, begin = np.zeros(NUM_ELEMENTS, np.float32), 0
    for _, count, _, offset in engine.tiles():
        if offset >= 0:
            whole[begin : begin + count] = owner[offset : offset + count]
        begin += count
    return whole


def test_what_owners_withheld_moves_without_a_backend_for_the_cpu(worlds: Worlds) -> None:
    answers = worlds(2).run(case_without_cpu, case="case_switched", prices=Prices())
    before, after = (sum(answer[i] for answer in answers) for i in (0, 1))
    assert before.any()
    assert np.array_equal(before, after)


def case_small_chunks(prices: Prices, chunk_bytes: int) -> int:
    from gradferry.core import device

    with mock.patch.object(device, "STREAM_CHUNK_BYTES", chunk_bytes):
        found = case_doctor(prices, layer_s=LAYER_S, hooks=["exact"])
    (predicted,) = (p for p in found.predictions if p.hook == "exact")
    return predicted.wire_bytes


def test_chunks_are_those_of_the_device(worlds: Worlds) -> None:
    # A bucket sends an owner 128 kB: in one chunk, as on a host, or in four.
    whole, parts = (
        worlds(2).run(case_small_chunks, prices=Prices(), chunk_bytes=chunk_bytes)[0]
        for chunk_bytes in (1 << 20, 1 << 15)
    )
    assert parts - whole == LAYERS * 3 * 2 * _native.HEADER_BYTES


def case_bucket_times(prices: Prices) -> list[list[dict[str, Any]]]:
    """Of an engine that was asked, after each step; and of one that was not."""
    from gradferry.ddp.state import bound_to

    with priced(prices):
        ddp, x = wrapped(LAYER_S, "streamed")
        state = gradferry.attach(ddp, "q8")
        engine = bound_to(state).running.engine
        seen = []
        for step in range(70):
            if step == 1:
                engine.time_buckets()
            ddp.zero_grad()
            ddp(x).backward()
            if step in (0, 1, 69):
                clock_of_device().wait()
                seen.append(engine.bucket_times())
    return seen


def clock_of_device() -> Any:
    import fake_device
    from gradferry.forecast.clock import clock_of

    return clock_of(fake_device.DEVICE)


def test_the_last_buckets_are_timed_once_someone_asks(worlds: Worlds) -> None:
    before, one, many = worlds(2).run(case_bucket_times, prices=Prices())[0]
    assert before == []
    assert [row["step"] for row in one] == [1] * LAYERS
    assert one[0]["begin_ms"] == 0
    for row, following in itertools.pairwise(one):
        assert 1e3 * LAYER_S <= following["begin_ms"] - row["begin_ms"] <= 1.2e3 * LAYER_S
        # Two collectives lie between, of 64 kB and their latency.
        assert row["complete_ms"] - row["begin_ms"] >= 2e3 * Prices().collective
    assert [row["step"] for row in many] == [step for step in range(6, 70) for _ in range(LAYERS)]
    assert many[0]["begin_ms"] == 0


def test_tables_say_what_was_measured_on_a_device(found: Any) -> None:
    from gradferry_lab.doctor import doctor_rows, doctor_tables

    rows = doctor_rows(found, "own", {"link": "as it is"})
    assert {row["device"] for row in rows} == {"fake"}
    codecs = [row for row in rows if row["kind"] == "codec"]
    assert all(row["encode_launch_us"] == pytest.approx(4, rel=0.01) for row in codecs)
    notes = " ".join(note for table in doctor_tables(rows) for note in table.notes)
    assert "ns per element, by events of the device" in notes
    assert "through the group of the model" in notes
    assert "the backward pass loses 0% of their time" in notes  # these streams share nothing


def case_bad_models() -> list[str]:
    import fake_device
    from gradferry.core import device

    ddp, x = wrapped(LAYER_S, "streamed")
    said = []
    with mock.patch.dict(device.LIBRARIES, clear=True), mock.patch.object(device, "_loaded", None):
        said.append(error_of(lambda: gradferry.doctor(ddp, lambda: (x,), show=False)))
        said.append(error_of(lambda: gradferry.attach(ddp, "auto")))
    ddp.module.weights[1] = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    said.append(error_of(lambda: gradferry.doctor(ddp, lambda: (x,), show=False)))
    said.append(str(fake_device.machine.races()))
    return said


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except gradferry.ConfigError as error:
        return str(error)
    return "no error"


def test_what_cannot_be_measured_is_refused(worlds: Worlds) -> None:
    for no_kernels, not_attached, half, races in worlds(2).run(case_bad_models):
        assert no_kernels.startswith("rank 0: there are no codecs for gradients on 'fake'; move")
        assert "there are no codecs for gradients on 'fake'" in not_attached
        assert re.match(
            "parameter 'module.weights.1' is on cpu, .* on fake:0: move the whole", half
        )
        assert races == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "multiprocessing.process.BaseProcess.start", lambda self: pytest.fail("started")
    )
    assert main(["doctor", "--device", "cuda"]) == 2
    assert "sees no GPU on this machine; run this where there is one" in capsys.readouterr().err
