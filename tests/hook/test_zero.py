"""ZeroRedundancyOptimizer behind the hook: the numbers of one optimizer per rank, to the bit."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from outcomes import attempt
from products import rows
from scenario import hooked
from stepping import bits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]


class Training:
    """Two layers behind DDP and a hook, stepped by AdamW or by shards of it."""

    def __init__(
        self, make: Callable[..., Any], attach: dict[str, Any], scaled: bool = False
    ) -> None:
        torch.manual_seed(3)
        self.ddp = DistributedDataParallel(
            nn.Sequential(nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 40)), bucket_cap_mb=0.01
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        if self.scaler.is_enabled():
            attach = {**attach, "grad_scaler": self.scaler}
        self.state = gradferry.attach(self.ddp, **attach)
        matrices = [p for p in self.ddp.parameters() if p.dim() > 1]
        vectors = [p for p in self.ddp.parameters() if p.dim() == 1]
        self.optimizer = make(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], self.state
        )
        self.calls = 0
        self.state.on_step(self._count)

    def _count(self, numbers: dict[str, Any]) -> None:
        self.calls += 1

    def step(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(4, 60, generator=generator)
        if self.scaler.is_enabled() and step == 2 and dist.get_rank() == 1:
            x[0, 0] = float("inf")
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9  # as a schedule
        self.optimizer.zero_grad()
        self.scaler.scale(self.ddp(x).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def bits(self) -> list[bytes]:
        return bits(self.ddp.parameters())


def adamw(groups: Any, state: Any) -> Any:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def sharded(groups: Any, state: Any, views: bool = False) -> Any:
    return ZeroRedundancyOptimizer(
        groups,
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=views,
        lr=0.01,
        weight_decay=0.1,
    )


MAKE = {views: functools.partial(sharded, views=views) for views in (False, True)}


def case_beside_plain(views: bool, scaled: bool, steps: int) -> dict[str, Any]:
    """Steps both ways; also what ZeRO's state would be in the optimizer of one rank."""
    plain, zero = (Training(make, {"check_every": 1}, scaled) for make in (adamw, MAKE[views]))
    differ = []
    for step in range(steps):
        plain.step(step)
        zero.step(step)
        if zero.bits() != plain.bits():
            differ.append(step)
    held = sum(t.numel() for s in zero.optimizer.optim.state.values() for t in s.values())
    zero.optimizer.consolidate_state_dict(to=0)
    same_state = None
    if dist.get_rank() == 0:
        ours, theirs = (t.optimizer.state_dict()["state"] for t in (zero, plain))
        same_state = ours.keys() == theirs.keys() and all(
            torch.equal(ours[i][name], theirs[i][name]) for i in theirs for name in theirs[i]
        )
    return {
        "differ": differ,
        "bits": zero.bits(),
        "calls": (plain.calls, zero.calls),
        "held": held,
        "same_state": same_state,
        "scale": zero.scaler.get_scale(),
    }


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("size", "views", "scaled"), rows((2, 4), (False, True), (False, True), turns=2)
)
def test_sharded_adamw_gives_the_parameters_of_adamw(
    worlds: Worlds, size: int, views: bool, scaled: bool
) -> None:
    steps = 5
    answers = worlds(size).run(case_beside_plain, views=views, scaled=scaled, steps=steps)
    for rank, answer in enumerate(answers):
        assert answer["differ"] == []
        assert answer["bits"] == answers[0]["bits"]
        assert answer["same_state"] == (True if rank == 0 else None)
        if scaled:
            assert answer["scale"] == 2.0**9  # the infinity of rank 1 was seen everywhere
        else:
            assert answer["calls"] == (steps, steps)
    # Two averages and a count of steps for every parameter, once among all ranks.
    elements = 60 * 50 + 50 + 50 * 40 + 40
    assert sum(answer["held"] for answer in answers) == 2 * elements + 4


def case_resumed(views: bool) -> bool:
    whole = Training(MAKE[views], {})
    for step in range(3):
        whole.step(step)
    zero = whole.optimizer
    zero.consolidate_state_dict(to=0)
    content = [zero.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(content)
    # On the CPU a consolidated state shares memory with the optimizer until it is copied or saved.
    model, hook, shards = copy.deepcopy(
        (whole.ddp.module.state_dict(), whole.state.state_dict(), content[0])
    )
    resumed = Training(MAKE[views], {})
    resumed.ddp.module.load_state_dict(model)
    resumed.state.load_state_dict(hook)
    resumed.optimizer.load_state_dict(shards)
    for step in range(3, 6):
        whole.step(step)
        resumed.step(step)
    return resumed.bits() == whole.bits()


@pytest.mark.parametrize(("size", "views"), rows((2, 4), (True, False)))
def test_consolidated_state_resumes_to_the_bit(worlds: Worlds, size: int, views: bool) -> None:
    assert worlds(size).run(case_resumed, views=views) == [True] * size


def in_momentum_mode(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda groups, state: gradferry.optim.momentum_mode(make(groups, state), state)


# Behind topk, parameters of one group arrive with several momenta.
@pytest.mark.parametrize("codec", ["sign1", "topk:ratio=0.04"])
@on_ranks()
def test_momentum_mode_is_that_of_one_optimizer_per_rank(codec: str) -> None:
    attach = {"codec": codec, "momentum": 0.8}
    plain, zero = (Training(in_momentum_mode(make), attach) for make in (adamw, sharded))
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradferry.GradferryWarning)
        for step in range(4):
            plain.step(step)
            zero.step(step)
    assert zero.bits() == plain.bits()
    for ours, theirs in zip(zero.optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        for setting in ("lr", "betas", "weight_decay"):
            assert ours[setting] == theirs[setting]
        assert ours["betas"] == (0.9, 0.999)  # as given
    overlapping = overlapped(zero.ddp.parameters())
    refused = attempt(lambda: gradferry.optim.momentum_mode(overlapping, zero.state))
    assert refused.error == "ConfigError"
    assert "overlap_with_ddp" in refused.text


def overlapped(parameters: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        parameters, optimizer_class=torch.optim.AdamW, overlap_with_ddp=True
    )


Register = Callable[[DistributedDataParallel, Callable[[Any], Any]], None]


def register_after_attach(ddp: DistributedDataParallel, zero: Callable[[Any], Any]) -> None:
    hooked(ddp)
    ddp.register_comm_hook(None, zero(allreduce_hook))


def register_before_attach(ddp: DistributedDataParallel, zero: Callable[[Any], Any]) -> None:
    ddp.register_comm_hook(None, zero(allreduce_hook))
    hooked(ddp)


def register_after_binding(ddp: DistributedDataParallel, zero: Callable[[Any], Any]) -> None:
    gradferry.HookState("q4", ddp)
    ddp.register_comm_hook(state=None, hook=zero(allreduce_hook))


def register_around_ours(ddp: DistributedDataParallel, zero: Callable[[Any], Any]) -> None:
    state = gradferry.HookState("q4", ddp)
    ddp.register_comm_hook(state, zero(gradferry.hook))


def step_without_its_hook(ddp: DistributedDataParallel, zero: Callable[[Any], Any]) -> None:
    optimizer = overlapped(ddp.parameters())
    hooked(ddp)
    ddp(torch.ones(2, 40)).sum().backward()
    optimizer.step()


USES: tuple[Register, ...] = (
    register_after_attach,
    register_before_attach,
    register_after_binding,
    register_around_ours,
    step_without_its_hook,
)


@pytest.mark.parametrize("name", ddp_zero_hook.__all__)
@pytest.mark.parametrize("use", USES)
@on_ranks()
def test_a_step_inside_the_backward_pass_is_refused(use: Register, name: str) -> None:
    """And training without it then works."""
    ddp = DistributedDataParallel(nn.Linear(40, 40))

    def zero(inner: Any) -> Any:
        # torch makes these hooks for NCCL's groups only.
        with mock.patch.object(ddp_zero_hook.dist, "get_backend", return_value="nccl"):
            return getattr(ddp_zero_hook, name)(inner, ddp, overlapped(ddp.parameters()))

    outcome = attempt(lambda: use(ddp, zero))
    assert outcome.error == "ConfigError", outcome
    assert "ZeroRedundancyOptimizer(overlap_with_ddp=True) does not go with" in outcome.text
    assert "build it without overlap_with_ddp, and call its step() after" in outcome.text
    for _ in range(2):
        outcome = attempt(lambda: ddp(torch.ones(2, 40)).sum().backward())
        assert use is register_before_attach or outcome.error is None
