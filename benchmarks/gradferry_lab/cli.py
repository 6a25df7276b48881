"""The command line: `gradferry`, also as `python -m gradferry`.

Neither torch nor what the laboratory needs is imported before a command is named, and of a command
that is named its own module alone.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Collection, Sequence
from importlib import metadata

# By the name of a command, which is that of its module, what it does.
COMMANDS = {
    "info": "versions, instruction sets and codecs of this installation",
    "demo": "train with several gradient hooks and compare loss, bytes and time",
    "bench": "measure speed on this machine",
    "doctor": "try training steps under every hook, and say which to use",
    "plan": "bytes and transfer times on a cluster that is not at hand, by arithmetic",
    "converge": "train with every codec and judge where trainings end",
}
# What `pip install gradferry[lab]` brings.
EXTRA = ("rich", "matplotlib")
_EXIT_FAILED = 1
_EXIT_USAGE = 2  # as argparse does
_EXIT_INTERRUPTED = 130  # as shells do: 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the process's exit code."""
    command_line = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a sign must not end a command
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        arguments = parser(command_line[:1]).parse_args(command_line or ["--help"])
        arguments.command_line = command_line  # for commands that start themselves again elsewhere
        from gradferry.errors import ConfigError, GradferryError

        try:
            code: int = arguments.run(arguments)
        except GradferryError as error:
            print(f"gradferry: {error}", file=sys.stderr)
            return _EXIT_USAGE if isinstance(error, ConfigError) else _EXIT_FAILED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        advice = f"this command needs {missing}: pip install 'gradferry[lab]'"
        print(f"gradferry: {advice}", file=sys.stderr)
        return _EXIT_USAGE
    except KeyboardInterrupt:
        print("gradferry: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return code


def parser(with_options: Collection[str] = COMMANDS.keys()) -> argparse.ArgumentParser:
    """The parser of the command line, with the options of these commands. Options name what this
    machine can run: they are declared by the command's module.
    """
    modules = {
        name: importlib.import_module(f"gradferry_lab.{name}")
        for name in COMMANDS
        if name in with_options
    }
    kind: type[argparse.ArgumentParser] = argparse.ArgumentParser
    if modules:
        from gradferry_lab import flags

        kind = flags.Parser
    whole = argparse.ArgumentParser(
        prog="gradferry",
        description="Gradient compression for PyTorch DistributedDataParallel.",
        epilog="gradferry COMMAND --help describes a command.",
    )
    whole.add_argument("--version", action="version", version=_version())
    commands = whole.add_subparsers(required=True, metavar="COMMAND", parser_class=kind)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in modules:
            command.description = modules[name].__doc__
            modules[name].add_arguments(command)
            command.set_defaults(run=modules[name].run)
    return whole


def _version() -> str:
    try:
        return metadata.version("gradferry")
    except metadata.PackageNotFoundError:  # a folder on PYTHONPATH has none
        from gradferry._build_info import PACKAGE_VERSION

        return PACKAGE_VERSION
