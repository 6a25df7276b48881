"""The parameters, or tensors, that are averaged together, in the order of the tile numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from gradferry import _native
from gradferry.core import device
from gradferry.core.codec_spec import CodecSpec
from gradferry.core.config import COARSE_BITS, EXACT, Config
from gradferry.core.names import plain_name
from gradferry.errors import ConfigError

# The smallest matrices, which together hold at most this percentage of all elements, travel with
# SMALL_CODEC instead of a codec below COARSE_BITS. On images, whose first and last layers are among
# them, most of the loss that a coarse codec costs comes from there. SMALL_CODEC adds at most about
# 0.1 bit per element of the model to what is sent.
SMALL_PERCENT = 3
SMALL_CODEC = CodecSpec("q4")
_REAL_DTYPES = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter as the engine sees it.

    Attributes:
        name: as in ``module.named_parameters()``, without wrappers of torch (`plain_name`).
        shape: of the parameter.
        strides: of its gradient in DDP's buckets, in elements: those of the parameter if it is
            dense and non-overlapping, else row-major. 1 for dimensions of size 1.
        dtype: of the parameter's real view.
        num_elements: of the real view: twice as many for complex parameters.
        is_complex: whether the parameter is.
        codec: as the rules decide.
        warmup: the codec of warm-up steps.
        residuals: whether it has a place in the (worker, owner) residual.
        owner: the rank that gets its mean in a reduce-scatter, or has it in an all-gather; None: in
            an all-reduce.
        whole_size: number of elements of the parameter that this is a shard of; None: it is whole.
        is_small: whether it has its codec because it is one of the smallest (`under`).
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    num_elements: int
    is_complex: bool
    codec: CodecSpec
    warmup: CodecSpec
    residuals: tuple[bool, bool]
    owner: int | None = None
    whole_size: int | None = None
    is_small: bool = False

    def record(self) -> dict[str, Any]:
        """The fields that must be equal on all ranks, JSON-serializable."""
        record = {
            "name": self.name,
            "shape": list(self.shape),
            "strides": list(self.strides),
            "dtype": str(self.dtype),
            "codec": str(self.codec),
            "residuals": list(self.residuals),
        }
        return record if self.owner is None else {**record, "owner": self.owner}

    def native(self) -> _native.ParameterSpec:
        """The parameter for the C++ engine."""
        return _native.ParameterSpec(
            name=self.name,
            num_elements=self.num_elements,
            dtype=self.dtype,
            codec=str(self.codec),
            warmup=str(self.warmup),
            worker_residual=self.residuals[0],
            owner_residual=self.residuals[1],
            owner=self.owner,
        )


def describe_parameters(
    named: Sequence[tuple[str, torch.Tensor]],
    config: Config,
    owners: Sequence[int | None] | None = None,
    whole_sizes: Sequence[int | None] | None = None,
    *,
    exchanges: bool,
) -> list[ParameterLayout]:
    """Resolves the codec and residuals of every parameter.

    Args:
        named: names and parameters, in order.
        config: checked.
        owners: see `ParameterLayout.owner`; None: of no parameter.
        whole_sizes: see `ParameterLayout.whole_size`; None: all parameters are whole.
        exchanges: False in a world of one, where every parameter has a place in the worker
            residual: for the momentum, or for the residuals of a larger world.

    Raises:
        ConfigError: a parameter's device or dtype has no codec, or parameters are on several
            devices.
    """
    for name, parameter in named:
        first_name, first = named[0]
        if parameter.device != first.device:
            raise ConfigError(
                f"parameter {name!r} is on {parameter.device} and {first_name!r} on "
                f"{first.device}; one hook compresses the gradients of one device"
            )
    if named and (place := named[0][1].device).type != "cpu" and not config.passes_through:
        device.load_kernels(place.type)
    nothing = [None] * len(named)
    described = [
        _describe(name, each, owner, whole_size)
        for (name, each), owner, whole_size in zip(
            named, owners or nothing, whole_sizes or nothing, strict=True
        )
    ]
    return under(config, described, exchanges=exchanges)


def under(
    config: Config, parameters: Sequence[ParameterLayout], *, exchanges: bool
) -> list[ParameterLayout]:
    """The same parameters with the codecs and residuals of another configuration.

    The first rule that matches a parameter gives its codec; else it is the configured one, or
    SMALL_CODEC, if that is coarse and the parameter is one of the smallest (SMALL_PERCENT).

    Args:
        config: the other one.
        parameters: all that are averaged together. Codecs depend on nothing else, so that they are
            the same on all ranks.
        exchanges: as of `describe_parameters`.
    """
    by_rule = [_codec_by_rule(config, parameter) for parameter in parameters]
    small = _smallest(parameters, by_rule)
    found = []
    for parameter, ruled in zip(parameters, by_rule, strict=True):
        asked = config.codec if ruled is None else ruled
        codecs: tuple[CodecSpec, ...] = (asked, config.warmup if asked.lossy else asked)
        own = codecs
        if ruled is None and parameter.name in small:
            own = tuple(SMALL_CODEC if each.bits() < COARSE_BITS else each for each in codecs)
        residuals = config.residuals_of(own[0]) if exchanges else (True, False)
        found.append(
            replace(
                parameter,
                codec=own[0],
                warmup=own[1],
                is_small=own != codecs,
                residuals=residuals,
            )
        )
    return found


def _codec_by_rule(config: Config, parameter: ParameterLayout) -> CodecSpec | None:
    if parameter.is_complex or parameter.dtype == torch.float64:
        return EXACT
    shape = parameter.shape
    return config.codec_by_rule(parameter.name, len(shape), math.prod(shape))


def _smallest(
    parameters: Sequence[ParameterLayout], by_rule: Sequence[CodecSpec | None]
) -> set[str]:
    """Picks from those without a rule, smallest first, what together has at most SMALL_PERCENT of
    all elements. All parameters of one size, as layers have them, are taken, or none. The shards of
    a parameter have one name.
    """
    sizes = {
        p.name: math.prod(p.shape) if p.whole_size is None else p.whole_size for p in parameters
    }
    names = {p.name for p, codec in zip(parameters, by_rule, strict=True) if codec is None}
    most, taken, small = SMALL_PERCENT * sum(sizes.values()), 0, set[str]()
    ascending = sorted((name for name in sizes if name in names), key=sizes.__getitem__)
    for size, alike in groupby(ascending, key=sizes.__getitem__):
        group = set(alike)
        taken += 100 * size * len(group)
        if taken > most:
            break
        small |= group
    return small


def _describe(
    name: str, parameter: torch.Tensor, owner: int | None, whole_size: int | None
) -> ParameterLayout:
    """The parameter, not yet under a configuration."""
    dtype = _REAL_DTYPES.get(parameter.dtype, parameter.dtype)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ConfigError(
            f"parameter {name!r} is {parameter.dtype}, which no codec takes; keep it out of DDP "
            "or convert it to float32, bfloat16, float16 or float64"
        )
    return ParameterLayout(
        name=plain_name(name),
        shape=tuple(parameter.shape),
        strides=tuple(_native.bucket_strides(parameter)),
        dtype=dtype,
        num_elements=parameter.numel() * (2 if parameter.is_complex() else 1),
        is_complex=parameter.is_complex(),
        codec=EXACT,
        warmup=EXACT,
        residuals=(False, False),
        owner=owner,
        whole_size=whole_size,
    )
