"""The parser of the command line as far as it needs none of the commands, nor torch."""

from __future__ import annotations

import argparse

# By name what a command does; `cli` has the modules.
COMMANDS = {
    "info": "versions, instruction sets and codecs of this installation",
    "demo": "train with several gradient hooks and compare loss, bytes and time",
    "bench": "measure speed on this machine",
    "doctor": "try training steps under every hook, and say which to use",
    "plan": "bytes and transfer times on a cluster that is not at hand, by arithmetic",
    "converge": "train with every codec and judge where trainings end",
}


def outline(
    kind: type[argparse.ArgumentParser], version: str
) -> tuple[argparse.ArgumentParser, argparse._SubParsersAction[argparse.ArgumentParser]]:
    """The parser of the command line without its commands, and that to which they are added."""
    whole = kind(
        prog="gradferry",
        description="Gradient compression for PyTorch DistributedDataParallel.",
        epilog="gradferry COMMAND --help describes a command.",
    )
    whole.add_argument("--version", action="version", version=version)
    return whole, whole.add_subparsers(required=True, metavar="COMMAND")
