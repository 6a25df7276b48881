"""The bytes that ranks send in one step, from the plan that engines follow, without sending any."""

from __future__ import annotations

from collections.abc import Sequence

from gradferry import _native
from gradferry.core.config import Config
from gradferry.core.nodes import Nodes
from gradferry.core.parameters import ParameterLayout


def planned_bytes(
    config: Config,
    parameters: Sequence[ParameterLayout],
    nodes: Nodes,
    buckets: Sequence[Sequence[int]],
    *,
    hosts: Sequence[int] | None = None,
    in_warmup: bool = False,
    find_unused_parameters: bool = False,
) -> list[tuple[int, int]]:
    """What each rank sends to other hosts, and to other ranks of its own; headers included.

    Args:
        config: of the hook.
        parameters: as the engine has them; with owners, it is a reduce-scatter.
        nodes: which ranks add their gradients before they send them.
        buckets: of the step: the indices of the parameters of each, in bucket order.
        hosts: of every rank; the ranks of a node share one. None: every node is a host.
        in_warmup: the step is one of `warmup_steps`.
        find_unused_parameters: that of DDP, for gradients on the CPU.
    """
    scatters = any(parameter.owner is not None for parameter in parameters)
    options = _native.EngineOptions(
        **config.for_engine(nodes.world_size),
        parameters=[parameter.native() for parameter in parameters],
        nodes=nodes.members,
        collective="reduce_scatter" if scatters else "all_reduce",
        find_unused_parameters=find_unused_parameters,
    )
    return _native.planned_bytes(
        options,
        buckets=buckets,
        hosts=nodes.of_rank if hosts is None else hosts,
        in_warmup=in_warmup,
    )
