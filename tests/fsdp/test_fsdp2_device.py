"""`gradferry.fsdp.attach` on a device with streams: the fake device under FSDP2.

The averages are those of the reference, the machine finds nothing unordered and no memory used
after it was freed, and the exchange is beside the backward pass.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gathering import Watch, differing, gathered_bytes
from gradferry.fsdp.hooks import GradientHook
from outcomes import attempt
from sharding import SHAPES, Model, Sharding, attached, local_gradients
from test_fsdp2 import IDLE, assert_equals_reference, assert_scales_change_no_bit, case_train
from world import World

Worlds = Callable[[int], World]

Q4 = {"codec": "q4"}
MOMENTUM = {"codec": "sign1", "momentum": 0.9, "warmup_steps": 2}
MODULES = len(SHAPES)


def case_train_twice(sharding: Sharding, attach: dict[str, Any]) -> list[dict[str, Any]]:
    """With streams in two orders."""
    from fake_device import machine

    answers = []
    for seed in (1, 2):
        machine.set_seed(seed * 100 + dist.get_rank())
        answers.append(case_train(sharding, attach))
        machine.synchronize()
        assert machine.races() == []
    return answers


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("device", "attach", "reduce_dtype"),
    [
        ("streamed", Q4, None),
        ("streamed", MOMENTUM, None),
        ("streamed", Q4, torch.bfloat16),
        ("staged", Q4, None),
        ("staged", MOMENTUM, None),
    ],
    ids=["q4", "momentum", "bf16 reduced", "staged q4", "staged momentum"],
)
def test_averages_equal_the_reference(
    device_worlds: Worlds, device: str, attach: dict[str, Any], reduce_dtype: torch.dtype | None
) -> None:
    sharding = Sharding(reduce_dtype=reduce_dtype, device=device)
    answers = device_worlds(4).run(case_train_twice, sharding=sharding, attach=attach)
    for shard in range(2):
        members = [*answers[shard], *answers[2 + shard]]
        assert_equals_reference(members, shard, sharding, attach)
        assert all(answer["stats"]["chunks"] > 0 for answer in members)
        assert not any(answer["warned"] for answer in members)


@pytest.mark.torch_core
def test_residuals_follow_the_loss_scale_while_a_module_has_no_gradient(
    device_worlds: Worlds,
) -> None:
    assert_scales_change_no_bit(device_worlds(4), hook="replicas", without=IDLE, device="streamed")


def case_resumed_without_a_scaler(device: str) -> list[np.ndarray]:
    """What comes after a state of another loss scale, if a module has no gradient at first."""
    sharding = Sharding(device=device)
    scaler = torch.amp.GradScaler(sharding.place.type, init_scale=2.0**10)
    model, saved = attached(sharding, error_feedback="both", grad_scaler=scaler)
    scaler.scale(model(sharding.targets(0, 0, dist.get_rank()))).backward()
    model, state = attached(sharding, error_feedback="both")
    state.load_state_dict(saved.state_dict())
    dataclasses.replace(sharding, without=IDLE).backward(model, 1)
    model.zero_grad()
    sharding.backward(model, 2)
    return local_gradients(model)


@pytest.mark.torch_core
def test_a_state_with_a_loss_scale_goes_on_without_one_as_on_the_host(
    worlds: Worlds, device_worlds: Worlds
) -> None:
    host = worlds(4).run(case_resumed_without_a_scaler, device="cpu")
    device = device_worlds(4).run(case_resumed_without_a_scaler, device="streamed")
    for one, other in zip(host, device, strict=True):
        assert all(map(np.array_equal, one, other))
        # Not 2^10 times what was withheld: gradients are below 2^4 in size.
        assert max(np.abs(gradient).max(initial=0.0) for gradient in one) < 2**5


class Watched:
    """A model in training, whose hooks count what they do to the device."""

    def __init__(self, attach: dict[str, Any]) -> None:
        from fake_device import machine

        self.machine = machine
        self.sharding = Sharding(device="streamed")
        self.model, self.state = attached(self.sharding, **attach)
        self.computes_on = torch.accelerator.current_stream()
        self.calls: list[dict[str, int]] = []  # of the hook in the last step

    def step(self, step: int, omitted: int = -1, read_early: int = -1) -> list[str]:
        """What the machine finds. `omitted`: a wait of the hook's calls; `read_early`: the call
        after which the stream that computes reads the average, and waits for nothing but what came
        before the call.
        """
        import fake_device
        from gradferry.fsdp.hooks import ReplicaHook

        def watched(hook: ReplicaHook, gradient: torch.Tensor) -> None:
            if omitted >= 0:
                self.machine.omit_wait(omitted - sum(call["waits"] for call in self.calls))
            came = torch.accelerator.current_stream().record_event()
            before = self.machine.counters()
            average(hook, gradient)
            after = self.machine.counters()
            self.machine.omit_wait(-1)
            self.calls.append({key: after[key] - before[key] for key in after})
            if len(self.calls) == 1 + read_early:
                self.computes_on.wait_event(came)
                with torch.get_device_module(fake_device.DEVICE).stream(self.computes_on):
                    gradient.clone()

        self.calls = []
        average = ReplicaHook.__call__
        with mock.patch.object(ReplicaHook, "__call__", watched):
            self.sharding.backward(self.model, step)
        local_gradients(self.model)  # read where an optimizer would
        self.model.zero_grad()
        self.machine.synchronize()
        return self.machine.races()


def case_overlap(attach: dict[str, Any]) -> dict[str, Any]:
    run = Watched(attach)
    found = [run.step(step) for step in range(2)]
    calls = run.calls
    early = [run.step(2 + number, read_early=number) for number in range(MODULES)]
    return {
        "found": found,
        "calls": calls,
        "early": early,
        "after": run.step(2 + MODULES),
        "host_waits": run.state.stats()["host_waits"],
        "computes_on": run.computes_on.stream_id,
    }


@pytest.mark.torch_core
@pytest.mark.parametrize("attach", [Q4, MOMENTUM], ids=["q4", "momentum"])
def test_the_exchange_is_beside_the_backward_pass(
    device_worlds: Worlds, attach: dict[str, Any]
) -> None:
    for answer in device_worlds(4).run(case_overlap, attach=attach):
        assert answer["found"] == [[], []]
        assert answer["after"] == []
        assert answer["host_waits"] == 0
        assert len(answer["calls"]) == MODULES
        for call in answer["calls"]:
            assert call["host_waits"] == 0
            assert call["allocations"] == 0
        # When the hook has returned, what computes is not behind the exchange, on another stream.
        computes_on = answer["computes_on"]
        for found in answer["early"]:
            assert found != []
            for race in found:
                both = sorted(race.split(" is not ordered with "))
                assert both[0] == f"copy on stream {computes_on}"
                assert both[1].startswith("decode on stream ")
                assert both[1] != f"decode on stream {computes_on}"


# The waits of a call after the first. All of them are on streams.
WAITS = ("ready", "slot", "scatter", "gather", "end")


def case_omit_waits(attach: dict[str, Any]) -> dict[str, Any]:
    """Steps whose last call omits each of its waits in turn."""
    run = Watched(attach)
    found = [run.step(step) for step in range(2)]
    waits = [call["waits"] for call in run.calls]
    omitted = range(sum(waits[:-1]), sum(waits))
    return {
        "found": found,
        "waits": waits[-1],
        "omitted": [bool(run.step(2 + number, omitted=number)) for number in omitted],
    }


def test_every_wait_is_needed(device_worlds: Worlds) -> None:
    for answer in device_worlds(4).run(case_omit_waits, attach=Q4):
        assert answer["found"] == [[], []]
        assert answer["waits"] == len(WAITS)
        # With a chunk per module there are as many slots: one is free since the step before.
        assert answer["omitted"] == [name != "slot" for name in WAITS]


class _InterruptedError(RuntimeError):
    """What ends a call between its exchange and its end."""


def case_memory(attach: dict[str, Any]) -> tuple[int, list[str]]:
    """How many streams freed memory waits for in a step after the first two; and what the machine
    finds of a call whose gradient is freed while the engine works on it.
    """
    run = Watched(attach)
    machine, found = run.machine, [run.step(step) for step in range(2)]
    before = machine.counters()["held_back"]
    found.append(run.step(2))
    held_back = machine.counters()["held_back"] - before
    assert found == [[], [], []]

    def interrupted(hook: GradientHook, gradient: torch.Tensor) -> bool:
        bucket = hook._passes.indices(hook._number), gradient
        hook._calls.start([bucket], in_background=False)
        raise _InterruptedError

    with mock.patch.object(GradientHook, "_average", interrupted), pytest.raises(_InterruptedError):
        run.sharding.backward(run.model, 3)
    del run
    gc.collect()
    machine.synchronize()
    # FSDP2's own reduce-scatter is given up, too.
    return held_back, [race for race in machine.races() if OF_THE_ENGINE.search(race)]


OF_THE_ENGINE = re.compile("(encode|reduce|decode) on")


@pytest.mark.parametrize("attach", [Q4, MOMENTUM], ids=["q4", "momentum"])
def test_a_gradient_waits_for_the_streams_of_the_engine_only_in_a_call_that_is_given_up(
    device_worlds: Worlds, attach: dict[str, Any]
) -> None:
    # FSDP2's stream for all-reduces goes on with the average; it waits for the engine.
    assert device_worlds(4).run(case_memory, attach=attach) == [(MODULES, [])] * 4


# --- gathers of parameters ------------------------------------------------------------------------


class WatchedGathers:
    """A model whose parameters are gathered, and what its gathers do to the device."""

    def __init__(self, device: str, codec: str, **options: Any) -> None:
        from fake_device import machine

        self.machine = machine
        self.sharding = Sharding(replicas=1, shards=2, device=device)
        self.model = self.sharding.model(self.sharding.mesh()["shard"])
        self.codec = codec
        options = {"reduce_scatter": "off", "all_gather": codec, **options}
        self.state = gradferry.fsdp.attach(self.model, **options)
        self.watch = Watch(self.model)
        torch.manual_seed(5)
        self.wholes = dict(Model().named_parameters())  # as they were before they were sharded
        self.calls: list[dict[str, int]] = []  # of the hook in the last step

    def step(self, omitted: int = -1) -> list[str]:
        """What the machine finds. `omitted`: a wait of the hook's calls."""
        from gradferry.fsdp.gathers import GatherHook

        def watched(hook: GatherHook, *args: Any, **kwargs: Any) -> None:
            if omitted >= 0:
                self.machine.omit_wait(omitted - sum(call["waits"] for call in self.calls))
            before = self.machine.counters()
            gather(hook, *args, **kwargs)
            after = self.machine.counters()
            self.machine.omit_wait(-1)
            self.calls.append({key: after[key] - before[key] for key in after})

        self.calls = []
        gather = GatherHook.__call__
        with mock.patch.object(GatherHook, "__call__", watched):
            targets = {
                module: {
                    name: torch.ones(shape, device=self.sharding.place).requires_grad_()
                    for name, shape in shapes.items()
                }
                for module, shapes in SHAPES.items()
            }
            self.model(targets).backward()
        self.used = {
            f"{module}.{name}".lstrip("."): target.grad.cpu().numpy()
            for module, each in targets.items()
            for name, target in each.items()
        }
        self.model.zero_grad()
        self.machine.synchronize()
        return self.machine.races()

    def wrong(self) -> list[str]:
        """Parameters with which a pass has not computed as messages say."""
        return [
            name
            for found in (self.watch.seen, self.used)
            for name in differing(found, self.wholes, self.codec, torch.float32, {})
        ]


def case_gathered(device: str, codec: str, **options: Any) -> list[dict[str, Any]]:
    """With streams in two orders."""
    from fake_device import machine

    answers = []
    for seed in (1, 2):
        machine.set_seed(seed * 100 + dist.get_rank())
        run = WatchedGathers(device, codec, **options)
        found, wrong = [], []
        for _ in range(3):
            found += run.step()
            wrong += run.wrong()
        stats = run.state.stats()
        answers.append({"found": found, "wrong": wrong, "stats": stats, "calls": run.calls})
    return answers


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("device", "codec"),
    [("streamed", "exact"), ("streamed", "q8"), ("streamed", "q4"), ("staged", "q8")],
)
def test_ranks_compute_with_what_messages_say(
    device_worlds: Worlds, device: str, codec: str
) -> None:
    for answers in device_worlds(2).run(case_gathered, device=device, codec=codec):
        for answer in answers:
            assert answer["found"] == []
            assert answer["wrong"] == []
            assert answer["stats"]["host_waits"] == 0
            gathers = len(SHAPES) + len(SHAPES) - 1  # forward, and of blocks in backward
            assert len(answer["calls"]) == gathers
            if device == "staged":
                continue
            sent = 3 * gathered_bytes(SHAPES, list(SHAPES), codec, 2)
            sent += 3 * gathered_bytes(SHAPES, list(SHAPES)[1:], codec, 2)
            sent -= 3 * gathers * 64  # commits on a device are one for a pass, in the next one
            assert answer["stats"]["wire_bytes"] == sent + 5 * 64
            for call in answer["calls"]:
                assert call["host_waits"] == 0
                assert call["allocations"] == 0


@pytest.mark.torch_core
def test_modules_of_several_chunks(device_worlds: Worlds) -> None:
    options = {"device": "streamed", "codec": "q8", "workspace_cap_mb": 0.15}
    for answers in device_worlds(2).run(case_gathered, **options):
        for answer in answers:
            assert answer["found"] == []
            assert answer["wrong"] == []
            assert answer["stats"]["chunks"] > answer["stats"]["buckets"]


def case_damaged_gather() -> dict[str, Any]:
    """What rank 1 gets of the root's parameters is damaged, in the second step."""
    import fake_device

    run: WatchedGathers | None = WatchedGathers("streamed", "q4")
    run.step()
    if dist.get_rank() == 1:
        fake_device.backends["streamed"].damage(0, 64 + 5, 0xEE)
    error = attempt(run.step)
    num_nan = {name: int(np.isnan(values).sum()) for name, values in run.watch.seen.items()}
    again = attempt(run.step)
    machine, run = run.machine, None
    # FSDP2 frees at once what it still copies to in a pass that an error has ended.
    gc.collect()
    machine.synchronize()
    machine.races()
    return {"num_nan": num_nan, "error": error, "again": again}


def test_a_damaged_gather_is_nan_at_once_and_an_error_later(
    device_worlds: Worlds,
) -> None:
    answers = device_worlds(2).run(case_damaged_gather)
    for rank, answer in enumerate(answers):
        assert {name for name, count in answer["num_nan"].items() if count} == (
            {"table", "scale"} if rank == 1 else set()
        )
        assert answer["error"].error == "ProtocolError"
        # The backward pass before does not gather the root: for the engine it is part of that.
        assert (
            "rank 1 refused a message from rank 0 (step 1, chunk 5, gather)" in answer["error"].text
        )
        assert answer["again"].headline == answer["error"].headline
    assert len({answer["error"].headline for answer in answers}) == 1


GATHER_WAITS = ("ready", "slot", "gather", "end")


def case_omit_gather_waits() -> dict[str, Any]:
    """Steps whose last gather omits each of its waits in turn."""
    run = WatchedGathers("streamed", "q4")
    found = [run.step() for _ in range(2)]
    waits = [call["waits"] for call in run.calls]
    omitted = range(sum(waits[:-1]), sum(waits))
    return {
        "found": found,
        "waits": waits[-1],
        "omitted": [bool(run.step(omitted=number)) for number in omitted],
    }


def test_every_wait_of_a_gather_is_needed(device_worlds: Worlds) -> None:
    for answer in device_worlds(2).run(case_omit_gather_waits):
        assert answer["found"] == [[], []]
        assert answer["waits"] == len(GATHER_WAITS)
        # The stream that FSDP2 gathers on waits for the gather before, and E for that stream.
        assert answer["omitted"] == [name != "slot" for name in GATHER_WAITS]


def case_refused_on_a_device() -> Any:
    sharding = Sharding(replicas=1, shards=2, device="streamed")
    model = sharding.model(sharding.mesh()["shard"])
    keeps = {"reduce_scatter": "off", "keep_gathered": True}
    return attempt(lambda: gradferry.fsdp.attach(model, **keeps))


@pytest.mark.torch_core
def test_what_a_device_does_not_do_yet_is_said(device_worlds: Worlds) -> None:
    for keep in device_worlds(2).run(case_refused_on_a_device):
        assert keep.error == "ConfigError"
        assert "keep_gathered=True is for parameters on the CPU" in keep.text
