"""Ranks compare their configurations before the first exchange, or all raise the same error."""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradferry import _native, errors
from gradferry._build_info import GRADFERRY_VERSION
from gradferry.core.rendezvous import (
    NO_STORE,
    absent_after_loss,
    say_failed,
    wait_or_hear,
    world_ranks,
)
from gradferry.errors import (
    ConfigError,
    EchoError,
    GradferryError,
    PeerError,
    ProtocolError,
    RankMismatchError,
)

Record = dict[str, Any]
Value = TypeVar("Value")
# What a record may say that a rank has raised, by name.
_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, GradferryError)
}
# A record has about 200 bytes per parameter; anything larger than this is not a record.
MAX_RECORD_BYTES = 1 << 30
# The first all-gather carries every record's size and its first bytes. Short records, as those of
# an outer step are, need no second one.
_SIZE_BYTES, _FIRST_BYTES = 8, 1024
# Our records carry it: what differs between ranks of two versions mostly follows from that.
_VERSION = "gradferry version"


def hash64(text: str) -> int:
    """First 8 bytes of BLAKE2b, little-endian: the hashes of message headers."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def record_hash(record: object) -> int:
    """Hash of anything JSON can hold, equal for equal values on all ranks."""
    return hash64(json.dumps(record, sort_keys=True))


def error_record(error: Exception) -> Record:
    """The record that a rank sends after an error, so that no other rank waits for it."""
    if isinstance(error, EchoError):
        return {"error": PeerError.__name__, "message": str(error), "echo": True}
    kind = type(error).__name__ if isinstance(error, GradferryError) else PeerError.__name__
    text = str(error) if isinstance(error, GradferryError) else f"{type(error).__name__}: {error}"
    return {"error": kind, "message": text}


def rendezvous_place(group: dist.ProcessGroup, place: torch.device) -> torch.device:
    """The device for exchanging records: the CPU if the group has a backend for it, else `place`.

    Raises:
        ConfigError: the group has a backend for neither.
    """
    types = {kind.type for kind in group._device_types}
    if "cpu" in types:
        return torch.device("cpu")
    if place.type not in types:
        raise no_backend(group, place)
    return place


def no_backend(group: dist.ProcessGroup, place: torch.device) -> ConfigError:
    """The error of a group that has no backend for tensors on `place`."""
    lacks = "" if dist.is_nccl_available() else " (this torch has no NCCL: install one for CUDA)"
    kinds = {f"{group._get_backend(kind).name()} for {kind.type!r}" for kind in group._device_types}
    return ConfigError(
        f"the process group has no backend for tensors on {place.type!r}, only "
        f"{', '.join(sorted(kinds))}; start it with init_process_group('cpu:gloo,cuda:nccl')"
        f"{lacks}, or 'gloo'"
    )


def gather_records(record: Record, group: dist.ProcessGroup, device: torch.device) -> list[Record]:
    """Every rank's record, in rank order.

    Args:
        record: JSON-serializable.
        group: the process group of DDP. Every one of its ranks must call.
        device: of the gradients, see `rendezvous_place`.

    Raises:
        ConfigError: the group has no backend for such a device.
        ProtocolError: a rank sent something else than a record.
        RankMismatchError: ranks have different versions of gradferry.
        PeerError: a collective failed, for example because a rank did not call or has ended.
    """
    place = rendezvous_place(group, device)
    with losing_names_ranks(group):
        records = _gather_records({_VERSION: GRADFERRY_VERSION, **record}, group, place)
    raise_first_mismatch([{_VERSION: r.pop(_VERSION, GRADFERRY_VERSION)} for r in records], group)
    return records


@contextmanager
def losing_names_ranks(group: dist.ProcessGroup) -> Iterator[None]:
    """Makes the error of a failed collective of the group a PeerError that names who is gone."""
    try:
        yield
    except RuntimeError as error:
        seen = _native.plain_reason(str(error))
        gone, reason = absent_after_loss(group, seen)
        lost = _native.name_ranks(gone) if gone else "another rank"
        if reason is None:
            reason = f"{seen}, and {NO_STORE}"
        raise PeerError(
            f"the ranks could not agree: lost contact with {lost}: {reason}; look at the other "
            "ranks' errors first (one without an error ended earlier), and whether one has posted "
            "another collective there, then restart"
        ) from error


def _gather_records(record: Record, group: dist.ProcessGroup, device: torch.device) -> list[Record]:
    data = json.dumps(record).encode()
    announced = len(data).to_bytes(_SIZE_BYTES, "little", signed=True) + data
    firsts = _all_gather(announced[:_FIRST_BYTES], _FIRST_BYTES, group, device)
    heads = [_bytes_of(first, 0, _SIZE_BYTES) for first in firsts]
    sizes = [int.from_bytes(head, "little", signed=True) for head in heads]
    smallest, largest = min(sizes), max(sizes)
    if smallest <= 0 or largest > MAX_RECORD_BYTES:
        raise ProtocolError(
            f"a rank announced a record of {smallest if smallest <= 0 else largest} bytes; run "
            "gradferry's attach, and nothing else, on all ranks at this point"
        )
    left = _SIZE_BYTES + largest - _FIRST_BYTES
    rests = firsts  # of which nothing is read where all fit
    if left > 0:
        rests = _all_gather(announced[_FIRST_BYTES:], left, group, device)
    records = []
    for rank, first, rest, size in zip(world_ranks(group), firsts, rests, sizes, strict=True):
        end = _SIZE_BYTES + size
        data = _bytes_of(first, _SIZE_BYTES, end) + _bytes_of(rest, 0, end - _FIRST_BYTES)
        records.append(_parse(data, rank))
    return records


def _all_gather(
    data: bytes, num_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> list[torch.Tensor]:
    """What every rank passes, each with zeros up to this size."""
    padded = torch.frombuffer(bytearray(data.ljust(num_bytes, b"\0")), dtype=torch.uint8)
    # A collective need not hold what it sends, and may let it go on a thread that must not wait for
    # Python, as it must to free bytes.
    sent = padded.to(device, copy=True)
    gathered = [torch.zeros_like(sent) for _ in range(group.size())]
    # By a method of the group: where there is a default group, and torch does not know this one,
    # functions of torch.distributed replace an error by another.
    wait_or_hear(group.allgather([gathered], [sent]), group)
    return gathered


def _bytes_of(tensor: torch.Tensor, begin: int, end: int) -> bytes:
    return tensor[begin : max(begin, end)].cpu().numpy().tobytes()


def _parse(data: bytes, rank: int) -> Record:
    try:
        record = json.loads(data)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ProtocolError(
            f"rank {rank} sent something else than its configuration; run gradferry's attach, and "
            "nothing else, on all ranks at this point"
        )
    return record


def most_of_ranks(
    values: Sequence[float],
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> list[float]:
    """The elementwise maximum over all ranks, for times those of the slowest rank. Collective.

    Args:
        values: the same number of values on every rank.
        group: None: the default group.
        device: as for `gather_records`; None: the CPU.
    """
    group = group or dist.distributed_c10d._get_default_group()
    place = rendezvous_place(group, device or torch.device("cpu"))
    tensor = torch.tensor(values, dtype=torch.float64, device=place)
    with losing_names_ranks(group):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    result: list[float] = tensor.tolist()
    return result


@contextmanager
def interrupts_told(group: dist.ProcessGroup) -> Iterator[None]:
    """Whatever interrupts this rank within, such as Ctrl-C, is told to the others, which wait for
    it no longer. Exceptions in the narrow sense are told as errors.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException:
        say_failed(group)
        raise


def on_all_ranks(
    act: Callable[[], Record | None],
    group: dist.ProcessGroup,
    device: torch.device,
    where: str | None = None,
    *,
    alike: bool = False,
) -> list[Record]:
    """What `act` returned on every rank, {} for None. The error of one is raised on all, so that
    none goes on alone. Collective.

    Args:
        act: returns a record, or nothing.
        group: of the ranks.
        device: as for `gather_records`.
        where: begins the text of an error.
        alike: also raises RankMismatchError if records differ.
    """
    with interrupts_told(group):
        try:
            record = act() or {}
        except Exception as error:
            record = error_record(error)
            if where is not None:
                record["message"] = f"{where}: {record['message']}"
        records = gather_records(record, group, device)
    raise_first_error(records, group)
    if alike:
        raise_first_mismatch(records, group)
    return records


def value_on_all_ranks(
    act: Callable[[], Value], group: dist.ProcessGroup, device: torch.device
) -> Value:
    """What `act` returned on this rank, once it has on all. Collective, as `on_all_ranks`."""
    found: list[Value] = []
    try:
        on_all_ranks(lambda: found.append(act()), group, device)
        return found[0]
    finally:
        found.clear()  # otherwise the traceback of an error would keep it alive


def content_of(content: object, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """What the rank `source` of the group passes here, with tensors on the CPU. An error of one
    rank is raised on all. Collective.

    Args:
        content: of that rank: what `torch.load` takes with ``weights_only``, so that no rank runs
            what another one sends.
        source: rank in the group.
        group: of the ranks.
        device: as for `gather_records`.
    """
    file = io.BytesIO()

    def pack() -> Record:
        if group.rank() == source:
            torch.save(content, file)
        return {"bytes": len(file.getbuffer())}

    size = on_all_ranks(pack, group, device)[source].get("bytes")
    if type(size) is not int or not 0 < size < 1 << 40:
        raise ProtocolError(f"a rank announced a content of {size} bytes")
    packed = bytearray(file.getvalue() or size)
    message = torch.frombuffer(packed, dtype=torch.uint8).to(rendezvous_place(group, device))
    with losing_names_ranks(group):
        wait_or_hear(group.broadcast(message, source), group)
    received = io.BytesIO(message.cpu().numpy().tobytes())
    return value_on_all_ranks(
        lambda: torch.load(received, map_location="cpu", weights_only=True), group, device
    )


def raise_first_error(records: list[Record], group: dist.ProcessGroup) -> None:
    """Raises the error of the lowest rank that failed, with the same text on every rank.

    An EchoError is raised only if no rank has another error.

    Args:
        records: of all ranks of the group, in rank order.
        group: of the ranks.
    """
    failed = [(rank, record) for rank, record in _named(records, group) if "error" in record]
    for rank, record in sorted(failed, key=lambda item: "echo" in item[1]):
        kind = _KINDS.get(str(record["error"]), GradferryError)
        text = str(record["message"])
        # What came from ranks of another group names one already.
        raise kind(text if text.startswith(("rank ", "ranks ")) else f"rank {rank}: {text}")


def raise_first_mismatch(records: list[Record], group: dist.ProcessGroup) -> None:
    """Compares every rank of the group with its first. Arguments as for `raise_first_error`.

    Raises:
        RankMismatchError: naming the lowest rank that differs, the field, and both values; the
            same text on every rank.
    """
    first = world_ranks(group)[0]
    for rank, record in _named(records, group):
        # What a rank called says more than what follows from it.
        for field in ("way in", *records[0]):
            expected: Any = records[0].get(field)
            received: Any = record.get(field)
            if received == expected:
                continue
            if field == "parameters":
                field, expected, received = _first_parameter(expected, received)
            raise RankMismatchError(
                f"rank {rank} differs from rank {first} in {field}: {received!r} instead of "
                f"{expected!r}; start every rank with the same code, arguments and environment, "
                "and load the same states before"
            )


def odd_one(values: Sequence[object]) -> tuple[int, int] | None:
    """The first index whose value most others do not have, and the first of those; None: all have
    the same. The usual value is the one most have; the earlier one where two are equally frequent.
    """
    texts = [repr(value) for value in values]
    usual, count = Counter(texts).most_common(1)[0]
    if count == len(texts):
        return None
    return next(i for i, text in enumerate(texts) if text != usual), texts.index(usual)


def _named(records: list[Record], group: dist.ProcessGroup) -> Iterator[tuple[int, Record]]:
    return zip(world_ranks(group), records, strict=True)


def _first_parameter(expected: list[Record], received: Any) -> tuple[str, object, object]:
    if not isinstance(received, list) or len(received) != len(expected):
        count = len(received) if isinstance(received, list) else None
        return "number of parameters", len(expected), count
    for index, (mine, theirs) in enumerate(zip(expected, received, strict=True)):
        for field, value in mine.items():
            if theirs.get(field) != value:
                return f"parameter {index} ({mine['name']}), {field}", value, theirs.get(field)
    return "parameters", expected, received
