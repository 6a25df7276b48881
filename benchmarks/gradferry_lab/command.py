"""The command `gradferry`, also `python -m gradferry`: its version, its help, or the laboratory.

Neither torch nor what the laboratory needs is imported before that.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from importlib import metadata

from gradferry_lab.outline import COMMANDS, outline

# What `pip install gradferry[lab]` brings.
EXTRA = ("rich", "matplotlib")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        # A folder on PYTHONPATH has no metadata: there the laboratory says it.
        with contextlib.suppress(metadata.PackageNotFoundError):
            print(metadata.version("gradferry"))
            return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        whole, commands = outline(argparse.ArgumentParser, "")
        for name, summary in COMMANDS.items():
            commands.add_parser(name, help=summary)
        whole.parse_args(arguments or ["--help"])  # which ends the process
    try:
        from gradferry_lab import cli

        return cli.main(arguments)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        print(
            f"gradferry: this command needs {missing}: pip install 'gradferry[lab]'",
            file=sys.stderr,
        )
        return 2
