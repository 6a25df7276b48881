"""The all-gather of `gradferry.fsdp.attach`: what it refuses, and errors, one on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from gathering import FOUR, ONLY_GATHERS, built, targets_of
from outcomes import Outcome, attempt
from relays import Relays
from sharding import Chosen, Model, Sharding, assert_refused, bits
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only
from world import World

Worlds = Callable[[int], World]


class Two(Chosen):
    """A sharded module in another one: a backward pass gathers once."""

    def __init__(self) -> None:
        super().__init__({"table": (97, 130)}, torch.float32)
        self.inner = Chosen({"weight": (61, 140)}, torch.float32)

    def forward(self, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(targets) + self.inner(targets)


def case_damaged(where: str, lane: str, shards: int = 4, **options: Any) -> dict[str, Any]:
    """One bit flips on the way from rank 1 to one other rank."""
    mesh = Sharding(4 // shards, shards).mesh()
    if shards < 4:
        options["replicate_group"] = mesh["replica"]
    torch.manual_seed(5)
    model: Any = Two()
    for module in (model.inner, model):
        fully_shard(module, mesh=mesh["shard"])
    relays = Relays()
    with relays.between() if dist.get_rank() == 1 else contextlib.nullcontext():
        state = gradferry.fsdp.attach(model, "q4", **options)
    targets = {"table": torch.ones(97, 130), "weight": torch.ones(61, 140)}

    def damage(*_: object) -> None:
        if dist.get_rank() == 1:
            relays.damage(lane)

    model(targets).backward()
    if where == "evaluation":  # of the inner module, which is gathered last
        handle = model.register_forward_pre_hook(damage)
        with torch.no_grad():
            outcome = attempt(lambda: model(targets))
        handle.remove()
    elif where == "forward":
        damage()
        outcome = attempt(lambda: model(targets).backward())
    else:
        model.set_requires_gradient_sync(where == "backward")
        loss = model(targets)
        damage()
        outcome = attempt(loss.backward)
    return {
        "outcome": outcome,
        "again": attempt(lambda: model(targets)),
        "in_flight": state.stats()["in_flight"],
    }


@pytest.mark.parametrize(
    ("where", "lane", "options"),
    [
        ("forward", "gather", {}),
        ("evaluation", "gather", {}),
        ("backward", "gather", {}),
        ("backward", "gather", {"reduce_scatter": "off"}),
        ("accumulation", "gather", {}),
        ("backward", "scatter", {}),
    ],
)
def test_a_flipped_bit_is_one_error_on_all_ranks(
    worlds: Worlds, where: str, lane: str, options: dict[str, Any]
) -> None:
    answers = worlds(4).run(case_damaged, where=where, lane=lane, **options)
    headlines = {answer["outcome"].headline for answer in answers}
    assert len(headlines) == 1, headlines
    for answer in answers:
        outcome = answer["outcome"]
        assert outcome.error == "ProtocolError"
        assert "refused a message from rank 1" in outcome.text
        assert f", {lane}): checksum" in outcome.text
        assert answer["again"].headline == outcome.headline
        assert answer["in_flight"] == 0


def test_replicas_hear_of_a_gather_that_failed(worlds: Worlds) -> None:
    # Groups of a mesh wait for thirty minutes, and a case has two.
    answers = worlds(4).run(
        case_damaged, where="backward", lane="gather", shards=2, all_gather="q8"
    )
    for rank, answer in enumerate(answers):
        outcome = answer["outcome"]
        assert outcome.error == "ProtocolError" if rank < 2 else "PeerError"
        assert "rank 0 refused a message from rank 1" in outcome.text
        assert answer["again"].error is not None


class Encoded(torch.Tensor):
    """A tensor that encodes itself for the all-gather."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Encoded:
        like = {"strides": inner.stride(), "dtype": inner.dtype, "device": inner.device}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), **like)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(Encoded, lambda each: each.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Encoded, func(*given[0], **given[1]))

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError

    def fsdp_post_all_gather(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


def case_refused() -> dict[str, Outcome]:
    mesh = FOUR.mesh()["shard"]

    def attached(model: nn.Module | None = None, **options: Any) -> Outcome:
        found = built("plain") if model is None else model
        before = bits(found) if isinstance(found, Model) else b""
        outcome = attempt(lambda: gradferry.fsdp.attach(found, **options))
        assert not before or before == bits(found)
        return outcome

    def sharded(model: nn.Module, **options: Any) -> nn.Module:
        return fully_shard(model, mesh=mesh, **options)

    rank = dist.get_rank()
    custom = built("plain")
    custom.set_custom_all_gather(_Custom())
    allocates = built("plain")
    allocates.blocks[0].set_allocate_memory_from_process_group_for_comm(True)
    found = {
        "rht": attached(all_gather="rht:bits=4"),
        "topk": attached(all_gather="topk"),
        "sign1": attached(all_gather="sign1"),
        "unknown": attached(all_gather="q9"),
        "rule": attached(all_gather_rules=[{"codec": "topk"}]),
        "bad rule": attached(all_gather_rules=[{"kodec": "q4"}]),
        "codec": attached(codec="q9", **ONLY_GATHERS),
        "no scatter": attached(reduce_scatter=None),
        "keep": attached(keep_gathered=1),
        "kept nothing": attached(all_gather="off", keep_gathered=True),
        "ruled nothing": attached(all_gather="off", all_gather_rules=[{"codec": "q4"}]),
        "unequal": attached(all_gather=("q8", "q4", "q8", "q8")[rank]),
        "unequal keeps": attached(keep_gathered=rank == 2),
        "unequal rules": attached(all_gather_rules=[{"codec": "q4"}] if rank == 3 else None),
        "one fails": attached(all_gather="topk" if rank == 2 else "q8"),
        "custom": attached(custom),
        "allocates": attached(allocates, **ONLY_GATHERS),
        "float64": attached(sharded(nn.Linear(64, 64).double()), **ONLY_GATHERS),
    }
    with contextlib.suppress(RuntimeError):  # torch 2.11 does not shard integers
        found["integers"] = attached(sharded(_WithIntegers()), **ONLY_GATHERS)
    encoded = nn.Linear(64, 64, bias=False)
    encoded.weight = nn.Parameter(Encoded(torch.ones(64, 64)))
    found["encoded"] = attached(sharded(encoded))
    if hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"):
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            param_dtype_override_fn=lambda p: p.dtype if p.ndim == 1 else None,
        )
        found["mixed"] = attached(sharded(nn.Linear(64, 64), mp_policy=policy))
    model = built("plain")
    found["first"] = attached(model)
    found["second"] = attached(model)
    model = built("plain")
    assert attached(model, **ONLY_GATHERS).error is None
    found["second gathers"] = attached(model, **ONLY_GATHERS)
    return found


class _Custom:
    def allocate(self, *size: Any, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)

    def __call__(self, *_: Any, **__: Any) -> None:
        raise AssertionError


class _WithIntegers(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 64)
        self.table = nn.Parameter(torch.arange(64), requires_grad=False)


TEXTS = {
    "rht": "all_gather='rht:bits=4' is none of exact, bf16, q8, q4: forward and backward must",
    "topk": "all_gather='topk' is none of",
    "sign1": "all_gather='sign1' is none of",
    "unknown": "all_gather='q9' is none of",
    "rule": "all_gather_rules[0]['codec']='topk",
    "bad rule": "all_gather: rules[0] has unknown key 'kodec'",
    "codec": "q9",
    "no scatter": "None",
    "keep": "keep_gathered=1 must be True or False",
    "kept nothing": "keep_gathered=True is for the all-gather: give all_gather",
    "ruled nothing": "is for the all-gather: give all_gather",
    "unequal": "rank 1 differs from rank 0 in all_gather: 'q4' instead of 'q8'",
    "unequal keeps": "rank 2 differs from rank 0 in keep_gathered",
    "unequal rules": "rank 3 differs from rank 0 in rules",
    "one fails": "rank 2: all_gather='topk' is none of",
    "custom": "already has an all-gather that is not FSDP2's own",
    "allocates": "already has an all-gather that is not FSDP2's own",
    "float64": "is gathered in torch.float64, and the all-gather takes",
    "integers": "parameter 'table' is gathered in torch.int64",
    "encoded": "is a Encoded, a tensor subclass that encodes itself",
    "mixed": "'bias' in torch.float32, as bytes without boundaries",
    "second": "gradferry is attached to this model already",
    "second gathers": "gradferry is attached to this model already",
}
KINDS_OF_ERRORS = dict.fromkeys(("unequal", "unequal keeps", "unequal rules"), "RankMismatchError")


@pytest.mark.torch_core
def test_what_cannot_be_gathered_is_refused_with_a_reason(worlds: Worlds) -> None:
    for found in worlds(4).run(case_refused):
        assert found.pop("first").error is None
        of_some = ("mixed", "integers")  # which not every torch shards
        texts = {name: each for name, each in TEXTS.items() if name in found or name not in of_some}
        assert_refused(found, texts, KINDS_OF_ERRORS)


def case_changed() -> dict[str, Outcome]:
    """What changes after attach, on all ranks or on rank 3 alone."""
    found = {}
    targets = targets_of(built("plain"), torch.float32)

    def attached(**options: Any) -> Any:
        model = built("plain")
        gradferry.fsdp.attach(model, **options)
        return model

    model = attached()
    model.blocks[1].set_custom_all_gather(_Custom())
    found["comm"] = attempt(lambda: model(targets))
    model = attached()
    model(targets).backward()
    if dist.get_rank() == 3:
        for parameter in model.blocks[0]._get_fsdp_state()._fsdp_param_group.fsdp_params:
            parameter.param_dtype = torch.bfloat16
    found["dtype"] = attempt(lambda: model(targets))
    model = attached()
    group = model.blocks[0]._get_fsdp_state()._fsdp_param_group
    group.mesh_info.shard_process_group = dist.new_group()
    found["group"] = attempt(lambda: model(targets))
    return found


CHANGES = {
    "comm": "'blocks.1' was given another all-gather after attach",
    "dtype": "the parameters of 'blocks.0' are gathered in torch.bfloat16, and at attach",
    "group": "'blocks.0' is gathered in process group",
}


@pytest.mark.torch_core
def test_what_changes_after_attach_is_one_error_on_all_ranks(worlds: Worlds) -> None:
    for rank, found in enumerate(worlds(4).run(case_changed)):
        kinds = dict.fromkeys(CHANGES, "StateError")
        kinds["dtype"] = "StateError" if rank == 3 else "PeerError"  # which names rank 3
        assert_refused(found, CHANGES, kinds)
        assert rank == 3 or found["dtype"].text.startswith("rank 3: ")


def case_in_a_pass() -> Outcome:
    model: Any = built("plain")
    state = gradferry.fsdp.attach(model, **ONLY_GATHERS)
    found = []

    def enter(*_: object) -> None:
        found.append(attempt(state.exact_gathers().__enter__))

    model.blocks[0].register_forward_pre_hook(enter)
    model(targets_of(model, torch.float32)).backward()
    return found[0]


@pytest.mark.torch_core
def test_exact_gathers_are_for_whole_passes(worlds: Worlds) -> None:
    for outcome in worlds(4).run(case_in_a_pass):
        assert outcome.error == "StateError"
        assert "is in the middle of a pass; enter and leave exact_gathers()" in outcome.text


def case_alone() -> list[Outcome]:
    sharding = Sharding(1, 1)
    models = [sharding.model(sharding.mesh()["shard"]) for _ in range(2)]
    outcomes = [
        attempt(lambda: gradferry.fsdp.attach(models[0], "q4", all_gather="q8")),
        attempt(lambda: gradferry.fsdp.attach(models[1], "q4")),
    ]
    sharding.backward(models[1], 0)
    return outcomes


@pytest.mark.torch_core
def test_a_rank_alone_gathers_nothing(worlds: Worlds) -> None:
    (outcomes,) = worlds(1).run(case_alone)
    assert [outcome.error for outcome in outcomes] == ["ConfigError", None]
    assert "the shard group is one rank, which gathers nothing" in outcomes[0].text
