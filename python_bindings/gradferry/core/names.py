"""Names of parameters, without what torch's wrappers put into them, and in messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

# What torch.compile, checkpoint_wrapper and FullyShardedDataParallel call the module inside. Names
# of torch's get_state_dict() leave these out, too.
_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """The name that a parameter or module has without wrappers. Also of a pattern of names.

    >>> plain_name("_orig_mod.blocks.0._checkpoint_wrapped_module.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def first_of(names: Sequence[str]) -> str:
    """At least one name, as a message shows them.

    >>> first_of(["weight", "bias", "scale"])
    "'weight' and 2 more"
    """
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


def closest(word: str, choices: Sequence[str]) -> str:
    """ "; did you mean 'x'?", or an empty string when no choice is similar."""
    near = difflib.get_close_matches(word, choices, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""
