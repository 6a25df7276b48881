"""Warnings are gradferry's own category, and seem to come from the user's line; and callbacks after
optimizer steps.
"""

from __future__ import annotations

import copy
import functools
import linecache
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import gradferry
import pytest
import torch
from gradferry.averaging.step_numbers import call_after_steps
from gradferry.core.device import Transport, expect_no_blocking
from gradferry.core.warn import warn
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD


def lines(caught: list[warnings.WarningMessage]) -> list[str]:
    """The lines that warnings of gradferry are attributed to."""
    ours = [w for w in caught if w.category is gradferry.GradferryWarning]
    return [linecache.getline(w.filename, w.lineno).strip() for w in ours]


def caught_behind_trainers_filter(call: Callable[[], object]) -> list[warnings.WarningMessage]:
    """With the filter that accelerate sets."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.optim.lr_scheduler")
        call()
    return caught


def inside(module: str, call: Callable[[], object]) -> Callable[[], object]:
    """A call of `call` by a function of this module."""
    scope: dict[str, Any] = {"__name__": module, "call": call}
    exec("def run():\n    call()", scope)
    return scope["run"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "modules",
    [
        [],
        ["gradferry.averaging.advice", "torch.optim.optimizer", "torch.optim.lr_scheduler"],
        ["gradferry.ddp.binding", "copy"],
        ["gradferry.ddp.state", "gradferry.integrations.lightning", "lightning.pytorch.trainer"],
        ["gradferry.averaging.advice", "torch.optim.optimizer", "accelerate.optimizer"],
        ["gradferry.ddp.state", "gradferry.integrations.transformers", "transformers.trainer"],
    ],
)
def test_frames_of_torch_gradferry_and_trainers_are_passed_over(modules: list[str]) -> None:
    call: Callable[[], object] = functools.partial(warn, "a text")
    for module in modules:
        call = inside(module, call)

    def users() -> None:
        call()  # of the user

    assert lines(caught_behind_trainers_filter(users)) == ["call()  # of the user"]


def test_a_module_whose_name_only_begins_like_torch_is_the_users() -> None:
    code = compile("warn('a text')", "/home/torchmodel.py", "exec")
    scope = {"__name__": "torchmodel", "warn": warn}
    caught = caught_behind_trainers_filter(lambda: exec(code, scope))
    assert [(w.filename, w.lineno) for w in caught] == [("/home/torchmodel.py", 1)]


@on_ranks(1)
def test_warnings_name_the_line_that_the_user_wrote() -> None:
    """In a training, and of copies and pickles."""
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    state = gradferry.attach(ddp, "sign1", momentum=0.8)
    optimizer = torch.optim.AdamW(ddp.parameters())
    torch.optim.lr_scheduler.LinearLR(optimizer)  # wraps `step` of this optimizer

    def train() -> None:
        for _ in range(2):
            ddp(torch.ones(2, 40)).sum().backward()
            optimizer.step()

    def copy_all() -> None:
        copy.deepcopy(state)
        pickle.dumps(state)

    assert lines(caught_behind_trainers_filter(train)) == ["optimizer.step()"]
    copies = ["copy.deepcopy(state)", "pickle.dumps(state)"]
    assert lines(caught_behind_trainers_filter(copy_all)) == copies


def transport(kind: str, *, exchanges: bool = True, streams: bool = True) -> Transport:
    return Transport(torch.device(kind), exchanges=exchanges, streams=streams)


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_collectives_that_block_the_host_are_refused(monkeypatch, name):
    for value in ("1", "True"):
        monkeypatch.setenv(name, value)
        with pytest.raises(gradferry.ConfigError, match="unset it before init_process_group"):
            expect_no_blocking(transport("cuda"))
        expect_no_blocking(transport("cpu", streams=False))
        expect_no_blocking(transport("cuda", streams=False))
        expect_no_blocking(transport("cuda", exchanges=False))
    monkeypatch.setenv(name, "0")
    expect_no_blocking(transport("cuda"))


class Owner:
    """Can be referred to weakly."""


def test_an_owner_that_goes_in_the_middle_of_a_step_ends_its_callback() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))])
    owners, called = [Owner()], []
    handle = call_after_steps(lambda _: owners.clear())
    call_after_steps(called.append, owner=owners[0])
    optimizer.step()
    handle.remove()
    assert called == []


def test_a_callback_that_raises_does_not_keep_the_step_from_others() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = SGD([parameter])
    called: list[object] = []

    def refuse(text: str) -> Callable[[object], None]:
        def callback(_: object) -> None:
            raise gradferry.GradferryWarning(text)

        return callback

    handles = [
        call_after_steps(each) for each in (refuse("first"), called.append, refuse("second"))
    ]
    handles.append(call_after_steps(called.append, index={}))  # of no parameter of it
    with pytest.raises(gradferry.GradferryWarning, match="first"):
        optimizer.step()
    assert called == [optimizer]
    for handle in handles:
        handle.remove()
