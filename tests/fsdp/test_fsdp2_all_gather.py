"""The all-gather of `gradferry.fsdp.attach`: what ranks compute with, on hosts and on the fake
device, and bytes.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import gradferry
import pytest
import torch
from gathering import (
    FOUR,
    KINDS,
    ONLY_GATHERS,
    Watch,
    built,
    differing,
    gathered_bytes,
    masters,
    targets_of,
    used_in_backward,
)
from on_ranks import on_ranks
from sharding import RATE, SHAPES, Model, Sharding, bits, in_order
from torch.utils.checkpoint import checkpoint
from watching import in_two_orders
from world import WorldsOn

FORWARD, BACKWARD = list(SHAPES), list(SHAPES)[1:]  # the root stays gathered
STREAMED, STAGED = (Sharding(1, 2, device=device) for device in ("streamed", "staged"))


def gathered(sharding: Sharding, kind: str, dtype: Any, **options: Any) -> dict[str, Any]:
    model = built(kind, dtype, sharding)
    gathered_in = dtype or torch.float32
    state = gradferry.fsdp.attach(model, **{**ONLY_GATHERS, **options})
    watch, codec = Watch(model), options["all_gather"]
    trained = [p for p in model.parameters() if p.requires_grad]
    # The fake device puts no whole parameters together: there they stay as they were.
    rate = RATE if sharding.device == "cpu" else 0.0
    optimizer = torch.optim.SGD(trained, lr=rate)
    dims = {"blocks.0.weight": 1} if kind == "columns" else {}
    sent = [0]
    for _ in range(2):
        wholes = masters(model) if rate else dict(seeded().named_parameters())
        before, targets = bits(model), targets_of(model, gathered_in)
        loss = model(targets)
        sent.append(state.stats()["wire_bytes"])
        loss.backward()
        sent.append(state.stats()["wire_bytes"])
        for found in (dict(watch.seen), used_in_backward(targets)):
            assert len(found) >= 6
            assert differing(found, wholes, codec, gathered_in, dims) == []
        assert bits(model) == before
        optimizer.step()
        optimizer.zero_grad()
    return {"sent": [b - a for a, b in itertools.pairwise(sent)], "stats": state.stats()}


def seeded() -> Model:
    torch.manual_seed(5)
    return Model()


def case_gathered(
    sharding: Sharding, kind: str = "plain", dtype: Any = None, **options: Any
) -> list[dict[str, Any]]:
    def gather() -> dict[str, Any]:
        return gathered(sharding, kind, dtype, **options)

    return [gather()] if sharding.device == "cpu" else in_two_orders(gather)


SMALL = {"workspace_cap_mb": 0.15}  # several chunks per module


@pytest.mark.torch_core
@pytest.mark.parametrize("keep", [False, True], ids=["twice", "kept"])
@pytest.mark.parametrize(
    ("sharding", "codec", "dtype", "options"),
    [
        (FOUR, "bf16", None, SMALL),
        (FOUR, "q4", None, {}),
        (FOUR, "q8", torch.bfloat16, {}),
        (STREAMED, "exact", None, {}),
        (STREAMED, "q8", None, SMALL),
        (STAGED, "q8", None, {}),
    ],
    ids=lambda value: getattr(value, "device", None),
)
def test_all_ranks_compute_with_what_messages_say(
    worlds_on: WorldsOn,
    sharding: Sharding,
    codec: str,
    dtype: torch.dtype | None,
    options: dict[str, Any],
    keep: bool,
) -> None:
    how = {"sharding": sharding, "all_gather": codec, "dtype": dtype, "keep_gathered": keep}
    shards = sharding.shards
    ranks = worlds_on(sharding.device)(shards).run(case_gathered, **how, **options)
    for rank, answer in (
        (rank, answer) for rank, answers in enumerate(ranks) for answer in answers
    ):
        stats = answer["stats"]
        assert stats["buckets"] == 2 * (len(FORWARD) + (0 if keep else len(BACKWARD)))
        assert (stats["chunks"] > stats["buckets"]) == bool(options)
        # What FSDP2 would have sent: all other shards, of every module forward, of blocks back.
        ring = (shards - 1) / shards * stats["gradient_bytes"]
        assert stats["ratio"] == pytest.approx(ring / stats["wire_bytes"], rel=1e-12)
        assert stats["exchanges"]["all_gather"]["wire_bytes"] == stats["wire_bytes"]
        if options or sharding.device == "staged":
            continue
        kind = str(dtype or torch.float32).removeprefix("torch.")
        forward = gathered_bytes(SHAPES, FORWARD, codec, shards, kind)[rank]
        backward = 0 if keep else gathered_bytes(SHAPES, BACKWARD, codec, shards, kind)[rank]
        if sharding.device == "cpu":
            assert answer["sent"] == 2 * [forward, backward]
        else:  # a device sends one commit for a pass, in the next one
            commits = (1 if keep else 3) - 2 * (len(FORWARD) + (0 if keep else len(BACKWARD)))
            assert stats["wire_bytes"] == 2 * (forward + backward) + 64 * commits


@pytest.mark.torch_core
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_kinds_of_models(kind: str) -> None:
    answer = gathered(FOUR, kind, None, all_gather="q4")
    assert (answer["sent"][1] > 0) == (kind not in ("few", "stays"))


class Passes:
    """Passes of a model, which compute with what messages say of its parameters."""

    def __init__(self, seed: int) -> None:
        self.rng, self.model = random.Random(seed), built("wide")
        self.state = gradferry.fsdp.attach(
            self.model, all_gather="q4", keep_gathered=bool(seed % 2), **ONLY_GATHERS
        )
        blocks: Any = self.model.blocks
        self.blocks = list(blocks)
        self.blocks[0].set_modules_to_forward_prefetch([self.blocks[1]])
        self.parameters = in_order(self.model)  # as optimizers have them
        self.watch, self.wholes = Watch(self.model), masters(self.model)

    def expect(self, found: dict[str, Any], codec: str = "q4") -> None:
        assert found
        assert differing(found, self.wholes, codec, torch.float32, {}) == []

    def forward(self, codec: str = "q4", *, leaves_out: bool = False) -> tuple[Any, Any]:
        """The loss, and the targets. A block that is left out was gathered ahead, for nothing."""
        targets, self.watch.seen = targets_of(self.model, torch.float32), {}
        if leaves_out:
            targets["blocks.1"] = {}
        loss = self.model(targets)
        self.expect(self.watch.seen, codec)
        return loss, targets

    def train(self) -> None:
        """Several forward passes before a backward pass, with changes in between."""
        model: Any = self.model
        model.set_requires_gradient_sync(self.rng.random() < 0.7)
        passes = [self.forward() for _ in range(self.rng.choice((1, 1, 2)))]
        changed = self.rng.random() < 0.5
        if changed:
            self.change()
            if self.rng.random() < 0.5:
                self.evaluate()
        sum(loss for loss, _ in passes).backward()
        for _, targets in passes:  # the root stays gathered
            used = used_in_backward(targets)
            self.expect({n: each for n, each in used.items() if not changed or "blocks" in n})

    def evaluate(self) -> None:
        with torch.no_grad():
            self.forward(leaves_out=self.rng.random() < 0.3)

    def evaluate_exactly(self) -> None:
        with self.state.exact_gathers(), torch.no_grad():
            for _ in range(2):
                self.forward("exact", leaves_out=self.rng.random() < 0.3)

    def train_exactly(self) -> None:
        """The backward pass does not compute with what was kept of the parameters before."""
        self.change()
        with self.state.exact_gathers():
            loss, targets = self.forward("exact")
        loss.backward()
        self.expect(used_in_backward(targets))

    def change(self) -> None:
        how = self.rng.choice(["data", "foreach", "load", "mul_"])
        with torch.no_grad():
            if how == "load":
                state = self.model.state_dict()
                self.model.load_state_dict({name: 1.25 * each for name, each in state.items()})
            elif how == "foreach":
                torch._foreach_mul_(self.parameters, 1.25)
            else:
                for each in self.parameters:
                    (each.data if how == "data" else each).mul_(1.25)
        self.wholes = masters(self.model)

    def gather_by_hand(self) -> None:
        for block in self.blocks:
            block.unshard(async_op=True).wait()
        self.train()


@pytest.mark.torch_core
@pytest.mark.parametrize("seed", range(6))
@on_ranks(4)
def test_passes_of_all_kinds_compute_with_what_messages_say(seed: int) -> None:
    passes = Passes(seed)
    often = [passes.train] * 4
    seldom = [passes.evaluate, passes.evaluate_exactly, passes.train_exactly, passes.change]
    for _ in range(10):
        passes.rng.choice([*often, *seldom, passes.gather_by_hand])()


class _StoppedError(RuntimeError):
    """What a user's code raises in a backward pass."""


@on_ranks(4)
def test_kept_messages_answer_no_forward_pass_after_an_exception() -> None:
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
    # FSDP2 then takes the root, and the module in which the backward pass has ended, for ones in
    # backward; the other one it had gathered ahead, and it uses that, as it does without a hook.
    wrong = differing(watch.seen, masters(model), "q4", torch.float32, {})
    assert wrong == ["blocks.0.weight", "blocks.0.bias"]


@pytest.mark.torch_core
@on_ranks(4)
def test_rules_give_codecs_by_name() -> None:
    model = built()
    rules = [{"name": "blocks.0.*", "codec": "exact"}, {"name": "scale", "codec": "q8"}]
    gradferry.fsdp.attach(model, all_gather="q4", all_gather_rules=rules, **ONLY_GATHERS)
    watch, wholes = Watch(model), masters(model)
    model(targets_of(model, torch.float32))
    for codec, prefix in (("exact", "blocks.0"), ("q4", "blocks.1"), ("q4", "table")):
        part = {name: each for name, each in watch.seen.items() if name.startswith(prefix)}
        assert part
        assert differing(part, wholes, codec, torch.float32, {}) == []


@pytest.mark.torch_core
@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(4)
def test_kept_gathers_answer_passes_that_checkpointing_repeats(reentrant: bool) -> None:
    model: Any = built()
    state = gradferry.fsdp.attach(model, all_gather="q8", keep_gathered=True, **ONLY_GATHERS)
    watch, wholes, sent = Watch(model), masters(model), []
    for _ in range(2):
        targets = targets_of(model, torch.float32)
        flag = torch.ones((), requires_grad=True)
        loss = sum(checkpoint(lambda f, b=b, t=targets[f"blocks.{i}"]: f * b(t), flag,
                              use_reentrant=reentrant)
                   for i, b in enumerate(model.blocks))  # fmt: skip
        sent.append(state.stats()["wire_bytes"])
        loss.backward()
        sent.append(state.stats()["wire_bytes"])
        assert not differing(watch.seen, wholes, "q8", torch.float32, {})
    assert 0 < sent[0] == sent[1] < sent[2] == sent[3]
