"""Checks the options of a hook, and derives the codec and residuals of each parameter."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from gradferry import _native
from gradferry.core.codec_spec import AUTO, OFF, CodecSpec, parse_codec
from gradferry.core.names import closest, plain_name
from gradferry.core.nodes import AUTO as FOUND_NODES
from gradferry.core.nodes import NodesOption, check_option
from gradferry.core.options import complete
from gradferry.core.values import as_whole
from gradferry.errors import ConfigError

ERROR_FEEDBACK = ("auto", "none", "owner", "worker", "both")
NONFINITE = ("propagate", "raise")
CHUNK_BYTES = _native.CHUNK_BYTES  # at most, per owner, stage and chunk
# Below this many bits per element, residuals hold whole gradients for many steps, and
# trainings end worse without momentum mode.
COARSE_BITS = 3.0


@dataclass(frozen=True)
class Rule:
    """Sets the codec of the parameters that meet all its conditions.

    Attributes:
        codec: of the parameters that match.
        name: shell-style pattern for the whole name, case-sensitive. Wrappers of torch do not count
            (`plain_name`).
        min_dims, max_dims: limits, inclusive, for the number of dimensions; None: no limit.
        min_size, max_size: limits, inclusive, for the number of elements; None: no limit.
    """

    codec: CodecSpec
    name: str = "*"
    min_dims: int = 0
    max_dims: int | None = None
    min_size: int = 0
    max_size: int | None = None

    def matches(self, name: str, dims: int, size: int) -> bool:
        """Whether the rule applies to a parameter with this name, dimensions and elements."""
        return (
            fnmatchcase(plain_name(name), plain_name(self.name))
            and self.min_dims <= dims
            and (self.max_dims is None or dims <= self.max_dims)
            and self.min_size <= size
            and (self.max_size is None or size <= self.max_size)
        )


EXACT = CodecSpec("exact")
# Runs until codec="auto" has tried its candidates. None of them leaves a larger compression error.
FIRST_OF_AUTO = CodecSpec("q4")
DEFAULT_RULES = (
    Rule(EXACT, max_dims=_native.EXEMPT_MAX_DIMS),
    Rule(EXACT, max_size=_native.EXEMPT_MAX_SIZE),
)


@dataclass(frozen=True)
class Config:
    """A checked configuration. Ranks compare it at attach; see `Options`."""

    codec: CodecSpec
    rules: tuple[Rule, ...]
    error_feedback: str
    momentum: float  # 0.0: no momentum mode
    warmup_steps: int
    warmup: CodecSpec
    grad_scaler: torch.amp.GradScaler | None
    nonfinite: str
    check_every: int
    seed: int
    disabled: bool
    chooses: bool  # with codec="auto"; `codec` is then the current choice
    workspace_cap_mb: float | None  # None: what suits the transport
    chunk_bytes: int = CHUNK_BYTES  # at most; see `chunk_bytes_at`
    on_streams: bool = False  # as collectives are: a bucket should be one chunk
    keep_gathered: bool = False  # of an all-gather; see `ShardedOptions`
    nodes: NodesOption = FOUND_NODES

    @property
    def passes_through(self) -> bool:
        """Whether every bucket takes the backend's own all-reduce."""
        return self.disabled or self.codec.name == OFF

    @property
    def workspace_cap_bytes(self) -> int:
        """`workspace_cap_mb` in bytes."""
        return int((self.workspace_cap_mb or _native.WORKSPACE_CAPS_MB[self.on_streams]) * 2**20)

    def chunk_bytes_at(self, world_size: int) -> int:
        """Most payload bytes per owner, stage and chunk that the workspace has room for."""
        return _native.chunk_bytes_within(self.workspace_cap_bytes, world_size, self.chunk_bytes)

    def for_engine(self, world_size: int) -> dict[str, Any]:
        """What an engine has of the configuration, by the fields of `_native.EngineOptions`."""
        return {
            "seed": self.seed,
            "warmup_steps": self.warmup_steps,
            "compressed_warmup": self.compressed_warmup,
            "momentum": self.momentum,
            "raise_nonfinite": self.nonfinite == "raise",
            "check_every": self.check_every,
            "chunk_bytes": self.chunk_bytes_at(world_size),
            # A link with a long round trip has as many bytes to carry where chunks are smaller.
            "most_slots": _native.HOST_SLOTS * max(CHUNK_BYTES // self.chunk_bytes, 1),
            "on_streams": self.on_streams,
            "keep_gathered": self.keep_gathered,
            "workspace_cap_bytes": self.workspace_cap_bytes,
        }

    def codec_by_rule(self, name: str, dims: int, size: int) -> CodecSpec | None:
        """The codec of the first rule that matches a parameter; None: no rule does."""
        rules = (*self.rules, *DEFAULT_RULES)
        return next((rule.codec for rule in rules if rule.matches(name, dims, size)), None)

    @property
    def compressed_warmup(self) -> bool:
        """Whether warm-up steps leave a compression error.

        In momentum mode a residual is delivered 1 / (1 - m) times. So at the end of such a warm-up
        the engine multiplies residuals by 1 - m, before anything else happens to them.
        """
        return self.warmup.lossy

    def holds_gradients(self, step: int) -> bool:
        """Whether residuals hold what is missing of gradients, although momentum will come.

        So in a compressed warm-up. Else, in momentum mode, they hold what is missing of a momentum,
        and the momentum itself.

        Args:
            step: the next one.
        """
        return self.momentum != 0 and self.compressed_warmup and step < self.warmup_steps

    def residuals_of(self, codec: CodecSpec) -> tuple[bool, bool]:
        """Whether parameters with this codec keep a (worker, owner) residual.

        In momentum mode every parameter has a worker residual, which carries the momentum.
        """
        if codec.name == OFF:
            return False, False
        return _native.kept_residuals(str(codec), self.error_feedback, self.momentum)

    def momentum_share(self, codec: CodecSpec) -> float:
        """The factor by which a residual must be larger to deliver the same momentum.

        A residual r delivers r / (1 - m) in total, because the share m of everything it delivers
        returns to it. For a codec that sends every element, m is `momentum`. For a codec that sends
        only some, m is smaller (hooks/engine_options.h), so the residual must be larger.

        Args:
            codec: of the parameter.

        Returns:
            The factor, at least 1; 1.0 outside momentum mode.
        """
        if not self.momentum:
            return 1.0
        kept = _native.momentum_behind(str(codec), self.momentum)
        return (1 - kept) / (1 - self.momentum)

    def record(self) -> dict[str, Any]:
        """The fields that must be equal on all ranks, JSON-serializable."""
        return {
            "GRADFERRY_DISABLE": self.disabled,
            "codec": AUTO if self.chooses else str(self.codec),
            "rules": [{**asdict(rule), "codec": str(rule.codec)} for rule in self.rules],
            "error_feedback": self.error_feedback,
            "momentum": self.momentum,
            "warmup_steps": self.warmup_steps,
            "warmup": str(self.warmup),
            "grad_scaler": self.grad_scaler is not None,
            "nonfinite": self.nonfinite,
            "check_every": self.check_every,
            "seed": self.seed,
            "workspace_cap_mb": self.workspace_cap_bytes / 2**20,
            "chunk_bytes": self.chunk_bytes,
            "on_streams": self.on_streams,
            "nodes": self.nodes,
        }


def make_config(codec: str, given: Mapping[str, Any] | None = None) -> Config:
    """Checks the codec and the options that a user passed.

    Raises:
        ConfigError: one is invalid; the message names it, its value and valid values.
    """
    options = complete(given or {})
    chooses = codec == AUTO
    spec = FIRST_OF_AUTO if chooses else _codec(codec, (OFF, AUTO))
    _choice("error_feedback", options["error_feedback"], ERROR_FEEDBACK)
    momentum = 0.0
    if options["momentum"] is not None:
        momentum = _momentum(options["momentum"], spec, options["error_feedback"])
    rules = _rules(options["rules"] or ())
    warmup_steps = count("warmup_steps", options["warmup_steps"])
    cap, usual = options["workspace_cap_mb"], _native.WORKSPACE_CAPS_MB[0]
    return Config(
        codec=spec,
        rules=rules,
        error_feedback=options["error_feedback"],
        momentum=momentum,
        warmup_steps=warmup_steps,
        warmup=_warmup(options["warmup"], warmup_steps, spec, rules, momentum, chooses=chooses),
        grad_scaler=_grad_scaler(options["grad_scaler"]),
        nonfinite=_choice("nonfinite", options["nonfinite"], NONFINITE),
        check_every=_check_every(options["check_every"], spec),
        seed=count("seed", options["seed"]),
        nodes=check_option(options["nodes"]),
        chooses=chooses,
        workspace_cap_mb=None if cap is None else mebibytes("workspace_cap_mb", cap, usual),
        disabled=_disabled(os.environ.get("GRADFERRY_DISABLE", "")),
    )


def _codec(text: str, others: Sequence[str] = ()) -> CodecSpec:
    """parse_codec() with errors that also list `others`, names that are valid here."""
    if isinstance(text, str) and text not in others:
        name = text.partition(":")[0]
        if name == "torch":
            raise ConfigError(
                f"codec {text!r} is a hook of PyTorch's own, which gradferry's commands compare "
                "codecs with; use 'bf16' or another codec, or register PyTorch's hook instead"
            )
        choices = [*(str(row["name"]) for row in _native.codecs()), *others]
        if name not in choices:
            raise ConfigError(
                f"codec {text!r} is none of {', '.join(choices)}{closest(name.lower(), choices)}"
            )
    return parse_codec(text)


def _momentum(momentum: float, codec: CodecSpec, error_feedback: str) -> float:
    if not isinstance(momentum, numbers.Real) or not 0.0 < momentum < 1.0:
        raise ConfigError(
            f"momentum={momentum!r} must be a number between 0 and 1, such as 0.9; leave it out "
            "for gradients without momentum"
        )
    if codec.name == OFF:
        raise ConfigError(
            f"momentum={momentum!r} needs a codec, and 'off' passes gradients through; use 'exact' "
            "for momentum without compression"
        )
    if error_feedback in ("none", "owner"):
        raise ConfigError(
            f"momentum={momentum!r} lives in the worker residual, which error_feedback="
            f"{error_feedback!r} leaves out; use 'auto', 'both' or 'worker'"
        )
    return float(momentum)


def _warmup(
    text: str,
    steps: int,
    codec: CodecSpec,
    rules: Sequence[Rule],
    momentum: float,
    *,
    chooses: bool,
) -> CodecSpec:
    """The codec of warm-up steps; `codec` is that of the steps after them."""
    if text in (OFF, AUTO):
        raise ConfigError(
            f"warmup={text!r} is for whole trainings; use 'exact', or a codec such as 'q8'"
        )
    warmup = _codec(text)
    if not warmup.lossy:
        return warmup
    if steps == 0:
        raise ConfigError(
            f"warmup={text!r} is the codec of warm-up steps, and there are none: give "
            "warmup_steps=, too"
        )
    if codec.name == OFF:
        raise ConfigError(f"warmup={text!r} needs a codec, and 'off' passes gradients through")
    if chooses:
        return warmup
    others = {one for one in (codec, *(rule.codec for rule in rules)) if one.lossy}
    if not others:
        raise ConfigError(
            f"warmup={text!r} has nothing to compress: what is 'exact' stays so in warm-up steps"
        )
    if not momentum and others == {warmup}:
        raise ConfigError(
            f"warmup={text!r} changes nothing: without momentum= these steps would be like all "
            "others; leave it out, with warmup_steps="
        )
    return warmup


def _check_every(steps: int, codec: CodecSpec) -> int:
    every = count("check_every", steps)
    if every and codec.name == OFF:
        raise ConfigError(
            f"check_every={steps!r} needs a codec, and 'off' passes gradients through; use 'exact' "
            "to compare parameters without compression"
        )
    return every


def _grad_scaler(value: object) -> torch.amp.GradScaler | None:
    if value is not None and not isinstance(value, torch.amp.GradScaler):
        raise ConfigError(
            f"grad_scaler={value!r} must be a torch.amp.GradScaler, not {type(value).__name__}"
        )
    return value if value is not None and value.is_enabled() else None


def mebibytes(argument: str, value: float, usual: float) -> float:
    """The value of an option in MiB. Raises ConfigError."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 < value < 2**24:
        raise ConfigError(
            f"{argument}={value!r} must be a number of MiB, more than 0, such as {usual}"
        )
    return float(value)


def _disabled(value: str) -> bool:
    if value not in ("", "0", "1"):
        raise ConfigError(f"GRADFERRY_DISABLE={value!r}: set it to 1, to 0, or not at all")
    return value == "1"


def _choice(argument: str, value: str, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            f"{argument}={value!r} is none of {', '.join(choices)}{closest(str(value), choices)}"
        )
    return value


def count(argument: str, value: int) -> int:
    """The value of an option that counts. Raises ConfigError for what does not fit 64 bits."""
    whole = as_whole(value)
    if whole is None or not 0 <= whole < 2**64:
        raise ConfigError(f"{argument}={value!r} must be a whole number, 0 or more, below 2**64")
    return whole


def _rules(given: Sequence[Mapping[str, Any]]) -> tuple[Rule, ...]:
    if not isinstance(given, Sequence):
        raise ConfigError(
            f"rules={given!r} must be a list of dicts, such as "
            '[{"name": "*.bias", "codec": "exact"}]'
        )
    return tuple(_parse_rule(rule, index) for index, rule in enumerate(given))


def _parse_rule(rule: Mapping[str, Any], index: int) -> Rule:
    if not isinstance(rule, Mapping):
        raise ConfigError(
            f"rules[{index}]={rule!r} must be a dict such as "
            "{'name': '*embedding*', 'codec': 'bf16'}"
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
    if rule["codec"] in (OFF, AUTO):
        raise ConfigError(
            f"rules[{index}] gives single parameters the codec {rule['codec']!r}, which is for "
            "whole models; use 'exact'"
        )
    codec = _codec(rule["codec"])
    if not isinstance(rule.get("name", "*"), str):
        raise ConfigError(f"rules[{index}] has name={rule['name']!r}; it must be a pattern")
    limits = {
        key: count(f"rules[{index}][{key!r}]", rule[key])
        for key in rule
        if key not in ("codec", "name")
    }
    return Rule(codec=codec, name=rule.get("name", "*"), **limits)
