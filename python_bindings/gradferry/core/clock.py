"""Time where a model computes: by the processor's clock, or by events of a device.

A device runs behind the host, so the host's clock says nothing about the work on it.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks instants, and tells the time between two of them."""

    def mark(self) -> Any:
        """This instant; on a device, of its current stream."""

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to a later one. Waits until the device is there."""

    def wait(self) -> None:
        """Waits until the device has done what its current stream holds."""


class HostClock:
    """The clock of the processor."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait(self) -> None:
        """The host does one thing after another."""


class DeviceClock:
    """The clock of a device, by events in its current stream."""

    def __init__(self, place: torch.device) -> None:
        self._place = place

    def mark(self) -> torch.Event:
        event = torch.Event(self._place, enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.Event, end: torch.Event) -> float:
        begin.synchronize()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        self.mark().synchronize()


def computing_on(place: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one: events are recorded in the streams of that."""
    if place.type == "cpu":
        return nullcontext()
    return torch.accelerator.device_index(place.index)


def clock_of(place: torch.device) -> Clock:
    """The clock of what computes on a device."""
    return HostClock() if place.type == "cpu" else DeviceClock(place)
