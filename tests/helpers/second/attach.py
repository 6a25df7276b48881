"""Section 1 of docs/reference/protocol.md: how ranks meet, compare records, and hash them."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from reference.message import hash64

Record = dict[str, Any]
PEER_ERROR = 3
MOST_PATIENCE_SECONDS = 300.0
PAUSE_SECONDS = 0.002


class Store(Protocol):
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


class Group(Protocol):
    """What an exchange needs of a process group."""

    rank: int
    world_size: int
    timeout_seconds: float
    store: Store

    def all_gather(self, data: bytes) -> list[bytes]:
        """Of equally long strings, by rank."""


class AttachError(Exception):
    """What all ranks raise; `kind` is the class that the document names."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class Agreement:
    nonce: str
    config_hash: int
    layout_hash: int


def meet(group: Group, purpose: str) -> None:
    patience = min(group.timeout_seconds / 2, MOST_PATIENCE_SECONDS)
    store, base = group.store, "gradferry/meetings"
    meeting = f"{base}/{store.add(f'{base}/number', 0)}"

    def decide(error: str | None) -> None:
        if store.add(f"{meeting}/decided", 1) == 1:
            store.add(f"{base}/number", 1)
            if error is not None:
                store.set(f"{meeting}/error", error)
            store.set(f"{meeting}/outcome", "decided")

    first_time = store.add(f"{meeting}/rank/{group.rank}", 1) == 1
    if first_time and store.add(f"{meeting}/came", 1) == group.world_size:
        decide(None)
    end = time.monotonic() + patience
    while not store.check([f"{meeting}/outcome"]):
        if time.monotonic() > end:
            ranks = range(group.world_size)
            missing = [r for r in ranks if not store.check([f"{meeting}/rank/{r}"])]
            decide(f"error\0{PEER_ERROR}\0ranks {missing} did not {purpose}\0")
            break
        time.sleep(PAUSE_SECONDS)
    store.wait([f"{meeting}/outcome"])
    if store.check([f"{meeting}/error"]):
        error = store.get(f"{meeting}/error").decode()
        raise AttachError("PeerError", error.split("\0")[2])


def gather_records(group: Group, record: Record) -> list[Record]:
    data = json.dumps(record).encode()
    parts = group.all_gather(len(data).to_bytes(8, "little") + data[:1016].ljust(1016, b"\0"))
    sizes = [int.from_bytes(part[:8], "little") for part in parts]
    texts = [part[8:] for part in parts]
    if max(sizes) > 1016:
        rests = group.all_gather(data[1016:].ljust(max(sizes) - 1016, b"\0"))
        texts = [text + rest for text, rest in zip(texts, rests, strict=True)]
    return [json.loads(text[:size]) for text, size in zip(texts, sizes, strict=True)]


def identity() -> Record:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"boot_id": boot_id, "network": Path("/proc/self/ns/net").stat().st_ino, "unread": ""}


def members_of_nodes(identities: Sequence[Record]) -> list[list[int]]:
    """Ranks by machine, machines by their lowest rank."""
    found: dict[Any, list[int]] = {}
    for rank, place in enumerate(identities):
        key = rank if place["unread"] else (place["boot_id"], place["network"])
        found.setdefault(key, []).append(rank)
    return list(found.values())


def raise_first_error(records: Sequence[Record]) -> None:
    failed = [(rank, record) for rank, record in enumerate(records) if "error" in record]
    for rank, record in sorted(failed, key=lambda item: "echo" in item[1]):
        text = record["message"]
        named = text if text.startswith(("rank ", "ranks ")) else f"rank {rank}: {text}"
        raise AttachError(record["error"], named)


def raise_first_mismatch(records: Sequence[Record]) -> None:
    for rank, record in enumerate(records):
        for field, wanted in records[0].items():
            if record.get(field) != wanted:
                raise AttachError(
                    "RankMismatchError", f"rank {rank} differs from rank 0 in {field}"
                )


def as_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def agree(group: Group, record: Record) -> Agreement:
    """Steps 1 to 4, without connections. `record`: with `parameters`."""
    meet(group, "come to attach")
    mine = {"nonce": secrets.token_hex(16), "identity": identity(), "record": record}
    envelopes = gather_records(group, mine)
    records = [envelope["record"] for envelope in envelopes]
    raise_first_error(records)
    raise_first_mismatch(records)
    agreed = {key: value for key, value in record.items() if key != "parameters"}
    agreed["members of nodes"] = members_of_nodes([e["identity"] for e in envelopes])
    agreed["exchange"] = [[rank] for rank in range(group.world_size)]
    return Agreement(
        envelopes[0]["nonce"], hash64(as_json(agreed)), hash64(as_json(record["parameters"]))
    )


def confirm(group: Group, error: str = "") -> None:
    """Step 5."""
    meet(group, "connect")
    outcome = {"error": "PeerError", "message": error} if error else {}
    raise_first_error(gather_records(group, outcome))
