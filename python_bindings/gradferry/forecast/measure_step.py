"""Measures a training step without communication, with its gradients, and one with a codec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
from torch.nn.parallel import DistributedDataParallel

from gradferry.core.agreement import meeting_place, most_of_ranks
from gradferry.core.device import CPU
from gradferry.core.parameters import reduced_parameters
from gradferry.forecast.clock import Clock, clock_of
from gradferry.forecast.costs import Parameter, StepProfile
from gradferry.forecast.measure_link import spare_cores

# `gradferry.attach`, passed as an argument because it belongs to a higher layer.
Attach = Callable[[DistributedDataParallel, str], object]
_WARMUP_STEPS = 3  # in the first, DDP arranges its buckets and optimizers create their state
_TURN_STEPS = 3  # between two barriers


def model_parameters(ddp: DistributedDataParallel) -> list[Parameter]:
    """The parameters that DDP reduces, in its order; complex ones as their real views."""
    found = []
    for name, parameter in reduced_parameters(ddp):
        real = torch.view_as_real(parameter.data) if parameter.is_complex() else parameter.data
        found.append(Parameter(name, tuple(real.shape), real.dtype))
    return found


@dataclass(frozen=True)
class MeasuredSteps:
    """Alternating steps without communication and with a codec."""

    parameters: tuple[Parameter, ...]
    profile: StepProfile
    exposed_s: float  # extra seconds of a step with the codec


def measure_steps(
    build_model: Callable[[], nn.Module],
    group: dist.ProcessGroup,
    make_step: Callable[[nn.Module], Callable[[], None]],
    compress: Callable[[DistributedDataParallel], object],
    bucket_cap_mb: float | None,
    turns: int,
    place: torch.device = CPU,
) -> MeasuredSteps:
    """Trains a few steps. Collective; the result is the same on all ranks.

    build_model: returns a model that may be changed; called twice.
    make_step: gets the wrapped model; returns a function that runs one step with the optimizer.
    compress: attaches the hook to one of the two models.
    place: where the models are.
    """

    def wrap() -> DistributedDataParallel:
        return DistributedDataParallel(
            build_model(), process_group=group, bucket_cap_mb=bucket_cap_mb
        )

    silent, talking = wrap(), wrap()
    silent.register_comm_hook(None, debugging_hooks.noop_hook)
    compress(talking)
    steps = make_step(silent), make_step(talking)
    for step in steps:
        for _ in range(_WARMUP_STEPS):
            step()
    clock = clock_of(place)
    meeting = meeting_place(group, place)
    times: tuple[list[float], list[float]] = ([], [])
    instants: list[list[float]] = []
    with _watching(silent, clock) as ready:
        for _ in range(turns):
            for number, step in enumerate(steps):
                most_of_ranks([0.0], group, meeting)  # a barrier
                marks = [clock.mark()]
                seen = []
                for _ in range(_TURN_STEPS):
                    step()
                    seen.append(list(ready))
                    marks.append(clock.mark())
                times[number].append(clock.seconds(marks[0], marks[-1]) / _TURN_STEPS)
                if number == 0:
                    for begin, of_step in zip(marks[:-1], seen, strict=True):
                        instants.append([clock.seconds(begin, instant) for instant in of_step])
    ready_s = [median(of_parameter) for of_parameter in zip(*instants, strict=True)]
    slowest = most_of_ranks([*times[0], *times[1], *ready_s], group, meeting)
    without, with_codec = slowest[:turns], slowest[turns : 2 * turns]
    exposed = (longer - shorter for longer, shorter in zip(with_codec, without, strict=True))
    ready_s = slowest[2 * turns :]
    profile = StepProfile(
        total_s=median(without),
        backward_end_s=max(ready_s),
        ready_s=tuple(ready_s),
        spare_cores=spare_cores(group) if place.type == "cpu" else 0.0,
    )
    return MeasuredSteps(tuple(model_parameters(silent)), profile, median(exposed))


@contextmanager
def _watching(ddp: DistributedDataParallel, clock: Clock) -> Iterator[list[Any]]:
    """Yields the instants at which each parameter last got its gradient, as marks of the clock."""
    parameters = [parameter for _, parameter in reduced_parameters(ddp)]
    ready = [clock.mark()] * len(parameters)

    def note(index: int) -> Callable[[torch.Tensor], None]:
        def noted(parameter: torch.Tensor) -> None:
            ready[index] = clock.mark()

        return noted

    handles = [
        parameter.register_post_accumulate_grad_hook(note(index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]
    try:
        yield ready
    finally:
        for handle in handles:
            handle.remove()
