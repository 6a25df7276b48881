"""The types of what `Averaging.stats` returns, which explains every key."""

from __future__ import annotations

from typing import TypedDict


class _Chosen(TypedDict):
    codec: str
    exchange: str
    reason: str


class Choice(_Chosen, total=False):
    """The entry ``choice`` of `Stats`; the last three keys with ``codec="auto"`` only."""

    step: int
    next_check: int
    measured_ms: dict[str, float]


class _Counters(TypedDict):
    steps: int
    buckets: int
    chunks: int
    gradient_bytes: int
    wire_bytes: int
    local_bytes: int
    ratio: float
    residual_bytes: int
    workspace_bytes: int
    workspace_allocations: int
    in_flight: int
    host_waits: int
    fallbacks: int
    encode_ms: float
    network_ms: float
    reduce_ms: float
    decode_ms: float
    exposed_ms: float
    worker_residual_ratio: float
    owner_residual_ratio: float
    choice: Choice
    step_buckets: list[list[int]]


class Stats(_Counters, total=False):
    """What ``stats()`` of a `HookState`, a `Reducer` or a `fsdp.ShardedState` returns: a dict, each
    key of which is explained there.
    """

    packing_bytes: int  # of a Reducer
