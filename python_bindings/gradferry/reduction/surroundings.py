"""Warnings of settings around a hook on a GPU that keep its streams from overlapping."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradferry.core.cuda_build import shown, this_build
from gradferry.core.device import Transport
from gradferry.core.warn import warn

_YES = ("1", "y", "yes", "t", "true")  # as torch reads its variables


@dataclass(frozen=True)
class Surroundings:
    """What may cost speed.

    Attributes:
        environment: of the process.
        high_priority: whether the group was made with a high-priority stream; None: unknown.
        translated: names the GPU, if the driver must translate the kernels for it.
    """

    environment: Mapping[str, str]
    high_priority: bool | None
    translated: str | None

    @classmethod
    def of(cls, place: torch.device, group: dist.ProcessGroup) -> Surroundings:
        """Those of this process, for gradients on a CUDA device."""
        backend = group._get_backend(place)
        try:
            options = backend.options
        except (RuntimeError, AttributeError):  # a backend without options
            options = None
        high_priority = getattr(options, "is_high_priority_stream", None)
        build, translated = this_build(), None
        capability = torch.cuda.get_device_capability(place)
        if build is not None and not build.has_machine_code(capability):
            translated = f"{place}, of compute capability {shown(capability)}"
        return cls(os.environ, high_priority, translated)

    def is_set(self, *names: str) -> bool:
        """Whether one of torch's variables says yes."""
        return any(self.environment.get(name, "").lower() in _YES for name in names)

    def advice(self) -> list[str]:
        """A sentence for each setting, which says what to do."""
        sentences = []
        if self.is_set("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
            sentences.append(
                "TORCH_NCCL_BLOCKING_WAIT has the host wait for every collective in the middle of "
                "backward(), so that nothing overlaps: unset it (errors and timeouts are noticed "
                "without it, see TORCH_NCCL_ASYNC_ERROR_HANDLING)"
            )
        if self.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            sentences.append(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 puts the work of all streams into one queue, so "
                "that encoding and collectives wait for backward() and it for them: unset it (DDP "
                "does not need it), or set it to 8 or more"
            )
        if self.high_priority is False and not self.is_set("TORCH_NCCL_HIGH_PRIORITY"):
            sentences.append(
                "the stream of this process group has normal priority, so that its collectives "
                "wait behind the kernels of backward(): set TORCH_NCCL_HIGH_PRIORITY=1, or make "
                "the group with pg_options=torch.distributed.ProcessGroupNCCL.Options("
                "is_high_priority_stream=True)"
            )
        if self.translated is not None:
            sentences.append(
                f"this installation of gradferry has no machine code for {self.translated}, so "
                "that the driver translates its kernels at the first attach, for up to a minute: "
                "install it again on this machine with CUDAARCHS=native set"
            )
        return sentences


def warn_about_surroundings(transport: Transport, group: dist.ProcessGroup) -> None:
    """Warns of settings that slow down a hook whose gradients are on a CUDA device."""
    if transport.device.type != "cuda" or not transport.streams or not transport.exchanges:
        return
    for sentence in Surroundings.of(transport.device, group).advice():
        warn(sentence)
