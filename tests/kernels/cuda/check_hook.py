"""The hook on GPUs, beside the hook on the CPU: one case per call, in processes of its own.

    python check_hook.py gloo --ranks 2        # one GPU for all ranks, gloo
    python check_hook.py nccl --ranks 1        # NCCL; one rank exchanges with itself
    python check_hook.py nccl --ranks 2        # NCCL; ranks may share a GPU, see below
    python check_hook.py nccl --ranks 1 --slow 7   # with random delays on the streams
    python check_hook.py nccl --ranks 1 --abandon  # after passes that were given up
    python check_hook.py nccl --ranks 1 --detail   # TORCH_DISTRIBUTED_DEBUG=DETAIL

Every rank has the same model twice, on the CPU and on a GPU, in DistributedDataParallel and
compressed; both get the same gradients, to the bit. What arrives in .grad must be equal, to the
bit, and so must the saved states. Memory that torch's allocator has back is filled with NaN after
every step: a stream that still reads it gets NaN, and one that writes it is found.

NCCL refuses two ranks on one GPU of a machine. Where there are more ranks than GPUs, each says that
it is a machine of its own, and NCCL connects them by sockets as it does machines.

Needs torch and gradferry, nothing else. Ends with code 0, or with 77 and a reason where this
machine cannot run the case.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import sys
from unittest import mock

import gradferry
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from gradferry import _native
from gradferry.core import device
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SKIPPED = 77
STEPS = 4
SHAPES = ((1000, 700), (77,), (512, 513), (3,), (4096,), (129, 401))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = tuple((shape, dtype) for dtype in DTYPES for shape in SHAPES)
SMALL = 1 << 20  # of torch's allocator
WARM_UP = 3  # steps until every bucket was seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", choices=("gloo", "nccl"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--slow", type=int, help="seed of random delays before every kernel")
    parser.add_argument("--abandon", action="store_true", help="give up a backward pass first")
    parser.add_argument("--detail", action="store_true", help="TORCH_DISTRIBUTED_DEBUG=DETAIL")
    arguments = parser.parse_args()
    if arguments.detail:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"  # for the ranks
    if reason := why_not(arguments):
        print(f"skipped: {reason}")
        return SKIPPED
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(run_rank, (arguments, store.port), nprocs=arguments.ranks)
    print(f"{arguments.ranks} ranks over {arguments.backend}: equal to the CPU")
    return 0


def why_not(arguments: argparse.Namespace) -> str:
    """Why this machine cannot run the case; empty if it can."""
    return "" if torch.cuda.is_available() else "torch sees no GPU"


def run_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    torch.manual_seed(0)
    if arguments.ranks > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"rank {rank}"
    place = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(place)
    if arguments.slow is not None:
        import gradferry_slow_cuda

        device.LIBRARIES["cuda"] = lambda: gradferry_slow_cuda.device_library(arguments.slow + rank)
    backend = "gloo" if arguments.backend == "gloo" else "cpu:gloo,cuda:nccl"
    timeout = datetime.timedelta(seconds=120)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=arguments.ranks, timeout=timeout
    )
    alone = arguments.ranks == 1
    with mock.patch.object(device, "EXCHANGE_WHEN_ALONE", alone):
        for row in _native.codecs():
            if arguments.abandon:
                abandon(row["name"], place)
            compare(row["name"], place, alone)
        if arguments.backend == "nccl" and arguments.slow is None and not arguments.detail:
            count_waits(place)
    dist.destroy_process_group()


class Model(nn.Module):
    """The gradient of every parameter is what the loss multiplies it with."""

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.zeros(shape, dtype=dtype, device=place) for shape, dtype in WEIGHTS
        )

    def forward(self, targets: list[torch.Tensor]) -> torch.Tensor:
        products = [(w * t).sum().float() for w, t in zip(self.weights, targets, strict=True)]
        return torch.stack(products).sum()


def targets(step: int, place: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    values = []
    for shape, dtype in WEIGHTS:
        exponents = torch.randint(-12, 3, shape, generator=generator)
        value = torch.randn(shape, generator=generator) * torch.exp2(exponents.float())
        values.append(value.to(dtype).to(place))
    return values


def poison(place: torch.device) -> None:
    """Fills memory that the allocator has back with NaN, and sees that it stays so."""
    stream = torch.cuda.current_stream(place).cuda_stream
    free: list[int] = []
    for segment in torch.cuda.memory_snapshot():
        if (segment["device"], segment["stream"]) != (place.index, stream):
            continue
        is_small = segment["segment_type"] == "small"  # serves up to SMALL bytes, and nothing else
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                continue
            if is_small:
                whole, rest = divmod(block["size"], SMALL)
                free += [SMALL] * whole + [rest] * (rest > 0)
            elif block["size"] > SMALL:
                free.append(block["size"])
    # Largest first, so that none is cut into smaller ones. 0xFF is a NaN in every format.
    taken = [
        torch.empty(size, dtype=torch.uint8, device=place).fill_(0xFF)
        for size in sorted(free, reverse=True)
    ]
    torch.cuda.synchronize(place)
    # One wait for all: other processes may share the GPU, and each wait takes its turn.
    untouched = [(block == 0xFF).all() for block in taken]
    assert not taken or bool(torch.stack(untouched).all()), "written after it was freed"


class GivenUpError(Exception):
    """A backward pass is to end."""


def abandon(codec: str, place: torch.device) -> None:
    """Gives up a backward pass when buckets are under way, and DistributedDataParallel with it."""

    def give_up(_: torch.Tensor) -> None:
        raise GivenUpError

    model = DistributedDataParallel(Model(place), bucket_cap_mb=1)
    gradferry.attach(model, codec, error_feedback="both")
    model(targets(0, place)).backward()
    model.module.weights[0].register_hook(give_up)  # its gradient comes last
    try:
        model(targets(1, place)).backward()
    except GivenUpError:
        del model
        gc.collect()  # DDP objects sit in reference cycles
        poison(place)
        return
    raise AssertionError("the pass went on")


def compare(codec: str, place: torch.device, alone: bool) -> None:
    """Trains on the CPU and on the GPU. A world of one has no exchange on the CPU to compare with:
    there the lossless codec must give what it got, but for the sign of a zero, which a sum that
    begins with zero loses, and the others something finite."""
    models = [
        DistributedDataParallel(Model(p), bucket_cap_mb=1) for p in (torch.device("cpu"), place)
    ]
    states = [gradferry.attach(model, codec, error_feedback="both") for model in models]
    for step in range(STEPS):
        for model in models:
            model.zero_grad()
            model(targets(step, next(model.parameters()).device)).backward()
        poison(place)
        for index, (a, b) in enumerate(zip(*(m.parameters() for m in models), strict=True)):
            where = f"{codec}, {a.dtype}, step {step}, parameter {index}, rank {dist.get_rank()}"
            got, want = b.grad.cpu(), a.grad
            if alone:
                same = torch.equal(got, want) if codec == "exact" else got.isfinite().all()
                assert same, where
            else:
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), where
    saved = [state.state_dict() for state in states]
    if not alone:
        slot = f"slot_{dist.get_rank()}"
        for name in ("worker", "owner"):
            assert torch.equal(saved[0][slot][name], saved[1][slot][name]), (codec, name)


def count_waits(place: torch.device) -> None:
    """After warm-up the hook neither allocates on the GPU nor waits for it."""
    model = DistributedDataParallel(Model(place), bucket_cap_mb=1)
    state = gradferry.HookState("q4", model, error_feedback="both")
    allocations: list[int] = []
    steps = {"now": 0}

    def hook(state, bucket):  # DDP looks at annotations
        warm = steps["now"] >= WARM_UP
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        # Whatever waits for the device through torch raises.
        torch.cuda.set_sync_debug_mode("error" if warm else "default")
        try:
            return gradferry.hook(state, bucket)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            after = torch.cuda.memory_stats()["allocation.all.allocated"]
            allocations.append(after - before if warm else 0)

    model.register_comm_hook(state, hook)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for step in range(WARM_UP):
        steps["now"] = step
        model(targets(step, place)).backward()
    with torch.profiler.profile(activities=activities) as profile:
        for step in range(WARM_UP, WARM_UP + 3):
            steps["now"] = step
            model(targets(step, place)).backward()
    torch.cuda.synchronize()
    assert not any(allocations), allocations
    assert state.stats()["host_waits"] == 0
    ours = [e for e in profile.events() if e.name.startswith("gradferry::")]
    assert ours, "no ranges of the hook in the profile"
    waits = [
        e.name
        for e in profile.events()
        if e.name
        in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMalloc")
        and any(
            r.thread == e.thread
            and r.time_range.start <= e.time_range.start
            and e.time_range.end <= r.time_range.end
            for r in ours
        )
    ]
    assert not waits, waits


if __name__ == "__main__":
    sys.exit(main())
