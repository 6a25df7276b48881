# ruff: noqa: F401 (names for those that import from here)
"""docs/reference/wire_format.md in NumPy: shares nothing with the library's implementation."""

from .codecs import CODECS, Codec, Context, find_codec
from .engine import ReferenceEngine
from .layout import (
    CHUNK_BYTES,
    STREAM_CAP_BYTES,
    TILE_ELEMENTS,
    Layout,
    Parameter,
    Tile,
    assign_owners,
    cut_chunks,
    sent_per_step,
    two_level_bytes_per_step,
    wire_bytes_per_step,
)
from .message import (
    HEADER,
    MAGIC,
    Header,
    accumulate_tensors,
    decode_tensor,
    encode_tensor,
    message_checksum,
    word_sum,
)
from .reduce_scatter import (
    ReferenceReduceScatter,
    gathered_bytes_per_step,
    scattered_bytes_per_step,
)
from .scalars import DTYPES, narrow, widen
