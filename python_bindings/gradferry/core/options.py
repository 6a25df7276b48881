"""The options of `gradferry.attach` and of all other ways in: each is declared here, once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast

from gradferry.core.names import closest
from gradferry.core.nodes import AUTO
from gradferry.errors import ConfigError

Way = TypeVar("Way", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """What `gradferry.attach` and every other way in take beside a model and a codec.

    Attributes:
        rules: dicts with ``codec`` and any of ``name`` (a shell-style pattern of the whole name,
            such as ``"*embedding*"``), ``min_dims``, ``max_dims``, ``min_size``, ``max_size``
            (elements). The first rule that matches a parameter gives its codec; a rule that matches
            no parameter causes a warning. Other parameters get ``exact`` if they have at most one
            dimension or fewer than 1024 elements, else ``codec``. If that has less than 3 bits per
            element, the smallest of them, which together have at most 3 % of all elements that are
            averaged, get ``q4``, of equally large ones all or none: on images most of the loss that
            such codecs cost comes from them. The same holds for a `warmup` of less than 3 bits.
            ``{"min_dims": 2, "min_size": 1024, "codec": "sign1"}`` as the last rule sends them with
            ``sign1``, too. float64 and complex parameters are always ``exact``.
        error_feedback: which residuals are kept: ``"none"``, ``"owner"``, ``"worker"``,
            ``"both"``, or ``"auto"``: both below 8 bits per element and in momentum mode, else the
            owner residual. With both, what was applied plus the residuals equals the sum of the
            gradients. Without the worker residual, which takes 4 bytes per element, the rounding
            error of a rank's own encoding is lost.
        momentum: between 0 and 1. Instead of gradients, the hook delivers their momentum
            m = momentum * m + (1 - momentum) * gradient, which the worker residual stores together
            with the compression error. ``topk`` uses a smaller momentum, because its elements
            already wait before they are sent. Use it with an optimizer that has no momentum of its
            own, as `gradferry.optim.momentum_mode` makes it, or with `gradferry.optim.OneBitAdam`.
            Needs one synced backward pass per optimizer step; refuses sparse gradients and
            ``find_unused_parameters``.
        warmup_steps: number of first steps in which gradients arrive without momentum, and are sent
            with the codec `warmup`.
        warmup: the codec of the first `warmup_steps`, for all parameters that are not ``exact``.
            ``"exact"`` sends gradients as they are: what arrives is their mean, added up in rank
            order in fp32 and rounded once to their dtype. Without a hook ranks add up in another
            order, so that with 3 ranks or more the last bits may differ. Another codec, such as
            ``"q8"``, sends less, with error feedback as in all other steps; in momentum mode, its
            residuals then enter the momentum. An adaptive optimizer learns its variance from
            what arrives, and needs 3 bits or more here.
        grad_scaler: the `torch.amp.GradScaler` that scales the loss. Residuals follow its scale,
            exactly where that changes by powers of two. Ranks compare their scales at attach and in
            every step, and raise `RankMismatchError` where they differ, on a device two steps
            later. Under ``join()`` a rank without input does not update its scaler: a scale that
            changes there is such an error.
        nonfinite: ``"propagate"`` delivers NaN and infinity to every rank, and changes residuals by
            the difference between what a step was given and what it delivered, wherever that is
            finite; ``"raise"`` raises `StateError` on every rank, after which the hook is finished,
            as after any error.
        check_every: number of steps after which all ranks compare hashes of their parameters, and
            raise `DivergedError` if those differ; 0 for never. Reads the model once and sends 8
            bytes per parameter. Not for uneven inputs under ``join()``: there a rank without
            input stops updating. The same steps, or an optimizer's third in a row where no
            gradients come to the hook, raise `StateError` for a parameter that trains although it
            was replaced, added or unfrozen after attach, so that DistributedDataParallel does not
            reduce it.
        seed: of the codecs' random numbers; equal on all ranks.
        workspace_cap_mb: the most memory for messages, in MiB, on the device of the model: by
            default 96, or 512 with NCCL. Chunks get smaller as the world grows, then fewer are in
            flight. ``print(state)`` shows what is used.
        nodes: which ranks share a node, and with it a network card. Ranks of a node first add up
            their gradients, and nodes exchange the compressed sums: *two levels*. ``"auto"``:
            those that run on one machine and in one network namespace; where that makes only one
            node, or nodes of one rank each, the exchange is *flat*, every rank with every other. On
            a device it begins flat, and DDP's hook tries both from its third step on, for 7 to 21
            steps each: the faster one stays. ``"flat"``: always flat. A whole number: so many
            consecutive ranks of the process group. A DeviceMesh of two dimensions: its rows.
            ``print(state)`` says which exchange runs, and why. Bits are equal on all ranks, but
            other than those of the flat exchange.
    """

    rules: Sequence[Mapping[str, Any]] | None
    error_feedback: str
    momentum: float | None
    warmup_steps: int
    warmup: str
    grad_scaler: object | None
    nonfinite: str
    check_every: int
    seed: int
    workspace_cap_mb: float | None
    nodes: object


DEFAULTS: Options = {
    "rules": None,
    "error_feedback": "auto",
    "momentum": None,
    "warmup_steps": 0,
    "warmup": "exact",
    "grad_scaler": None,
    "nonfinite": "propagate",
    "check_every": 0,
    "seed": 0,
    "workspace_cap_mb": None,
    "nodes": AUTO,
}


class ShardedOptions(Options, total=False):
    """What `gradferry.fsdp.attach` takes beside.

    Attributes:
        reduce_scatter: the codec of the reduce-scatter of gradients within a replica; ``"off"``
            leaves it to FSDP2. ``"auto"`` is `codec`, or ``"off"`` where there are replicas.
        all_gather: the codec of the all-gather of parameters: ``"exact"``, ``"bf16"``, ``"q8"`` or
            ``"q4"``; ``"off"`` leaves it to FSDP2. ``"auto"`` is ``"q8"``, or ``"off"`` where
            there are replicas, with codec ``"off"``, and where the shard group is one rank.
        keep_gathered: if true, a backward pass computes with what the forward pass gathered, and
            gathers nothing again. Keeps the messages of all ranks: 1.02 bytes per parameter of the
            whole model on every rank with ``q8``, 0.54 with ``q4``; beside `workspace_cap_mb`.
        all_gather_rules: as `rules`, for the codecs of `all_gather`. Dimensions and elements are
            those of this rank's shard.
        scatter_feedback: ``"none"``, or ``"worker"``, which keeps on every rank the compression
            error of the *whole* model's gradients in the reduce-scatter: 4 bytes for each
            parameter, not divided by the number of ranks. Codecs below 3 bits need it.
    """

    reduce_scatter: str
    all_gather: str
    keep_gathered: bool
    all_gather_rules: Sequence[Mapping[str, Any]] | None
    scatter_feedback: str


SHARDED_DEFAULTS: ShardedOptions = {
    **DEFAULTS,
    "reduce_scatter": AUTO,
    "all_gather": AUTO,
    "keep_gathered": False,
    "all_gather_rules": None,
    "scatter_feedback": "none",
}


def complete(
    options: Mapping[str, Any],
    without: Collection[str] = (),
    defaults: Mapping[str, Any] = DEFAULTS,
) -> Options:
    """The options with defaults for those that are not given. Their values are not checked.

    Raises:
        ConfigError: there is no such option, or it is among `without`.
    """
    known = [name for name in defaults if name not in without]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"there is no option {name!r} here; the options are {', '.join(known)}"
                f"{closest(name, known)}"
            )
    return cast(Options, {**defaults, **options})


def takes_options(
    without: Collection[str] = (), defaults: Mapping[str, Any] = DEFAULTS
) -> Callable[[Way], Way]:
    """Shows the options in the signature and in the docstring of a function that takes them as
    ``**options``, for ``help()`` and notebooks.

    Args:
        without: options that the function does not take.
        defaults: of all options that there are for it.
    """
    texts = dict(re.findall(r"^        (\w+): (.*?)(?=^        \w+: |\Z)", _texts(), re.S | re.M))

    def show(function: Way) -> Way:
        names = [name for name in defaults if name not in without]
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        keyword = inspect.Parameter.KEYWORD_ONLY
        options = [inspect.Parameter(name, keyword, default=defaults[name]) for name in names]
        shown = signature.replace(parameters=[*own, *options])
        function.__signature__ = shown  # type: ignore[attr-defined]
        told = "".join(f"        {name}: {texts[name]}" for name in names)
        function.__doc__ = re.sub(
            r"^        \*\*options: .*?(?=^        \w|^$)",
            lambda _: told,
            function.__doc__ or "",
            count=1,
            flags=re.S | re.M,
        )
        return function

    return show


def _texts() -> str:
    documents = (Options.__doc__, ShardedOptions.__doc__)
    parts = [(text or "").partition("    Attributes:\n")[2].rstrip() for text in documents]
    return "\n".join(parts) + "\n"
