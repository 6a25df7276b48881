"""When buckets travel under PyTorch's own hooks, which keep no record of it as codecs do."""

# DDP compares the hook's annotations with the classes themselves: no postponed evaluation here.

import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class BucketTimes:
    """A communication hook of a model, and the instants of its buckets in the last step."""

    def __init__(self, ddp: DistributedDataParallel, state: object, hook: Hook) -> None:
        """Registers nothing yet: DDP without a hook stays as it is until `register`."""
        self._ddp = ddp
        self._state = state
        self._hook = hook
        self._is_registered = False
        self._events: list[dict[str, float]] = []

    def register(self) -> None:
        """Registers the hook, if that was not done before."""
        if not self._is_registered:
            self._ddp.register_comm_hook(self._state, self._noting_hook())
            self._is_registered = True

    def events(self) -> list[dict[str, float]]:
        """`bucket`, `begin_ms` (DDP hands it over) and `complete_ms` (its average is there), as in
        HookState.events().
        """
        return list(self._events)

    def _noting_hook(self) -> Hook:
        def note_times(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if bucket.index() == 0:
                self._events = []
            event = {"bucket": bucket.index(), "begin_ms": 1000 * time.monotonic()}
            self._events.append(event)

            def complete(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
                event["complete_ms"] = 1000 * time.monotonic()
                return done.value()

            return self._hook(state, bucket).then(complete)

        return note_times
