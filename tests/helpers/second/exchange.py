"""Section 3 of docs/reference/protocol.md: buckets of one rank, from gradients to averages.

Gradients in host memory, flat exchange, without momentum, warm-up steps and loss scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from reference.codecs import OWNER, WORKER, Context, find_codec
from reference.engine import encode_tiles, finish_residual, reduce_tiles, resolve_error_feedback
from reference.layout import CHUNK_BYTES, HEADER_BYTES, Layout, Parameter, Tile, cut_chunks
from reference.message import GATHER, PARAMETERS, SCATTER, Header, tiles_hash
from reference.scalars import narrow, widen

from .attach import Agreement, Group
from .lanes import Lanes, LostContactError
from .messages import (
    BAD_CHECKSUM,
    BAD_CHUNK,
    BAD_LOSS_SCALE,
    CHECKS,
    CORRUPT_PAYLOAD,
    LOCAL_FAILURE,
    PEER_TROUBLE,
    Fault,
    check,
    hash_bits,
    map_bytes,
    outcome,
    used_by_any,
    write,
    write_commit,
)

PHASES = {1: "scatter", 2: "gather", 3: "commit", 5: "check of parameters"}
FIELDS = {status: field.replace("_", " ") for status, field in CHECKS} | {
    5: "configuration hash",
    BAD_CHECKSUM: "checksum",
    CORRUPT_PAYLOAD: "number of corrupt tiles",
}


@dataclasses.dataclass(frozen=True)
class Options:
    codec: str = "q4"
    error_feedback: str = "auto"
    rules: Sequence[tuple[str, str]] = ()  # (pattern of the name, codec)
    check_every: int = 0
    seed: int = 0
    workspace_cap_mb: float = 96.0
    find_unused_parameters: bool = False


class ExchangeError(Exception):
    """Ends the exchange; `kind` is the class that the document names."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclasses.dataclass
class _Chunk:
    number: int
    tiles: list[int]
    own_payloads: dict[int, np.ndarray]  # by tile, what this rank sent

    def of(self, owners: Sequence[int], rank: int) -> list[int]:
        return [tile for tile in self.tiles if owners[tile] == rank]


@dataclasses.dataclass
class _Bucket:
    number: int
    step: int
    parameters: list[int]
    gradient: np.ndarray  # flat, in the storage of its dtype; averages replace it
    used: list[int]  # empty: no map
    before: dict[int, Any]  # by parameter that this rank did not use
    chunks: list[_Chunk]
    fault: Fault | None


def describe(parameters: Sequence[Parameter], options: Options) -> list[dict[str, Any]]:
    """What the record says of the codec and residuals of every parameter."""
    layout = Layout(parameters, options.codec, 2, options.rules)
    return [
        {
            "codec": find_codec(codec).name,
            "residuals": list(resolve_error_feedback(options.error_feedback, codec, p.dtype)),
        }
        for p, codec in zip(layout.parameters, layout.codecs, strict=True)
    ]


def chunk_bytes(workspace_cap_mb: float, world_size: int) -> int:
    cap = int(workspace_cap_mb * 2**20)
    within = max(4608, cap // 8 * 7 // (4 * (3 * world_size + 1)) - 64)
    return min(CHUNK_BYTES, within, (2**32 - 1) // world_size - 64)


class SecondRank:
    """Hands buckets to `begin` as soon as they are there, and ends a step with `finish`."""

    def __init__(
        self,
        group: Group,
        agreement: Agreement,
        parameters: Sequence[Parameter],
        options: Options,
        parameter_bits: Callable[[], Sequence[bytes]],
    ) -> None:
        """`parameter_bits`: of the parameters as they are now, in memory order."""
        self.group, self.agreement, self.options = group, agreement, options
        self.layout = Layout(parameters, options.codec, group.world_size, options.rules)
        self.lanes = Lanes(group, agreement.nonce)
        self.step = self.num_chunks = self.num_buckets = 0
        self._parameter_bits = parameter_bits
        self._seen: set[int] = set()
        self._check_is_due = False
        self._under_way: list[_Bucket] = []
        self._residuals: dict[str, dict[int, np.ndarray]] = {WORKER: {}, OWNER: {}}  # by tile
        for index, parameter in enumerate(self.layout.parameters):
            has = resolve_error_feedback(
                options.error_feedback, self.layout.codecs[index], parameter.dtype
            )
            for tile in self.layout.tiles_of[index]:
                row = (1, self.layout.tiles[tile].num_elements)
                if has[0]:
                    self._residuals[WORKER][tile] = np.zeros(row, np.float32)
                if has[1] and self.layout.owners[tile] == group.rank:
                    self._residuals[OWNER][tile] = np.zeros(row, np.float32)

    # --- a bucket, handed over

    def begin(
        self, parameters: Sequence[int], gradient: np.ndarray, used: Sequence[int] = ()
    ) -> None:
        """Encodes and sends, and does not wait, but for a check of parameters.

        `used`: by parameter, with find_unused_parameters. `gradient` holds averages after
        `finish`.
        """
        if self._seen & set(parameters):
            self.step, self._seen = self.step + 1, set()
        every = self.options.check_every
        if not self._seen:
            self._check_is_due = every > 0 and self.step > 0 and self.step % every == 0
        self._seen |= set(parameters)
        if not len(gradient):
            return
        fault = None
        if self._check_is_due:
            self._check_is_due = False
            fault = self._check_parameters()
        bucket = _Bucket(
            self.num_buckets, self.step, list(parameters), gradient, list(used), {}, [], fault
        )
        self.num_buckets += 1
        self._keep_unused(bucket)
        limit = chunk_bytes(self.options.workspace_cap_mb, self.group.world_size)
        for tiles in cut_chunks(self.layout, bucket.parameters, limit):
            self._send_scatter(bucket, _Chunk(self.num_chunks, tiles, {}))
            self.num_chunks += 1
        self._under_way.append(bucket)

    def _check_parameters(self) -> Fault | None:
        hashes = np.array([hash_bits(bits) for bits in self._parameter_bits()], "<u8")
        payload = hashes.view(np.uint8)
        header = self.header(PARAMETERS, self.num_chunks, self.step)
        message = write(header, payload)
        self._to_others("scatter", lambda _: message)
        by_rank = {self.group.rank: hashes}
        first = None
        for rank in self._others():
            came = self.hear("scatter", rank, len(message))
            lawful = self._lawful(PARAMETERS, self.num_chunks, self.step)
            wanted = dataclasses.replace(lawful, source_rank=rank, payload_bytes=len(payload))
            fault, theirs = check(came, wanted)
            first = first or fault
            by_rank[rank] = theirs.view("<u8")
        if first:
            return first
        for index, parameter in enumerate(self.layout.parameters):
            for rank in range(1, self.group.world_size):
                if by_rank[rank][index] != by_rank[0][index]:
                    raise self._failed(
                        "DivergedError",
                        f"parameter '{parameter.name}' of rank {rank} differs from that of rank 0 "
                        f"at step {self.step}",
                    )
        return None

    def _send_scatter(self, bucket: _Bucket, chunk: _Chunk) -> None:
        bucket.chunks.append(chunk)
        header = self.header(SCATTER, chunk.number, bucket.step, chunk.tiles)
        try:
            for tile in chunk.tiles:
                chunk.own_payloads[tile] = self.encode(bucket, tile)
        except ArithmeticError:
            note(bucket, Fault(LOCAL_FAILURE, SCATTER, self.group.rank, chunk.number))
            header = dataclasses.replace(header, status=LOCAL_FAILURE)
            for tile in chunk.tiles:
                size = self.layout.tiles[tile].worker_bytes
                chunk.own_payloads[tile] = np.zeros(size, np.uint8)

        def message(rank: int) -> bytes:
            tiles = chunk.of(self.layout.owners, rank)
            return write(header, joined([chunk.own_payloads[tile] for tile in tiles]))

        self._to_others("scatter", message)

    # --- and completed

    def finish(self) -> None:
        """Completes all buckets.

        Raises:
            ExchangeError: this rank or another one has failed.
        """
        try:
            for bucket in self._under_way:
                for chunk in bucket.chunks:
                    self._reduce(bucket, chunk)
                    self._decode(bucket, chunk)
                self._commit(bucket)
            self.lanes.flush()
        except LostContactError as error:
            raise self._failed("PeerError", str(error)) from error
        self._under_way = []

    def _reduce(self, bucket: _Bucket, chunk: _Chunk) -> None:
        rank, owners = self.group.rank, self.layout.owners
        mine = chunk.of(owners, rank)
        size = sum(self.layout.tiles[tile].worker_bytes for tile in mine)
        payloads = {rank: joined([chunk.own_payloads[tile] for tile in mine])}
        first = None
        for source in self._others():
            message = self.hear("scatter", source, HEADER_BYTES + size)
            lawful = self._lawful(SCATTER, chunk.number, bucket.step, chunk.tiles)
            wanted = dataclasses.replace(lawful, source_rank=source, payload_bytes=size)
            fault, payloads[source] = check(message, wanted)
            first = first or fault
        note(bucket, first)
        result = joined([np.zeros(self.layout.tiles[tile].owner_bytes, np.uint8) for tile in mine])
        if not bucket.fault:
            result = self._reduced(bucket, chunk, mine, [payloads[r] for r in sorted(payloads)])
        status = bucket.fault.status if bucket.fault else 0
        header = self.header(GATHER, chunk.number, bucket.step, chunk.tiles)
        message = write(dataclasses.replace(header, status=status), result)
        longest = self._gather_size(chunk)
        chunk.own_payloads |= {-1: result}
        self._to_others("gather", lambda _: message.ljust(longest, b"\0"))

    def _reduced(
        self, bucket: _Bucket, chunk: _Chunk, mine: Sequence[int], by_rank: Sequence[np.ndarray]
    ) -> np.ndarray:
        result, num_corrupt, senders = [], 0, []
        offset = 0
        for number in mine:
            tile = self.layout.tiles[number]
            context = self._context(number, bucket.step, WORKER)
            payloads = [each[None, offset : offset + tile.worker_bytes] for each in by_rank]
            offset += tile.worker_bytes
            codec = find_codec(tile.codec)
            corrupt = [codec.corrupt(each, tile.num_elements, context).any() for each in payloads]
            num_corrupt += any(corrupt)
            senders += [rank for rank, bad in enumerate(corrupt) if bad]
            dtype, residual = self._dtype(tile), self._residuals[OWNER].get(number)
            result.append(
                reduce_tiles(
                    tile.codec, dtype, payloads, tile.num_elements, residual, context=context
                )[0]
            )
        if num_corrupt:
            fault = (CORRUPT_PAYLOAD, SCATTER, min(senders), chunk.number, 0, num_corrupt)
            note(bucket, Fault(*fault))
        return joined(result)

    def _gather_size(self, chunk: _Chunk) -> int:
        return HEADER_BYTES + max(map(self._owned_bytes(chunk), range(self.group.world_size)))

    def _owned_bytes(self, chunk: _Chunk) -> Callable[[int], int]:
        tiles, owners = self.layout.tiles, self.layout.owners
        return lambda rank: sum(tiles[t].owner_bytes for t in chunk.of(owners, rank))

    def _decode(self, bucket: _Bucket, chunk: _Chunk) -> None:
        payloads = {self.group.rank: chunk.own_payloads.pop(-1)}
        sizes = self._owned_bytes(chunk)
        first = None
        for source in self._others():
            message = self.hear("gather", source, self._gather_size(chunk))
            lawful = self._lawful(GATHER, chunk.number, bucket.step, chunk.tiles)
            wanted = dataclasses.replace(lawful, source_rank=source, payload_bytes=sizes(source))
            fault, payloads[source] = check(message, wanted)
            first = first or fault
        note(bucket, first)
        if bucket.fault:
            return
        offsets = dict.fromkeys(payloads, 0)
        for number in chunk.tiles:
            tile, source = self.layout.tiles[number], self.layout.owners[number]
            begin = offsets[source]
            offsets[source] += tile.owner_bytes
            payload = payloads[source][None, begin : begin + tile.owner_bytes]
            self._decode_tile(bucket, chunk, number, payload, source)

    def _decode_tile(
        self, bucket: _Bucket, chunk: _Chunk, number: int, payload: np.ndarray, source: int
    ) -> None:
        tile, codec = self.layout.tiles[number], find_codec(self.layout.tiles[number].codec)
        n, dtype = tile.num_elements, self._dtype(tile)
        context = self._context(number, bucket.step, OWNER)
        if codec.corrupt(payload, n, context).any():
            note(bucket, Fault(CORRUPT_PAYLOAD, GATHER, source, chunk.number, 0, 1))
        arrived = codec.decode(payload, n, dtype, context)
        average = narrow(arrived, dtype)
        place = self._place(bucket, number)
        residual = self._residuals[WORKER].get(number)
        if residual is not None:
            sent = chunk.own_payloads[number][None]
            own = codec.decode(sent, n, dtype, self._context(number, bucket.step, WORKER))
            usable = np.isfinite(widen(average, dtype))
            finish_residual(residual, widen(place, dtype)[None], own, arrived, usable, 1.0, 0.0)
        place[:] = average[0]

    def _commit(self, bucket: _Bucket) -> None:
        rank, num_used = self.group.rank, len(bucket.used)
        own = write_commit(rank, bucket.step, bucket.number, bucket.fault, bucket.used)
        self._to_others("commit", lambda _: own)
        records = [
            own if source == rank else self.hear("commit", source, 64 + map_bytes(num_used))
            for source in range(self.group.world_size)
        ]
        reporter, fault = outcome(records, rank, bucket.step, bucket.number)
        if fault:
            raise self._failed(*describe_fault(reporter, fault, bucket.step))
        if num_used:
            self._put_back_unused(bucket, used_by_any(records, num_used))

    # --- parameters that nobody used

    def _keep_unused(self, bucket: _Bucket) -> None:
        for position, used in enumerate(bucket.used):
            if used:
                continue
            tiles = self.layout.tiles_of[bucket.parameters[position]]
            places = [self._place(bucket, tile).copy() for tile in tiles]
            residuals = [
                (kept, tile, kept[tile].copy())
                for kept in self._residuals.values()
                for tile in tiles
                if tile in kept
            ]
            bucket.before[position] = (tiles, places, residuals)

    def _put_back_unused(self, bucket: _Bucket, used: Sequence[bool]) -> None:
        for position, (tiles, places, residuals) in bucket.before.items():
            if used[position]:
                continue
            for tile, place in zip(tiles, places, strict=True):
                self._place(bucket, tile)[:] = place
            for kept, tile, values in residuals:
                kept[tile][...] = values

    # --- what a test may replace

    def header(self, phase: int, chunk: int, step: int, tiles: Sequence[int] = ()) -> Header:
        """Of a message of this rank, without what follows from its payload."""
        return self._lawful(phase, chunk, step, tiles)

    def encode(self, bucket: _Bucket, number: int) -> np.ndarray:
        """The payload of a tile."""
        tile = self.layout.tiles[number]
        dtype = self._dtype(tile)
        gradient = widen(self._place(bucket, number), dtype)[None]
        context = self._context(number, bucket.step, WORKER)
        residual = self._residuals[WORKER].get(number)
        return encode_tiles(tile.codec, dtype, gradient, residual, context=context)[0]

    def hear(self, lane: str, rank: int, size: int) -> bytes:
        return self.lanes.receive(lane, rank, size)

    # ---

    def _lawful(self, phase: int, chunk: int, step: int, tiles: Sequence[int] = ()) -> Header:
        """`tiles`: of the chunk, if it is a message of one."""
        return Header(
            phase=phase,
            source_rank=self.group.rank,
            config_hash=self.agreement.config_hash,
            layout_hash=self.agreement.layout_hash ^ (tiles_hash(tiles) if tiles else 0),
            step=step,
            chunk=chunk,
        )

    def _others(self) -> list[int]:
        return [rank for rank in range(self.group.world_size) if rank != self.group.rank]

    def _to_others(self, lane: str, message: Callable[[int], bytes]) -> None:
        for rank in self._others():
            self.lanes.send(lane, rank, message(rank))

    def _dtype(self, tile: Tile) -> str:
        return self.layout.parameters[tile.parameter].dtype

    def _context(self, number: int, step: int, stage: str) -> Context:
        return Context(stage, self.options.seed, step, number)

    def _place(self, bucket: _Bucket, number: int) -> np.ndarray:
        """A tile's part of the bucket."""
        tile, begin = self.layout.tiles[number], 0
        for index in bucket.parameters:
            if index == tile.parameter:
                break
            begin += self.layout.parameters[index].num_elements
        begin += tile.offset
        return bucket.gradient[begin : begin + tile.num_elements]

    def _failed(self, kind: str, text: str) -> ExchangeError:
        """Tells the others, and lets them read what was sent before the connections close."""
        peers = f"gradferry/{self.agreement.nonce}/peers"
        if self.group.store.add(f"{peers}/told", 1) == 1:
            line = text if text.startswith("rank ") else f"rank {self.group.rank} failed: {text}"
            self.group.store.set(f"{peers}/error", line)
        self._under_way = []
        return ExchangeError(kind, text)

    def close(self) -> None:
        self.lanes.close()


def note(bucket: _Bucket, fault: Fault | None) -> None:
    """Keeps the first fault, and a cause rather than the echo of another rank's."""
    if fault and (bucket.fault is None or bucket.fault.status == PEER_TROUBLE):
        bucket.fault = fault


def describe_fault(reporter: int, fault: Fault, step: int) -> tuple[str, str]:
    unit = "bucket" if fault.phase == 3 else "chunk"
    where = f"(step {step}, {unit} {fault.chunk}, {PHASES[fault.phase]})"
    if fault.status == LOCAL_FAILURE:
        return "PeerError", f"rank {reporter} failed while it compressed gradients {where}"
    if fault.status == BAD_LOSS_SCALE:
        return "RankMismatchError", f"rank {reporter} has a loss scale at step {step}"
    field = "bucket" if fault.phase == 3 and fault.status == BAD_CHUNK else FIELDS[fault.status]
    return "ProtocolError", (
        f"rank {reporter} refused a message from rank {fault.rank} {where}: {field} is "
        f"{fault.received}, expected {fault.expected}"
    )


def joined(payloads: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.uint8), *payloads])
