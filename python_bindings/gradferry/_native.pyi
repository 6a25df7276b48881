from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypedDict

import torch
from torch._C._distributed_c10d import Backend, GradBucket, Reducer, Store, Work

TILE_ELEMENTS: int
WIRE_VERSION: int
HEADER_BYTES: int  # of every message, padding included
COMMIT_BYTES: int  # of the commit that ends a bucket, without a map
EXEMPT_MAX_DIMS: int  # such parameters are exempt by default
EXEMPT_MAX_SIZE: int  # likewise, of elements
CHUNK_BYTES: int  # most payload bytes per owner, stage and chunk, in small worlds
WORKSPACE_CAP_MB: int
BUCKET_CAP_MB: int  # that of DistributedDataParallel
MOST_RANKS: int  # of a world
CHUNK_SLOTS: int  # chunks in flight
DEVICE_CHUNK_SLOTS: int  # the same, of a DeviceEngine
COMMIT_SLOTS: int  # buckets whose commits are in flight
GATHERS_IN_FLIGHT: int
SCATTER_PADDING_PART: int  # padding is at most this part of a chunk's scatter messages
MOST_DENSE_BYTES: int  # of gradient in a chunk and a column, where nodes have several ranks
PIECE_ALIGNMENT: int  # elements, of tiles on their way to their delegates
RESIDUAL_ALIGNMENT: int  # fp32 elements

class _OptionInfo(TypedDict):
    name: str
    default: str
    help: str
    minimum: float
    maximum: float
    choices: list[str]

class _CodecInfo(TypedDict):
    name: str
    summary: str
    lossy: bool
    supports_float64: bool
    options: list[_OptionInfo]

class _CodecCost(TypedDict):
    encode_per_element: float
    reduce_per_element: float
    decode_per_element: float
    check_per_byte: float

class _NodeCost(TypedDict):
    pack_per_element: float
    sum_per_element: float

class ParameterSpec:
    def __init__(
        self,
        *,
        name: str,
        num_elements: int,
        dtype: torch.dtype,
        codec: str,
        warmup: str,
        worker_residual: bool,
        owner_residual: bool,
        owner: int | None,
    ) -> None: ...

class EngineOptions:
    def __init__(
        self,
        *,
        parameters: list[ParameterSpec],
        rank: int,
        nodes: Sequence[Sequence[int]],
        config_hash: int,
        layout_hash: int,
        seed: int,
        warmup_steps: int,
        compressed_warmup: bool,
        momentum: float,
        raise_nonfinite: bool,
        exact_skip: bool,
        loss_scale: torch.Tensor | None,
        check_every: int,
        chunk_bytes: int,
        equal_scatter: bool,
        collective: str,
        workspace_cap_bytes: int,
        find_unused_parameters: bool,
        way_on: str,
        store: Store | None,
        world_ranks: Sequence[int],
    ) -> None: ...

class SharedMemory:
    def __init__(self, descriptor: int, num_bytes: int) -> None: ...
    def part(self, offset: int, num_bytes: int) -> torch.Tensor: ...

def shared_memory_bytes(options: EngineOptions) -> int: ...
def chunk_bytes_within(workspace_cap_bytes: int, world_size: int, most: int) -> int: ...
def dense_bytes_within(
    workspace_cap_bytes: int, chunk_bytes: int, nodes: Sequence[Sequence[int]]
) -> int: ...

class BucketEngine:
    def stats(self) -> dict[str, Any]: ...
    def workspace(self) -> dict[str, int]: ...
    def current_step(self) -> int: ...
    def events(self) -> list[dict[str, Any]]: ...
    def all_reduce(self, gradient: torch.Tensor) -> None: ...
    def fail(self, message: str) -> None: ...
    def expect_alive(self) -> None: ...
    def state(self) -> tuple[int, torch.Tensor, torch.Tensor, float]: ...
    def load_state(
        self,
        steps: int,
        worker_residual: torch.Tensor,
        owner_residual: torch.Tensor,
        loss_scale: float,
    ) -> None: ...
    def residual_sizes(self) -> tuple[int, int]: ...
    def tiles(self) -> list[tuple[int, int, int, int]]: ...
    def skip_step(self) -> None: ...
    def end_optimizer_step(self, *, applied: bool) -> None: ...
    def note_passed(self, parameters: Sequence[int]) -> None: ...
    def compare(self, parameters: list[torch.Tensor]) -> None: ...
    def add_to_worker_residual(
        self, parameter: int, values: torch.Tensor, factor: float
    ) -> None: ...
    def scale_residuals(self, factor: float) -> None: ...

class Collective:
    def wait(self) -> None: ...
    def is_completed(self) -> bool: ...

class Lane:
    def __init__(self, backend: Backend) -> None: ...
    def all_to_all(
        self,
        receive: torch.Tensor,
        receive_bytes: list[int],
        send: torch.Tensor,
        send_bytes: list[int],
    ) -> Collective: ...
    def all_gather(self, receive: torch.Tensor, send: torch.Tensor) -> Collective: ...

def socket_lanes(
    lanes: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    rank: int,
    timeout_seconds: float,
    world_ranks: Sequence[int],
) -> list[Lane]: ...

class PendingAllReduce:
    def wait(self) -> None: ...
    def is_completed(self) -> bool: ...

class AllReducer:
    def __init__(self, engine: BucketEngine) -> None: ...
    def start(
        self, buckets: Sequence[tuple[Sequence[int], torch.Tensor]], *, in_background: bool
    ) -> PendingAllReduce: ...

class HostEngine(BucketEngine):
    def __init__(
        self,
        options: EngineOptions,
        *,
        tensors: list[torch.Tensor],
        lanes: Mapping[str, Lane],
        memory: SharedMemory | None,
        local_stage: str,
    ) -> None: ...
    def local_stage(self) -> str: ...

class DeviceEngine(BucketEngine):
    def __init__(
        self,
        options: EngineOptions,
        *,
        device: torch.device,
        tensors: list[torch.Tensor],
        lanes: dict[str, Lane],
        group_name: str | None,
    ) -> None: ...
    def time_buckets(self) -> None: ...
    def bucket_times(self) -> list[dict[str, Any]]: ...

def parameter_hashes(parameters: list[torch.Tensor]) -> list[int]: ...
def reducer_parameters(reducer: Reducer) -> list[torch.Tensor]: ...

class BucketHook:
    def __init__(
        self, *, engine: BucketEngine | None, parameters: list[torch.Tensor], group_name: str
    ) -> None: ...
    def attach(self, reducer: Reducer) -> None: ...
    def watch_use(self, parameters: list[torch.Tensor], reducer: Reducer) -> None: ...
    def use_engine(self, engine: BucketEngine | None) -> None: ...
    def call_at(
        self, step: int, callback: Callable[[BucketHook, int], None], purpose: str
    ) -> None: ...
    def resume(self, step: int) -> None: ...
    def finished_steps(self) -> int: ...
    def admit(self, bucket: GradBucket) -> bool: ...
    def passed(self) -> int: ...
    def note_passed(self) -> None: ...
    def fail(self, message: str) -> NoReturn: ...
    def fail_without_memory(self) -> NoReturn: ...
    def run(self, bucket: GradBucket) -> Work: ...

class CodecTimer:
    def __init__(
        self,
        *,
        codec: str,
        dtype: torch.dtype,
        isa: str,
        num_elements: int,
        world_sizes: Sequence[int],
        rounds: int,
        threads: int,
    ) -> None: ...
    def rows(self) -> list[dict[str, Any]]: ...
    def encode_pass(self) -> float: ...
    def decode_pass(self) -> float: ...
    def gradient(self) -> torch.Tensor: ...

class DeviceCodec:
    def __init__(
        self,
        *,
        codec: str,
        dtype: torch.dtype,
        num_elements: int,
        device: torch.device,
        world_size: int = 1,
        momentum: bool = False,
    ) -> None: ...
    @property
    def worker_bytes(self) -> int: ...
    @property
    def owner_bytes(self) -> int: ...
    @property
    def sent(self) -> torch.Tensor: ...
    @property
    def received(self) -> torch.Tensor: ...
    @property
    def reduced(self) -> torch.Tensor: ...
    def encode(self, gradient: torch.Tensor, residual: torch.Tensor | None) -> None: ...
    def receive(self, rank: int) -> None: ...
    def reduce(self, residual: torch.Tensor | None, world_size: int) -> None: ...
    def decode(self, gradient: torch.Tensor, residual: torch.Tensor | None) -> None: ...
    def expect_no_findings(self) -> None: ...

class DeviceNode:
    def __init__(
        self, *, dtype: torch.dtype, num_elements: int, device: torch.device, num_ranks: int
    ) -> None: ...
    def pack(self, gradient: torch.Tensor) -> None: ...
    def receive(self, rank: int, gradient: torch.Tensor) -> None: ...
    def sum(self, gradient: torch.Tensor) -> torch.Tensor: ...

def codecs() -> list[_CodecInfo]: ...
def canonical_codec(text: str) -> str: ...
def momentum_behind(codec: str, momentum: float) -> float: ...
def kept_residuals(codec: str, error_feedback: str, momentum: float) -> tuple[bool, bool]: ...
def payload_bytes(codec: str, num_elements: int, dtype: torch.dtype, stage: str) -> int: ...
def available_isas() -> list[str]: ...
def active_isa() -> str: ...
def bucket_strides(parameter: torch.Tensor) -> list[int]: ...
def reordered_since_buckets_were_made(reducer: Reducer) -> list[torch.Tensor]: ...
def moved_since_buckets_were_made(reducer: Reducer) -> list[torch.Tensor]: ...
def encode_tensor(
    tensor: torch.Tensor,
    codec: str,
    *,
    seed: int,
    step: int,
    config_hash: int,
    layout_hash: int,
) -> torch.Tensor: ...
def decode_tensor(
    message: torch.Tensor,
    codec: str,
    out: torch.Tensor,
    *,
    config_hash: int,
    layout_hash: int,
) -> None: ...
def accumulate_tensors(
    messages: Sequence[torch.Tensor],
    codec: str,
    out: torch.Tensor,
    *,
    divisor: int,
    config_hash: int,
    layout_hash: int,
) -> None: ...
def use_device_library(library: object) -> None: ...
def shutdown(timeout_seconds: float) -> None: ...
def compressed_mean(
    gradients: Sequence[torch.Tensor],
    codec: str,
    *,
    seed: int,
    worker_residual: bool,
    owner_residual: bool,
) -> torch.Tensor: ...
def codec_cost(
    codec: str,
    *,
    dtype: torch.dtype,
    world_size: int,
    worker_residual: bool,
    owner_residual: bool,
    momentum: bool,
    num_elements: int,
    rounds: int,
) -> _CodecCost: ...
def node_cost(
    dtype: torch.dtype, *, num_ranks: int, num_elements: int, rounds: int
) -> _NodeCost: ...
def memcpy_gbps(num_bytes: int, rounds: int) -> float: ...
