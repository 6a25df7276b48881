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
from gradferry.core.device import Version, driver_version, shown, this_build, why_not
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
        "CUDA driver": _driver(driver_version()),
        **_gpus(),
    }


def _cuda_kernels() -> str:
    """Which CUDA kernels this build holds, and whether they load."""
    if not _build_info.CUDA_COMPILER:
        return "no kernels in this build"
    built = f"kernels by {_build_info.CUDA_COMPILER} for {_build_info.CUDA_ARCHITECTURES}"
    if (build := this_build()) is not None:
        built += f" ({build})"
    if not torch.cuda.is_available():
        return f"{built}, not loaded without a GPU"
    try:
        device.load_kernels("cuda")
    except ConfigError as error:
        return f"{built}: {error}"
    return f"{built}, loaded"


def _driver(newest: Version | None) -> str:
    """What this machine's driver can run of this build."""
    if newest is None:
        return "none on this machine"
    build = this_build()
    if build is None:
        return f"runs CUDA {shown(newest)} and older"
    if newest[0] < build.toolkit[0]:
        return f"runs CUDA {shown(newest)} and older, too old for these kernels"
    translates = "and translates their PTX" if newest >= build.toolkit else "but not their PTX"
    return f"runs CUDA {shown(newest)} and older: the machine code of these kernels, {translates}"


def _gpus() -> dict[str, str]:
    """What each GPU runs, by its name in torch."""
    build, driver = this_build(), driver_version()
    rows = {}
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        runs = "not known" if _build_info.CUDA_COMPILER else "no kernels in this build"
        if build is not None:
            held = "machine code" if build.has_machine_code(capability) else "translated PTX"
            runs = why_not(build, driver, capability, "it") or f"runs {held}"
        name = torch.cuda.get_device_name(index)
        rows[f"cuda:{index}"] = f"{name}, compute capability {shown(capability)}: {runs}"
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
