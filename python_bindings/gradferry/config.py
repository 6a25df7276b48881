"""What a user may ask for, checked, and what it means for each parameter."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from gradferry.codec_spec import OFF, CodecSpec, parse_codec
from gradferry.errors import ConfigError

ERROR_FEEDBACK = ("auto", "none", "owner", "worker", "both")
NONFINITE = ("propagate", "raise")
# Most payload bytes per owner, stage and chunk: over about 1 MB a gloo message reaches half the
# rate of a link on which both sides send.
CHUNK_BYTES = 512 * 1024
# From this precision on the worker's residual brings next to nothing.
OWNER_ONLY_BITS = 3.0


@dataclass(frozen=True)
class Rule:
    """Gives the parameters it matches a codec. All its conditions must hold."""

    codec: CodecSpec
    name: str = "*"
    min_dims: int = 0
    max_dims: int | None = None
    min_size: int = 0
    max_size: int | None = None

    def matches(self, name: str, dims: int, size: int) -> bool:
        """Whether a parameter of this name, number of dimensions and elements is meant."""
        return (
            fnmatchcase(name, self.name)
            and self.min_dims <= dims
            and (self.max_dims is None or dims <= self.max_dims)
            and self.min_size <= size
            and (self.max_size is None or size <= self.max_size)
        )


EXACT = CodecSpec("exact")
DEFAULT_RULES = (Rule(EXACT, max_dims=1), Rule(EXACT, max_size=1023))


@dataclass(frozen=True)
class Config:
    """A checked configuration. Equal on all ranks, or attach refuses."""

    codec: CodecSpec
    rules: tuple[Rule, ...]
    error_feedback: str
    warmup_steps: int
    nonfinite: str
    seed: int
    disabled: bool
    chunk_bytes: int = CHUNK_BYTES

    @property
    def passes_through(self) -> bool:
        """Whether every bucket takes the backend's own all-reduce."""
        return self.disabled or self.codec.name == OFF

    def codec_of(self, name: str, dims: int, size: int) -> CodecSpec:
        """The codec of a parameter: the first rule that matches, else the configured one."""
        for rule in (*self.rules, *DEFAULT_RULES):
            if rule.matches(name, dims, size):
                return rule.codec
        return self.codec

    def residuals_of(self, codec: CodecSpec) -> tuple[bool, bool]:
        """Whether parameters of this codec keep a (worker, owner) residual."""
        if not codec.lossy:
            return False, False
        mode = self.error_feedback
        if mode == "auto":
            mode = "owner" if codec.bits() >= OWNER_ONLY_BITS else "both"
        return mode in ("worker", "both"), mode in ("owner", "both")


def make_config(
    codec: str,
    *,
    rules: Sequence[Mapping[str, Any]] | None,
    error_feedback: str,
    momentum: float | None,
    warmup_steps: int,
    grad_scaler: object | None,
    nonfinite: str,
    exact_skip: bool,
    check_every: int,
    seed: int,
) -> Config:
    """Checks the arguments of `attach` and `HookState`.

    Raises:
        ConfigError: naming the argument, its value and what would be accepted.
    """
    for name, value, default in (
        ("momentum", momentum, None),
        ("grad_scaler", grad_scaler, None),
        ("exact_skip", exact_skip, False),
        ("check_every", check_every, 0),
    ):
        if value != default:
            raise ConfigError(f"{name}={value!r} is not available in this version; leave it out")
    return Config(
        codec=parse_codec(codec),
        rules=tuple(_parse_rule(rule, i) for i, rule in enumerate(rules or ())),
        error_feedback=_choice("error_feedback", error_feedback, ERROR_FEEDBACK),
        warmup_steps=_count("warmup_steps", warmup_steps),
        nonfinite=_choice("nonfinite", nonfinite, NONFINITE),
        seed=_count("seed", seed),
        disabled=_disabled(os.environ.get("GRADFERRY_DISABLE", "")),
    )


def _disabled(value: str) -> bool:
    if value not in ("", "0", "1"):
        raise ConfigError(f"GRADFERRY_DISABLE={value!r}: set it to 1, to 0, or not at all")
    return value == "1"


def _choice(argument: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ConfigError(
            f"{argument}={value!r} is none of {', '.join(choices)}{closest(str(value), choices)}"
        )
    return value


def _count(argument: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise ConfigError(f"{argument}={value!r} must be a whole number, 0 or more")
    return value


def closest(word: str, choices: Sequence[str]) -> str:
    """ "; did you mean 'x'?", or nothing when no choice is near."""
    near = difflib.get_close_matches(word, choices, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _parse_rule(rule: Mapping[str, Any], index: int) -> Rule:
    if not isinstance(rule, Mapping):
        raise ConfigError(
            f"rules[{index}]={rule!r} must be a dict such as "
            "{'name': '*.embedding.*', 'codec': 'bf16'}"
        )
    fields = tuple(Rule.__dataclass_fields__)
    for key in rule:
        if key not in fields:
            raise ConfigError(
                f"rules[{index}] has unknown key {key!r}; known keys are {', '.join(fields)}"
                f"{closest(str(key), fields)}"
            )
    if "codec" not in rule:
        raise ConfigError(f"rules[{index}]={dict(rule)!r} names no codec; add 'codec'")
    codec = parse_codec(rule["codec"])
    if codec.name == OFF:
        raise ConfigError(
            f"rules[{index}] gives single parameters the codec 'off', which is for whole models; "
            "use 'exact'"
        )
    if not isinstance(rule.get("name", "*"), str):
        raise ConfigError(f"rules[{index}] has name={rule['name']!r}; it must be a pattern")
    limits = {key: rule[key] for key in rule if key not in ("codec", "name")}
    for key, value in limits.items():
        _count(f"rules[{index}][{key!r}]", value)
    return Rule(codec=codec, name=rule.get("name", "*"), **limits)
