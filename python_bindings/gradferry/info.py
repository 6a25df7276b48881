"""`gradferry info`: what this installation is, and what it can do on this machine."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console

from gradferry import _build_info, _native, device
from gradferry.codec_spec import parse_codec
from gradferry.errors import ConfigError
from gradferry.reporting.environment import cpu_model, os_name
from gradferry.reporting.table import Column, Table, print_line, print_table

_KEY_WIDTH = 18  # characters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`gradferry info` has no options."""


def run(arguments: argparse.Namespace) -> int:
    """Prints versions, instruction sets and codecs."""
    console = Console()
    for key, value in facts().items():
        print_line(console, f"{key + ':':<{_KEY_WIDTH}}{value}")
    console.print()
    print_table(console, codec_table())
    return 0


def facts() -> dict[str, str]:
    """What `gradferry info` says above the codecs, in order."""
    return {
        "gradferry": f"{_build_info.GRADFERRY_VERSION}, wire format {_build_info.WIRE_VERSION}",
        "built against": f"torch {_build_info.TORCH_VERSION}, Python {_build_info.PYTHON_VERSION}, "
        f"{_build_info.COMPILER}",
        "running on": f"torch {torch.__version__}, Python {platform.python_version()}, {os_name()}",
        "cpu": cpu_model(),
        "instruction sets": f"{' '.join(_native.available_isas())}; active: "
        f"{_native.active_isa()} (GRADFERRY_ISA chooses)",
        "CUDA": f"{_cuda_kernels()}; {torch.cuda.device_count()} devices seen by torch",
    }


def _cuda_kernels() -> str:
    """Which CUDA kernels this build holds, and whether they load."""
    if not _build_info.CUDA_COMPILER:
        return "no kernels in this build"
    built = f"kernels by {_build_info.CUDA_COMPILER} for {_build_info.CUDA_ARCHITECTURES}"
    if not torch.cuda.is_available():
        return f"{built}, not loaded without a GPU"
    try:
        device.load_kernels("cuda")
    except ConfigError as error:
        return f"{built}: {error}"
    return f"{built}, loaded"


def codec_table() -> Table:
    """Every codec of this build."""
    columns = (
        Column("codec", lambda row: str(row["name"]), is_number=False),
        Column("bits per\nelement", _bits),
        Column("options", _options, is_number=False),
        Column("what it does", lambda row: str(row["summary"]), is_number=False),
    )
    return Table(
        title="Codecs",
        columns=columns,
        rows=_native.codecs(),
        notes=(
            "Bits are those of 4096 fp32 elements on their way to the owner, at the default "
            "options. Codec 'off' leaves gradients to the backend's own all-reduce.",
        ),
    )


def _bits(codec: Mapping[str, Any]) -> str:
    return f"{parse_codec(codec['name']).bits():.2f}"


def _options(codec: Mapping[str, Any]) -> str:
    return ",".join(_option(option) for option in codec["options"]) or "-"


def _option(option: Mapping[str, Any]) -> str:
    values = "|".join(option["choices"]) or f"{option['minimum']:g}..{option['maximum']:g}"
    default = f" (default {option['default']})" if option["default"] else ""
    return f"{option['name']}={values}{default}"
