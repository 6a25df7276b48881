"""Warnings are gradferry's own category, and seem to come from the user's line."""

from __future__ import annotations

import copy
import functools
import linecache
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import gradferry
import pytest
import torch
from gradferry.core.warn import warn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World


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
        ["gradferry.ddp.state"],
        ["gradferry.reduction.advice", "torch.optim.optimizer", "torch.optim.lr_scheduler"],
        ["gradferry.ddp.model", "torch.nn.parallel.distributed"],
        ["gradferry.ddp.registration", "copy"],
    ],
)
@pytest.mark.parametrize("in_thread", [False, True])
def test_frames_of_torch_and_gradferry_are_passed_over(modules: list[str], in_thread: bool) -> None:
    call: Callable[[], object] = functools.partial(warn, "a text")
    for module in modules:
        call = inside(module, call)

    def users() -> None:
        call()  # of the user

    def run() -> None:
        if in_thread:
            thread = threading.Thread(target=users)
            thread.start()
            thread.join()
        else:
            users()

    assert lines(caught_behind_trainers_filter(run)) == ["call()  # of the user"]


def test_a_module_whose_name_only_begins_like_torch_is_the_users() -> None:
    code = compile("warn('a text')", "/home/torchmodel.py", "exec")
    scope = {"__name__": "torchmodel", "warn": warn}
    caught = caught_behind_trainers_filter(lambda: exec(code, scope))
    assert [(w.filename, w.lineno) for w in caught] == [("/home/torchmodel.py", 1)]


def case_places() -> list[list[str]]:
    """The lines that warnings of a training, of copies and of pickles are attributed to."""
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    state = gradferry.attach(ddp, "sign1", momentum=0.8)
    optimizer = torch.optim.AdamW(ddp.parameters())
    torch.optim.lr_scheduler.LinearLR(optimizer)  # wraps `step` of this optimizer

    def train() -> None:
        for _ in range(2):
            ddp(torch.ones(2, 40)).sum().backward()
            optimizer.step()

    def copy_all() -> None:
        copy.deepcopy(ddp)
        copy.deepcopy(state)
        pickle.dumps(ddp)

    return [lines(caught_behind_trainers_filter(call)) for call in (train, copy_all)]


def test_warnings_name_the_line_that_the_user_wrote(worlds: Callable[[int], World]) -> None:
    (places,) = worlds(1).run(case_places)
    copies = ["copy.deepcopy(ddp)", "copy.deepcopy(state)", "pickle.dumps(ddp)"]
    assert places == [["optimizer.step()"], copies]


def test_a_warning_can_become_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradferry.GradferryWarning)
        with pytest.raises(gradferry.GradferryWarning, match="a text"):
            warn("a text")
