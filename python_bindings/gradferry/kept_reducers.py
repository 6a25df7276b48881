"""`all_reduce`: a tensor at a time, through Reducers that are kept by name and group."""

from __future__ import annotations

import threading
import weakref
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

from gradferry.averaging.start import usable_group
from gradferry.core.codec_spec import OFF
from gradferry.core.rendezvous import exists
from gradferry.errors import ConfigError, StateError
from gradferry.reducer import Reducer, Work

__all__ = ["all_reduce", "forget"]


class _KeptReducer(Reducer):
    _RECOVERY_HINT = (
        "What is kept for this name is finished, on all ranks. To go on, call "
        "gradferry.forget(name) on every rank."
    )
    asked = ""  # for the codec, as the first call did


# By group and name of the tensor. Weak: a gloo group that outlives destroy_process_group() ends the
# process with an abort.
_kept: MutableMapping[dist.ProcessGroup, dict[str, _KeptReducer]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def all_reduce(
    tensor: torch.Tensor,
    codec: str = "q4",
    *,
    name: str,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Replaces a tensor by its average over all ranks, through a codec. Collective.

    The first call with a name, in one order of names on all ranks, makes a `Reducer` of this one
    tensor, with connections and residuals of its own. It is kept for later calls with the same name
    and group until `forget`: the residual of a tensor is added to the next tensor of that name.
    For many tensors, options and checkpoints make a `Reducer` yourself.

    Args:
        tensor: does not require grad; of one shape, dtype and device for each name.
        codec: a codec string, for any number of dimensions and elements. float64 and complex
            tensors are sent as they are. The same at every call with a name.
        name: of the tensor, equal on all ranks.
        group: of the ranks; the default group if None.
        async_op: as for `Reducer.all_reduce`.

    Returns:
        What `Reducer.all_reduce` returns.

    Raises:
        ConfigError, RankMismatchError, PeerError: the first call with a name, as `Reducer`; or
            the name is no string.
        StateError: the codec is another than that of the first call; or as `Reducer.all_reduce`.
        PeerError, ProtocolError: as `Reducer.all_reduce`.
    """
    members = usable_group(group)
    kept = _find(name, members)
    if kept is None:
        # For this tensor, however small it is; a codec for whole models is none for rules.
        rules = None if codec in (OFF, "auto") else [{"codec": codec}]
        kept = _KeptReducer([(name, tensor)], codec, members, rules=rules)
        kept.asked = codec
        kept._keep_no_tensors()
        with _lock:
            _kept.setdefault(members, {})[name] = kept
    elif codec != kept.asked:
        kept._fail(
            f"{name!r} was averaged with codec {kept.asked!r} before and now with {codec!r}: call "
            f"gradferry.forget({name!r}) on every rank first, or take another name"
        )
    return kept.all_reduce([tensor], async_op)


def forget(name: str, group: dist.ProcessGroup | None = None) -> None:
    """Drops what `all_reduce` keeps for a name: residuals and connections. Not collective.

    Call it on every rank. The next call with this name begins anew, and may have another codec,
    shape, dtype or device.

    Args:
        name: of the tensor.
        group: as for `all_reduce`.

    Raises:
        StateError: nothing is kept for this name and group, or its last call was not waited for.
    """
    members = usable_group(group)
    kept = _find(name, members)
    if kept is None:
        names = sorted(_kept.get(members, ()))
        raise StateError(
            f"nothing is kept for {name!r}; there is something for {names or 'no name'}"
        )
    kept._engine_at_rest("forget it")
    with _lock:
        _kept[members].pop(name, None)


def _find(name: str, group: dist.ProcessGroup) -> _KeptReducer | None:
    """What is kept, once that of groups that were destroyed is gone."""
    if not isinstance(name, str):
        raise ConfigError(f"name={name!r} must be a string, equal on all ranks")
    with _lock:
        for each in [each for each in _kept if not exists(each)]:
            del _kept[each]
        return _kept.get(group, {}).get(name)
