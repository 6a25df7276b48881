"""The configuration and engine that average named tensors; `codec="auto"` changes them."""

from __future__ import annotations

import json
import math
import uuid
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradferry import _native
from gradferry.averaging import step_numbers
from gradferry.averaging.tiles import (
    KINDS,
    Kind,
    Tile,
    collect,
    rescale,
    spread,
    zero_residual,
)
from gradferry.core.agreement import (
    Record,
    losing_names_ranks,
    on_all_ranks,
    record_hash,
    rendezvous_place,
    value_on_all_ranks,
)
from gradferry.core.codec_spec import AUTO, CodecSpec
from gradferry.core.config import EXACT, Config
from gradferry.core.device import Transport, transport_of
from gradferry.core.engine import loss_scale, start_engine
from gradferry.core.nodes import Exchange, Nodes, flat
from gradferry.core.parameters import ParameterLayout, describe_parameters, under
from gradferry.core.rendezvous import exists, world_ranks
from gradferry.core.warn import warn
from gradferry.errors import ConfigError, GradferryError, StateError


@dataclass
class Running:
    """The configuration in use for named tensors, and its engine.

    Attributes:
        config: as agreed by all ranks; with "auto" its codec is the current one.
        parameters: as agreed by all ranks.
        rank: this rank in the process group.
        world_ranks: of all ranks of that group, by rank: how errors name them.
        group_name: name of that group; empty where torch.distributed has not made it.
        group_itself: weak, so that it can be destroyed: a gloo group that outlives that aborts the
            process at its end.
        index: for each tensor that was registered, such as a parameter that DDP reduces, its index
            in `parameters`. By the object, which torch keeps when it moves or converts a model, and
            not weakly: it would refuse to.
        transport: how bytes reach the other ranks.
        agreed: the record that all ranks agreed on, without its parameters.
        nodes: which ranks share a machine; until they have met, none.
        exchange: which one runs between them; until they have met, the flat one.
        recovery_hint: for people, what to do after an error has ended the engine.
        collective: of every bucket: "all_reduce", "reduce_scatter" or "all_gather".
        of_parts: whether what is averaged are parts of the tensors in `index`.
        engine: None if every bucket passes through.
        retired: sums of the counters of earlier engines.
        switches: number of changes of the codec.
        steps_before: steps of the training that were not taken here but before a loaded state.
        delivers: whether the engine sends gradients as they are, with all residuals.
        nonce: of the engine, as ranks agreed on it.
    """

    config: Config
    parameters: tuple[ParameterLayout, ...]
    rank: int
    world_ranks: Sequence[int]
    group_name: str
    group_itself: weakref.ref[dist.ProcessGroup]
    index: Mapping[torch.Tensor, int]
    transport: Transport
    agreed: Record
    nodes: Nodes
    exchange: Exchange
    recovery_hint: str
    collective: str = "all_reduce"
    of_parts: bool = False
    engine: _native.BucketEngine | None = None
    retired: Counter[str] = field(default_factory=Counter)
    switches: int = 0
    steps_before: int = 0
    delivers: bool = False
    nonce: str = ""
    _to_deliver: tuple[torch.Tensor, torch.Tensor] | None = None  # residuals when that began

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises StateError once it was destroyed, or nobody has it."""
        group = self.group_itself()
        if group is None and not self.group_name:
            raise StateError("the process group has ended, because nobody has kept it")
        if group is None or not exists(group):
            raise StateError(f"the process group {self.group_name!r} was destroyed")
        return group

    @property
    def world_size(self) -> int:
        """Number of ranks in the process group."""
        return len(self.world_ranks)

    @property
    def world_rank(self) -> int:
        """This rank in the whole job: how errors name it."""
        return self.world_ranks[self.rank]

    @property
    def config_hash(self) -> int:
        """Hash of the configuration and the tables of nodes, in every message header."""
        changes = {"choice": str(self.config.codec), "switches": self.switches}
        nodes, levels = self.nodes.members, self.exchange.nodes.members
        agreed = {**self.agreed, "members of nodes": nodes, "exchange": levels}
        if self.collective != "all_reduce":
            agreed["collective"] = self.collective
        return record_hash({**agreed, **(changes if self.switches else {})})

    @property
    def layout_hash(self) -> int:
        """Hash of the parameters, in every message header."""
        return record_hash(self._parameter_records())

    @property
    def saved_layout(self) -> str:
        """The parameters as JSON, for checkpoints; independent of world size and of "auto"."""
        left_out = {"residuals", "codec"} if self.config.chooses else {"residuals"}
        records = self._parameter_records()
        kept = [{k: p[k] for k in p if k not in left_out} for p in records]
        return json.dumps(kept, sort_keys=True)

    @property
    def ring_share(self) -> float:
        """Bytes that this rank's share of an uncompressed ring has, for each byte of gradients.

        All elements but those of one rank pass every rank: once in a reduce-scatter or an
        all-gather, twice in an all-reduce. A ring leaves each node at one rank, which sends for all
        ranks of the node.
        """
        passes = 2 if self.collective == "all_reduce" else 1
        siblings = next(each for each in self.exchange.nodes.members if self.rank in each)
        return passes * (self.world_size - 1) / self.world_size / len(siblings)

    @property
    def finds_unused_parameters(self) -> bool:
        """Whether a pass may leave out parameters, as DDP's own option of this name says."""
        return bool(self.agreed.get("find_unused_parameters", False))

    def has_residuals(self, kind: Kind) -> bool:
        """Whether any rank has a worker or an owner residual."""
        return any(parameter.residuals[KINDS.index(kind)] for parameter in self.parameters)

    @property
    def codec_asked_for(self) -> str:
        """The codec as the user named it, for checkpoints and DDP's logs: "auto" stays "auto"."""
        return AUTO if self.config.chooses else str(self.config.codec)

    def record(self) -> Record:
        """The fields that must be equal on all ranks before an engine starts."""
        scale = loss_scale(self.config, self.transport.device)
        # Not in `agreed`, and so in no hash: a state goes on under another scale.
        now = {} if scale is None else {"scale of grad_scaler": float(scale)}
        return {**self.agreed, **now, "parameters": self._parameter_records()}

    def start(self, group: dist.ProcessGroup, nonce: str) -> None:
        """Starts the engine, if the configuration needs one. Collective.

        Args:
            group: that of the ranks.
            nonce: equal on all ranks, different for every engine of the group.
        """
        self.engine, self.nonce = None, nonce
        parameters = self.parameters
        if self.delivers:
            parameters = tuple(replace(parameter, warmup=EXACT) for parameter in parameters)
        # With a weak reference to a tensor torch does not convert it in place.
        reads = not self.of_parts and self.config.check_every > 0
        if not self.config.passes_through:
            self.engine = start_engine(
                self.config,
                parameters,
                group,
                nonce,
                transport=self.transport,
                hashes=(self.config_hash, self.layout_hash),
                tensors=self.tensors() if reads else (),
                find_unused_parameters=self.finds_unused_parameters,
                nodes=self.exchange.nodes.members,
                recovery_hint=self.recovery_hint,
                collective=self.collective,
                delivers=self.delivers,
            )

    def tiles(self) -> list[Tile]:
        """The tiles of the engine; empty without one."""
        if self.engine is None:
            return []
        parameters = [
            (number, *parameter.residuals)
            for number, parameter in enumerate(self.parameters)
            for _ in range(0, parameter.num_elements, _native.TILE_ELEMENTS)
        ]
        rows = zip(self.engine.tiles(), parameters, strict=True)
        return [Tile(*row, *parameter) for row, parameter in rows]

    def momentum_shares(self, *, exchanges: bool, codec: CodecSpec | None = None) -> list[float]:
        """`Config.momentum_share` for the codec of each parameter.

        Args:
            exchanges: False: for a world of one, which sends every element; all shares are 1.
            codec: replaces the configured one if given.
        """
        if not exchanges:
            return [1.0] * len(self.parameters)
        config = replace(self.config, codec=codec or self.config.codec)
        return [config.momentum_share(parameter.codec) for parameter in self._described(config)]

    def tensors(self) -> list[torch.Tensor]:
        """The registered tensors themselves, in order."""
        return sorted(self.index, key=self.index.__getitem__)

    def stats(self) -> dict[str, Any]:
        """The counters of the engine, plus those of earlier engines."""
        now = step_numbers.zeros() if self.engine is None else self.engine.stats()
        return now | {key: now[key] + count for key, count in self.retired.items()}

    def switch(
        self,
        hook: _native.BucketHook,
        codec: CodecSpec,
        step: int,
        exchange: Exchange | None = None,
        *,
        delivers: bool = False,
    ) -> None:
        """Replaces the codec, and the exchange if one is given. Collective; at the first bucket of
        `step`.

        Residuals move with their tiles, to new owners and, of a node, to new leaders. With
        another exchange every node gets the mean of the nodes' worker residuals. They are rescaled
        where the new codec keeps another share of the momentum, and dropped where it has none
        (`loses_under`): an engine that `delivers` must come before.

        Raises:
            GradferryError: on all ranks; the engine before has failed on a rank, or the new one
                cannot start there. The hook keeps the engine before.
        """
        old = replace(self)
        group, device = self.group, self.transport.device
        residuals = None

        def read_old() -> Record:
            nonlocal residuals
            residuals = None if old.engine is None else old.engine.state()
            return {"nonce": uuid.uuid4().hex}

        nonces = on_all_ranks(read_old, group, device)
        if old.engine is not None:
            counted = old.engine.stats()
            sums = {key: counted[key] for key in step_numbers.CONTINUED if key in counted}
            self.retired = old.retired + Counter(sums)
        self.config = replace(old.config, codec=codec)
        self.exchange = exchange or old.exchange
        self.parameters = tuple(self._described(self.config))
        self.switches += 1
        self.delivers = delivers
        moving: Iterator[torch.Tensor] = iter(())

        def begin() -> None:
            nonlocal moving
            self.start(group, str(nonces[0]["nonce"]))
            if self.engine is not None:
                moving = self._take_over(self.engine, old, residuals, step)

        try:
            on_all_ranks(begin, group, device)
            go_on = partial(next, moving, None)
            while (whole := value_on_all_ranks(go_on, group, device)) is not None:
                with losing_names_ranks(group):
                    dist.all_reduce(whole, group=group)
        except GradferryError:
            # Nothing changed; but no later engine may have the hash of this one.
            vars(self).update({**vars(old), "switches": self.switches})
            raise
        hook.use_engine(self.engine)

    def _take_over(
        self,
        engine: _native.BucketEngine,
        old: Running,
        residuals: tuple[int, torch.Tensor, torch.Tensor, float] | None,
        step: int,
    ) -> Iterator[torch.Tensor]:
        """Gives the engine what the one before has; yields tensors that are then added up over all
        ranks, the same number on each.
        """
        worker_size, owner_size = engine.residual_sizes()
        worker, owner, scale = zero_residual(worker_size), zero_residual(owner_size), 0.0
        if old.engine is not None and residuals is not None:
            _, old_worker, old_owner, scale = residuals
            pairs = ((old_worker, worker), (old_owner, owner))
            for kind, (given, taken) in zip(KINDS, pairs, strict=True):
                if old.has_residuals(kind) and self.has_residuals(kind):
                    yield from self._hand_over(old, kind, given, taken)
            if not self.config.holds_gradients(step):
                was = old.momentum_shares(exchanges=self.transport.exchanges)
                now = self.momentum_shares(exchanges=self.transport.exchanges)
                rescale(worker, owner, self.tiles(), was, now)
        engine.load_state(
            steps=step, worker_residual=worker, owner_residual=owner, loss_scale=scale
        )
        self._to_deliver = (worker, owner) if self.delivers else None

    def loses_under(self, codec: CodecSpec) -> bool:
        """Whether another codec has no place for residuals that there are now."""
        if self.engine is None:
            return False
        config = replace(self.config, codec=codec)
        # Rules keep their codecs, but where everything passes through nothing is kept.
        kept = not config.passes_through
        return any(
            here and not (there and kept)
            for now, then in zip(self.parameters, self._described(config), strict=True)
            for here, there in zip(now.residuals, then.residuals, strict=True)
        )

    def undelivered(self) -> int:
        """How many parameters' residuals this rank has not delivered since an engine began to
        deliver: no step has used them, or no such step was finite.
        """
        assert self.engine is not None
        assert self._to_deliver is not None
        _, worker, owner, _ = self.engine.state()
        left: set[int] = set()
        delivered: set[int] = set()
        for now, before, kind in zip((worker, owner), self._to_deliver, KINDS, strict=True):
            for tile in self.tiles():
                part = slice(tile.offset(kind), tile.offset(kind) + tile.num_elements)
                if tile.offset(kind) >= 0 and before[part].any():
                    stays = torch.equal(now[part], before[part])
                    (left if stays else delivered).add(tile.parameter)
        return len(left - delivered)

    def _hand_over(
        self, old: Running, kind: Kind, given: torch.Tensor, taken: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Moves worker or owner residuals to the ranks that have them now. Yields as `_take_over`.

        Sums over all ranks: one rank of a node sums a tile, and one of all ranks owns it, so the
        others of the node, or all, get its residual. If the nodes are others than before, each
        gets the mean, which is what the averaged gradient still lacks.
        """
        world = (range(self.world_size),)
        other_nodes = kind == "worker" and old.exchange != self.exchange
        if other_nodes:
            given = given / len(old.exchange.nodes.members)
        for ranks in world if kind == "owner" or other_nodes else self.exchange.nodes.members:
            takes_part = self.rank in ranks
            if len(ranks) == 1:  # its tiles stay where they are
                if takes_part and given.numel() == taken.numel():
                    taken.copy_(given)
                continue
            whole = spread(given if takes_part else torch.zeros_like(given), old.tiles(), kind)
            whole = whole.to(rendezvous_place(self.group, self.transport.device))
            yield whole
            if takes_part:
                taken.copy_(collect(whole.cpu(), self.tiles(), kind))

    def _parameter_records(self) -> list[Record]:
        return [parameter.record() for parameter in self.parameters]

    def _described(self, config: Config) -> list[ParameterLayout]:
        return under(config, self.parameters, exchanges=self.transport.exchanges)


def propose(
    config: Config,
    group: dist.ProcessGroup,
    place: torch.device,
    named: Sequence[tuple[str, torch.Tensor]],
    model: Record,
    recovery_hint: str,
    *,
    known_as: Sequence[torch.Tensor | None] | None = None,
    owners: Sequence[int | None] | None = None,
    whole_sizes: Sequence[int | None] | None = None,
    collective: str = "all_reduce",
) -> Running:
    """The configuration of this rank, without an engine yet, for comparison with other ranks.

    Args:
        config: checked.
        group: of the ranks.
        place: device of the gradients.
        named: names and tensors.
        model: other fields that must be equal on all ranks.
        recovery_hint: as in `Running`.
        known_as: what optimizers and users have instead of these tensors, which are parts of it;
            None: the tensors themselves, or nothing instead of one of them.
        owners: of each tensor the rank that gets its mean in a reduce-scatter, or has it in an
            all-gather; None: all ranks.
        whole_sizes: see `ParameterLayout.whole_size`; None: all tensors are whole.
        collective: see `Running`.

    Raises:
        ConfigError: a parameter's device or dtype has no codec, or parameters are on several
            devices; or the loss scale is on another one, or not positive and finite.
    """
    scale = loss_scale(config, place)
    if scale is not None and scale.device != place:
        raise ConfigError(
            f"the scale of grad_scaler is on {scale.device}, the gradients are on {place}; make a "
            f"torch.amp.GradScaler({place.type!r})"
        )
    if scale is not None and not 0 < float(scale) < math.inf:
        raise ConfigError(
            f"the scale of grad_scaler is {float(scale)}; it must be positive and finite: load a "
            "sound state into it, or make a new one"
        )
    if config.momentum and config.disabled:
        warn(
            f"GRADFERRY_DISABLE=1: gradients arrive without the momentum that momentum="
            f"{config.momentum} asks for",
        )
    transport = transport_of(place, group)
    alone = flat(group.size())
    parameters = describe_parameters(
        named, config, owners, whole_sizes, exchanges=transport.exchanges
    )
    config = transport.adapted(config)
    known = [parameter for _, parameter in named] if known_as is None else known_as
    return Running(
        config=config,
        parameters=tuple(parameters),
        rank=group.rank(),
        world_ranks=world_ranks(group),
        group_name=group.group_name,
        group_itself=weakref.ref(group),
        index={tensor: i for i, tensor in enumerate(known) if tensor is not None},
        transport=transport,
        agreed={
            **model,
            "wire version": _native.WIRE_VERSION,
            **config.record(),
            "device": place.type,
        },
        nodes=alone,
        exchange=Exchange(alone, "ranks have not met"),
        recovery_hint=recovery_hint,
        collective=collective,
        of_parts=known_as is not None,
    )
