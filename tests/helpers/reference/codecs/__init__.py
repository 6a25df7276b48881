"""Section 4 of docs/reference/wire_format.md: the codecs."""

from __future__ import annotations

import functools

from .base import DEFAULT, OWNER, WORKER, Codec, Context, padded
from .dense import BFloat16, Exact
from .q4 import Q4
from .q8 import Q8
from .rht import RHT
from .sign1 import Sign1
from .topk import TopK


@functools.cache
def find_codec(text: str) -> Codec:
    """Of a codec string, canonical or not, such as `topk:ratio=0.02`."""
    name, _, rest = text.partition(":")
    options = dict(option.split("=") for option in rest.split(",") if option)
    if name == "topk":
        ratios = {
            key: float(options.pop(key)) for key in ("ratio", "owner_ratio") if key in options
        }
        return TopK(**ratios, **options)
    if name == "rht":
        return RHT(**{key: int(value) for key, value in options.items()})
    plain = {"exact": Exact, "bf16": BFloat16, "q4": Q4, "q8": Q8, "sign1": Sign1}
    return plain[name](**options)


# Every codec with every way of writing bytes that it has, by the text that asks for it.
CODECS = {
    text: find_codec(text)
    for text in (
        "exact",
        "bf16",
        "q4",
        "q8",
        "sign1",
        "topk",
        "topk:values=q4",
        "rht:bits=4",
        "rht:bits=3",
        "rht:bits=2",
    )
}

__all__ = ["CODECS", "DEFAULT", "OWNER", "WORKER", "Codec", "Context", "find_codec", "padded"]
