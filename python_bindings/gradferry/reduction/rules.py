"""Warnings about rules that give no parameter its codec."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import torch

from gradferry.core.config import DEFAULT_RULES, Config, Rule
from gradferry.core.parameters import ParameterLayout
from gradferry.core.warn import warn


def warn_about_rules(
    config: Config, parameters: Sequence[ParameterLayout], *, exchanges: bool
) -> None:
    """Warns of rules that match no parameter, and of a codec that no parameter gets."""
    for number, rule in enumerate(config.rules):
        if not any(_matches(rule, parameter) for parameter in parameters):
            names = [parameter.name for parameter in parameters]
            warn(_unmatched(number, rule, names))
    reasons = [_why_exempt(config, parameter) for parameter in parameters]
    compresses = config.codec.lossy or config.chooses
    if not exchanges or not compresses or not all(reasons) or set(reasons) <= {_BY_RULE}:
        return
    counted = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).items())
    warn(
        f"nothing is compressed: every parameter is exempt ({counted}) and travels as 'exact', "
        "which sends no less than DDP does by itself; leave gradferry out, or give parameters of "
        "fp32, bf16 or fp16 a codec by rules=",
    )


_BY_RULE = "by your rules"


def _why_exempt(config: Config, parameter: ParameterLayout) -> str | None:
    """Why a parameter is never compressed; None when a lossy codec takes it."""
    if parameter.is_complex or parameter.dtype == torch.float64:
        return "of float64 or complex"
    for rule in (*config.rules, *DEFAULT_RULES):
        if _matches(rule, parameter):
            if rule.codec.lossy:
                return None
            if rule in config.rules:
                return _BY_RULE
            if rule.max_dims is not None:
                return f"of at most {rule.max_dims} dimension"
            assert rule.max_size is not None
            return f"of fewer than {rule.max_size + 1} elements"
    return None


def _matches(rule: Rule, parameter: ParameterLayout) -> bool:
    return rule.matches(parameter.name, len(parameter.shape), math.prod(parameter.shape))


def _unmatched(number: int, rule: Rule, names: Sequence[str]) -> str:
    given = {
        key: value
        for key, value in {**asdict(rule), "codec": str(rule.codec)}.items()
        if value != Rule.__dataclass_fields__[key].default
    }
    text = f"rules[{number}]={given!r} matches no parameter"
    if any(Rule(rule.codec, rule.name).matches(name, 0, 0) for name in names):
        return f"{text}: of those with such a name none has these dimensions and this size"
    near = _closest_names(rule.name, names)
    if near:
        text += f"; the closest names are {', '.join(map(repr, near))}"
    return (
        f"{text}. A pattern covers the whole name, dots included: '*embedding*' matches "
        "'embedding.weight' and 'encoder.embedding.weight'"
    )


def _closest_names(pattern: str, names: Sequence[str]) -> list[str]:
    """At most three names that are similar to the pattern without its wildcards."""
    wanted = pattern.strip("*?.")

    def nearness(name: str) -> float:
        parts = (name, *name.split("."))
        return max(difflib.SequenceMatcher(None, wanted, part).ratio() for part in parts)

    near = [name for name in names if nearness(name) > 0.6]
    return sorted(near, key=nearness, reverse=True)[:3]
