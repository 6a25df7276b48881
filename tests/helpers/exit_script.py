"""One rank of a training that ends in the way named on the command line, and says when it does.

The timeout of its group is an hour: an end that waits for a peer hangs.
"""

from __future__ import annotations

import datetime
import os
import sys

import torch
import torch.distributed as dist
from scenario import Run, Scenario, Weight

SCENARIO = Scenario((Weight("first", (90, 100)), Weight("last", (50, 60))))


def say_that_it_ends() -> None:
    print("ends", flush=True)


def train(native: bool) -> Run:
    ddp = {"bucket_cap_mb": 0.01}
    run = Run(Scenario(SCENARIO.weights, native=native, ddp=ddp))
    for step in range(3):
        run.step(step)
    return run


def raise_in_flight(run: Run) -> None:
    """Raises while the bucket of `last` is under way; the peer never sends its own."""

    def fail(_: torch.Tensor) -> None:
        say_that_it_ends()
        raise RuntimeError("in the middle of backward")

    run.model.get_parameter("first").register_hook(fail)
    run.step(3)


def average() -> None:
    """Through a Reducer with a thread of its own, and one that the package keeps."""
    import gradferry

    global reducer  # alive until the interpreter has gone
    tensor = torch.zeros(500, 1000)
    reducer = gradferry.Reducer([("t", tensor)], "exact", workspace_cap_mb=1)
    reducer.all_reduce(async_op=True).wait()
    gradferry.all_reduce(tensor, "q4", name="kept")


def raise_in_a_call() -> None:
    """Raises while that thread hands over chunks that the peer never answers."""
    global work
    work = reducer.all_reduce(async_op=True)
    say_that_it_ends()
    raise RuntimeError("while a call is under way")


def main(rank: int, rendezvous: str, registered: str, ending: str, destroy: str) -> int:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(hours=1),
    )
    global run  # alive until the interpreter has gone
    if registered == "reducer":
        average()
    else:
        run = train(registered == "native")
    if ending == "in_flight":
        if rank == 0:
            raise_in_a_call() if registered == "reducer" else raise_in_flight(run)
        os.read(0, 1)  # stays until the test lets it go
    if destroy == "destroyed":
        dist.destroy_process_group()
    say_that_it_ends()
    if ending == "sys_exit":
        sys.exit(3)
    if ending == "exception":
        raise ValueError("not caught")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
