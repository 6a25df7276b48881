"""doctor and codec="auto" on the fake device: they follow its clock."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
from auto_trials import FOUND, TRIAL
from gradferry import diagnosis
from gradferry.averaging import start
from gradferry.core.nodes import Nodes
from gradferry.ddp import auto
from gradferry.ddp.trial import Clock
from outcomes import Outcome, attempt
from priced_device import Prices, group_without_cpu, priced, wrapped
from stepping import logged
from torch.nn.parallel import DistributedDataParallel
from watching import expect_no_race
from world import Worlds

Members = tuple[tuple[int, ...], ...]

EVEN: Members = ((0, 1), (2, 3))
NEAR = 1 / 64  # of what a byte takes, what one between siblings takes
LAYER_S = 100e-6
SLOW = Prices(byte_sent=32e-9)  # 250 Mb/s


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


@contextlib.contextmanager
def on_nodes(members: Members | None, near: float = NEAR) -> Iterator[None]:
    """Ranks seem to be on these nodes, with a faster link between those of a node."""
    from gradferry.core import engine

    make = engine._new_device_backend

    def made(*arguments: Any) -> Any:
        backend = make(*arguments)
        if "/siblings/" in arguments[-1]:
            backend.set_byte_share(near)
        return backend

    if members is None:
        yield
        return
    nodes = Nodes(members)
    with (
        mock.patch.object(start, "resolve", return_value=nodes),
        mock.patch.object(diagnosis, "found_nodes", return_value=nodes),
        mock.patch.object(engine, "_new_device_backend", made),
    ):
        yield


def seconds_of(ddp: DistributedDataParallel, x: torch.Tensor, steps: int) -> list[float]:
    """Trains; from the end of each step to that of the next, by the clock of the device."""
    clock = Clock(x.device)
    marks = []
    for _ in range(steps):
        ddp.zero_grad()
        ddp(x).backward()
        marks.append(clock.mark())
    return [clock.seconds(*pair) for pair in itertools.pairwise(marks)]


# --- doctor


def case_doctor(
    prices: Prices,
    hooks: list[str],
    layer_s: float = LAYER_S,
    kind: str = "streamed",
    members: Members | None = None,
    has_cpu: bool = True,
) -> tuple[Any, str]:

    group = contextlib.nullcontext() if has_cpu else group_without_cpu()
    with on_nodes(members), group, priced(prices):
        ddp, x = wrapped(layer_s, kind)
        found = gradferry.doctor(ddp, lambda: (x,), hooks=hooks)
    expect_no_race()
    return found, str(found)


def test_doctor_tries_both_exchanges_where_ranks_share_nodes(worlds: Worlds) -> None:
    arguments = {"prices": SLOW, "hooks": ["q4"], "members": EVEN, "has_cpu": False}
    answers = worlds(4).run(case_doctor, **arguments)
    found, _ = answers[0]
    assert all(answer == answers[0] for answer in answers)
    assert [step.name for step in found.steps[:2]] == ["q4 (two-level)", "q4 (flat)"]
    # Each copy keeps its exchange: ranks of a node send a card twice as much in the flat one.
    assert found.steps[1].wire_bytes > found.steps[0].wire_bytes
    assert found.verdict.startswith("Use q4 (two-level): it takes ")
    assert "; attach with nodes=2; none of these keeps up, and gradferry.DiLoCo" in found.verdict
    alone = worlds(4).run(case_alone_on, members=EVEN)[0]
    assert alone[-1] <= found.steps[0].seconds * (1 + 1e-9)  # sums of floats


def case_alone_on(members: Members) -> list[float]:
    """Seconds per step of a training as attach alone does it."""
    with on_nodes(members), priced(SLOW):
        ddp, x = wrapped(LAYER_S, "streamed")
        gradferry.attach(ddp, "q4", nodes=len(members[0]))
        return seconds_of(ddp, x, 9)


def test_doctor_leaves_out_an_exchange_that_attach_cannot_be_told(worlds: Worlds) -> None:
    arguments = {"prices": SLOW, "hooks": ["q4"], "members": FOUND, "kind": "staged"}
    (found, _), *_ = worlds(3).run(case_doctor, **arguments)
    assert {step.name for step in found.steps} == {"torch:fp32", "q4"}


def case_bad_models() -> list[Outcome]:
    import fake_device
    from gradferry.core import device

    ddp, x = wrapped(LAYER_S, "streamed")
    said = []
    with mock.patch.dict(device.LIBRARIES, clear=True), mock.patch.object(device, "_loaded", None):
        said.append(attempt(lambda: gradferry.doctor(ddp, lambda: (x,), show=False)))
        said.append(attempt(lambda: gradferry.attach(ddp, "auto")))
    assert fake_device.machine.races() == []
    return said


def test_what_cannot_be_measured_is_refused(worlds: Worlds) -> None:
    for outcomes in worlds(2).run(case_bad_models):
        no_kernels, not_attached = outcomes
        assert {outcome.error for outcome in outcomes} == {"ConfigError"}
        assert no_kernels.text.startswith("rank 0: there are no codecs for gradients on 'fake'")
        assert "there are no codecs for gradients on 'fake'" in not_attached.text


# --- codec="auto"


def case_auto(
    prices: Prices,
    codec: str = "auto",
    layer_s: float = LAYER_S,
    kind: str = "streamed",
    members: Members | None = None,
    near: float = NEAR,
    has_cpu: bool = True,
) -> tuple[dict[str, Any], list[float], list[str]]:
    """The choice between q4 and off, or of the codec's exchange, the seconds of each step, and what
    was logged.
    """

    steps = 2 + (2 if members is None else 3) * TRIAL + 4
    group = contextlib.nullcontext() if has_cpu else group_without_cpu()
    few = mock.patch.object(auto, "CODECS", ("q4",))
    with on_nodes(members, near), group, few, priced(prices), logged() as messages:
        ddp, x = wrapped(layer_s, kind)
        state = gradferry.attach(ddp, codec)
        seconds = seconds_of(ddp, x, steps)
        choice = state.stats()["choice"]
        state.load_state_dict(state.state_dict())
        for field in ("codec", "exchange"):
            assert state.stats()["choice"][field] == choice[field]
    expect_no_race()
    return choice, seconds, messages


@pytest.mark.parametrize("codec", ["auto", "q4"])
@pytest.mark.parametrize(
    ("near", "has_cpu", "exchange"), [(NEAR, False, "two-level"), (1.0, True, "flat")]
)
def test_auto_and_a_named_codec_take_the_faster_exchange(
    worlds: Worlds, codec: str, near: float, has_cpu: bool, exchange: str
) -> None:
    # Siblings exchange whole gradients: where a byte between them takes as long as any other, the
    # flat exchange sends less.
    arguments = {"codec": codec, "members": EVEN, "near": near, "has_cpu": has_cpu}
    answers = worlds(4).run(case_auto, prices=SLOW, **arguments)
    assert all(answer[:2] == answers[0][:2] for answer in answers)
    choice, seconds, (line,) = answers[0]
    assert choice["exchange"] == exchange
    named = f"{choice['codec']} ({exchange})"
    other = named.replace(exchange, {"flat": "two-level", "two-level": "flat"}[exchange])
    assert choice["measured_ms"][named] < choice["measured_ms"][other]
    by = "codec" if codec == "auto" else "nodes"
    assert line.startswith(f"{by}='auto' takes {named} from step {choice['step']} on: ")
    assert f"{named} {choice['measured_ms'][named]:.1f}" in line
    assert f"{other} {choice['measured_ms'][other]:.1f}" in line
    assert bool(choice["next_check"]) == (codec == "auto")  # no second trial of a named codec
    assert seconds[-1] == pytest.approx(1e-3 * choice["measured_ms"][named], rel=0.01)
