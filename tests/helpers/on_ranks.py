"""Tests whose body runs on every rank of a world, which asserts it there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def on_ranks(size: int = 2) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of the body's name and parameters that runs the body in the session's world of
    `size`. A parameter `device`, other than "cpu", asks for a world of the fake device.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(worlds_on: Any, **arguments: Any) -> None:
            worlds_on(arguments.get("device", "cpu"))(size).run(body, **arguments)

        own = inspect.signature(body)
        fixture = inspect.Parameter("worlds_on", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = own.replace(parameters=[fixture, *own.parameters.values()])  # type: ignore[attr-defined]
        test.__name__, test.__module__, test.__doc__ = body.__name__, body.__module__, body.__doc__
        test.body = body  # type: ignore[attr-defined]
        body.__qualname__ = f"{body.__name__}.body"  # by which a rank finds it
        return test

    return decorate


def of_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """This value of every rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values
