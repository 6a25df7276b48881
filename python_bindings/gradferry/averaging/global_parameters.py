"""What ranks that train alone have in common: the global parameters, and their outer optimizer.

`GlobalParameters` also sees what else happens to the model between two steps of its optimizers:
parameters that were loaded, replaced, frozen, or that an optimizer keeps copies of.
"""

from __future__ import annotations

import io
import numbers
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from gradferry import _native
from gradferry.core.agreement import Record, record_hash, rendezvous_place
from gradferry.core.device import CPU
from gradferry.core.rendezvous import is_known, say_failed, wait_or_hear, world_ranks
from gradferry.core.values import as_whole
from gradferry.errors import ConfigError, PeerError, ProtocolError, StateError

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_SAMPLE = 64  # elements of each parameter that are looked at before and after every inner step
_MOST_NUMBERS = 1 << 10  # in an option of an optimizer that is a tensor


class Loaded(NamedTuple):
    """Parameters that something other than an optimizer has put into the model."""

    name: str  # one of them
    since: int  # inner steps before it
    copies: list[torch.Tensor]  # of all parameters

    def record(self) -> list[Any]:
        """In which ranks differ that have loaded others."""
        return [self.name, self.since, record_hash(_native.parameter_hashes(self.copies))]


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The outer optimizer of arXiv 2311.08105; on the host in one pass through memory."""
    fused = all(p.device == CPU and p.is_floating_point() for p in parameters)
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True, fused=fused or None)


class GlobalParameters:
    """Copies of a model's parameters as all ranks have them, in fp32 or better, with an optimizer.

    Attributes:
        names: of the parameters of the model that require grad.
        tensors: the global parameters, in this order: of this rank's shards under FSDP2.
        changes: the pseudo-gradients, global minus local, and then their average over ranks: of the
            shapes of `tensors`, and in memory one behind the other, so that a Reducer need not copy
            them.
        outer: the optimizer of `tensors`.
        device: of all these.
        since: inner steps of this period.
        loaded: from what the model was trained, if not from the global parameters.
        is_shown: whether the model is at the global parameters, within `shown`.

    Args:
        model: whose parameters they are.
        optimizers: that train it.
        device: ``"cpu"``, or that of the model.
        make_outer: makes the outer optimizer.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: str | torch.device,
        make_outer: MakeOptimizer,
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._parameters = _trained_by(optimizers, model)
        self._frozen = {n: p for n, p in model.named_parameters() if n not in self._parameters}
        self.names = list(self._parameters)
        self.device = _place(device, self._local())
        self._layout = self._layout_now()
        self.tensors = [nn.Parameter(each) for each in self._copies()]
        self.make_changes()
        self.outer = _outer_optimizer(make_outer, self.tensors)
        self._made = [type(self.outer).__name__, *described(self.outer)]
        self.since = 0
        self.loaded: Loaded | None = None
        self._began: Loaded | None = None  # what it was for `measure`
        # Within `shown`: where the model was, and what was loaded then.
        self._shown: tuple[list[torch.Tensor], Loaded | None] | None = None
        self.mark(are_global=True)

    def make_changes(self) -> None:
        """Zeros in new memory: for each dtype, views of one flat tensor."""
        self.changes: list[torch.Tensor] = []
        flats: dict[torch.dtype, torch.Tensor] = {}  # what is left of each
        for dtype in {each.dtype for each in self.tensors}:
            size = sum(each.numel() for each in self.tensors if each.dtype == dtype)
            flats[dtype] = torch.zeros(size, dtype=dtype, device=self.device)
        for each in self.tensors:
            flat = flats[each.dtype]
            self.changes.append(flat[: each.numel()].view(each.shape))
            flats[each.dtype] = flat[each.numel() :]

    def shard_groups(self) -> list[tuple[dist.ProcessGroup, torch.device]]:
        """The groups over which FSDP2 spreads the model, and the device of what this rank has."""
        found: dict[str, tuple[dist.ProcessGroup, torch.device]] = {}
        for parameter in self._parameters.values():
            mesh = getattr(parameter, "device_mesh", None)
            for group in [] if mesh is None else mesh.get_all_groups():
                found[group.group_name] = group, _own_part(parameter).device
        return [found[name] for name in sorted(found)]

    def record(self) -> Record:
        """What must be equal on all ranks."""
        shards: list[Any] = [p for p in self._parameters.values() if _is_shard(p)]
        places = {
            str((p.placements, p.device_mesh.shape, p.device_mesh.get_coordinate())) for p in shards
        }
        return {
            "shard (group= is of ranks with the same one)": ", ".join(sorted(places)),
            "parameters": [
                {
                    "name": name,
                    "shape": list(_own_part(each).shape),
                    "dtype": str(each.dtype),
                    "frozen": name in self._frozen,
                }
                for name, each in [*self._parameters.items(), *self._frozen.items()]
            ],
            "outer optimizer as it was made": self._made,
        }

    def _local(self) -> list[torch.Tensor]:
        """What this rank has of the model's parameters, which FSDP2 spreads over ranks."""
        parameters = list(self._parameters.values())
        if any(map(_is_shard, parameters)):
            # Not above: it takes longer to import than all the rest.
            from torch.distributed.fsdp import FSDPModule

            # A module that a forward pass has left whole would go on with what it has gathered.
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return [_own_part(parameter) for parameter in parameters]

    def _layout_now(self) -> list[tuple[tuple[int, ...], str]]:
        return [(tuple(now.shape), str(now.dtype)) for now in self._local()]

    def _copies(self) -> list[torch.Tensor]:
        """Where the model is, as the global parameters would hold it."""
        kept = torch.contiguous_format  # fused optimizers take memory as it comes, whatever strides
        local = self._local()
        dtypes = [torch.promote_types(now.dtype, torch.float32) for now in local]
        return [
            now.to(self.device, dtype, copy=True, memory_format=kept)
            for now, dtype in zip(local, dtypes, strict=True)
        ]

    # --- what happens between two steps ---

    def expect_same_model(self) -> None:
        """The model has the parameters that it had.

        Raises:
            StateError: one was replaced, removed, added, unfrozen or converted.
        """
        for change in self._changes_of_model():
            raise StateError(
                f"{change}; the model must stay as it is: make a new DiLoCo on every rank"
            )

    def _changes_of_model(self) -> Iterator[str]:
        self._local()  # has FSDP2 put the shards into the modules
        now = dict(self._model.named_parameters())
        for name, parameter in {**self._parameters, **self._frozen}.items():
            if now.get(name) is not parameter:
                yield f"the parameter {name!r} was {'replaced' if name in now else 'removed'}"
        for name, parameter in now.items():
            if parameter.requires_grad and name not in self._parameters:
                yield f"the parameter {name!r} was added or unfrozen"
        for name, was, is_now in zip(self.names, self._layout, self._layout_now(), strict=True):
            if was != is_now:
                yield f"the parameter {name!r} is {is_now}, and was {was}"
        for each in self._optimizers:
            if not _held_by(each) <= set(map(id, now.values())):
                yield (
                    f"{type(each).__name__} got parameters that the model lacks, which every rank "
                    "would train alone"
                )

    def expect_known(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that has stepped is one of those that were given, or of another model.

        Raises:
            StateError: it has parameters that the model has, or had.
        """
        own = {id(p) for p in (*self._parameters.values(), *self._model.parameters())}
        if not any(optimizer is each for each in self._optimizers) and own & _held_by(optimizer):
            self.expect_same_model()
            raise StateError(
                f"{type(optimizer).__name__} has stepped on parameters of the model, and DiLoCo "
                "counts the steps of other optimizers; give all that train the model, in a list"
            )

    def frozen(self) -> list[str]:
        """Parameters that were frozen since the beginning."""
        return [n for n, p in self._parameters.items() if not p.requires_grad]

    def moved(self) -> list[str]:
        """Parameters of these that `measure` has seen move: before they were frozen."""
        changes = dict(zip(self.names, self.changes, strict=True))
        return [name for name in self.frozen() if changes[name].any()]

    def mark(self, *, are_global: bool = False) -> None:
        """What the parameters are now was done by an optimizer, or is known.

        Args:
            are_global: whether they are the global parameters.
        """
        self._are_global = are_global
        self._hashes: list[int] | None = None  # of the model in a state that was loaded
        self._places, self._sample = self._places_now(), self._sample_now()

    def look(self) -> None:
        """Sets `loaded` to what something other than an optimizer has put into the model."""
        if self._changed():
            self.loaded = self._loaded_now()
            self.mark()

    def accept(self) -> None:
        """What the model has now is what this rank has trained."""
        self.loaded = None
        self.mark()

    def _loaded_now(self) -> Loaded | None:
        """`loaded` as `look` would set it, which notes nothing: a change may yet be taken back."""
        if self._shown:
            return self._shown[1]
        if not (names := self._changed()):
            return self.loaded
        return Loaded(names[0], self.since, self._copies()) if self.apart() else None

    @torch.no_grad()
    def _changed(self) -> list[str]:
        """Parameters that something other than an optimizer has changed since `mark`, or since the
        state was saved that was loaded. A change and its reversal are none.

        Versions of tensors tell where to look, and a sample of each parameter what there is. Writes
        through ``.data`` leave no version: the sample is compared without it at the start of a
        period, and on the host always.
        """
        places, names = self._places_now(), []
        if self._hashes is not None:
            pairs = zip(self.names, self._hashes, self._local_hashes(), strict=True)
            names = [name for name, was, now in pairs if was != now]
        elif self._are_global and places != self._places:
            names = self.apart()
        elif self._are_global or places != self._places or self._sample.device == CPU:
            differ = ~torch.isclose(self._sample, self._sample_now(), 0, 0, equal_nan=True)
            if differ.any():
                sizes = [len(_sample_of(_own_part(p))) for p in self._parameters.values()]
                parts = zip(self.names, torch.split(differ, sizes), strict=True)
                names = [name for name, part in parts if part.any()]
        if not names and (places != self._places or self._hashes is not None):
            self.mark(are_global=self._are_global)
        return names

    @torch.no_grad()
    def apart(self) -> list[str]:
        """Parameters of the model that are not the global ones."""
        return [
            name
            for name, start, now in zip(self.names, self.tensors, self._local(), strict=True)
            if not torch.equal(start.to(now.device, now.dtype), now)
        ]

    def _local_hashes(self) -> list[int]:
        """A hash of the bits of each parameter of the model; within `shown`, of before."""
        return _native.parameter_hashes(self._shown[0] if self._shown else self._local())

    def _places_now(self) -> list[tuple[int, int]]:
        own = map(_own_part, self._parameters.values())
        return [(each.data_ptr(), each._version) for each in own]

    @torch.no_grad()
    def _sample_now(self) -> torch.Tensor:
        parts = [_sample_of(_own_part(each)) for each in self._parameters.values()]
        if len({(each.device, each.dtype) for each in parts}) > 1:
            parts = [each.to(parts[0].device, torch.float64) for each in parts]
        return torch.cat(parts).double()

    def _copies_in_optimizers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Which tensors in the state of optimizers are the model's parameters, such as master
        weights, each with the global parameter: by key, if all are, and not all of them are zero.
        """
        found = defaultdict(list)
        for parameter, local, start in zip(
            self._parameters.values(), self._local(), self.tensors, strict=True
        ):
            for number, optimizer in enumerate(self._optimizers):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        found[number, key].append((_own_part(value), local, start))
        return [
            (copy, start)
            for kept in found.values()
            if all(_are_equal(copy, local) for copy, local, _ in kept)
            and any(copy.numel() > 1 and copy.any() for copy, _, _ in kept)
            for copy, _, start in kept
        ]

    # --- an outer step ---

    @torch.no_grad()
    def measure(self) -> None:
        """Sets `changes` to the pseudo-gradients of this rank.

        Raises:
            StateError: the model has other parameters than before, or one is not finite.
        """
        self.expect_same_model()
        self._began = self.loaded
        starts = self.loaded.copies if self.loaded else self.tensors
        for start, now, change in zip(starts, self._local(), self.changes, strict=True):
            # The model began with the global parameters as its dtype can hold them.
            began = start.to(now.dtype).to(change.dtype)
            torch.sub(began, now.to(change.device, change.dtype), out=change)
        for name, change in zip(self.names, self.changes, strict=True):
            if not _is_finite(change):
                raise StateError(
                    f"{name!r} has come to NaN or infinity, so that no rank takes this outer step; "
                    "look at the loss of this rank, and go on from a checkpoint"
                )

    def apply(self, absent: Iterable[str]) -> None:
        """Steps the outer optimizer with the averages in `changes`, and moves the model there. What
        was `loaded` before `measure` becomes the global parameters first, with an optimizer that
        begins anew.

        Args:
            absent: parameters without a pseudo-gradient, which stay where they are.
        """
        if self._began:
            with torch.no_grad():
                for start, copy in zip(self.tensors, self._began.copies, strict=True):
                    start.copy_(copy)
            self.outer.state.clear()
        without = set(absent)
        for name, start, change in zip(self.names, self.tensors, self.changes, strict=True):
            start.grad = None if name in without else change
        self.outer.step()
        self.outer.zero_grad(set_to_none=True)
        self.go_on_from_here()

    @torch.no_grad()
    def go_on_from_here(self) -> None:
        """Moves the model, and the copies of it that optimizers keep, to the global parameters."""
        copies = self._copies_in_optimizers()
        self._move(self.tensors)
        for copy, start in copies:
            copy.copy_(start)
        self.since, self.loaded = 0, None
        self.mark(are_global=True)

    @torch.no_grad()
    def _move(self, to: Sequence[torch.Tensor]) -> None:
        for now, there in zip(self._local(), to, strict=True):
            now.copy_(there)

    @property
    def is_shown(self) -> bool:
        return self._shown is not None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """See `DiLoCo.global_parameters`."""
        self.expect_same_model()
        kept, before = [now.clone() for now in self._local()], self._shown
        self._shown = before or (kept, self._loaded_now())
        self._move(self.tensors)
        try:
            yield
        finally:
            self._move(kept)
            self._shown = before

    def hashes(self) -> list[int]:
        """A hash of the bits of each global parameter."""
        return _native.parameter_hashes([each.detach() for each in self.tensors])

    # --- handed on ---

    def frozen_hashes(self) -> list[int]:
        """Hashes of the parameters that were frozen from the beginning."""
        return _native.parameter_hashes([_own_part(each) for each in self._frozen.values()])

    @torch.no_grad()
    def hand_on(
        self,
        source: int,
        group: dist.ProcessGroup,
        *,
        anybody: bool,
        me: bool,
        frozen: bool,
    ) -> None:
        """Gives what the rank `source` has to ranks that lack it: always the options of the outer
        optimizer. Collective.

        Args:
            source: the rank in the group.
            group: of the ranks.
            anybody: whether a rank takes the global parameters and the state of their optimizer.
            me: whether this rank does.
            frozen: whether a newcomer takes the parameters that were frozen from the beginning.

        Raises:
            ProtocolError: what has come fits no such optimizer.
            PeerError: a rank was lost. Nothing was changed here.
        """
        gives, place = group.rank() == source, rendezvous_place(group, self.device)

        def travel(message: torch.Tensor) -> torch.Tensor:
            message = message.to(place).contiguous()
            raw = message.flatten().view(torch.uint8)  # backends lack some dtypes
            try:
                wait_or_hear(group.broadcast(raw, source), group)
            except RuntimeError as error:
                say_failed(group)  # to ranks that are not connected with the one that was lost
                raise PeerError(
                    f"a rank was lost while newcomers got what the others have: {error}"
                ) from error
            return message

        packed = pack(self.outer, with_state=anybody) if gives else b""
        (size,) = travel(torch.tensor([len(packed)], dtype=torch.int64, device="cpu")).tolist()
        if not 0 < size < 1 << 40:
            raise ProtocolError(f"a rank says that its outer optimizer has {size} bytes")
        room = torch.frombuffer(bytearray(packed.ljust(size, b"\0")), dtype=torch.uint8)
        packed = travel(room).cpu().numpy().tobytes()
        handed = [(each.detach(), me) for each in self.tensors if anybody]
        handed += [(_own_part(each), True) for each in self._frozen.values() if frozen]
        received = [travel(own if gives else torch.empty_like(own)) for own, _ in handed]
        state = unpack(packed, self.outer)
        for (own, takes), message in zip(handed, received, strict=True):
            if takes:
                own.copy_(message)
        if me and anybody:
            mine = self.outer.state_dict()["param_groups"]
            self.outer.load_state_dict({"state": state, "param_groups": mine})

    # --- saved ---

    def saved(self) -> dict[str, Any]:
        """Copies of the global parameters, by name, and of what the outer optimizer keeps; and what
        it takes to see whether the model was loaded with them.
        """
        loaded = self._loaded_now()
        return {
            "since": self.since,
            "global": {
                name: start.detach().clone()
                for name, start in zip(self.names, self.tensors, strict=True)
            },
            "local": self._local_hashes(),
            "loaded": loaded and loaded.copies,
            "outer_type": type(self.outer).__name__,
            "outer": _copied(self.outer.state_dict()),
        }

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any], also: Callable[[], None]) -> None:
        """Restores what `saved` returned, and what `also` does, or nothing.

        Raises:
            StateError: it is of another model, or damaged; or what `also` raises.
        """
        values: Any
        local: Any
        loaded: Any
        values, local, loaded = (saved.get(key) for key in ("global", "local", "loaded"))
        expect_saved(
            isinstance(values, Mapping) and list(values) == self.names,
            f"has no global parameters {', '.join(self.names[:4])}",
        )
        are_hashes = isinstance(local, list) and [*map(type, local)] == [int] * len(values)
        is_whole = loaded is None or (isinstance(loaded, list) and len(loaded) == len(values))
        expect_saved(are_hashes and is_whole, "does not say where the model was")
        named = list(zip(self.names, self.tensors, strict=True))
        tensors = [*values.values(), *(loaded or ())]
        for value, (name, start) in zip(tensors, 2 * named, strict=False):
            expect_saved(
                _is_alike(start, value) and bool(value.isfinite().all()),
                f"has no finite tensor of shape {tuple(start.shape)} and {start.dtype} as the "
                f"global parameter {name!r}",
            )
        before, kind = _copied(self.outer.state_dict()), type(self.outer).__name__
        try:
            try:
                expect_saved(saved.get("outer_type") == kind, f"is not of an outer {kind}")
                # An optimizer goes on in the tensors that it loads, where they fit as they are.
                self.outer.load_state_dict(_copied(saved["outer"]))
                _expect_fitting(self.outer.state.items())
            except (LookupError, RuntimeError, ValueError, TypeError, AttributeError) as error:
                expect_saved(False, f"is of another outer optimizer than outer= makes: {error}")
            also()
        except BaseException:
            self.outer.load_state_dict(before)
            raise
        for name, start in zip(self.names, self.tensors, strict=True):
            start.copy_(values[name])
        self.since, self._are_global = saved["since"], False
        self.loaded = Loaded(self.names[0], self.since, loaded) if loaded else None
        self._hashes = [*map(int, local or ())]  # of the model, before it is loaded or after


def expect_saved(is_good: bool, otherwise: str) -> None:
    """Raises StateError where a saved state is not as it must be."""
    if not is_good:
        raise StateError(
            f"the saved state {otherwise}; it was damaged, or saved with another model or other "
            "arguments: load what diloco.state_dict() returned where these are the same"
        )


def _copied(state: Any) -> Any:
    """A state with contiguous copies of its tensors, on the same devices."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    return tree_map_only(torch.Tensor, copy, state)


def _expect_fitting(states: Iterable[tuple[torch.Tensor, Mapping[str, Any]]]) -> None:
    """What an optimizer keeps of a tensor is finite, and of its shape, also with a size of 1
    instead of any other: means over a dimension, as Adafactor's. Raises ValueError.
    """
    for tensor, kept in states:
        for key, value in kept.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                continue
            sizes = zip(value.shape, tensor.shape, strict=False)
            fits = value.dim() == tensor.dim() and all(own in (1, size) for own, size in sizes)
            if not fits or not value.isfinite().all():
                raise ValueError(f"its {key} is not finite, or of another shape")


# --- tensors --------------------------------------------------------------------------------------


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite, in one pass and without a boolean tensor."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return not real.numel() or bool(torch.stack(real.aminmax()).isfinite().all())


def _is_alike(one: Any, other: Any) -> bool:
    """Whether both are tensors of one shape and dtype."""
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and (one.shape, one.dtype) == (other.shape, other.dtype)


def _is_shard(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "to_local")


def _own_part(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    part: torch.Tensor = tensor._local_tensor if _is_shard(tensor) else tensor
    return part.detach()


def _sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Elements from all over it."""
    count = tensor.numel()
    size, step = min(count, _SAMPLE), max(1, count // _SAMPLE)
    places = zip(tensor.shape, tensor.stride(), strict=True)
    if sum((n - 1) * stride for n, stride in places) + 1 == count:  # without gaps, in any order
        part = tensor.as_strided((size,), (step,))
    else:
        part = tensor.reshape(-1)[::step][:size]
    return torch.view_as_real(part).reshape(-1) if part.is_complex() else part


def _are_equal(copy: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, or rounds to it."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(parameter.device, parameter.dtype)

    if copy.shape != parameter.shape or copy.is_complex() != parameter.is_complex():
        return False
    begin = (slice(0, 1),) * copy.dim()
    same = torch.equal(rounded(copy[begin]), parameter[begin])
    return same and torch.equal(rounded(copy), parameter)


# --- optimizers -----------------------------------------------------------------------------------


def _held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _is_plain(value: object) -> bool:
    """Whether another rank can have this option."""
    if isinstance(value, torch.Tensor):
        return value.numel() <= _MOST_NUMBERS and not _is_shard(value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
        for group in optimizer.param_groups
    ]


def _text(value: object) -> str:
    """In which two options are equal only if their types are."""
    return repr(tree_map_only(torch.Tensor, lambda t: [str(t.dtype), t.tolist()], value))


def described(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """The options of an optimizer's groups, for comparison with those of other ranks."""
    return [{key: _text(value) for key, value in group.items()} for group in _options(optimizer)]


def pack(optimizer: torch.optim.Optimizer, *, with_state: bool = False) -> bytes:
    """The options of an optimizer and, if asked for, its state."""
    file = io.BytesIO()
    state = optimizer.state_dict()["state"] if with_state else {}
    torch.save({"groups": _options(optimizer), "state": state}, file)
    return file.getvalue()


def unpack(packed: bytes, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Takes the options that another rank has `pack`ed, and returns the state. Tensors stay the
    same objects: a schedule may hold them.

    Raises:
        ProtocolError: it fits no such optimizer. Nothing was changed.
    """
    try:
        content = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
        state, groups = content["state"], content["groups"]
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        _expect_fitting((own[index], kept) for index, kept in state.items())
        pairs = list(zip(optimizer.param_groups, groups, strict=True))
        if any("params" in each or not _is_plain(each) for each in groups):
            raise ValueError("an option is none")
    except Exception as error:  # whatever bytes may do
        raise ProtocolError(
            f"what a rank says of its outer optimizer fits none of these parameters: {error}; "
            "start every rank with the same code"
        ) from error
    for group, options in pairs:
        for key, value in options.items():
            if _is_alike(group.get(key), value):
                group[key].copy_(value)
            else:
                group[key] = value
    return dict(state)


# --- arguments -----------------------------------------------------------------------------------


def checked_optimizers(given: object) -> list[torch.optim.Optimizer]:
    """One optimizer, or a list of them. Raises ConfigError where it is neither."""
    optimizers: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer={type(each).__name__} is no torch.optim.Optimizer, nor a list of them"
            )
        if not hasattr(each, "_optimizer_step_pre_hooks"):
            raise ConfigError(
                f"optimizer={type(each).__name__} was made without Optimizer.__init__ and has no "
                "hooks; give the one that it wraps, such as optimizer.optimizer"
            )
    if not optimizers or len(set(map(id, optimizers))) != len(optimizers):
        raise ConfigError("optimizer= has no optimizer, or one twice; give each that steps once")
    return optimizers


def checked_period(sync_every: Any) -> int:
    """Inner steps of a period. Raises ConfigError."""
    steps = as_whole(sync_every)
    if steps is None or steps < 1:
        raise ConfigError(f"sync_every={sync_every!r} must be a number of steps, 1 or more")
    return steps


def checked_decay(decay: Any) -> float:
    """By what a residual is multiplied before an average. Raises ConfigError."""
    is_number = isinstance(decay, numbers.Real) and not isinstance(decay, bool)
    if not is_number or not 0 < decay <= 1:
        raise ConfigError(f"residual_decay={decay!r} must be above 0 and at most 1")
    return float(decay)


def refuse_average_of_every_step(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raises ConfigError where DistributedDataParallel averages gradients of these ranks, too."""
    ranks = set(world_ranks(group))
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and is_known(group):
            averaged = set(world_ranks(module.process_group))
            if len(ranks) > 1 and ranks <= averaged:
                raise ConfigError(
                    "DistributedDataParallel averages every step over all ranks of group=, so that "
                    "DiLoCo has nothing to save; give DiLoCo the model without it, or make it of "
                    "the ranks of one worker: DistributedDataParallel(model, process_group=...)"
                )


def _trained_by(
    optimizers: Iterable[torch.optim.Optimizer], model: nn.Module
) -> dict[str, nn.Parameter]:
    """The parameters of the model that require grad, which these optimizers have."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={type(model).__name__} is no torch.nn.Module")
    named = dict(model.named_parameters())
    own = {id(parameter) for parameter in named.values()}
    trained: set[int] = set()
    for each in optimizers:
        if not _held_by(each) <= own:
            raise ConfigError(
                f"{type(each).__name__} has parameters that the model lacks; make it of "
                "model.parameters(), after the model was wrapped"
            )
        trained |= _held_by(each)
    parameters = {name: p for name, p in named.items() if p.requires_grad}
    for name, parameter in parameters.items():
        if id(parameter) not in trained:
            raise ConfigError(
                f"no optimizer has the parameter {name!r}; give all optimizers that train the "
                "model, in a list, or freeze it with requires_grad_(False)"
            )
    if not parameters:
        raise ConfigError("the model has no parameters that require grad")
    return parameters


def _place(device: str | torch.device, local: Sequence[torch.Tensor]) -> torch.device:
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is no device: {error}") from None
    own = local[0].device
    if wanted.type == "cpu":
        return CPU
    if wanted.type != own.type or wanted.index not in (None, own.index):
        raise ConfigError(f"device={device!r} must be 'cpu' or that of the model, {str(own)!r}")
    return own


def _outer_optimizer(make: MakeOptimizer, tensors: list[nn.Parameter]) -> torch.optim.Optimizer:
    try:
        made = make(tensors)
    except Exception as error:
        raise ConfigError(
            f"outer={make!r} raised {type(error).__name__}: {error}; give a function of parameters "
            "such as lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)"
        ) from error
    is_optimizer = isinstance(made, torch.optim.Optimizer)
    if not is_optimizer or _held_by(made) != {id(each) for each in tensors}:
        raise ConfigError(
            f"outer= returned {type(made).__name__}, which is no torch.optim.Optimizer of all "
            "parameters that it is given"
        )
    return made
