"""Which of FSDP2's exchanges go through a codec, and through which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradferry.core.agreement import Record
from gradferry.core.codec_spec import AUTO, OFF
from gradferry.core.config import COARSE_BITS, Config, make_config
from gradferry.core.nodes import FLAT
from gradferry.core.options import DEFAULTS, SHARDED_DEFAULTS, complete
from gradferry.errors import ConfigError
from gradferry.fsdp.model import ShardedModule

# What averages over replicas alone have: in a reduce-scatter only its owner sees a mean.
_OF_REPLICAS = ("error_feedback", "momentum", "check_every", "nodes")
# What gathers have, too.
_SHARED = ("seed", "workspace_cap_mb")
# Whose payload depends on nothing but the parameters. With other codecs forward and backward would
# compute with different ones.
_GATHERED = ("exact", "bf16", "q8", "q4")
_FEEDBACK = ("none", "worker")


@dataclass(frozen=True)
class Choice:
    """The configuration of every exchange; None: it is left to FSDP2."""

    replicas: Config | None
    reduce_scatter: Config | None
    all_gather: Config | None

    def record(self) -> Record:
        """What must be equal on all ranks, before they connect."""
        configs = {
            "codec": self.replicas,
            "reduce_scatter": self.reduce_scatter,
            "all_gather": self.all_gather,
        }
        codecs = {name: None if each is None else str(each.codec) for name, each in configs.items()}
        keeps = self.all_gather is not None and self.all_gather.keep_gathered
        options = {} if self.replicas is None else self.replicas.record()
        return {**codecs, "keep_gathered": keeps, **options}


def choose(
    codec: str, given: Mapping[str, Any], modules: Sequence[ShardedModule], *, averages: bool
) -> Choice:
    """What a user asked for.

    Args:
        codec: as given to `gradferry.fsdp.attach`.
        given: its options.
        modules: of the model.
        averages: whether there are replicas.

    Raises:
        ConfigError: an option is invalid, or FSDP2 or a codec cannot do that.
    """
    asked: dict[str, Any] = dict(complete(given, defaults=SHARDED_DEFAULTS))
    own = {name: asked.pop(name) for name in SHARDED_DEFAULTS if name not in DEFAULTS}
    alone = _num_shards(modules) == 1
    scatter, gather = own["reduce_scatter"], own["all_gather"]
    leaves_scatter = averages if scatter == AUTO else scatter == OFF
    if scatter == AUTO:
        scatter = codec  # "off" counts steps, and passes through
    if gather == AUTO:
        gather = OFF if averages or alone or codec == OFF else "q8"
    if averages and alone and not leaves_scatter:
        raise ConfigError(
            f"reduce_scatter={scatter!r}: the model is replicated, not sharded; leave it out"
        )
    choice = Choice(
        replicas=_config(codec, asked) if averages else None,
        reduce_scatter=None if leaves_scatter else _scattering(scatter, asked, own),
        all_gather=None if gather == OFF else _gathering(gather, asked, own, modules),
    )
    if not averages:
        _config(codec, asked)  # checked, where reduce_scatter names another
        _expect_defaults(asked, _OF_REPLICAS, "averages over replicas, on a mesh of two dimensions")
    if choice.replicas is None and choice.reduce_scatter is None:
        of_gradients = [name for name in asked if name not in _SHARED]
        _expect_defaults(asked, of_gradients, "gradients: give reduce_scatter")
    if choice.reduce_scatter is None:
        _expect_defaults(own, ("scatter_feedback",), "the reduce-scatter: give reduce_scatter")
    if choice.all_gather is None:
        _expect_defaults(
            own, ("keep_gathered", "all_gather_rules"), "the all-gather: give all_gather"
        )
    if choice == Choice(None, None, None):
        raise ConfigError(
            "nothing is left to compress: give another reduce_scatter or all_gather than 'off', or "
            "shard over a mesh of two dimensions, whose replicas are averaged"
        )
    return choice


def _num_shards(modules: Sequence[ShardedModule]) -> int:
    group = modules[0].shard_group
    return 1 if group is None else group.size()


def _expect_defaults(given: Mapping[str, Any], names: Sequence[str], of_what: str) -> None:
    for name in names:
        if given[name] != {**DEFAULTS, **SHARDED_DEFAULTS}[name]:
            raise ConfigError(f"{name}={given[name]!r} is for {of_what}, or leave {name} out")


def _config(codec: str, options: Mapping[str, Any]) -> Config:
    config = make_config(codec, options)
    if config.chooses:
        raise ConfigError(
            "codec='auto' tries codecs in the steps of DistributedDataParallel; name a codec for "
            "FSDP2, such as 'q4'"
        )
    return config


def _scattering(codec: str, asked: Mapping[str, Any], own: Mapping[str, Any]) -> Config:
    feedback = own["scatter_feedback"]
    if feedback not in _FEEDBACK:
        raise ConfigError(
            f"scatter_feedback={feedback!r}: means are not encoded in a reduce-scatter, so that "
            "only 'worker' and 'none' are left"
        )
    without = {name: DEFAULTS[name] for name in _OF_REPLICAS}  # type: ignore[literal-required]
    config = _config(codec, {**asked, **without, "error_feedback": feedback, "nodes": FLAT})
    codecs = [config.codec, *(rule.codec for rule in config.rules)]
    coarse = next((each for each in codecs if each.lossy and each.bits() < COARSE_BITS), None)
    if coarse is not None and feedback == "none":
        raise ConfigError(
            f"{coarse} needs scatter_feedback='worker' here, which takes 4 bytes for each "
            "parameter of the whole model on every rank; or take a codec of 3 bits"
        )
    return config


def _gathering(
    codec: str, asked: Mapping[str, Any], own: Mapping[str, Any], modules: Sequence[ShardedModule]
) -> Config:
    keep = own["keep_gathered"]
    if not isinstance(keep, bool):
        raise ConfigError(f"keep_gathered={keep!r} must be True or False")
    _expect_gathered("all_gather", codec)
    rules = own["all_gather_rules"]
    shared = {name: asked[name] for name in _SHARED}
    try:
        config = make_config(
            codec, {**shared, "rules": rules, "error_feedback": "none", "nodes": FLAT}
        )
    except ConfigError as error:
        raise ConfigError(f"all_gather: {error}") from error
    for number, rule in enumerate(config.rules):
        _expect_gathered(f"all_gather_rules[{number}]['codec']", str(rule.codec))
    if _num_shards(modules) == 1:
        raise ConfigError(
            f"all_gather={codec!r}: the shard group is one rank, which gathers nothing; leave "
            "all_gather out, or shard over more ranks"
        )
    for module in modules:
        module.expect_gatherable()
    return replace(config, keep_gathered=keep)


def _expect_gathered(option: str, codec: object) -> None:
    name = codec.partition(":")[0] if isinstance(codec, str) else codec
    if name not in _GATHERED:
        raise ConfigError(
            f"{option}={codec!r} is none of {', '.join(_GATHERED)}: forward and backward must "
            "compute with the same parameters, and so their codec must depend on nothing else"
        )
