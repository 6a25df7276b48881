"""`attach` for the native hook, and `hook` with the standard signature on the same engine."""

# DDP compares the hook's annotations with the classes themselves: no postponed evaluation here.

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradferry.core.nodes import AUTO
from gradferry.core.options import WORKSPACE_CAP_MB, Options
from gradferry.ddp.state import HookState, bound_to


def attach(
    ddp: DistributedDataParallel,
    codec: str = "q4",
    *,
    rules: Sequence[Mapping[str, Any]] | None = None,
    error_feedback: str = "auto",
    momentum: float | None = None,
    warmup_steps: int = 0,
    warmup: str = "exact",
    grad_scaler: object | None = None,
    nonfinite: str = "propagate",
    exact_skip: bool = False,
    check_every: int = 0,
    seed: int = 0,
    workspace_cap_mb: float = WORKSPACE_CAP_MB,
    nodes: object = AUTO,
) -> HookState:
    """Compresses the gradients of a DistributedDataParallel from now on. Collective.

    Registers a native hook, which runs without Python and the GIL. Call it once on every rank,
    after the model was wrapped and before the first backward pass that should be compressed.

    Args:
        ddp: the model, also as torch.compile or Lightning Fabric wrapped it again; it must not have
            a communication hook.
        codec: a codec string such as ``"q4"``, ``"off"`` for the backend's own all-reduce, or
            ``"auto"``. ``"auto"`` begins with ``q4``. From the third step on, or behind a warm-up,
            ``rht:bits=3``, ``q4``, ``q8`` and ``off`` (or ``exact``, where ``nonfinite`` or
            ``check_every`` need an engine) train for seven steps each, of which five count; in
            momentum mode codecs below 3 bits instead of ``off``. One whose first counted step takes
            1.5 times what the fastest took gets no more. It takes the most precise one within 2 %
            of the fastest, by the median on the slowest rank. It tries again after 1000 steps, then
            less often after every change. What was withheld is delivered before a codec that has no
            residual for it. ``stats()["choice"]`` explains the choice.
        rules: dicts with ``codec`` and any of ``name`` (a shell-style pattern of the whole name,
            such as ``"*embedding*"``), ``min_dims``, ``max_dims``, ``min_size``, ``max_size``
            (elements). The first rule that matches a parameter gives its codec; a rule that matches
            no parameter causes a warning. Other parameters get ``exact`` if they have at most one
            dimension or fewer than 1024 elements, else ``codec``. float64 and complex parameters
            are always ``exact``.
        error_feedback: which residuals are kept: ``"none"``, ``"owner"``, ``"worker"``,
            ``"both"``, or ``"auto"``: both below 8 bits per element and in momentum mode, else the
            owner residual. With both, what was applied plus what is withheld equals the sum of the
            gradients. Without the worker residual, which takes 4 bytes per element, the rounding
            error of a rank's own encoding is lost.
        momentum: between 0 and 1. Instead of gradients, the hook delivers their momentum
            m = momentum * m + (1 - momentum) * gradient, which the worker residual stores together
            with what was withheld. ``topk`` uses a smaller momentum, because its elements already
            wait before they are sent. Use it with an optimizer that has no momentum of its own, as
            `gradferry.optim.momentum_mode` makes it, or with `gradferry.optim.OneBitAdam`. Needs
            one synced backward pass per optimizer step; refuses sparse gradients and
            ``find_unused_parameters``.
        warmup_steps: number of first steps in which gradients arrive without momentum, and are sent
            with the codec `warmup`.
        warmup: the codec of the first `warmup_steps`, for all parameters that are not ``exact``.
            ``"exact"`` sends gradients as they are: what arrives is their mean, added up in rank
            order in fp32 and rounded once to their dtype. Without a hook ranks add up in another
            order, so that with 3 ranks or more the last bits may differ. Another codec, such as
            ``"q8"``, sends less, with error feedback as in all other steps; in momentum mode, what
            it has withheld then enters the momentum. An adaptive optimizer learns its variance from
            what arrives, and needs 3 bits or more here.
        grad_scaler: the `torch.amp.GradScaler` that scales the loss. Residuals follow its scale,
            exactly where that changes by powers of two. Ranks compare their scales at attach and in
            every step, and raise `RankMismatchError` where they differ, on a device two steps
            later. Under ``join()`` a rank without input does not update its scaler: a scale that
            changes there is such an error. An optimizer that steps three times without an
            ``update()`` of the scaler causes a warning.
        nonfinite: ``"propagate"`` delivers NaN and infinity to every rank; ``"raise"`` raises
            `StateError` on every rank, after which the hook is finished, as after any error.
        exact_skip: if true, a step whose result holds a NaN or infinity, which a GradScaler skips,
            leaves the residuals unchanged. If false, such a step changes them by the difference
            between what it was given and what it delivered, wherever that is finite. Costs a copy
            of the residuals. With ``grad_scaler``, a step is all synced backward passes since an
            optimizer of the model stepped or since ``scaler.update()``; without, every synced
            backward pass is a step. What an optimizer has applied is never taken back: where two
            optimizers share the parameters of one model, the first that steps ends what can be.
        check_every: number of steps after which all ranks compare hashes of their parameters, and
            raise `DivergedError` if those differ; 0 for never. Reads the model once and sends 8
            bytes per parameter. Not for uneven inputs under ``join()``: there a rank without
            input stops updating. The same steps, or the optimizer's where no gradients come to the
            hook, raise `StateError` for a parameter that trains although it was replaced, added,
            unfrozen or converted after attach, so that DistributedDataParallel does not reduce it.
        seed: of the codecs' random numbers; equal on all ranks.
        workspace_cap_mb: the most memory for messages, in MiB, on the device of the model: chunks
            get smaller as the world grows, then fewer are in flight. ``print(state)`` shows what is
            used.
        nodes: which ranks share a node, and with it a network card. Ranks of a node first add up
            their gradients, and nodes exchange the compressed sums: *two levels*. ``"auto"``:
            those that run on one machine and in one network namespace; where that makes only one
            node, or nodes of one rank each, the exchange is *flat*, every rank with every other.
            ``"flat"``: always flat. A whole number: so many consecutive ranks of the process group.
            A DeviceMesh of two dimensions: its rows. ``print(state)`` says which exchange runs, and
            why. Nodes of different sizes work. Results depend on the nodes: bits are equal on all
            ranks, but other than those of the flat exchange. On a device, where nobody has timed
            two levels, ``"auto"`` is flat with a codec that is named; with codec ``"auto"`` both
            exchanges are candidates, as on the CPU.

    Returns:
        The hook's state. The hook lives as long as the model, whether the state is kept or not.

    Raises:
        ConfigError: an argument or the model cannot be used; nothing was changed.
        RankMismatchError: ranks differ in configuration or model; nothing was changed.
        PeerError: a rank did not call this, or failed to set up its connections or memory; nothing
            was changed.
        StateError: the process group was destroyed.
    """
    return HookState._attached(ddp, Options.among(locals()))


def hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for ``ddp.register_comm_hook(state, gradferry.hook)``.

    Args:
        state: bound to the same model.
        bucket: from DDP.

    Returns:
        A future of the bucket's buffer, holding the average over all ranks.

    Raises:
        ConfigError: the state is no HookState.
        StateError: the state is not bound, or bound to another DistributedDataParallel than the
            one that calls; or it failed before.
    """
    bound = bound_to(state)
    bound.expect_registered()
    try:
        if bound.hook.admit(bucket):
            return bound.hook.run(bucket).get_future()
    except MemoryError:  # on the way to the engine, which would leave the others waiting
        bound.hook.fail_without_memory()
    bound.hook.note_passed()
    return allreduce_hook(bound.running.group, bucket)
