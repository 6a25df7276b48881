"""Callbacks after optimizer steps: whose they are, when they end, and passes between steps."""

from __future__ import annotations

import gc
from collections.abc import Callable

import gradferry
import pytest
import torch
from gradferry.reduction import step_numbers
from gradferry.reduction.step_numbers import PassCounter, call_after_steps
from torch import nn
from torch.optim import SGD


def test_passes_are_counted_for_each_optimizer() -> None:
    passes = 0
    counter = PassCounter(lambda: passes)
    parameter = nn.Parameter(torch.zeros(1))
    first, second = SGD([parameter]), SGD([parameter])
    seen = []
    for more, optimizer in [(1, first), (2, second), (0, first), (0, first), (3, second)]:
        passes += more
        seen.append(counter.take(optimizer))
    # The second begins where the first has stepped, and the first had two passes meanwhile.
    assert seen == [1, 2, 2, 0, 3]


class Owner:
    """Can be referred to weakly."""


def test_callbacks_end_with_their_owner_and_their_parameters() -> None:
    before = len(step_numbers._calls)
    owner, parameter = Owner(), nn.Parameter(torch.zeros(1))
    other = SGD([nn.Parameter(torch.zeros(1))])
    called = []
    call_after_steps(called.append, owner=owner)
    index = torch.utils.weak.WeakIdKeyDictionary({parameter: 0})
    call_after_steps(lambda _: called.append(None), index=index)
    other.step()
    assert called == [other]  # it does not hold the parameter
    del owner, parameter
    gc.collect()
    other.step()
    assert called == [other]
    assert len(step_numbers._calls) == before


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
    with pytest.raises(gradferry.GradferryWarning, match="first"):
        optimizer.step()
    assert called == [optimizer]
    for handle in handles:
        handle.remove()
