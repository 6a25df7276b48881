"""What the calls of a hook do to the fake device; cases with its streams in two orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gradferry.fsdp.hooks import GradientHook

Result = TypeVar("Result")


def expect_no_race() -> None:
    """Raises AssertionError with what the machine has found since it was last asked."""
    from fake_device import machine

    if found := machine.races():
        raise AssertionError("\n".join(found))


def in_two_orders(case: Callable[[], Result]) -> list[Result]:
    """What a case gives with streams in two orders, of which the machine finds nothing."""
    from fake_device import machine

    results = []
    for seed in (1, 2):
        machine.set_seed(seed * 100 + dist.get_rank())
        results.append(case())
        machine.synchronize()
        expect_no_race()
    return results


class WatchedCalls:
    """A model in training, whose hooks count what they do to the device."""

    def __init__(self) -> None:
        from fake_device import machine

        self.machine = machine
        self.computes_on = torch.accelerator.current_stream()
        self.calls: list[dict[str, int]] = []  # of the hook in the last step

    @contextmanager
    def counted(
        self,
        hook: type,
        omitted: int = -1,
        read_early: int = -1,
        before: Callable[[torch.Tensor], object] = lambda _: None,
    ) -> Iterator[None]:
        """Counts the calls of these hooks.

        Args:
            omitted: a wait of the calls.
            read_early: the call after which the stream that computes reads what the hook was given,
                and waits for nothing but what came before the call.
            before: what is done before a call with what the hook is given.
        """
        import fake_device

        def watched(of: object, *args: torch.Tensor, **given: Any) -> None:
            tensor = args[0] if args else given["input_tensor"]
            before(tensor)
            if omitted >= 0:
                self.machine.omit_wait(omitted - sum(call["waits"] for call in self.calls))
            came = torch.accelerator.current_stream().record_event()
            counters = self.machine.counters()
            call(of, *args, **given)
            after = self.machine.counters()
            self.machine.omit_wait(-1)
            self.calls.append({key: after[key] - counters[key] for key in after})
            if len(self.calls) == 1 + read_early:
                self.computes_on.wait_event(came)
                with torch.get_device_module(fake_device.DEVICE).stream(self.computes_on):
                    tensor.clone()

        self.calls = []
        call: Any = hook.__call__
        with mock.patch.object(hook, "__call__", watched):
            yield

    def found(self) -> list[str]:
        """What the machine finds, when all is done."""
        self.machine.synchronize()
        races: list[str] = self.machine.races()
        return races

    def held_back(self, step: Callable[[int], list[str]]) -> int:
        """How many streams freed memory waits for in a step after the first two."""
        found = [step(number) for number in range(2)]
        before = self.machine.counters()["held_back"]
        found.append(step(2))
        held_back: int = self.machine.counters()["held_back"] - before
        assert found == [[], [], []]
        return held_back


class _InterruptedError(RuntimeError):
    """What ends a call between its exchange and its end."""


@contextmanager
def given_up() -> Iterator[None]:
    """A backward pass within it ends in its first call of a hook, while the engine works on it."""

    def interrupted(hook: GradientHook, gradient: torch.Tensor) -> bool:
        hook.start(hook.exchange.indices(hook.number), gradient)
        raise _InterruptedError

    with mock.patch.object(GradientHook, "_average", interrupted), pytest.raises(_InterruptedError):
        yield
