"""The command line: `gradferry`, also as `python -m gradferry`."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from gradferry._build_info import PACKAGE_VERSION
from gradferry.errors import ConfigError, GradferryError

from gradferry_lab import bench, converge, demo, doctor, info, plan
from gradferry_lab.flags import Parser
from gradferry_lab.outline import COMMANDS, outline

_MODULES = {
    "info": info,
    "demo": demo,
    "bench": bench,
    "doctor": doctor,
    "plan": plan,
    "converge": converge,
}
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
        arguments = parser().parse_args(command_line)  # options name what this machine can run
        arguments.command_line = command_line  # for commands that start themselves again elsewhere
        code: int = arguments.run(arguments)
    except ConfigError as error:
        print(f"gradferry: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except GradferryError as error:
        print(f"gradferry: {error}", file=sys.stderr)
        return _EXIT_FAILED
    except KeyboardInterrupt:
        print("gradferry: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return code


def parser() -> argparse.ArgumentParser:
    """The parser of the command line: options name what this machine can run."""
    whole, commands = outline(Parser, PACKAGE_VERSION)
    for name, summary in COMMANDS.items():
        module = _MODULES[name]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return whole
