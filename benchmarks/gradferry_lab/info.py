"""`gradferry info`: what this installation is, and what it can do on this machine."""

from __future__ import annotations

import argparse
import platform
import textwrap
from collections.abc import Mapping
from typing import Any

import torch
from gradferry import _build_info, _native
from gradferry.core import device
from gradferry.core.codec_spec import parse_codec
from gradferry.errors import ConfigError
from rich.console import Console

from gradferry_lab.output.json_file import cpu_model, os_name
from gradferry_lab.output.table import print_line

_KEY_WIDTH = 18  # characters
_MOST_WIDTH = 100  # longer lines are hard to read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`gradferry info` has no options."""


def run(arguments: argparse.Namespace) -> int:
    """Prints versions, instruction sets and codecs."""
    console = Console()
    for key, value in facts().items():
        print_line(console, f"{key + ':':<{_KEY_WIDTH}}{value}")
    console.print()
    for line in codec_lines(min(console.width, _MOST_WIDTH)):
        print_line(console, line)
    return 0


def facts() -> dict[str, str]:
    """What `gradferry info` says above the codecs, in order."""
    return {
        "gradferry": f"{_build_info.PACKAGE_VERSION}, wire format {_build_info.WIRE_VERSION}",
        "built against": f"torch {_build_info.TORCH_VERSION}, Python {_build_info.PYTHON_VERSION}, "
        f"{_build_info.COMPILER}",
        "running on": f"torch {torch.__version__}, Python {platform.python_version()}, {os_name()}",
        "cpu": cpu_model(),
        "instruction sets": f"{' '.join(_native.available_isas())}; active: "
        f"{_native.active_isa()} (GRADFERRY_ISA chooses)",
        "CUDA": f"{_cuda_kernels()}; {torch.cuda.device_count()} devices seen by torch",
        **_gpus(),
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


def _gpus() -> dict[str, str]:
    """Each GPU by its name in torch, and for which architecture its kernels would be made."""
    rows = {}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        rows[f"cuda:{index}"] = f"{name}, compute capability {major}.{minor}"
    return rows


def codec_lines(width: int) -> list[str]:
    """Every codec of this build: name, bits per element, what it does, its options. No line is
    longer than `width`, in characters.
    """
    codecs = _native.codecs()
    names = max(len(codec["name"]) for codec in codecs)
    lines = [f"{'codec':<{names}}    bits", "-" * width]
    for codec in codecs:
        head = f"{codec['name']:<{names}}  {parse_codec(codec['name']).bits():>6.2f}  "
        lines += _wrapped(codec["summary"], head, width)
        for option in codec["options"]:
            lines += _wrapped(f"{_option(option)}: {option['help']}", " " * len(head), width)
    return [
        *lines,
        "",
        *_wrapped(
            f"Bits are those per element of {_native.TILE_ELEMENTS} fp32 elements on their way to "
            "the owner, at the default options. Codec 'off' leaves gradients to the backend's own "
            "all-reduce.",
            "",
            width,
        ),
    ]


def _wrapped(text: str, head: str, width: int) -> list[str]:
    """`text` beside `head`; its further lines stand below its first one."""
    below = " " * len(head)
    return textwrap.wrap(
        text, width, initial_indent=head, subsequent_indent=below, break_on_hyphens=False
    )


def _option(option: Mapping[str, Any]) -> str:
    values = "|".join(option["choices"]) or f"{option['minimum']:g}..{option['maximum']:g}"
    default = f" (default {option['default']})" if option["default"] else ""
    return f"{option['name']}={values}{default}"
