"""The all-gather of `gradferry.fsdp.attach`: what ranks compute with, bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
from gathering import (
    FOUR,
    ONLY_GATHERS,
    Watch,
    built,
    differing,
    gathered_bytes,
    masters,
    targets_of,
    used_in_backward,
)
from sharding import RATE, SHAPES, Sharding, bits, same
from world import World

Worlds = Callable[[int], World]

BLOCKS = tuple(name for name in SHAPES if name)


def case_gathered(
    codec: str, kind: str = "plain", dtype: torch.dtype | None = None, **options: Any
) -> dict[str, Any]:
    model = built(kind, dtype)
    gathered_in = dtype or torch.float32
    attach = {"all_gather": codec, **ONLY_GATHERS, **options}
    state = gradferry.fsdp.attach(model, **attach)
    watch = Watch(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    dims = {"blocks.0.weight": 1} if kind == "columns" else {}
    wrong, sent, exact = [], [0], []
    for _ in range(2):
        wholes, before = masters(model), bits(model)
        targets = targets_of(model, gathered_in)
        loss = model(targets)
        sent.append(state.stats()["wire_bytes"])
        loss.backward()
        sent.append(state.stats()["wire_bytes"])
        seen = dict(watch.seen)
        assert len(seen) >= 6
        wrong += differing(seen, wholes, codec, gathered_in, dims)
        wrong += differing(used_in_backward(targets), wholes, codec, gathered_in, dims)
        exact.append(bits(model) == before)
        optimizer.step()
        optimizer.zero_grad()
    steps = [after - first for first, after in itertools.pairwise(sent)]
    return {"wrong": wrong, "masters": exact, "sent": steps, "stats": state.stats()}


@pytest.mark.torch_core
@pytest.mark.parametrize("codec", ["exact", "bf16", "q8", "q4"])
@pytest.mark.parametrize("keep", [False, True], ids=["twice", "kept"])
def test_all_ranks_compute_with_what_messages_say(worlds: Worlds, codec: str, keep: bool) -> None:
    for answer in worlds(4).run(case_gathered, codec=codec, keep_gathered=keep):
        assert answer["wrong"] == []
        assert answer["masters"] == [True, True]
        forward = gathered_bytes(SHAPES, list(SHAPES), codec, 4)
        backward = 0 if keep else gathered_bytes(SHAPES, BLOCKS, codec, 4)
        assert answer["sent"] == 2 * [forward, backward]
        # What FSDP2 would have sent: three of four shards, of every module forward, of blocks back.
        stats = answer["stats"]
        ring = 0.75 * stats["gradient_bytes"]
        assert stats["ratio"] == pytest.approx(ring / stats["wire_bytes"], rel=1e-12)
        assert stats["exchanges"]["all_gather"]["wire_bytes"] == stats["wire_bytes"]


KINDS = ("frozen", "tied", "offloaded", "columns", "few", "stays", "checkpointed", "compiled")


@pytest.mark.torch_core
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models(worlds: Worlds, kind: str) -> None:
    for answer in worlds(4).run(case_gathered, codec="q4", kind=kind):
        assert answer["wrong"] == []
        assert answer["masters"] == [True, True]
        assert (answer["sent"][1] > 0) == (kind not in ("few", "stays"))


@pytest.mark.torch_core
@pytest.mark.parametrize("keep", [False, True], ids=["twice", "kept"])
def test_parameters_in_bf16(worlds: Worlds, keep: bool) -> None:
    for answer in worlds(4).run(
        case_gathered, codec="q8", dtype=torch.bfloat16, keep_gathered=keep
    ):
        assert answer["wrong"] == []
        forward = gathered_bytes(SHAPES, list(SHAPES), "q8", 4, "bfloat16")
        assert answer["sent"][0] == forward


def case_passes(keep: bool) -> dict[str, Any]:
    """Accumulation, two forwards before a backward, and by hand."""
    model = built("plain")
    gradferry.fsdp.attach(model, all_gather="q4", keep_gathered=keep, **ONLY_GATHERS)
    watch, wholes, wrong = Watch(model), masters(model), {}

    def compare(name: str, *all_targets: dict[str, dict[str, torch.Tensor]]) -> None:
        found = [watch.seen, *map(used_in_backward, all_targets)]
        wrong[name] = [differing(each, wholes, "q4", torch.float32, {}) for each in found]
        watch.seen = {}

    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        targets = targets_of(model, torch.float32)
        model(targets).backward()
        compare(f"accumulation {sync}", targets)
    first, second = (targets_of(model, torch.float32) for _ in range(2))
    (model(first) + model(second)).backward()
    compare("two forwards", first, second)
    with torch.no_grad():  # weights change, and are gathered by hand before forward does
        for parameter in model.parameters():
            parameter.mul_(1.25)
    wholes = masters(model)
    for block in model.blocks:
        handle = block.unshard(async_op=True)
        handle.wait()
    targets = targets_of(model, torch.float32)
    model(targets).backward()
    compare("by hand", targets)
    return wrong


@pytest.mark.torch_core
@pytest.mark.parametrize("keep", [False, True], ids=["twice", "kept"])
def test_passes_of_all_kinds(worlds: Worlds, keep: bool) -> None:
    for answer in worlds(4).run(case_passes, keep=keep):
        assert list(answer) == [
            "accumulation False",
            "accumulation True",
            "two forwards",
            "by hand",
        ]
        assert not any(any(each) for each in answer.values()), answer


def case_exact(codec: str, native: bool) -> list[np.ndarray]:
    model = built("plain")
    if not native:
        gradferry.fsdp.attach(model, codec, all_gather="exact")
    FOUR.backward(model, 0)
    return [p.grad.to_local().numpy().copy() for p in model.parameters()]


@pytest.mark.torch_core
def test_exact_is_what_fsdp2_gathers_itself(worlds: Worlds) -> None:
    # With codec "off" FSDP2 reduces gradients.
    ours, theirs = (
        worlds(4).run(case_exact, codec="off", native=native) for native in (False, True)
    )
    assert same(ours, theirs)


def case_evaluated() -> dict[str, Any]:
    model = built("wide")
    state = gradferry.fsdp.attach(model, all_gather="q4", keep_gathered=True, **ONLY_GATHERS)
    watch, wholes, found = Watch(model), masters(model), {}

    def forward(name: str, codec: str) -> None:
        watch.seen = {}
        with torch.no_grad():
            model(targets_of(model, torch.float32))
        found[name] = differing(watch.seen, wholes, codec, torch.float32, {})

    forward("before", "q4")  # which leaves the root as it was gathered
    with state.exact_gathers():
        forward("exact", "exact")
    forward("after", "q4")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    wholes = masters(model)
    with state.exact_gathers():
        loss = model(targets := targets_of(model, torch.float32))
    loss.backward()  # does not compute with what was kept of the parameters before
    found["backward"] = differing(used_in_backward(targets), wholes, "q4", torch.float32, {})
    return found


@pytest.mark.torch_core
def test_evaluation_has_the_parameters_as_they_are(worlds: Worlds) -> None:
    for answer in worlds(4).run(case_evaluated):
        assert not any(answer.values()), answer


class _StoppedError(RuntimeError):
    """What a user's code raises in a backward pass."""


def case_stopped() -> list[str]:
    model = built("wide")
    gradferry.fsdp.attach(model, all_gather="q4", keep_gathered=True, **ONLY_GATHERS)
    watch, state = Watch(model), model.state_dict()
    block: Any = model.blocks[1]
    inner = block.forward

    def stop(_: torch.Tensor) -> None:
        raise _StoppedError

    def stopped(targets: dict[str, torch.Tensor]) -> torch.Tensor:
        targets["weight"].register_hook(stop)  # before FSDP2 has the module's gradients
        return inner(targets)

    block.forward = stopped
    loss = model(targets_of(model, torch.float32))
    block.forward = inner
    with pytest.raises(_StoppedError):
        loss.backward()
    model.load_state_dict({name: 1.25 * value for name, value in state.items()})
    watch.seen = {}
    with torch.no_grad():
        model(targets_of(model, torch.float32))
    return differing(watch.seen, masters(model), "q4", torch.float32, {})


def test_kept_messages_answer_no_forward_pass_after_an_exception(worlds: Worlds) -> None:
    # FSDP2 then takes the root, and the module in which the backward pass has ended, for ones in
    # backward; the other one it had gathered ahead, and it uses that, as it does without a hook.
    assert worlds(4).run(case_stopped) == [["blocks.0.weight", "blocks.0.bias"]] * 4


def case_rules() -> list[list[str]]:
    model = built("plain")
    rules = [{"name": "blocks.0.*", "codec": "exact"}, {"name": "scale", "codec": "q8"}]
    gradferry.fsdp.attach(model, all_gather="q4", all_gather_rules=rules, **ONLY_GATHERS)
    watch, wholes = Watch(model), masters(model)
    model(targets_of(model, torch.float32))
    rows = []
    for codec, prefix in (("exact", "blocks.0"), ("q4", "blocks.1"), ("q4", "table")):
        part = {name: each for name, each in watch.seen.items() if name.startswith(prefix)}
        assert part
        rows.append(differing(part, wholes, codec, torch.float32, {}))
    return rows


@pytest.mark.torch_core
def test_rules_give_codecs_by_name(worlds: Worlds) -> None:
    assert worlds(4).run(case_rules) == [[[], [], []]] * 4


# --- everything together --------------------------------------------------------------------------


ALL = {"codec": "q4", "reduce_scatter": "q4", "all_gather": "q8"}


def case_all(keep: bool) -> dict[str, Any]:
    sharding = Sharding()
    mesh = sharding.mesh()
    model = sharding.model(mesh["shard"])
    state = gradferry.fsdp.attach(model, replicate_group=mesh["replica"], keep_gathered=keep, **ALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rows: list[dict[str, Any]] = []
    state.on_step(rows.append)
    for step in range(3):
        sharding.backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    stats = state.stats()
    return {
        "bits": bits(model),
        "stats": stats,
        "rows": rows,
        "text": str(state),
        "events": {event["exchange"] for event in state.events()},
        "codecs": {name: str(each["choice"]["codec"]) for name, each in stats["exchanges"].items()},
    }


@pytest.mark.torch_core
@pytest.mark.parametrize("keep", [False, True], ids=["twice", "kept"])
def test_all_three_exchanges_of_hybrid_sharding(worlds: Worlds, keep: bool) -> None:
    answers = worlds(4).run(case_all, keep=keep)
    for rank, answer in enumerate(answers):
        assert answer["bits"] == answers[rank % 2]["bits"]
        assert answer["codecs"] == {"replicas": "q4", "reduce_scatter": "q4", "all_gather": "q8"}
        stats, parts = answer["stats"], answer["stats"]["exchanges"]
        assert stats["steps"] == 3
        assert stats["wire_bytes"] == sum(part["wire_bytes"] for part in parts.values())
        assert stats["wire_bytes"] == sum(row["wire_bytes"] for row in answer["rows"])
        assert [row["step"] for row in answer["rows"]] == [0, 1, 2]
        assert answer["events"] == set(parts)
        for name in parts:
            assert f"{name}: gradferry: " in answer["text"]
