"""The parameters, or tensors, that are averaged together, in the order of the tile numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradferry import _native
from gradferry.core import device
from gradferry.core.codec_spec import CodecSpec
from gradferry.core.config import EXACT, Config, Sized
from gradferry.core.names import plain_name
from gradferry.errors import ConfigError

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
        is_small: whether it has its codec because it is one of the smallest (`Config.codecs_of`).
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

    def sized(self) -> Sized:
        """What its codec depends on."""
        size = math.prod(self.shape)
        return Sized(
            name=self.name,
            dims=len(self.shape),
            size=size,
            whole_size=size if self.whole_size is None else self.whole_size,
            is_compressible=not self.is_complex and self.dtype != torch.float64,
        )

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
            devices; or the GPU or its driver is too old for the kernels.
    """
    for name, parameter in named:
        first_name, first = named[0]
        if parameter.device != first.device:
            raise ConfigError(
                f"parameter {name!r} is on {parameter.device} and {first_name!r} on "
                f"{first.device}; one hook compresses the gradients of one device"
            )
    if named and (place := named[0][1].device).type != "cpu" and not config.passes_through:
        device.expect_runnable(place)
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

    Args:
        config: the other one.
        parameters: all that are averaged together.
        exchanges: as of `describe_parameters`.
    """
    codecs = config.codecs_of([parameter.sized() for parameter in parameters])
    return [
        replace(
            parameter,
            codec=own.codec,
            warmup=own.warmup,
            is_small=own.is_small,
            residuals=config.residuals_of(own.codec) if exchanges else (True, False),
        )
        for parameter, own in zip(parameters, codecs, strict=True)
    ]


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
