"""Tensors as the buckets that an engine averages, and back.

An engine's bucket is one piece of memory, as DDP's is. Tensors that do not lie one behind the other
are copied into one.
Buckets of DDP's size hide the encoding of one behind the exchange of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from gradferry import _native
from gradferry.core.parameters import ParameterLayout

Bucket = tuple[tuple[int, ...], torch.Tensor]  # indices of tensors; their elements, flat and real


@dataclass
class Packed:
    """The buckets of one call.

    Attributes:
        buckets: in the order of all ranks.
        copies: tensors, and their views of a bucket that is no memory of theirs.
    """

    buckets: list[Bucket]
    copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    unpacked: torch.Event | None  # on a device; the next call may be on another stream

    @torch.no_grad()
    def unpack(self) -> None:
        """Copies what the buckets hold to the tensors."""
        for tensors, views in self.copies:
            _copy(tensors, views)
        if self.unpacked is not None:
            self.unpacked.record()


@dataclass
class _Room:
    """What tensors that travel together are copied to, made when it is first needed."""

    indices: tuple[int, ...]
    flat: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)


class Packing:
    """How tensors are divided into buckets, equal on all ranks.

    Tensors of one dtype share a bucket, in their order, until it is full. Those that lie one behind
    the other, each with its elements as in the registered tensor, are averaged where they are; so
    is one that is alone in its bucket. Others are copied there and back.

    Args:
        parameters: of the tensors, as agreed by all ranks.
        dtypes: of the tensors.
        device: where the tensors are.
        cap_bytes: of a bucket of several tensors, at most.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterLayout],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        cap_bytes: int,
    ) -> None:
        self._parameters = parameters
        self._dtypes = dtypes
        self._device = device
        self._unpacked = None if device.type == "cpu" else torch.Event(device)
        self._rooms = [_Room(indices) for indices in _divided(parameters, dtypes, cap_bytes)]

    @property
    def num_bytes(self) -> int:
        """Memory of buckets that tensors are copied to, so far."""
        return sum(room.flat.nbytes for room in self._rooms if room.flat is not None)

    @torch.no_grad()
    def pack(self, tensors: Sequence[torch.Tensor]) -> Packed:
        """Tensors with the shapes, dtypes and device of the registered ones, as buckets."""
        if self._unpacked is not None:
            self._unpacked.wait()
        packed = Packed([], [], self._unpacked)
        for room in self._rooms:
            mine = [tensors[index] for index in room.indices]
            flat = self._in_place(room.indices, mine)
            if flat is None:
                flat = self._filled(room, mine)
                packed.copies.append((mine, room.views))
            else:
                # The engine writes behind the back of autograd, which must notice.
                for each in mine:
                    if not each.is_inference():
                        torch.autograd.graph.increment_version(each)
            packed.buckets.append((room.indices, flat))
        return packed

    def _in_place(
        self, indices: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """The tensors' own memory, if their elements lie there as all ranks expect."""
        first = tensors[0]
        storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
        for tensor in tensors:
            if tensor.untyped_storage().data_ptr() != storage or tensor.storage_offset() != offset:
                return None
            offset += tensor.numel()
        if offset * first.element_size() > first.untyped_storage().nbytes():
            return None  # two storages begin at one address
        layouts = [self._parameters[index] for index in indices]
        for layout, tensor in zip(layouts, tensors, strict=True):
            if tensor.is_conj() or tensor.is_neg() or not is_dense(tensor):
                return None
            if tuple(_native.bucket_strides(tensor)) != layout.strides:
                return None
        real = torch.view_as_real(first) if first.is_complex() else first
        return real.detach().as_strided((sum(each.num_elements for each in layouts),), (1,))

    @torch.inference_mode(False)
    def _filled(self, room: _Room, tensors: list[torch.Tensor]) -> torch.Tensor:
        if room.flat is None:
            layouts = [self._parameters[index] for index in room.indices]
            size = sum(layout.num_elements for layout in layouts)
            room.flat = torch.empty(size, dtype=layouts[0].dtype, device=self._device)
            room.views = list(_views(room.flat, layouts, self._dtypes[room.indices[0]]))
        _copy(room.views, tensors)
        return room.flat


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, each once."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _divided(
    parameters: Sequence[ParameterLayout], dtypes: Sequence[torch.dtype], cap_bytes: int
) -> list[tuple[int, ...]]:
    """Indices by bucket."""
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, (parameter, dtype) in enumerate(zip(parameters, dtypes, strict=True)):
        num_bytes = parameter.num_elements * parameter.dtype.itemsize
        bucket, filled = open_buckets.get(dtype, ([], 0))
        if not bucket or filled + num_bytes > cap_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[dtype] = bucket, filled + num_bytes
    return [tuple(bucket) for bucket in buckets]


def _views(
    flat: torch.Tensor, layouts: Sequence[ParameterLayout], dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """The part of each tensor, in its shape and their dtype."""
    begin = 0
    for layout in layouts:
        part = flat[begin : begin + layout.num_elements]
        begin += layout.num_elements
        if dtype.is_complex:
            part = torch.view_as_complex(part.view(-1, 2))
        yield part.as_strided(layout.shape, layout.strides)


def _copy(into: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    if any(tensor.is_complex() or tensor.is_neg() for tensor in (*into, *of)):
        for one, other in zip(into, of, strict=True):
            one.copy_(other)
    else:
        torch._foreach_copy_(into, of)
