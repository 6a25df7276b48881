"""Flags that several commands have, and checks of their values, which raise ConfigError."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradferry import _native
from gradferry.errors import ConfigError

_COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


class Parser(argparse.ArgumentParser):
    """Its namespaces have `given`, if options were named: by destination, how each was written."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("action", None, _Store)
        self.register("action", "store_true", _StoreTrue)


class _Store(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, True if self.nargs == 0 else values)
        vars(namespace).setdefault("given", {})[self.dest] = option_string


class _StoreTrue(_Store):
    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, **options)


def file_to_write(text: str) -> Path:
    """The type of options that name a file, which is replaced when the results are there."""
    path = Path(text)
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no file; name one that may be replaced")
    return path.resolve() if path.is_symlink() else path


def make_folder(folder: Path) -> None:
    """Makes the folder of --out. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot make this folder: {error}") from error


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declares --json."""
    parser.add_argument(
        "--json", type=file_to_write, metavar="FILE", help="also write the rows as JSON"
    )


def count(text: str) -> float:
    """The type of options that count something: `125M`, `1.3B`, `7e9`."""
    number, unit = text, 1.0
    if text[-1:].upper() in _COUNTS:
        number, unit = text[:-1], _COUNTS[text[-1].upper()]
    try:
        return float(number) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number; write it as in 125M, 1.3B or 7e9"
        ) from None


def add_wide(parser: argparse.ArgumentParser) -> None:
    """Declares --wide."""
    parser.add_argument(
        "--wide", action="store_true", help="all columns, also those that do not fit the terminal"
    )


def add_seed(parser: argparse.ArgumentParser) -> None:
    """Declares --seed."""
    parser.add_argument("--seed", type=int, default=0, help="of model and data (default: 0)")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declares --model, for `workloads.models.load_workload`."""
    parser.add_argument(
        "--model",
        default="transformer",
        help="transformer (19.2 M parameters, 4 x 64 bytes of text per rank), small (a transformer "
        "of 0.87 M), or module:function for your own: a function without arguments that returns "
        "(model, batch_fn), where model(*batch_fn()) is the loss (default: %(default)s)",
    )


def add_several(
    parser: argparse.ArgumentParser, flag: str, default: Sequence[Any], metavar: str, what: str
) -> None:
    """Declares an option of one value or more, which are of the type of the default ones."""
    shown = (each if isinstance(each, str) else f"{each:g}" for each in default)
    parser.add_argument(
        flag,
        nargs="+",
        type=type(default[0]),
        default=list(default),
        metavar=metavar,
        help=f"{what} (default: {' '.join(shown)})",
    )


def add_codecs(parser: argparse.ArgumentParser, beside: str = "") -> None:
    """Declares --codecs. `beside`: what is compared with them."""
    names = [str(codec["name"]) for codec in _native.codecs()]
    what = f"codecs as listed by `gradferry info`{beside}"
    add_several(parser, "--codecs", names, "CODEC", what)


def add_hooks(parser: argparse.ArgumentParser, default: Sequence[str], what: str) -> None:
    """Declares --hooks. `what`: which there are, and how they are written."""
    add_several(parser, "--hooks", default, "HOOK", what)


def apply_smoke(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """With --smoke, sets these options. Raises ConfigError when the command line sets one, too."""
    if arguments.smoke:
        refuse(arguments, settings, "beside --smoke, which sets it")
        vars(arguments).update(settings)


def refuse(arguments: argparse.Namespace, options: Iterable[str], why: str) -> None:
    """Raises ConfigError when the command line names one of these options.

    arguments: of a Parser. why: the options mean nothing here, as in "without --link".
    """
    given = vars(arguments).get("given", {})
    for option in options:
        if option in given:
            raise ConfigError(f"{given[option]} means nothing {why}; leave it out")


def require_at_least(least: int, arguments: argparse.Namespace, *options: str) -> None:
    """Options whose value, or each of whose values, counts something."""
    for option in options:
        value = getattr(arguments, option)
        for count in value if isinstance(value, list) else [value]:
            if count < least:
                raise ConfigError(f"--{option.replace('_', '-')}: {count} must be at least {least}")


def require_between(flag: str, value: float, least: float, most: float) -> None:
    """The value of the option `flag`; a NaN is refused, too."""
    if not least <= value <= most:
        raise ConfigError(f"{flag}: {value:g} must be a number from {least:g} to {most:g}")


def require_more_than_zero(flag: str, values: Iterable[float]) -> None:
    """Values of the option `flag`; a NaN is refused, too."""
    for value in values:
        if not value > 0:
            raise ConfigError(f"{flag}: {value:g} must be more than 0")
