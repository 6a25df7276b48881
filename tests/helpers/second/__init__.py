"""A rank of its own: docs/reference/protocol.md in Python, beside ranks of the library.

It was written from docs/reference/protocol.md and docs/reference/wire_format.md. Tiles, layout,
headers and codecs are those of `reference`, which implements the latter. Nothing here knows the
library or torch.
"""

from .attach import Agreement, AttachError, Group, agree, confirm, members_of_nodes
from .exchange import ExchangeError, Options, SecondRank

__all__ = [
    "Agreement",
    "AttachError",
    "ExchangeError",
    "Group",
    "Options",
    "SecondRank",
    "agree",
    "confirm",
    "members_of_nodes",
]
