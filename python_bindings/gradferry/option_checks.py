"""Checks that several commands make of their options. All raise ConfigError."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from gradferry.errors import ConfigError


def require_at_least_one(arguments: argparse.Namespace, *options: str) -> None:
    """Options whose value, or each of whose values, counts something."""
    for option in options:
        value = getattr(arguments, option)
        for count in value if isinstance(value, list) else [value]:
            if count < 1:
                raise ConfigError(f"--{option.replace('_', '-')}: {count} must be at least 1")


def require_more_than_zero(flag: str, values: Iterable[float]) -> None:
    """Values of the option `flag`; a NaN is refused, too."""
    for value in values:
        if not value > 0:
            raise ConfigError(f"{flag}: {value:g} must be more than 0")
