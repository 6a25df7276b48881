"""The text of ``print(state)``, and the reason for the codec of a hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradferry import _native
from gradferry.averaging.running import Running
from gradferry.averaging.step_numbers import Stats
from gradferry.core.codec_spec import OFF
from gradferry.core.config import COARSE_BITS
from gradferry.core.nodes import FLAT
from gradferry.core.parameters import SMALL_CODEC, SMALL_PERCENT


def as_asked(running: Running) -> dict[str, Any]:
    """The entry ``choice`` of `Averaging.stats`, where nothing chooses the codec."""
    config = running.config
    codec = OFF if config.disabled else str(config.codec)
    if config.disabled:
        reason = "GRADFERRY_DISABLE=1"
    elif config.chooses:
        reason = "a world of one rank does not communicate"
    else:
        reason = "as attached"
    return {"codec": codec, "exchange": running.exchange.name, "reason": reason}


def describe(running: Running, stats: Stats) -> str:
    """The text of ``print(state)``: codecs, exempt parameters, small ones, exchange, memory and
    averages of the steps so far, by line.

    Args:
        running: what is described.
        stats: of `Averaging.stats`.
    """
    config, choice = running.config, stats["choice"]
    name = repr(running.group_name) if running.group_name else "without a name"
    group = f"process group {name}"
    if running.engine is None:
        reason = "GRADFERRY_DISABLE=1" if config.disabled else "codec 'off'"
        chosen = f", {choice['reason']}" if "next_check" in choice else ""
        return f"gradferry: passes through ({reason}{chosen}), {group}"
    parameters = running.parameters
    total = sum(p.num_elements for p in parameters)
    # Errors name ranks of the world.
    is_world = list(running.world_ranks) == list(range(running.world_size))
    in_world = "" if is_world else f" ({_native.name_ranks(running.world_ranks)} of the world)"
    lines = [
        f"gradferry: {config.codec}, error feedback {config.error_feedback}, "
        f"rank {running.rank} of {running.world_size}, {group}{in_world}"
    ]
    if "next_check" in choice:
        lines.append(f"  chosen by 'auto': {choice['reason']}")
    for codec in dict.fromkeys(p.codec for p in parameters):
        members = [p for p in parameters if p.codec == codec]
        elements = sum(p.num_elements for p in members)
        bits = sum(p.num_elements * codec.bits(p.dtype) for p in members) / max(elements, 1)
        lines.append(
            f"  {codec}: {len(members)} parameters, {elements:,} elements "
            f"({elements / total if total else 0:.1%}), {bits:.2f} bits/element"
        )
    if config.warmup_steps:
        lines.append(f"  warm-up: {config.warmup_steps} steps with {config.warmup}")
    exempt = [p.name for p in parameters if not p.codec.lossy]
    if exempt:
        lines.append(f"  exempt from compression: {_at_most_four(exempt)}")
    small = [p.name for p in parameters if p.is_small]
    if small:
        coarse = config.codec if config.codec.bits() < COARSE_BITS else config.warmup
        lines.append(
            f"  {SMALL_CODEC} instead of {coarse}, as the smallest matrices (at most "
            f"{SMALL_PERCENT} % of all elements): {_at_most_four(small)}"
        )
    if running.transport.exchanges:
        lines.append(_exchange_line(running))
    lines.append(
        f"  memory: residuals {stats['residual_bytes'] / 2**20:.1f} MiB, workspace "
        f"{stats['workspace_bytes'] / 2**20:.1f} of at most {config.workspace_cap_bytes / 2**20:g} "
        f"MiB, {running.engine.workspace()['slots']} chunks in flight"
    )
    steps, passed = stats["steps"], stats["fallbacks"]
    if steps and stats["wire_bytes"]:
        lines.append(
            f"  mean of {steps} steps: {stats['wire_bytes'] / steps:,.0f} bytes sent, "
            f"{stats['ratio']:.2f} times fewer than uncompressed, "
            f"{stats['exposed_ms'] / steps:.1f} ms exposed"
            # As in a trial of "off"; their bytes are not counted.
            + (f"; {passed} buckets passed through" if passed else "")
        )
    return "\n".join(lines)


def _at_most_four(names: Sequence[str]) -> str:
    """These names, or four and how many others there are. Shards of one parameter count once."""
    different = list(dict.fromkeys(names))
    more = f", and {len(different) - 4} more" if len(different) > 4 else ""
    return ", ".join(different[:4]) + more


def _exchange_line(running: Running) -> str:
    """Which exchange runs, where the ranks are, and why it is this one."""
    nodes, exchange = running.nodes, running.exchange
    if not exchange.nodes.is_flat:
        shown = f"two levels, {nodes.describe()}"
    elif running.config.nodes == FLAT:  # nobody asked where ranks are
        shown = f"flat between {running.world_size} ranks"
    else:
        shown = f"flat between {running.world_size} ranks on {nodes.describe()}"
    engine = running.engine
    stage = engine.local_stage() if isinstance(engine, _native.HostEngine) else ""
    note = f"; within this node through {stage}" if stage else ""
    note += f"; {nodes.note}" if nodes.note else ""
    return f"  exchange: {shown}, because {exchange.reason}{note}"
